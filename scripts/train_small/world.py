"""The small world that the model knows: what its clips show, in names and numbers. No torch.

One shape of one colour moves in one way over a plain background. A combination is (colour, shape, motion); a few of
them are held out: never in training, so that they show what the model puts together by itself.
"""

from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

SIDE, FRAMES = 64, 17  # pixels, and frames of a clip
SHAPES = ("ball", "square", "triangle", "cross")
COLOURS = {
    "red": (222, 28, 28),
    "orange": (255, 135, 0),
    "yellow": (250, 222, 20),
    "green": (30, 160, 50),
    "cyan": (0, 205, 215),
    "blue": (35, 75, 235),
    "purple": (135, 40, 200),
    "pink": (255, 120, 190),
}
BACKGROUNDS = {"dark": (22, 22, 30), "grey": (118, 118, 122), "light": (232, 230, 224)}
# Unit steps in x (rightwards) and y (downwards) of the straight ways to move.
DIRECTIONS = {
    "left": (-1.0, 0.0),
    "right": (1.0, 0.0),
    "up": (0.0, -1.0),
    "down": (0.0, 1.0),
    "up-left": (-0.75, -0.75),
    "up-right": (0.75, -0.75),
    "down-left": (-0.75, 0.75),
    "down-right": (0.75, 0.75),
}
STILL, BOUNCE, CIRCLE = "still", "bounce", "circle"
MOTIONS = (*DIRECTIONS, STILL, BOUNCE, CIRCLE)
SPEEDS = ("slow", "fast")
HELD_OUT_EVERY = 11  # about one combination in eleven


class Combination(NamedTuple):
    colour: str
    shape: str
    motion: str


@dataclass(frozen=True)
class Scene:
    """Everything that a caption can say of a clip; None is left unsaid."""

    colour: str
    shape: str
    motion: str
    speed: str | None = None
    background: str | None = None

    @property
    def combination(self) -> Combination:
        return Combination(self.colour, self.shape, self.motion)


def all_combinations() -> list[Combination]:
    return [Combination(*names) for names in product(COLOURS, SHAPES, MOTIONS)]


def is_held_out(combination: Combination) -> bool:
    """One motion for every pair of colour and shape: each pair, and each motion of each colour or shape, is trained."""
    colour, shape, motion = combination
    place = 3 * list(COLOURS).index(colour) + 5 * SHAPES.index(shape) + MOTIONS.index(motion)
    return place % HELD_OUT_EVERY == 0


def trained_combinations() -> list[Combination]:
    return [one for one in all_combinations() if not is_held_out(one)]


def held_out_combinations() -> list[Combination]:
    return [one for one in all_combinations() if is_held_out(one)]
