"""What a session does with its options: each has an effect that is seen here (D14, D18)."""

import gc
import weakref
from dataclasses import fields
from types import SimpleNamespace

import pytest
import torch

from tests.tiny import tiny_checkpoint
from tests.unit.stand_ins import request
from usp.launch import encode, job, session
from usp.launch.device import prepare_device
from usp.launch.request import Request
from usp.launch.world import SINGLE
from usp.models.wan.checkpoint.folder import open_checkpoint
from usp.models.wan.sampling import Prompt, SamplingConfig, make_scheduler, sample
from usp.models.wan.transformer import WanTransformer


def test_the_number_of_threads_is_set_whatever_it_was(monkeypatch):
    before = torch.get_num_threads()
    try:
        for threads in (2, 1, 3):
            prepare_device(request("--device", "cpu", "--cpu_threads", str(threads)), SINGLE)
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("t5_cpu", "where"), [(True, "cpu"), (False, "meta")])
def test_the_text_encoder_runs_where_it_was_asked_to(monkeypatch, t5_cpu, where):
    used = []
    loader = SimpleNamespace(
        load_text_encoder=lambda _checkpoint, device, dtype: used.append((device.type, dtype)),
        load_tokenizer=lambda _checkpoint: None,
    )
    text = SimpleNamespace(encode_prompts=lambda _encoder, _tokenizer, texts, dtype: torch.zeros(len(texts), 1))
    monkeypatch.setitem(__import__("sys").modules, "usp.models.wan.checkpoint.loader", loader)
    monkeypatch.setitem(__import__("sys").modules, "usp.models.wan.text", text)
    made = request("--prompt", "a", *(["--t5_cpu"] if t5_cpu else []))
    one = job.Job(("a",), 0)
    states = encode.encode_on_first_rank(made, one, rank=0, device=torch.device("meta"))
    assert used == [(where, torch.float32)] and len(states) == 2


@pytest.mark.parametrize("keep_one", [True, False])
def test_keeping_one_expert_frees_the_other_before_it_loads(keep_one, monkeypatch):
    """Through the loop itself, whose own references count as well. After each load the ranks meet."""
    meetings = []
    monkeypatch.setattr(session, "meet", lambda: meetings.append(len(seen)))
    checkpoint = open_checkpoint(tiny_checkpoint())
    made = SimpleNamespace(checkpoint=checkpoint, dtype="fp32", offload_model=keep_one)
    experts = session.make_experts(made, torch.device("cpu"))
    alive, seen = weakref.WeakSet(), []
    for name, load in list(experts._loaders.items()):

        def watched(load=load) -> WanTransformer:
            gc.collect()
            seen.append(len(alive))
            model = load()
            alive.add(model)
            return model

        experts._loaders[name] = watched

    class Denoiser:
        def predict(self, model, latent, *, timestep, guidance, prompt):
            prompt.project(model, "positive")
            return torch.zeros_like(latent)

    settings = SamplingConfig(4, 12.0, 0.875, guidance_high=1.0, guidance_low=1.0)
    prompt = Prompt(torch.randn(1, 3, 32), None)
    noise = torch.randn(1, 16, 1, 2, 2)
    scheduler = make_scheduler({}, shift=12.0)
    sample(noise, config=settings, scheduler=scheduler, experts=experts, denoiser=Denoiser(), prompt=prompt)
    assert seen == [0, 0 if keep_one else 1] and meetings == [1, 2]


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("offload", [True, False])
def test_before_decoding_the_text_is_dropped_and_so_are_experts_that_are_not_needed_again(monkeypatch, index, offload):
    """D18."""
    agreed, dropped, saved = [], [], []
    monkeypatch.setattr(session, "agree", lambda facts, what: agreed.append(facts))
    monkeypatch.setattr(session, "release_memory", lambda device: dropped.append("memory"))
    prompts = []

    class Watched(Prompt):
        def __init__(self, *states):
            super().__init__(*states)
            prompts.append(self)

        def drop(self):
            super().drop()
            dropped.append("text")

    monkeypatch.setattr(session, "Prompt", Watched)
    fake = SimpleNamespace(
        job=job.Job(("a", "b"), 5),
        request=request("--prompt", "a", "--offload_model", str(offload).lower()),
        phases=SimpleNamespace(phase=lambda name: __import__("contextlib").nullcontext()),
        ranks=SimpleNamespace(rank=0, device=torch.device("cpu")),
        experts=SimpleNamespace(drop=lambda: dropped.append("experts")),
        _sample=lambda seed, prompt: (torch.full((1, 16, 1, 2, 2), seed, dtype=torch.float32), [0.1]),
        _save=lambda vae, latents, index: saved.append(list(dropped)) or "a.mp4",
    )
    result = session.Session._make_video(fake, index, torch.zeros(3, 4, 5), None)
    expected = ["text", "experts", "memory"] if offload or index == 1 else ["text"]
    assert saved == [expected] and result["seed"] == 5 + index
    assert agreed == [{"latents_sha256": result["latents_sha256"]}]


# Fields of a request that may differ between ranks, and why.
NOT_COMPARED = {
    "fps": "rank 0 alone writes the file",
    "t5_cpu": "rank 0 alone encodes",
    "save_file": "rank 0 alone saves",
    "save_latents": "rank 0 alone saves",
    "load_latents": "one process only",
    "report": "rank 0 alone reports",
    "stall_timeout": "each rank's own patience",
    "notices": "follow from the flags",
}


def _facts_of(*argv: str, **of_checkpoint) -> dict[str, object]:
    return job._facts(request(*argv, fingerprint=of_checkpoint.pop("fingerprint", "f" * 64), **of_checkpoint))


@pytest.mark.parametrize(
    ("field", "argv", "of_checkpoint"),
    [
        ("checkpoint", "", {"fingerprint": "e" * 64}),
        ("task", "--task t2v-A14B", {"boundary": 0.875}),
        ("prompts", "--prompt b", {}),
        ("prompt_file", "--prompt_file {file}", {}),
        ("negative_prompt", "--negative_prompt c", {}),
        ("clip", "--size 32*32", {}),
        ("clip", "--frame_num 5", {}),
        ("steps", "--sample_steps 3", {}),
        ("shift", "--sample_shift 3", {}),
        ("guidance_high", "--guidance_scale_high 2", {}),
        ("guidance_low", "--guidance_scale_low 2", {}),
        ("boundary_ratio", "", {"boundary": 0.5}),
        ("base_seed", "--base_seed 3", {}),
        ("mesh", "--cfg_size 1", {}),
        ("device", "", {}),
        ("dtype", "--dtype bf16", {}),
        ("exchange", "--exchange gloo", {}),
        ("attention", "--attention math", {}),
        ("cpu_threads", "--cpu_threads 2", {}),
        ("offload_model", "--offload_model true", {}),
    ],
)
def test_ranks_that_differ_in_a_field_of_the_request_are_noticed(tmp_path, field, argv, of_checkpoint):
    (tmp_path / "p").write_text("b")
    usual = _facts_of(ranks=2)
    assert field in {one.name for one in fields(Request)}
    if field in ("device", "task"):  # cannot be varied by a flag here, but must be among the facts
        assert field in usual
    else:
        assert _facts_of(*argv.format(file=tmp_path / "p").split(), ranks=2, **of_checkpoint) != usual


def test_every_field_of_a_request_is_compared_or_has_a_reason_not_to_be():
    compared = {case[0] for case in test_ranks_that_differ_in_a_field_of_the_request_are_noticed.pytestmark[0].args[1]}
    assert compared | set(NOT_COMPARED) == {one.name for one in fields(Request)}
    assert {"usp", "torch", "diffusers"} <= set(_facts_of(ranks=2))
