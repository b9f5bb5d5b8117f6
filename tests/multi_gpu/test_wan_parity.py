"""Wan on every mesh against the reference pipeline of diffusers, from checkpoints on disk (D01, D04, D14).

fp32 on the CPU, one thread a rank. The bounds are those of docs/numerics.md: one forward within 1e-5 of the reference,
a whole sampling within 1e-4; a mesh within 1e-5 and 5e-5 of one process; guidance in parallel equal to serial, bitwise.
"""

from functools import cache
from pathlib import Path

import pytest
import torch
from diffusers import UniPCMultistepScheduler

from tests.multi_gpu.wan import Case, run_forward, run_sampling
from tests.tiny import reference_pipeline, tiny_checkpoint
from usp.layout import MeshShape
from usp.models.wan.checkpoint.folder import open_checkpoint
from usp.models.wan.checkpoint.loader import load_text_encoder, load_tokenizer
from usp.models.wan.clip import Clip
from usp.models.wan.text import encode_prompts

CLIPS = {45: Clip(9, 48, 80), 30: Clip(5, 48, 80), 1: Clip(1, 16, 16)}
MESHES = [(1, 1), (1, 2), (2, 1), (2, 2), (1, 4), (1, 3), (2, 3)]
PROMPT, NEGATIVE = "A small boat crosses a wide river at noon", "blurred, static"
HEADS_AND_TOKENS = [(4, 45), (4, 30), (6, 45), (6, 1)]
EXCHANGES = ("gloo", "host")
REFERENCE_FORWARD, REFERENCE_SAMPLING = 1e-5, 1e-4
MESH_FORWARD, MESH_SAMPLING = 1e-5, 5e-5


def _folder(heads: int) -> Path:
    return tiny_checkpoint(heads=heads, seed=heads)


@cache
def _pipeline(heads: int):
    return reference_pipeline(_folder(heads))


@cache
def _states(heads: int) -> torch.Tensor:
    """Our own text path: [2, 512, text_dim]."""
    checkpoint, cpu = open_checkpoint(_folder(heads)), torch.device("cpu")
    encoder = load_text_encoder(checkpoint, device=cpu, dtype=torch.float32)
    return encode_prompts(encoder, load_tokenizer(checkpoint), [PROMPT, NEGATIVE], dtype=torch.float32)


def _case(heads: int, tokens: int, steps: int, **settings: float | str) -> Case:
    return Case(_folder(heads), CLIPS[tokens], _states(heads), steps=steps, **settings)


def _reference_sampling(case: Case, heads: int) -> torch.Tensor:
    """The reference's own latents from the same prompt text and seed, its own tokenizer and text encoder included."""
    pipeline = _pipeline(heads)
    pipeline.scheduler = UniPCMultistepScheduler.from_pretrained(case.folder / "scheduler", flow_shift=case.shift)
    return pipeline(
        prompt=PROMPT,
        negative_prompt=NEGATIVE,
        height=case.clip.height,
        width=case.clip.width,
        num_frames=case.clip.frames,
        num_inference_steps=case.steps,
        guidance_scale=case.guidance_high,
        guidance_scale_2=case.guidance_low,
        generator=torch.Generator("cpu").manual_seed(case.seed),
        output_type="latent",
    ).frames


def _largest(difference: torch.Tensor) -> float:
    return difference.abs().max().item()


@pytest.mark.parametrize("heads", [4, 6])
@pytest.mark.parametrize(("cfg", "ulysses"), MESHES)
def test_one_forward_equals_the_reference_on_every_mesh(ranks, cfg: int, ulysses: int, heads: int) -> None:
    for tokens, clip in CLIPS.items():
        latent = torch.randn(1, 16, *clip.latent_size)
        timestep = float(torch.randint(1, 1000, (1,)))
        for text_len in (16, 17, 512):  # D04: the text is whole on every rank, whatever its length
            states = torch.randn(1, text_len, 32)
            with torch.no_grad():
                expected = _pipeline(heads).transformer(latent, torch.tensor([timestep]), states, return_dict=False)[0]
            args = (_folder(heads), clip, latent, states, timestep)
            alone = ranks(1).run(run_forward, MeshShape(1, 1), *args)[0]
            for found in ranks(cfg * ulysses).run(run_forward, MeshShape(cfg, ulysses), *args):
                where = f"{tokens} tokens, {text_len} text positions"
                assert found.shape == expected.shape, where
                assert _largest(found - expected) <= REFERENCE_FORWARD, where
                assert _largest(found - alone) <= MESH_FORWARD, where


@pytest.mark.parametrize("heads", [4, 6])
@pytest.mark.parametrize(("cfg", "ulysses"), MESHES)
def test_a_whole_sampling_equals_the_reference_on_every_mesh(ranks, cfg: int, ulysses: int, heads: int) -> None:
    cases = [_case(heads, tokens, steps) for tokens in CLIPS for steps in (4, 12)]
    alone = ranks(1).run(run_sampling, MeshShape(1, 1), cases)[0]
    everyone = ranks(cfg * ulysses).run(run_sampling, MeshShape(cfg, ulysses), cases)
    for index, case in enumerate(cases):
        expected = _reference_sampling(case, heads)
        latents, counts = everyone[0][index]
        where = f"{case.clip.num_tokens} tokens, {case.steps} steps"
        assert set(counts.experts) == {"high", "low"}, where
        assert _largest(latents - expected) <= REFERENCE_SAMPLING, where
        assert _largest(latents - alone[index][0]) <= MESH_SAMPLING, where
        assert all(torch.equal(latents, other[index][0]) for other in everyone), "every rank ends with the same bits"


@pytest.mark.parametrize("ulysses", [1, 2, 3])
def test_guidance_in_parallel_has_the_bits_of_guidance_in_turn(ranks, ulysses: int) -> None:
    guidances = [(4.0, 3.0), (1.0, 3.0), (4.0, 1.0), (0.0, 2.0), (1.0, 1.0), (1.0001, -1.0)]
    cases = [
        _case(4, tokens, 4, guidance_high=high, guidance_low=low, seed=seed)
        for tokens in CLIPS
        for seed, (high, low) in enumerate(guidances)
    ]
    serial = ranks(ulysses).run(run_sampling, MeshShape(1, ulysses), cases)[0]
    parallel = ranks(2 * ulysses).run(run_sampling, MeshShape(2, ulysses), cases)[0]
    for (expected, _), (found, _), case in zip(serial, parallel, cases, strict=True):
        assert torch.equal(expected, found), case


def test_guidance_of_one_computes_one_branch_and_idles_the_other_half(ranks) -> None:
    """D14: 4 steps of two experts; 0 is a value, 1 skips a branch, and in parallel each rank has one forward a step."""
    for guidance, serial in ((1.0, 4), (0.0, 8), (1.0001, 8), (4.0, 8)):
        case = _case(4, 45, 4, guidance_high=guidance, guidance_low=guidance)
        (_, counts), *_ = ranks(1).run(run_sampling, MeshShape(1, 1), [case])[0]
        assert counts.forwards == serial
        both = [answers[0][1].forwards for answers in ranks(2).run(run_sampling, MeshShape(2, 1), [case])]
        assert both == ([4, 0] if guidance == 1 else [4, 4])


def test_guidance_changes_the_result_at_each_value_but_for_the_skipped_branch(ranks) -> None:
    """D14."""
    latents = {
        guidance: ranks(1).run(
            run_sampling, MeshShape(1, 1), [_case(4, 45, 4, guidance_high=guidance, guidance_low=guidance)]
        )[0][0][0]
        for guidance in (0.0, 1.0, 1.0001, 4.0)
    }
    assert _largest(latents[1.0] - latents[1.0001]) < 1e-3
    assert _largest(latents[0.0] - latents[1.0]) > 1e-3
    assert _largest(latents[4.0] - latents[1.0]) > 1e-3


def test_self_attention_alone_exchanges(ranks) -> None:
    """D04: three scatters (q, k, v) a block and forward; the text's keys and values never travel."""
    case = _case(4, 45, 4)
    for _, counts in (answers[0] for answers in ranks(4).run(run_sampling, MeshShape(1, 4), [case])):
        assert counts.exchanges == 3 * 2 * counts.forwards  # two blocks


@pytest.mark.parametrize(("cfg", "ulysses"), [(1, 2), (2, 2), (1, 4), (1, 3)])
def test_the_pipelined_exchange_gives_a_sampling_the_bits_of_the_collective_one(ranks, cfg: int, ulysses: int) -> None:
    cases = [_case(heads, tokens, 4, exchange=exchange) for heads, tokens in HEADS_AND_TOKENS for exchange in EXCHANGES]
    found = ranks(cfg * ulysses).run(run_sampling, MeshShape(cfg, ulysses), cases)[0]
    for index in range(0, len(cases), 2):
        assert torch.equal(found[index][0], found[index + 1][0]), cases[index]
