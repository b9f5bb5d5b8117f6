"""What a flag's text may be: one function for each kind of value, from text to value.

Each raises argparse.ArgumentTypeError with a clause that says what would work; flags.py puts the flag's name before it.
"""

import argparse
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from usp.models.wan.tasks import TASKS

MAX_SEED = 2**63 - 1
RANDOM_SEED = -1


class GuideScale(NamedTuple):
    """Guidance per expert. The reference writes the pair low first; here the names decide, never the place."""

    low: float
    high: float


def integer(minimum: int | None = None) -> Callable[[str], int]:
    def convert(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if minimum is not None and value < minimum:
            raise argparse.ArgumentTypeError(f"{value} is too small; use at least {minimum}")
        return value

    return convert


def finite(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text} is not finite; use a number such as 4.0")
    return value


def positive(text: str) -> float:
    value = finite(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def seed(text: str) -> int | None:
    value = integer()(text)
    if not RANDOM_SEED <= value <= MAX_SEED:
        raise argparse.ArgumentTypeError(f"{value} is out of range; use 0 to {MAX_SEED}, or -1 to draw one")
    return None if value == RANDOM_SEED else value


def guide_scale(text: str) -> GuideScale:
    parts = [finite(part) for part in text.split(",")]
    if len(parts) > 2:
        raise argparse.ArgumentTypeError(f"{text!r} holds {len(parts)} values; give one for both experts, or low,high")
    return GuideScale(low=parts[0], high=parts[-1])


def size(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"\s*(-?\d{1,9})\s*[*xX]\s*(-?\d{1,9})\s*", text, re.ASCII)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not WIDTH*HEIGHT, such as 1280*720")
    return int(match[1]), int(match[2])


def task(text: str) -> str:
    if text not in TASKS:
        raise argparse.ArgumentTypeError(f"{text!r}: only text-to-video is supported; use {', '.join(TASKS)}")
    return text


def solver(text: str) -> str:
    if text != "unipc":
        raise argparse.ArgumentTypeError(f"{text!r} is not supported; use unipc")
    return text


def boolean(text: str) -> bool:
    values = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    if text.lower() not in values:
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return values[text.lower()]


def path(text: str) -> Path:
    if not text or "\0" in text:
        raise argparse.ArgumentTypeError("the path is empty or holds a NUL character")
    return Path(text)
