"""What a clip shows, by plain image measurement: colour of the thing that stands out, its shape, the path it takes.

The background is the median of the picture's border, the thing whatever differs from it. Its area and centroid say
where each ideal shape of that area would lie; the one that overlaps best is its shape. Knows nothing of the model.

Shapes: T frames, H = W = SIDE pixels.
"""

import math
from dataclasses import dataclass

import torch

from scripts.train_small.data import cover_of
from scripts.train_small.world import (
    BACKGROUNDS,
    BOUNCE,
    CIRCLE,
    COLOURS,
    DIRECTIONS,
    SHAPES,
    SIDE,
    SPEEDS,
    STILL,
    Combination,
    Scene,
)

NOTHING = "nothing"
LEAST_CONTRAST = 40.0  # of 255: distance in RGB from which something stands out
LEAST_AREA, MOST_AREA = 40.0, SIDE * SIDE / 3  # pixels of a thing
LEAST_COVER = 0.3  # fainter pixels are noise
STILL_RANGE = 5.0  # pixels that something at rest may wander
SLOW_RANGE = 21.0  # pixels that a slow thing covers on a straight path
STRAIGHT = 0.6  # from start to end, as a share of the largest extent of a path
SIDEWAYS = 0.4  # narrower than this share of its height, a path that comes back is a bounce
SLOW_TURN = {BOUNCE: 3.0, CIRCLE: 4.7}  # length of the path over its extent; once around is 2 and pi


@dataclass(frozen=True)
class Finding:
    """What was seen; NOTHING everywhere if no single thing stands out in every frame."""

    colour: str = NOTHING
    shape: str = NOTHING
    motion: str = NOTHING
    speed: str = NOTHING
    background: str = NOTHING
    overlap: float = 0.0  # with the ideal shape, 0..1

    @property
    def combination(self) -> Combination:
        return Combination(self.colour, self.shape, self.motion)


def judge(frames: torch.Tensor) -> Finding:
    """Look at a clip [T, H, W, 3] of values 0..255, of any dtype."""
    rgb = frames.float().cpu()
    ground = _border(rgb).median(dim=0).values
    background = _nearest(ground, BACKGROUNDS)
    contrast = (rgb - ground).norm(dim=-1)  # [T, H, W]
    core = contrast > max(LEAST_CONTRAST, 0.6 * float(contrast.flatten().quantile(0.99)))
    if not core.any():
        return Finding(background=background)
    colour = rgb[core].median(dim=0).values
    cover = _cover(rgb, ground, colour)
    area = cover.sum(dim=(1, 2))  # [T]
    if area.min() < LEAST_AREA or area.max() > MOST_AREA:
        return Finding(background=background)
    path = _centroids(cover, area)
    shape, overlap = _shape(cover, path, area)
    motion = _motion(path)
    return Finding(_nearest(colour, COLOURS), shape, motion, _speed(path, motion), background, overlap)


def is_right(finding: Finding, scene: Scene) -> bool:
    """Whether colour, shape and motion are as asked."""
    return finding.combination == scene.combination


def _border(rgb: torch.Tensor) -> torch.Tensor:
    """[T, H, W, 3] -> pixels of the outermost rows and columns, [N, 3]."""
    sides = (rgb[:, 0], rgb[:, -1], rgb[:, :, 0], rgb[:, :, -1])
    return torch.cat([side.reshape(-1, 3) for side in sides])


def _nearest(rgb: torch.Tensor, names: dict[str, tuple[int, int, int]]) -> str:
    return min(names, key=lambda name: float((rgb - torch.tensor(names[name])).norm()))


def _cover(rgb: torch.Tensor, ground: torch.Tensor, colour: torch.Tensor) -> torch.Tensor:
    """How far each pixel has gone from the background's colour to the thing's, [T, H, W] in 0..1."""
    way = colour - ground
    share = ((rgb - ground) @ way / way.dot(way)).clamp(0, 1)
    return torch.where(share < LEAST_COVER, 0.0, share)


def _centroids(cover: torch.Tensor, area: torch.Tensor) -> torch.Tensor:
    """(x, y) per frame, [T, 2]."""
    place = torch.arange(SIDE) + 0.5
    x, y = (cover.sum(dim=1) * place).sum(dim=1), (cover.sum(dim=2) * place).sum(dim=1)
    return torch.stack([x, y], dim=1) / area[:, None]


def _shape(cover: torch.Tensor, path: torch.Tensor, area: torch.Tensor) -> tuple[str, float]:
    """The shape that overlaps best on average over the frames, and by how much (intersection over union)."""
    count = len(SHAPES)
    radius = (area / math.pi).sqrt().expand(count, -1)
    ideal = cover_of(torch.arange(count), path.expand(count, -1, -1), radius)  # [shapes, T, H, W]
    shared, joined = torch.minimum(ideal, cover).sum(dim=(2, 3)), torch.maximum(ideal, cover).sum(dim=(2, 3))
    overlap = (shared / joined).mean(dim=1)
    best = int(overlap.argmax())
    return SHAPES[best], float(overlap[best])


def _motion(path: torch.Tensor) -> str:
    width, height = _extent(path)
    step = path[-2:].mean(dim=0) - path[:2].mean(dim=0)
    if max(width, height) < STILL_RANGE:
        return STILL
    if float(step.norm()) > STRAIGHT * math.hypot(width, height):
        return max(DIRECTIONS, key=lambda name: _along(step, DIRECTIONS[name]))
    return BOUNCE if width < SIDEWAYS * height else CIRCLE


def _along(step: torch.Tensor, direction: tuple[float, float]) -> float:
    towards = torch.tensor(direction)
    return float(step.dot(towards) / towards.norm())


def _speed(path: torch.Tensor, motion: str) -> str:
    if motion == STILL:
        return NOTHING
    extent = max(_extent(path))
    if motion in SLOW_TURN:
        length = float(path.diff(dim=0).norm(dim=1).sum())
        return SPEEDS[length / extent > SLOW_TURN[motion]]
    dx, dy = DIRECTIONS[motion]
    return SPEEDS[extent / max(abs(dx), abs(dy)) > SLOW_RANGE]


def _extent(path: torch.Tensor) -> tuple[float, float]:
    width, height = (path.amax(dim=0) - path.amin(dim=0)).tolist()
    return width, height
