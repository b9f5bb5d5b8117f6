"""The size of a clip: what is legal, and the one place that every shape comes from (D08, D09)."""

import re
from pathlib import Path

import pytest

from usp.errors import UserError
from usp.models.wan.clip import Clip

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("frames", "height", "width", "tokens"),
    [
        *((81, 720, 1280, 75_600), (81, 480, 832, 32_760), (81, 720, 720, 42_525), (121, 480, 832, 48_360)),
        *((9, 48, 80, 45), (5, 48, 80, 30), (1, 16, 16, 1)),
    ],
)
def test_tokens_of_known_sizes(frames: int, height: int, width: int, tokens: int) -> None:
    assert Clip(frames, height, width).num_tokens == tokens


@pytest.mark.parametrize(
    ("frames", "nearest"),
    [(-1, "1 or 5"), (0, "1 or 5"), (2, "1 or 5"), (4, "1 or 5"), (48, "45 or 49"), (80, "77 or 81")],
)
def test_frames_that_are_not_4k_plus_1_are_refused_with_the_nearest_two(frames: int, nearest: str) -> None:
    with pytest.raises(UserError, match=f"frame_num is {frames}; .* use {nearest}"):
        Clip(frames, 48, 80)


@pytest.mark.parametrize("axis", ["height", "width"])
@pytest.mark.parametrize(
    ("side", "nearest"),
    [(8, "16 or 32"), (24, "16 or 32"), (40, "32 or 48"), (50, "48 or 64"), (0, "16 or 32"), (-16, "16 or 32")],
)
def test_sides_that_are_no_multiple_of_16_are_refused_with_the_nearest_two(axis: str, side: int, nearest: str) -> None:
    with pytest.raises(UserError, match=f"{axis} is {side}; .* use {nearest}"):
        Clip(**{"frames": 5, "height": 48, "width": 80, axis: side})


def test_a_clip_longer_than_the_rotary_table_is_refused() -> None:
    Clip(4093, 16, 16).check_positions(1024)
    with pytest.raises(UserError, match="1025 token positions, but this model knows 1024"):
        Clip(4097, 16, 16).check_positions(1024)


def test_no_shape_is_written_for_81_frames() -> None:
    """D08: the default of 81 frames stands in the task table and nowhere else, and its 21 latent frames nowhere."""
    sources = [path for folder in ("usp", "ipc", "models", "launch") for path in (ROOT / folder).rglob("*.py")]
    found = [
        path.name
        for path in sources
        if re.search(r"(?<![\d.])(81|21)(?![\d.%])", re.sub(r"#.*|\".*?\"", "", path.read_text()))
    ]
    assert set(found) == {"tasks.py"}
