"""Frames in, files out: an MP4 or a PNG as bytes, a contact sheet, and the read-back that proves them.

H.264 in yuv420p through PyAV, in memory, one chunk of frames at a time, so a long clip need not be held twice.
Used by the rank that saves, after decoding, and by the tests. Linux only: the MP4 grows in an anonymous memory file.

Legend: F frames, H rows, W columns.
"""

import io
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import av
import numpy as np
from av.video.reformatter import ColorPrimaries, ColorRange, Colorspace, ColorTrc, Interpolation
from numpy.typing import NDArray
from PIL import Image

from usp.errors import UserError

if TYPE_CHECKING:
    import torch
    from av.container import InputContainer, OutputContainer
    from av.video.stream import VideoStream

Frames = NDArray[np.uint8]  # [F, H, W, 3], or one frame [H, W, 3]
# crf is x264's scale of loss; from about 18 down it is hard to see. With mbtree x264 reads more than it has computed,
# and the same frames give other bytes now and then.
X264 = {"crf": "18", "preset": "medium", "mbtree": "0"}
MAX_FPS = 1000
FASTSTART = {"movflags": "+faststart"}  # the index comes first, so players start before the end has arrived
# With accurate rounding flat colours come back within 1 of 255; without it, within 3.
SCALING = Interpolation.BICUBIC | Interpolation.ACCURATE_RND | Interpolation.FULL_CHR_H_INT


@dataclass(frozen=True)
class VideoInfo:
    """What a video file really holds, counted by decoding every frame."""

    frames: int
    width: int
    height: int
    fps: Fraction


def to_uint8(frames: "torch.Tensor | NDArray[np.floating[Any]]") -> Frames:
    """[F, H, W, 3] in [-1, 1] to bytes, rounded and clipped. Raises UserError naming the first frame with a NaN."""
    values = frames if isinstance(frames, np.ndarray) else frames.detach().float().cpu().numpy()
    _check_finite(values)
    pixels = np.empty(values.shape, np.uint8)
    for value, pixel in zip(values, pixels, strict=True):  # frame by frame: a long clip in fp32 fills gigabytes
        pixel[...] = np.clip(np.rint((value + 1.0) * 127.5), 0, 255)
    return pixels


def encode_mp4(frames: Frames | Iterable[Frames], fps: float) -> bytes:
    """An MP4 of [F, H, W, 3], given whole or as consecutive chunks.

    The same frames give the same bytes.
    Raises UserError for no frames, for an odd side, for frames of more than one size and for an impossible rate.
    """
    rate = exact_rate(fps)
    pictures = _pictures(frames)
    first = next(pictures, None)
    if first is None:
        raise UserError("0 frames given; a video needs at least 1")
    check_size(height=first.shape[0], width=first.shape[1])
    # faststart reads the file back by name, which a BytesIO does not have
    with os.fdopen(os.memfd_create("clip.mp4"), "rb") as file:
        with av.open(f"/proc/self/fd/{file.fileno()}", "w", format="mp4", options=FASTSTART) as container:
            stream = _add_stream(container, first.shape, rate)
            container.mux(stream.encode(_to_yuv(first)))
            for picture in pictures:
                _check_same_size(picture, first)
                container.mux(stream.encode(_to_yuv(picture)))
            container.mux(stream.encode(None))
        return file.read()


def try_encoder(*, height: int, width: int, fps: float) -> None:
    """Encode two frames of a clip's size and read them back. Raises UserError if this installation cannot."""
    wanted = VideoInfo(2, width, height, exact_rate(fps))
    try:
        found = probe(encode_mp4(np.zeros((2, height, width, 3), np.uint8), fps))
    except Exception as error:
        raise UserError(f"PyAV {av.__version__} cannot make a video here: {type(error).__name__}: {error}") from error
    if found != wanted:
        raise UserError(f"PyAV {av.__version__} does not give back what was encoded: {found}, not {wanted}")


def encode_png(frame: Frames) -> bytes:
    """A PNG of one frame [H, W, 3]."""
    buffer = io.BytesIO()
    Image.fromarray(frame).save(buffer, format="PNG")
    return buffer.getvalue()


def contact_sheet(frames: Frames, count: int = 9) -> bytes:
    """A PNG of up to `count` frames of [F, H, W, 3], evenly spaced from first to last, row by row on a square grid."""
    num_cells = min(count, len(frames))
    columns = int(np.ceil(np.sqrt(num_cells)))
    rows = -(-num_cells // columns)
    height, width = frames.shape[1:3]
    sheet = np.zeros((rows * height, columns * width, 3), np.uint8)
    for cell, pick in enumerate(sheet_picks(len(frames), num_cells)):
        top, left = cell // columns * height, cell % columns * width
        sheet[top : top + height, left : left + width] = frames[pick]
    return encode_png(sheet)


def sheet_picks(num_frames: int, num_cells: int) -> list[int]:
    """Which frames a contact sheet shows: the first, the last, and evenly spaced ones between."""
    return [int(pick) for pick in np.rint(np.linspace(0, num_frames - 1, num_cells))]


def decode(source: Path | bytes) -> Frames:
    """Every frame of a video, [F, H, W, 3]."""
    with _open(source) as container:
        pictures = [frame.to_ndarray(format="rgb24", interpolation=SCALING) for frame in container.decode(video=0)]
    return np.stack(pictures).astype(np.uint8, copy=False)


def probe(source: Path | bytes) -> VideoInfo:
    """Count a video's frames by decoding them all; read size and rate. Raises UserError for a damaged or empty one."""
    try:
        with _open(source) as container:
            stream = container.streams.video[0]
            sizes = [(frame.width, frame.height) for frame in container.decode(stream)]
            fps = stream.average_rate
    except (av.FFmpegError, IndexError) as error:
        raise UserError(f"the video cannot be decoded to its end: {error}") from error
    if not sizes or fps is None or len(set(sizes)) != 1:
        raise UserError(f"the video holds {len(sizes)} frames of sizes {sorted(set(sizes))} at {fps} frames per second")
    return VideoInfo(len(sizes), *sizes[0], fps)


def check_size(*, height: int, width: int) -> None:
    """Raise UserError unless both sides are even, as yuv420p requires."""
    if height % 2 or width % 2 or min(height, width) < 2:
        even = f"{max(2, width // 2 * 2)}x{max(2, height // 2 * 2)}"
        raise UserError(f"frames of {width}x{height} do not fit yuv420p, whose sides are even; use {even}")


def exact_rate(fps: float) -> Fraction:
    """Frames per second as written: 23.976 is 2997/125, not the nearest float. Raises UserError out of range."""
    if not 1 / MAX_FPS <= fps <= MAX_FPS:
        raise UserError(f"fps is {fps}; use {1 / MAX_FPS} to {MAX_FPS}")
    return Fraction(str(fps)).limit_denominator(1_000_000)  # the container counts in 32 bits


def _check_finite(values: NDArray[np.floating[Any]]) -> None:
    num_bad = [value.size - np.count_nonzero(np.isfinite(value)) for value in values]
    for frame, bad in enumerate(num_bad):
        if bad:
            raise UserError(
                f"frame {frame} of {len(values)} holds {bad} of {values[frame].size} values that are NaN or infinite "
                f"({np.count_nonzero(num_bad)} such frames in all), so no video is written; "
                "a smaller guidance or shift, or a wider --dtype, may help"
            )


def _pictures(frames: Frames | Iterable[Frames]) -> Iterator[Frames]:
    """One [H, W, 3] at a time."""
    for chunk in [frames] if isinstance(frames, np.ndarray) else frames:
        assert chunk.dtype == np.uint8 and chunk.ndim == 4 and chunk.shape[3] == 3
        yield from chunk


def _check_same_size(picture: Frames, first: Frames) -> None:
    if picture.shape != first.shape:
        (height, width), (first_height, first_width) = picture.shape[:2], first.shape[:2]
        raise UserError(
            f"a frame of {width}x{height} follows one of {first_width}x{first_height}; a video has one size"
        )


def _add_stream(container: "OutputContainer", shape: tuple[int, ...], rate: Fraction) -> "VideoStream":
    stream = container.add_stream("libx264", rate=rate, options=X264)
    stream.height, stream.width, stream.pix_fmt = shape[0], shape[1], "yuv420p"
    codec = stream.codec_context
    codec.thread_count = 1  # the number of threads is part of the bytes
    codec.colorspace, codec.color_range = Colorspace.ITU709, ColorRange.MPEG
    codec.color_primaries, codec.color_trc = ColorPrimaries.BT709, ColorTrc.BT709
    return stream


def _to_yuv(picture: Frames) -> av.VideoFrame:
    return av.VideoFrame.from_ndarray(np.ascontiguousarray(picture), format="rgb24").reformat(
        format="yuv420p",
        src_color_range=ColorRange.JPEG,
        dst_color_range=ColorRange.MPEG,
        dst_colorspace=Colorspace.ITU709,
        dst_color_primaries=ColorPrimaries.BT709,
        dst_color_trc=ColorTrc.BT709,
        interpolation=SCALING,
        threads=1,
    )


def _open(source: Path | bytes) -> "InputContainer":
    return av.open(io.BytesIO(source) if isinstance(source, bytes) else str(source), "r")
