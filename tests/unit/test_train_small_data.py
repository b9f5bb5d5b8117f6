"""The small world: what clips show, what captions say, and that the judge sees what is there and nothing else."""

import math
from collections import Counter
from random import Random

import pytest
import torch
import torch.nn.functional as F

from scripts.train_small.captions import caption, plain_caption, random_scene
from scripts.train_small.data import cover_of, draw_clips, draw_scenes
from scripts.train_small.judge import NOTHING, Finding, is_right, judge
from scripts.train_small.world import (
    COLOURS,
    MOTIONS,
    SHAPES,
    SIDE,
    STILL,
    Scene,
    all_combinations,
    held_out_combinations,
    trained_combinations,
)

CPU = torch.device("cpu")
pytestmark = pytest.mark.timeout(900)  # hundreds of clips are drawn and judged
ATTRIBUTES = ("colour", "shape", "motion", "background")


def fresh_clips(count: int, seed: int) -> tuple[list[Scene], torch.Tensor]:
    """Scenes, and their clips [B, 3, T, H, W]."""
    scenes = draw_scenes(count, all_combinations(), random=Random(seed))
    return scenes, draw_clips(scenes, seed=seed, device=CPU).pixels


def as_frames(pixels: torch.Tensor) -> torch.Tensor:
    return ((pixels.clamp(-1, 1) + 1) * 127.5).round().movedim(1, -1)  # [B, 3, T, H, W] -> [B, T, H, W, 3]


def blurred(pixels: torch.Tensor) -> torch.Tensor:
    kernel = torch.full((3, 1, 1, 3, 3), 1 / 9)
    return F.conv3d(F.pad(pixels, (1, 1, 1, 1, 0, 0), mode="replicate"), kernel, groups=3)


def share_right(scenes: list[Scene], findings: list[Finding]) -> float:
    return sum(is_right(finding, scene) for finding, scene in zip(findings, scenes, strict=True)) / len(scenes)


@pytest.fixture(scope="module")
def judged() -> tuple[list[Scene], list[Finding]]:
    """Blurred and noisy clips, more than a VAE does to them."""
    seed = int(torch.randint(1 << 30, ()))
    scenes, pixels = fresh_clips(200, seed)
    noisy = blurred(pixels) + 0.1 * torch.randn(pixels.shape)
    return scenes, [judge(frames) for frames in as_frames(noisy)]


def test_the_judge_is_right_about_blurred_and_noisy_clips(judged):
    scenes, findings = judged
    assert share_right(scenes, findings) > 0.99
    for name in ATTRIBUTES:
        told = sum(
            getattr(finding, name) == getattr(scene, name) for finding, scene in zip(findings, scenes, strict=True)
        )
        assert told > 0.99 * len(scenes), name


def test_the_judge_tells_slow_from_fast(judged):
    moving = [(scene, finding) for scene, finding in zip(*judged, strict=True) if scene.motion != STILL]
    assert sum(finding.speed == scene.speed for scene, finding in moving) > 0.99 * len(moving)


def test_shuffled_captions_are_right_by_chance_only(judged):
    scenes, findings = judged
    shifted = scenes[1:] + scenes[:1]
    assert share_right(shifted, findings) < 0.03  # chance is one in 352
    colours = sum(finding.colour == scene.colour for finding, scene in zip(findings, shifted, strict=True))
    assert colours < 0.3 * len(scenes)  # one in eight


def test_a_clip_played_backwards_moves_the_other_way():
    _, pixels = fresh_clips(1, 0)
    pixels = draw_clips([Scene("red", "ball", "left", "fast", "dark")], seed=1, device=CPU).pixels
    assert judge(as_frames(pixels)[0]).motion == "left"
    assert judge(as_frames(pixels.flip(2))[0]).motion == "right"


def test_red_with_its_channels_turned_is_another_colour():
    pixels = draw_clips([Scene("red", "ball", "left", "fast", "dark")], seed=1, device=CPU).pixels
    assert judge(as_frames(pixels.roll(1, dims=1))[0]).colour == "green"


@pytest.mark.parametrize("frames", ["noise", "grey", "half"])
def test_noise_an_empty_picture_and_one_that_comes_late_show_nothing(frames: str):
    if frames == "noise":
        clip = torch.randint(256, (17, SIDE, SIDE, 3)).float()
    elif frames == "grey":
        clip = torch.full((17, SIDE, SIDE, 3), 120.0)
    else:
        clip = as_frames(draw_clips([Scene("red", "ball", STILL, "fast", "dark")], seed=1, device=CPU).pixels)[0]
        clip[:8] = clip[:1, :1, :1]
    assert judge(clip).combination == (NOTHING, NOTHING, NOTHING)


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_has_the_area_of_its_ball_and_its_centroid_where_asked(shape: str):
    centre, radius = torch.tensor([[[30.3, 33.8]]]), torch.tensor([9.0])
    cover = cover_of(torch.tensor([SHAPES.index(shape)]), centre, radius)[0, 0].double()
    place = torch.arange(SIDE) + 0.5
    assert float(cover.sum()) == pytest.approx(math.pi * 81, rel=0.02)
    assert float((cover.sum(dim=0) * place).sum() / cover.sum()) == pytest.approx(30.3, abs=0.1)
    assert float((cover.sum(dim=1) * place).sum() / cover.sum()) == pytest.approx(33.8, abs=0.1)


def test_nothing_touches_the_border():
    _, pixels = fresh_clips(400, 3)
    corner = pixels[:, :, :1, 0, :1]  # [B, 3, 1, 1]
    for side in (pixels[..., 0, :], pixels[..., -1, :], pixels[..., :, 0], pixels[..., :, -1]):
        assert torch.equal(side, corner.expand_as(side))


def test_edges_are_anti_aliased():
    pixels = draw_clips([Scene("red", "ball", STILL, "slow", "dark")], seed=4, device=CPU).pixels
    levels = pixels[0, 0, 0].unique()
    assert len(levels) > 10


def test_a_seed_fixes_a_clip_and_another_changes_it():
    scenes, first = fresh_clips(4, 7)
    assert torch.equal(first, draw_clips(scenes, seed=7, device=CPU).pixels)
    assert not torch.equal(first, draw_clips(scenes, seed=8, device=CPU).pixels)


def test_fewer_frames_are_the_first_of_the_same_clip():
    scenes, whole = fresh_clips(4, 7)
    assert torch.equal(draw_clips(scenes, seed=7, device=CPU, frames=9).pixels, whole[:, :, :9])


def test_one_motion_of_every_pair_of_colour_and_shape_is_held_out():
    held_out = held_out_combinations()
    assert Counter((one.colour, one.shape) for one in held_out) == Counter(
        {(colour, shape): 1 for colour in COLOURS for shape in SHAPES}
    )
    trained = trained_combinations()
    assert not set(held_out) & set(trained)
    assert {(one.colour, one.motion) for one in trained} == {(c, m) for c in COLOURS for m in MOTIONS}
    assert {(one.shape, one.motion) for one in trained} == {(s, m) for s in SHAPES for m in MOTIONS}


def test_plain_captions_differ_wherever_scenes_do():
    scenes = {Scene(*one, speed, "dark") for one in all_combinations() for speed in ("slow", "fast")}
    told = [scene for scene in scenes if scene.motion != STILL or scene.speed == "slow"]
    assert len({plain_caption(scene) for scene in told}) == len(told)


def test_captions_vary_and_always_name_the_colour():
    random = Random(5)
    scene = Scene("orange", "square", "up-left", "fast", "dark")
    said = {caption(random, random_scene(random, scene)) for _ in range(200)}
    assert len(said) > 100
    assert all("orange" in text and "left" in text and "up" in text for text in said)
    assert {"dark" in text for text in said} == {True, False}
