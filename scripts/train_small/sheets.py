"""Pictures of a training: clips as rows of frames under their captions, and losses over time."""

import json
import math
from itertools import pairwise
from pathlib import Path

import torch
from PIL import Image

from usp.sheet import SCALE, Sheet

FRAMES_SHOWN = 9
MARGIN, ROW_GAP, PLOT_WIDTH, PLOT_HEIGHT, LINE = 8, 16, 720, 150, "#2f6fb0"


def clip_sheet(clips: torch.Tensor, captions: list[str]) -> Image.Image:
    """[B, T, H, W, 3] of 0..255: a row of frames per clip, evenly spaced from first to last, its caption above."""
    _, frames, height, width, _ = clips.shape
    picks = [round(index * (frames - 1) / (FRAMES_SHOWN - 1)) for index in range(FRAMES_SHOWN)]
    row_height = height + ROW_GAP
    sheet = Sheet(FRAMES_SHOWN * (width + 2), len(clips) * row_height)
    for row, (clip, text) in enumerate(zip(clips, captions, strict=True)):
        sheet.text(2, row * row_height + ROW_GAP / 2, text, size=10)
        for column, pick in enumerate(picks):
            frame = Image.fromarray(clip[pick].to(torch.uint8).numpy())
            large = frame.resize((width * SCALE, height * SCALE), Image.Resampling.NEAREST)
            sheet.image.paste(large, (column * (width + 2) * SCALE, (row * row_height + ROW_GAP) * SCALE))
    return sheet.image


def plot_losses(folder: Path, names: list[str]) -> Path:
    """One panel per stage that has a log: loss, on a logarithmic scale, over seconds. Writes `losses.png`."""
    logs = {name: _points(folder / f"{name}.jsonl") for name in names if (folder / f"{name}.jsonl").exists()}
    sheet = Sheet(PLOT_WIDTH, max(1, len(logs)) * (PLOT_HEIGHT + 3 * ROW_GAP) + MARGIN)
    for index, (name, points) in enumerate(logs.items()):
        _panel(sheet, name, points, top=MARGIN + index * (PLOT_HEIGHT + 3 * ROW_GAP) + ROW_GAP)
    sheet.save(folder / "losses.png")
    return folder / "losses.png"


def _points(log: Path) -> list[tuple[float, float]]:
    """(seconds, loss)"""
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    return [(line["seconds"], line["loss"]) for line in lines]


def _panel(sheet: Sheet, name: str, points: list[tuple[float, float]], *, top: float) -> None:
    seconds, losses = ([point[axis] for point in points] for axis in (0, 1))
    low, high = math.log10(min(losses)), math.log10(max(losses))
    span, end = max(high - low, 1e-9), max(seconds[-1], 1e-9)
    left, right, bottom = 70.0, PLOT_WIDTH - MARGIN, top + PLOT_HEIGHT
    places = [
        (left + (right - left) * second / end, top + (bottom - top) * (high - math.log10(loss)) / span)
        for second, loss in points
    ]
    sheet.line(left, top, left, bottom, "#888888")
    sheet.line(left, bottom, right, bottom, "#888888")
    for (x, y), (next_x, next_y) in pairwise(places):
        sheet.line(x, y, next_x, next_y, LINE)
    sheet.text(left, top - 8, f"{name}: loss over seconds of training", size=11)
    sheet.text(left - 4, top, f"{max(losses):.3g}", size=10, anchor="rm")
    sheet.text(left - 4, bottom, f"{min(losses):.3g}", size=10, anchor="rm")
    sheet.text(right, bottom + 8, f"{seconds[-1]:.0f} s", size=10, anchor="rm")
