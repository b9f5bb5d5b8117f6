"""Named ranges for profilers: step, layer, head group, and each send, wait, attend and return inside.

Off unless asked for: USP_NVTX=1 marks for Nsight Systems, `record_functions()` for torch's own profiler. An executor is
given its ranges when its steps are built, so a call pays for them only where they are on. `parse` reads the names back.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

from usp.errors import UserError
from usp.schedule import Kind, Op

VARIABLE = "USP_NVTX"
MARKED = (Kind.FILL, Kind.PLACE, Kind.SEND, Kind.WAIT, Kind.ATTEND, Kind.KEEP, Kind.RETURN)
TO_PEER = (Kind.SEND, Kind.RETURN)
NAME = re.compile(
    r"usp (?P<kind>[a-z]+)(?: g?(?P<number>-?\d+))?(?:[<>](?P<peer>\d+))?"
    r"(?: rank (?P<rank>\d+) of (?P<ranks>\d+(?: \d+)*))?"
)

Function = Callable[..., Any]


class _Nothing:
    """A range that leaves no trace; one serves every name."""

    __slots__ = ()

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        return None


NOTHING = _Nothing()


def unmarked(name: str) -> _Nothing:
    """The range that is no range."""
    return NOTHING


@dataclass(frozen=True)
class Ranges:
    """`with ranges.range(name):` marks what is issued inside; with `Ranges()` it marks nothing, in 0.2 us."""

    range: Callable[[str], AbstractContextManager[Any]] = unmarked

    @property
    def enabled(self) -> bool:
        return self.range is not unmarked

    def wrap(self, name: str, function: Function) -> Function:
        """The function inside a range; the function itself where nothing is marked."""
        return partial(self._inside, name, function) if self.enabled and name else function

    def steps(self, ops: Sequence[Op], steps: Sequence[Function]) -> list[Function]:
        """The steps of a schedule inside ranges of their own and of their head groups."""
        if not self.enabled:
            return list(steps)
        numbered = zip(_groups(ops), ops, steps, strict=True)
        return [
            self.wrap(f"usp group {group}" if group >= 0 else "", partial(_in_turn, [self._step(*one) for one in run]))
            for group, run in groupby(numbered, key=lambda one: one[0])
        ]

    def _step(self, group: int, op: Op, step: Function) -> Function:
        return self.wrap(op_name(op), step)

    def _inside(self, name: str, function: Function, *args: Any) -> Any:
        with self.range(name):
            return function(*args)


@dataclass(frozen=True)
class Mark:
    """A range's name taken apart. `number` is the step, layer or head group; a layer names its rank and the group's."""

    kind: str
    number: int = -1
    peer: int = -1  # by index in the group of ranks
    rank: int = -1  # in the job
    ranks: tuple[int, ...] = ()


def nvtx() -> Ranges:
    """For Nsight Systems. Raises UserError where torch has no NVTX."""
    import torch

    if torch.version.cuda is None:
        raise UserError(f"{VARIABLE}=1 needs a CUDA build of torch, and this is {torch.__version__}; leave it out")
    return Ranges(torch.cuda.nvtx.range)


def record_functions() -> Ranges:
    """For torch's profiler, which does not see NVTX."""
    import torch

    return Ranges(torch.profiler.record_function)


def ranges_from(environ: Mapping[str, str]) -> Ranges:
    """What USP_NVTX asks for: nothing by default."""
    value = environ.get(VARIABLE, "0")
    if value not in ("", "0", "1"):
        raise UserError(f"{VARIABLE} is {value!r}; give 1 to mark ranges for Nsight Systems, or 0")
    return nvtx() if value == "1" else Ranges()


def step_name(step: int) -> str:
    return f"usp step {step}"


def layer_name(layer: int, who: str) -> str:
    return f"usp layer {layer} {who}"


def who(rank: int, ranks: Sequence[int]) -> str:
    """A rank of the job, and all ranks that it exchanges with, in the order of their indices."""
    return f"rank {rank} of {' '.join(map(str, ranks))}"


def op_name(op: Op) -> str:
    """`usp send g1>3`: group 1 of peer 3; empty for what is not marked."""
    if op.kind not in MARKED:
        return ""
    group = f" g{op.group}" if op.group >= 0 else ""
    peer = f">{op.peer}" if op.kind in TO_PEER else f"<{op.flag.writer}" if op.flag is not None else ""
    return f"usp {op.kind.value}{group}{peer}"


def parse(name: str) -> Mark | None:
    """None for a range that is not ours."""
    found = NAME.fullmatch(name)
    if found is None:
        return None
    number, peer, rank = (int(found[field] or -1) for field in ("number", "peer", "rank"))
    return Mark(found["kind"], number, peer, rank, tuple(map(int, (found["ranks"] or "").split())))


def _groups(ops: Sequence[Op]) -> Iterator[int]:
    """The head group that each operation works for; events belong to the group before them, fill and place to none."""
    current = -1
    for op in ops:
        if op.kind not in (Kind.RECORD, Kind.AWAIT):
            current = op.group
        yield current


def _in_turn(steps: Sequence[Function], *args: Any) -> None:
    for step in steps:
        step(*args)
