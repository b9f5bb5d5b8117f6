"""Clips of the small world, drawn on any device: every pixel of every clip of a batch in a few tensor operations.

Edges are anti-aliased: a pixel's cover is half a pixel minus its distance from the edge, clipped. The random numbers
are drawn on the CPU, so a seed gives the same scenes on every device.

Shapes: B clips, T frames, H = W = SIDE pixels.
"""

import math
from dataclasses import dataclass
from random import Random

import torch

from scripts.train_small.world import (
    BACKGROUNDS,
    BOUNCE,
    CIRCLE,
    COLOURS,
    DIRECTIONS,
    FRAMES,
    MOTIONS,
    SHAPES,
    SIDE,
    SPEEDS,
    Combination,
    Scene,
)

RADII = (7.0, 9.2)  # pixels, of the ball with the shape's area
DISTANCE = {"slow": (12.0, 16.0), "fast": (27.0, 31.0)}  # pixels that a straight path covers
BOUNCE_HEIGHT, CIRCLE_RADIUS = 22.0, 11.0
TURNS = {"slow": 1.0, "fast": 2.0}  # bounces or rounds in a clip
MARGIN = 2.0  # pixels to the border, which the soft edge of a sharp corner may use
COLOUR_JITTER = 8.0  # of 255, to either side
# Of shapes with the area of a ball of radius 1.
SQUARE_HALF = math.sqrt(math.pi) / 2
TRIANGLE_INNER = math.sqrt(math.pi / (3 * math.sqrt(3)))  # radius of the circle inside
CROSS_ARM = math.sqrt(math.pi / 5)  # width of an arm, a third of the cross
REACH = {  # how far a shape goes from its centroid: sideways and upwards (downwards it is never farther)
    "ball": (1.0, 1.0),
    "square": (SQUARE_HALF, SQUARE_HALF),
    "triangle": (math.sqrt(3) * TRIANGLE_INNER, 2 * TRIANGLE_INNER),
    "cross": (1.5 * CROSS_ARM, 1.5 * CROSS_ARM),
}


@dataclass(frozen=True)
class Clips:
    """Pixels [B, 3, T, H, W] in -1..1 and what each clip shows."""

    pixels: torch.Tensor
    scenes: list[Scene]


def draw_scenes(count: int, combinations: list[Combination], *, random: Random) -> list[Scene]:
    """Scenes with every attribute said, combinations drawn evenly from the list."""
    return [
        Scene(*random.choice(combinations), random.choice(SPEEDS), random.choice(list(BACKGROUNDS)))
        for _ in range(count)
    ]


def draw_clips(scenes: list[Scene], *, seed: int, device: torch.device, frames: int = FRAMES) -> Clips:
    """The clips of these scenes; sizes, places and small differences of colour follow from the seed.

    With fewer `frames` a clip shows the first part of its motion.
    """
    generator = torch.Generator().manual_seed(seed)
    radius = _uniform((len(scenes),), *RADII, generator)
    path = _paths(scenes, generator)
    path = path + _starts(scenes, path, radius, generator)[:, None]
    colour = _jittered([COLOURS[scene.colour] for scene in scenes], generator).to(device)
    ground = _jittered([_ground(scene) for scene in scenes], generator).to(device)
    shape = torch.tensor([SHAPES.index(scene.shape) for scene in scenes], device=device)
    cover = cover_of(shape, path[:, :frames].to(device), radius.to(device))[:, None]  # [B, 1, T, H, W]
    return Clips(torch.lerp(_wide(ground), _wide(colour), cover), scenes)


def cover_of(shape: torch.Tensor, centre_bt2: torch.Tensor, radius: torch.Tensor) -> torch.Tensor:
    """How much of each pixel a shape covers, [B, T, H, W] in 0..1.

    `shape` [B] are places in SHAPES, `centre_bt2` centroids (x, y) in pixels, `radius` [B] or [B, T].
    """
    place = torch.arange(SIDE, device=centre_bt2.device) + 0.5
    x = place - centre_bt2[..., 0, None, None]  # [B, T, 1, W]
    y = place[:, None] - centre_bt2[..., 1, None, None]  # [B, T, H, 1]
    r = radius.reshape(len(shape), -1, 1, 1)
    pick = shape[:, None, None, None]
    distance = torch.hypot(x, y) - r
    for index, edge in enumerate((_square, _triangle, _cross), start=1):
        distance = torch.where(pick == index, edge(x, y, r), distance)
    return (0.5 - distance).clamp(0, 1)


def _square(x: torch.Tensor, y: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
    return torch.maximum(x.abs(), y.abs()) - SQUARE_HALF * r


def _triangle(x: torch.Tensor, y: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
    return torch.maximum(y, math.sqrt(0.75) * x.abs() - 0.5 * y) - TRIANGLE_INNER * r


def _cross(x: torch.Tensor, y: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
    x, y, long, short = x.abs(), y.abs(), 1.5 * CROSS_ARM * r, 0.5 * CROSS_ARM * r
    return torch.minimum(torch.maximum(x - long, y - short), torch.maximum(x - short, y - long))


def _paths(scenes: list[Scene], generator: torch.Generator) -> torch.Tensor:
    """Offsets (x, y) from the start, [B, T, 2]."""
    motion = torch.tensor([MOTIONS.index(scene.motion) for scene in scenes])[:, None, None]
    speed = torch.tensor([SPEEDS.index(scene.speed or SPEEDS[0]) for scene in scenes])
    share = torch.rand(len(scenes), generator=generator)
    time = torch.linspace(0, 1, FRAMES)
    least, most = torch.tensor([DISTANCE[name] for name in SPEEDS])[speed].unbind(dim=1)
    step = torch.tensor([DIRECTIONS.get(name, (0.0, 0.0)) for name in MOTIONS])[motion[:, 0, 0]]  # [B, 2]
    straight = time[:, None] * ((least + share * (most - least))[:, None] * step)[:, None]
    turns = torch.tensor([TURNS[name] for name in SPEEDS])[speed][:, None] * time  # [B, T]
    height = -BOUNCE_HEIGHT * (math.pi * turns).sin().abs()
    bounce = torch.stack([torch.zeros_like(height), height], dim=2)
    angle = 2 * math.pi * (turns + share[:, None])
    circle = CIRCLE_RADIUS * torch.stack([angle.cos(), angle.sin()], dim=2)
    path = torch.where(motion == MOTIONS.index(BOUNCE), bounce, straight)
    return torch.where(motion == MOTIONS.index(CIRCLE), circle, path)


def _starts(scenes: list[Scene], path: torch.Tensor, radius: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Where a path may start so that the shape stays inside the picture, [B, 2]."""
    reach = torch.tensor([REACH[scene.shape] for scene in scenes]) * radius[:, None]
    lowest = reach - path.amin(dim=1) + MARGIN
    highest = SIDE - reach - path.amax(dim=1) - MARGIN
    return lowest + torch.rand(len(scenes), 2, generator=generator) * (highest - lowest)


def _ground(scene: Scene) -> tuple[int, int, int]:
    return BACKGROUNDS[scene.background or "grey"]


def _jittered(colours: list[tuple[int, int, int]], generator: torch.Generator) -> torch.Tensor:
    """[B, 3] in -1..1"""
    values = torch.tensor(colours, dtype=torch.float32)
    values += _uniform(values.shape, -COLOUR_JITTER, COLOUR_JITTER, generator)
    return values.clamp(0, 255) / 127.5 - 1


def _uniform(shape: tuple[int, ...], low: float, high: float, generator: torch.Generator) -> torch.Tensor:
    return low + (high - low) * torch.rand(shape, generator=generator)


def _wide(colour: torch.Tensor) -> torch.Tensor:
    return colour[:, :, None, None, None]
