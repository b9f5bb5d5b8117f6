"""What is asked for is what is made: every option has its effect, on four ranks, on two and on one.

The requests of each world run in one set of ranks; the tests look at what they left.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from tests.multi_gpu.batch import Made, make_all, modules_of, small
from tests.multi_gpu.programs import Finished, Programs, alone, torchrun
from tests.tiny import reference_pipeline, tiny_checkpoint
from usp.launch.values import MAX_SEED
from usp.launch.video import VideoInfo, decode, probe

pytestmark = pytest.mark.timeout(600)  # the first test of each world waits for all its requests

PROMPTS = ("a red ball", "two cats\u3002\u4e24\u53ea\u732b", "  three   dogs  ")
LONG_PROMPTS = {
    "300 letters": "abcdefgh " * 33 + "xyz",
    "100 Chinese": "\u96ea\u5c71\u4e0b\u7684\u6e56" * 20,
    "80 emoji": "\U0001f680" * 80,
    "path": "../a/b\n..",
    "surrogate": "half a \ud83d and &amp;quot;more&quot;",
}
GUIDANCES = ("0", "1", "1.0001", "4")
NEGATIVES = {"empty": "", "given": "rain, fog"}
FRAMES = (1, 5, 9, 17, 33)
HEADS = (4, 5, 6)
TINY = "16*16"


def guided(value: str) -> dict[str, object]:
    return {"guidance_scale_high": value, "guidance_scale_low": value}


def of_four() -> dict[str, list[str]]:
    requests = {
        "plain": small(),
        "original": small(tiny_checkpoint(layout="original")),
        "drawn": small(base_seed=None),
        "drawn again": small(base_seed="@drawn"),
        "minus one": small(base_seed=-1),
        "minus one again": small(base_seed="@minus one"),
        "largest": small(base_seed=MAX_SEED),
        "prompts": small(prompt=None, prompt_file="../prompts.txt", base_seed=10, save_file="all.mp4"),
    }
    requests |= {f"prompt {i}": small(prompt=text.strip(), base_seed=10 + i) for i, text in enumerate(PROMPTS)}
    requests |= {f"guidance {g}": small(cfg_size=2, ulysses_size=2, **guided(g)) for g in GUIDANCES}
    requests |= {f"negative {name}": small(negative_prompt=text) for name, text in NEGATIVES.items()}
    requests |= {name: small(prompt=text, sample_steps=1) for name, text in LONG_PROMPTS.items()}
    for heads in HEADS:
        checkpoint = tiny_checkpoint(heads=heads)
        requests[f"{heads} heads, 1x4"] = small(
            checkpoint, cfg_size=1, ulysses_size=4, save_latents=f"{heads}a.safetensors"
        )
        requests[f"{heads} heads, 2x2"] = small(
            checkpoint, cfg_size=2, ulysses_size=2, save_latents=f"{heads}b.safetensors"
        )
    return requests


def of_two() -> dict[str, list[str]]:
    return {f"guidance {g}": small(cfg_size=1, ulysses_size=2, **guided(g)) for g in GUIDANCES}


def of_one() -> dict[str, list[str]]:
    requests = {"plain": small(save_latents="plain.safetensors", save_file="plain.mp4")}
    requests["decoded"] = small(size=None, frame_num=None, load_latents="plain.safetensors", save_file="decoded.mp4")
    requests |= {f"{n} frames": small(size=TINY, frame_num=n, sample_steps=2) for n in FRAMES}
    requests["still"] = small(frame_num=1, save_file="still.png", save_latents="still.safetensors")
    return requests


@dataclass(frozen=True)
class World:
    made: dict[str, Made]
    finished: Finished

    def hash(self, name: str) -> str:
        return self.made[name].hash


def _world(base: Path, launcher: list[str], requests: dict[str, list[str]]) -> Iterator[World]:
    with Programs(base) as programs:
        yield World(*make_all(programs, launcher, requests, files={"../prompts.txt": "\n\n".join(PROMPTS)}))


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    yield from _world(tmp_path_factory.mktemp("four"), torchrun(4), of_four())


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    yield from _world(tmp_path_factory.mktemp("two"), torchrun(2), of_two())


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    yield from _world(tmp_path_factory.mktemp("one"), alone(), of_one())


def test_both_layouts_of_the_same_weights_give_the_same_latents(four):
    layouts = [four.made[name].report["layout"] for name in ("plain", "original")]
    assert layouts == ["diffusers", "original"]
    assert four.hash("original") == four.hash("plain")


def test_a_prompt_file_makes_what_single_runs_with_counted_seeds_make(four):
    """D07."""
    made = four.made["prompts"]
    assert [video["seed"] for video in made.report["videos"]] == [10, 11, 12]
    assert [file.name for file in made.videos] == ["all_0.mp4", "all_1.mp4", "all_2.mp4"]
    assert made.hashes == [four.hash(f"prompt {i}") for i in range(3)]
    assert {probe(file) for file in made.videos} == {VideoInfo(9, 80, 48, 16)}


@pytest.mark.parametrize("name", ["drawn", "minus one"])
def test_a_drawn_seed_is_printed_and_replays(four, name):
    """D07."""
    drawn = four.made[name]
    seed = drawn.report["base_seed"]
    assert len(four.finished.lines(f"latents sha256 {drawn.hash}", f"(seed {seed})")) == 2
    assert four.hash(f"{name} again") == drawn.hash


def test_the_smallest_and_the_largest_seed_are_honoured(four):
    """D07: 0 is a seed, not the lack of one."""
    seeds = [four.made[name].report["videos"][0]["seed"] for name in ("plain", "original", "largest")]
    assert seeds == [0, 0, MAX_SEED]
    assert len({four.hash(name) for name in ("plain", "largest", "drawn", "minus one")}) == 4


@pytest.mark.parametrize("heads", HEADS)
def test_every_legal_mesh_runs_whether_or_not_the_heads_divide(four, heads):
    """D06."""
    flat, square = (four.made[f"{heads} heads, {mesh}"] for mesh in ("1x4", "2x2"))
    assert (flat.report["mesh"], square.report["mesh"]) == ({"cfg": 1, "ulysses": 4}, {"cfg": 2, "ulysses": 2})
    latents = [load_file(flat.folder / f"{heads}{mesh}.safetensors")["latents"] for mesh in "ab"]
    assert torch.max(torch.abs(latents[0] - latents[1])) <= 1e-4  # each is within 5e-5 of one process


def test_every_guidance_makes_a_video_of_its_own(four):
    """D14: 0 and 1 are values, and no value is replaced by another."""
    for value in GUIDANCES:
        assert four.made[f"guidance {value}"].report["guidance"] == {"high": float(value), "low": float(value)}
    assert len({four.hash(f"guidance {g}") for g in GUIDANCES}) == len(GUIDANCES)


@pytest.mark.parametrize("guidance", GUIDANCES)
def test_guidance_in_parallel_equals_guidance_in_one_rank_bit_for_bit(four, two, guidance):
    """D14."""
    parallel, serial = (world.made[f"guidance {guidance}"] for world in (four, two))
    assert (parallel.report["mesh"]["cfg"], serial.report["mesh"]["cfg"]) == (2, 1)
    assert parallel.hash == serial.hash


def test_a_negative_prompt_counts_whether_silent_empty_or_given(four):
    """D14: silent means the default, and only '' means none."""
    texts = [four.made[name].report["negative_prompt"] for name in ("negative empty", "negative given")]
    assert texts == ["", "rain, fog"]
    assert four.made["plain"].report["negative_prompt"]
    assert len({four.hash(name) for name in ("plain", "negative empty", "negative given")}) == 3


@pytest.mark.parametrize("name", LONG_PROMPTS)
def test_no_prompt_is_too_long_or_too_strange_for_a_file_name(four, name):
    """D10, D11."""
    made = four.made[name]
    assert made.video.parent == made.folder / "outputs"
    assert probe(made.video) == VideoInfo(9, 80, 48, 16)


def test_one_process_comes_close_to_every_mesh(four, one):
    single = load_file(one.made["plain"].folder / "plain.safetensors")["latents"]
    for mesh in "ab":
        latents = load_file(four.finished.folder / f"4{mesh}.safetensors")["latents"]
        assert torch.max(torch.abs(latents - single)) <= 5e-5


@pytest.mark.parametrize("frames", FRAMES)
def test_the_file_holds_as_many_frames_as_were_announced(one, frames):
    """D08, D09."""
    assert one.made[f"{frames} frames"].report["clip"]["frames"] == frames
    assert one.finished.lines(f"{frames} frames of 16x16")
    assert probe(one.made[f"{frames} frames"].video) == VideoInfo(frames, 16, 16, 16)


@pytest.mark.long
def test_the_file_holds_as_many_frames_as_a_full_clip_has(tmp_path):
    """D08."""
    requests = {f"{n} frames": small(size=TINY, frame_num=n, sample_steps=2) for n in (81, 85)}
    with Programs(tmp_path) as programs:
        made, _ = make_all(programs, torchrun(2), requests)
    assert [probe(made[name].video) for name in requests] == [VideoInfo(81, 16, 16, 16), VideoInfo(85, 16, 16, 16)]


def test_saved_latents_make_the_same_video_again(one):
    tensors = load_file(one.finished.folder / "plain.safetensors")
    assert list(tensors) == ["latents"]
    assert (tensors["latents"].dtype, tuple(tensors["latents"].shape)) == (torch.float32, (1, 16, 3, 6, 10))
    again, first = (decode(one.finished.folder / name) for name in ("decoded.mp4", "plain.mp4"))
    assert np.array_equal(again, first)


@pytest.mark.parametrize(("picture", "latents"), [("plain.sheet.png", "plain"), ("still.png", "still")])
def test_pixels_are_those_of_the_reference_decoder(one, picture, latents):
    """Before the lossy encoding: the contact sheet of nine frames holds each of them, and a still is its only frame."""
    expected = _decoded_by_reference(load_file(one.finished.folder / f"{latents}.safetensors")["latents"])
    found = torch.from_numpy(np.array(Image.open(one.finished.folder / picture)))
    rows = [torch.cat(list(expected[row : row + 3]), dim=1) for row in range(0, len(expected), 3)]
    assert found.shape == torch.cat(rows).shape
    assert torch.max(torch.abs(found.float() - torch.cat(rows))) <= 1


@torch.inference_mode()
def _decoded_by_reference(latents: torch.Tensor) -> torch.Tensor:
    """[F, H, W, 3] in 0..255, unrounded."""
    vae = reference_pipeline(tiny_checkpoint()).vae
    mean, std = (
        torch.tensor(values).view(1, -1, 1, 1, 1) for values in (vae.config.latents_mean, vae.config.latents_std)
    )
    video = vae.decode(latents * std + mean).sample
    return (video[0].clamp(-1, 1).permute(1, 2, 3, 0) + 1) * 127.5


def test_only_rank_zero_imports_what_text_decoding_and_files_need(four):
    needed = {"transformers", "tokenizers", "ftfy", "av", "diffusers.models"}
    loaded = [modules_of(four.finished, rank) for rank in range(4)]
    assert needed <= loaded[0]
    for modules in loaded[1:]:
        assert not needed & modules
        assert {"torch", "usp.models.wan.transformer", "usp.launch.run"} <= modules
        assert not {"usp.launch.save", "usp.launch.video", "usp.models.wan.vae", "torchvision", "accelerate"} & modules
