"""Marks each step for a profiler, and lets one capture chosen steps only: USP_PROFILE_STEPS=3-4, counted from 0.

All ranks meet behind the start and before the stop, so whichever process a profiler listens to, the steps are whole on
every rank. Used by the session; scripts/profile_overlap.sh sets the variables.
"""

import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch

from usp.collectives import agree
from usp.errors import UserError
from usp.ranges import Ranges, ranges_from, step_name

VARIABLE = "USP_PROFILE_STEPS"


def _nothing() -> None:
    """Where there is no CUDA, there is no profiler to start."""


@dataclass
class Capture:
    """`before` and `after` each step, with the device idle at `after`. Collective where steps are captured."""

    ranges: Ranges
    chosen: range = range(0)
    start: Callable[[], object] = _nothing
    stop: Callable[[], object] = _nothing
    meet: Callable[[int], None] = lambda step: agree({VARIABLE: step}, what="ranks profile different steps")
    _open: list[AbstractContextManager[Any]] = field(default_factory=list)

    def before(self, step: int) -> None:
        if self.chosen and step == self.chosen[0]:
            self.start()
            self.meet(step)
        self._open.append(self.ranges.range(step_name(step)))
        self._open[-1].__enter__()

    def after(self, step: int) -> None:
        self._open.pop().__exit__(None, None, None)
        if self.chosen and step == self.chosen[-1]:
            self.meet(step)
            self.stop()


def capture_from(environ: Mapping[str, str], *, num_steps: int, device: torch.device) -> Capture:
    """What the environment asks for. Raises UserError."""
    ranges, chosen = ranges_from(environ), _chosen(environ.get(VARIABLE, ""), num_steps)
    if device.type != "cuda":
        return Capture(ranges, chosen)
    return Capture(ranges, chosen, torch.cuda.profiler.start, torch.cuda.profiler.stop)


def _chosen(text: str, num_steps: int) -> range:
    if not text:
        return range(0)
    found = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    first, last = (int(found[1]), int(found[2] or found[1])) if found else (0, -1)
    if not first <= last < num_steps:
        raise UserError(f"{VARIABLE} is {text!r}; give a step or two, such as 1-2, among 0-{num_steps - 1}")
    return range(first, last + 1)
