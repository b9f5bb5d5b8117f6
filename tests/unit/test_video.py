"""Video files: what is written is what is read back, and what cannot be written is refused before anything is (D23)."""

import io
import re
import struct
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from usp.errors import UserError
from usp.launch import video

SIZES = [(16, 16), (48, 80), (50, 82)]  # height, width
RATES = [(16, Fraction(16)), (24, Fraction(24)), (23.976, Fraction(23976, 1000))]


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng()


def random_frames(rng: np.random.Generator, frames: int, height: int = 48, width: int = 80) -> video.Frames:
    return rng.integers(0, 256, (frames, height, width, 3), dtype=np.uint8)


def numbered_frames(count: int, height: int = 48, width: int = 80) -> video.Frames:
    """Frame i is one flat grey, 10 + 9 i, so that a lost or misplaced frame shows."""
    greys = (10 + 9 * np.arange(count)).astype(np.uint8)
    return np.broadcast_to(greys[:, None, None, None], (count, height, width, 3)).copy()


@pytest.mark.parametrize(("height", "width"), SIZES)
@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize(("fps", "rate"), RATES)
def test_file_has_the_size_count_and_rate_that_were_asked_for(rng, height, width, count, fps, rate):  # D23
    mp4 = video.encode_mp4(random_frames(rng, count, height, width), fps)
    assert video.probe(mp4) == video.VideoInfo(frames=count, width=width, height=height, fps=rate)


@pytest.mark.parametrize(("height", "width"), [(49, 81), (48, 81), (49, 80), (1, 1), (0, 16)])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_odd_sides_are_refused_by_name(height, width, count):  # D23
    with pytest.raises(UserError, match=f"{width}x{height}.*even"):
        video.encode_mp4(np.zeros((count, height, width, 3), np.uint8), 16)


def test_refusal_of_an_odd_side_names_a_size_that_works():
    with pytest.raises(UserError) as refusal:
        video.check_size(height=49, width=81)
    width, height = map(int, re.findall(r"use (\d+)x(\d+)", str(refusal.value))[0])
    video.check_size(height=height, width=width)


@pytest.mark.parametrize("fps", [0, -16, float("nan"), float("inf"), 1e-9, 1e9])
def test_impossible_rates_are_refused(rng, fps):
    with pytest.raises(UserError, match="fps is"):
        video.encode_mp4(random_frames(rng, 1), fps)


@pytest.mark.parametrize("fps", [0.001, 0.5, 29.97, 59.94005994, 16.123456789, 1000])
def test_file_keeps_unusual_rates(rng, fps):
    assert float(video.probe(video.encode_mp4(random_frames(rng, 2), fps)).fps) == pytest.approx(fps, rel=1e-9)


def test_frames_come_back_in_order():
    frames = numbered_frames(25)
    np.testing.assert_allclose(video.decode(video.encode_mp4(frames, 16)).astype(int), frames.astype(int), atol=2)


@pytest.mark.parametrize("colour", [(255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255), (0, 0, 0), (200, 30, 90)])
def test_flat_colours_come_back_within_two_of_255(colour):
    frames = np.full((3, 48, 80, 3), colour, np.uint8)
    read = video.decode(video.encode_mp4(frames, 16)).astype(int)
    assert np.abs(read - np.array(colour)).max() <= 2


def test_smooth_pictures_come_back_nearly_unchanged():
    rows, columns = np.mgrid[0:96, 0:128]
    picture = np.stack([rows * 2, columns * 1.5, 255 - rows - columns], axis=-1).clip(0, 255).astype(np.uint8)
    read = video.decode(video.encode_mp4(np.stack([picture] * 5), 16)).astype(int)
    assert np.abs(read - picture).mean() < 1.5


def test_chunks_give_the_bytes_of_the_whole_clip(rng):
    frames = random_frames(rng, 13)
    chunks = (frames[start : start + 4] for start in range(0, 13, 4))
    assert video.encode_mp4(chunks, 16) == video.encode_mp4(frames, 16)


def test_same_frames_give_the_same_bytes(rng):
    frames = random_frames(rng, 9, 64, 96)
    assert len({video.encode_mp4(frames.copy(), 16) for _ in range(4)}) == 1


def test_strided_frames_are_read_as_they_look(rng):
    frames = random_frames(rng, 5, 64, 96)
    views = [frames[:, ::-1], frames[..., ::-1], frames[:, :, 16:80]]
    assert all(video.encode_mp4(view, 16) == video.encode_mp4(np.ascontiguousarray(view), 16) for view in views)


@pytest.mark.parametrize("nothing", [[], np.zeros((0, 16, 16, 3), np.uint8), [np.zeros((0, 16, 16, 3), np.uint8)]])
def test_a_clip_of_no_frames_is_refused(nothing):
    with pytest.raises(UserError, match="at least 1"):
        video.encode_mp4(nothing, 16)


def test_frames_of_two_sizes_are_refused(rng):
    with pytest.raises(UserError, match="80x64 follows one of 80x48"):
        video.encode_mp4([random_frames(rng, 2), random_frames(rng, 1, 64, 80)], 16)


def test_players_can_start_before_the_file_has_arrived(rng):
    assert top_level_boxes(video.encode_mp4(random_frames(rng, 5), 16))[:2] == ["ftyp", "moov"]


def top_level_boxes(mp4: bytes) -> list[str]:
    names, at = [], 0
    while at < len(mp4):
        size, name = struct.unpack(">I4s", mp4[at : at + 8])
        names.append(name.decode())
        at += size
    return names


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9])
def test_a_cut_file_does_not_pass_for_a_whole_one(rng, tmp_path: Path, share):
    whole = video.encode_mp4(random_frames(rng, 9, 96, 96), 16)
    cut = tmp_path / "cut.mp4"
    cut.write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(UserError, match="cannot be decoded to its end"):
        video.probe(cut)


def test_probe_reads_a_file_and_its_bytes_alike(rng, tmp_path: Path):
    path = tmp_path / "clip.mp4"
    path.write_bytes(video.encode_mp4(random_frames(rng, 2), 24))
    assert video.probe(path) == video.probe(path.read_bytes())


def test_pixels_are_rounded_and_clipped():
    values = torch.tensor([-9.0, -1.0, -0.999, 0.0, 0.001, 0.9999, 1.0, 9.0])
    frames = values.repeat_interleave(3).reshape(1, 2, 4, 3)
    assert video.to_uint8(frames)[0, :, :, 0].ravel().tolist() == [0, 0, 0, 128, 128, 255, 255, 255]


def test_every_byte_survives_the_way_to_floats_and_back():
    bytes_ = np.arange(256, dtype=np.uint8).repeat(3).reshape(1, 16, 16, 3)
    assert np.array_equal(video.to_uint8(bytes_ / 127.5 - 1.0), bytes_)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_pixels_of_any_dtype_match_plain_arithmetic(dtype):
    frames = (torch.rand(2, 4, 6, 3) * 2.2 - 1.1).to(dtype)
    expected = ((frames.double() + 1) * 127.5).clamp(0, 255)
    assert np.abs(video.to_uint8(frames) - expected.numpy()).max() <= 0.5 + 1e-4


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("kind", ["torch", "numpy"])
def test_values_that_are_not_finite_are_an_error_that_names_the_frame(value, kind):  # D23
    frames = torch.rand(5, 16, 16, 3)
    frames[3, 2, 5, 1] = frames[3, 0, 0, 0] = frames[4, 1, 1, 1] = value
    with pytest.raises(UserError, match=r"frame 3 of 5 holds 2 of 768 values .*2 such frames"):
        video.to_uint8(frames if kind == "torch" else frames.numpy())


def test_png_is_lossless(rng):
    frame = random_frames(rng, 1)[0]
    assert np.array_equal(open_png(video.encode_png(frame)), frame)


@pytest.mark.parametrize(
    ("count", "grid"), [(1, (1, 1)), (2, (1, 2)), (3, (2, 2)), (5, (2, 3)), (8, (3, 3)), (9, (3, 3)), (81, (3, 3))]
)
def test_contact_sheet_shows_up_to_nine_frames_in_order(rng, count, grid):
    frames = random_frames(rng, count, 16, 32)
    sheet = open_png(video.contact_sheet(frames))
    assert sheet.shape == (grid[0] * 16, grid[1] * 32, 3)
    cells = sheet.reshape(grid[0], 16, grid[1], 32, 3).swapaxes(1, 2).reshape(-1, 16, 32, 3)
    shown = [int(np.flatnonzero((frames == cell).all(axis=(1, 2, 3)))[0]) for cell in cells[: min(count, 9)]]
    assert shown == sorted(set(shown))
    assert (shown[0], shown[-1]) == (0, count - 1)
    assert not cells[min(count, 9) :].any()


def test_contact_sheet_of_81_frames_is_evenly_spaced():
    assert video.sheet_picks(81, 9) == list(range(0, 81, 10))


def open_png(data: bytes) -> np.ndarray:
    image = Image.open(io.BytesIO(data))
    assert image.format == "PNG"
    return np.asarray(image)
