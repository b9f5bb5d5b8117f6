"""From latents to files, on the rank that saves: decode, encode, read back, and only then the final name.

If anything in here fails, the latents are on disk and the error says how to go on from them.
"""

import logging
import shlex
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save

from usp.errors import UserError
from usp.launch.files import OutputPaths, atomic_write
from usp.launch.guard import Guard
from usp.launch.request import Request
from usp.launch.video import (
    Frames,
    VideoInfo,
    contact_sheet,
    encode_mp4,
    encode_png,
    exact_rate,
    probe,
    sheet_picks,
    to_uint8,
)
from usp.launch.world import program_words
from usp.models.wan.vae import decode_chunks

log = logging.getLogger(__name__)

LATENTS_KEY = "latents"
SHEET_FRAMES = 9


def save_latents(latents: torch.Tensor, path: Path, *, guard: Guard) -> None:
    """fp32 [1, C, F, H, W] as a safetensors file with the one key `latents`."""
    atomic_write(path, save({LATENTS_KEY: latents.float().cpu().contiguous()}), guard=guard)
    log.info("latents in %s", path)


def load_latents(path: Path) -> torch.Tensor:
    return load_file(path)[LATENTS_KEY].float()


def save_results(vae: Any, latents: torch.Tensor, paths: OutputPaths, *, request: Request, guard: Guard) -> None:
    """The latents if they were asked for, the video, its contact sheet. On failure the latents are kept somewhere."""
    kept = request.load_latents
    try:
        if paths.latents is not None:
            save_latents(latents, paths.latents, guard=guard)
            kept = paths.latents
        _decode_and_write(vae, latents, paths, request=request, guard=guard)
    except Exception as error:
        if request.load_latents is None:
            error.add_note(_how_to_go_on(latents, kept, paths, request=request, guard=guard))
        raise


def _decode_and_write(vae: Any, latents: torch.Tensor, paths: OutputPaths, *, request: Request, guard: Guard) -> None:
    sheet: list[Frames] = []
    chunks = _pixels(vae, latents, num_frames=request.clip.frames, sheet=sheet)
    if paths.video.suffix.lower() == ".png":
        data = encode_png(next(chunks)[0])
    else:
        data = encode_mp4(chunks, request.fps)
        _check_read_back(probe(data), request)
    if paths.sheet is not None:
        atomic_write(paths.sheet, contact_sheet(np.stack(sheet)), guard=guard)
    atomic_write(paths.video, data, guard=guard)


def _pixels(vae: Any, latents: torch.Tensor, *, num_frames: int, sheet: list[Frames]) -> Iterator[Frames]:
    """Chunks of [F, H, W, 3] uint8; the frames that the contact sheet shows are kept in `sheet` as they pass."""
    picks, start = sheet_picks(num_frames, min(SHEET_FRAMES, num_frames)), 0
    for chunk in decode_chunks(vae, latents):
        pixels = to_uint8(chunk)
        sheet += [pixels[pick - start] for pick in picks if start <= pick < start + len(pixels)]
        start += len(pixels)
        yield pixels


def _check_read_back(found: VideoInfo, request: Request) -> None:
    """What a player will see is what was announced."""
    clip = request.clip
    announced = VideoInfo(clip.frames, clip.width, clip.height, Fraction(exact_rate(request.fps)))
    if found != announced:
        raise RuntimeError(f"the encoded video reads back as {found}, not as {announced}")


def _how_to_go_on(
    latents: torch.Tensor, kept: Path | None, paths: OutputPaths, *, request: Request, guard: Guard
) -> str:
    """Where the latents are, written now if they are nowhere yet, and the command that decodes them."""
    if kept is None:
        try:
            save_latents(latents, paths.rescue, guard=guard)
        except UserError as error:  # a full disk, most likely, which was also the first fault
            return f"The sampled latents are lost: {error}"
        kept = paths.rescue
    command = ["python", *program_words(), "--ckpt_dir", request.checkpoint.root, "--load_latents", kept]
    command += ["--save_file", paths.video, "--fps", f"{request.fps:g}"]
    return f"The sampled latents are kept. To decode them later: {shlex.join(map(str, command))}"
