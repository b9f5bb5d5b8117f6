"""Recorded calls added up per rank and step: as a table in milliseconds, and as JSON in microseconds."""

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from usp.overlap import Overlap, length, union
from usp.recorded_call import Call
from usp.tables import OVERLAP_HEADER, overlap_cells, table

HEADER = ["rank", "step", "calls", *OVERLAP_HEADER[1:], "GB", "GB/s"]


@dataclass(frozen=True)
class StepSum:
    """All calls of one rank in one step; copies counted in bytes are those that the rank issued."""

    rank: int
    step: int | None
    num_calls: int
    overlap: Overlap
    nbytes: int
    copying_us: float

    @property
    def gbps(self) -> float | None:
        return self.nbytes / self.copying_us / 1e3 if self.copying_us else None

    def cells(self) -> list[str]:
        step = "-" if self.step is None else str(self.step)
        speed = "-" if self.gbps is None else f"{self.gbps:.0f}"
        places = [str(self.rank), step, str(self.num_calls)]
        times = [cell.replace("-0.000", "0.000") for cell in overlap_cells(self.overlap)]  # idle is a difference
        return [*places, *times, f"{self.nbytes / 1e9:.3f}", speed]

    def fields(self) -> dict[str, Any]:
        place = {"rank": self.rank, "step": self.step, "num_calls": self.num_calls}
        return {**place, **_fields(self.overlap), "nbytes": self.nbytes, "gbps": self.gbps}


def sums(calls: Iterable[Call]) -> list[StepSum]:
    """In order of rank and step."""
    by_step: defaultdict[tuple[int, int], list[Call]] = defaultdict(list)
    for call in calls:
        by_step[call.rank, call.step].append(call)
    return [_sum(rank, step, own) for (rank, step), own in sorted(by_step.items())]


def text(calls: Sequence[Call]) -> str:
    lines = ["attention calls per rank and step, times in ms", ""]
    lines += [*table(HEADER, [one.cells() for one in sums(calls)]), ""]
    missing = sorted({rank for call in calls for rank in call.ranks} - {call.rank for call in calls})
    if missing:
        names = " ".join(map(str, missing))
        lines += [f"not recorded: ranks {names}; while only their copies ran, others are counted as stalled", ""]
    return "\n".join(lines)


def as_json(calls: Sequence[Call]) -> str:
    """Per rank and step, and per call."""
    each = [
        {
            "rank": call.rank,
            "step": _step(call.step),
            "layer": call.key[1],
            "window": call.window,
            **_fields(call.overlap),
        }
        for call in calls
    ]
    return json.dumps({"unit": "us", "steps": [one.fields() for one in sums(calls)], "calls": each}, indent=1)


def _sum(rank: int, step: int, calls: list[Call]) -> StepSum:
    names = [field.name for field in fields(Overlap)]
    overlap = Overlap(**{name: sum(getattr(call.overlap, name) for call in calls) for name in names})
    sized = [[copy for copy in call.own if copy.nbytes] for call in calls]
    copying = sum(length(union(copy.span for copy in own)) for own in sized)
    return StepSum(rank, _step(step), len(calls), overlap, sum(copy.nbytes for own in sized for copy in own), copying)


def _step(number: int) -> int | None:
    return number if number >= 0 else None


def _fields(overlap: Overlap) -> dict[str, float | None]:
    shares = {"hidden_share": overlap.hidden_share, "inner_hidden_share": overlap.inner_hidden_share}
    return {**asdict(overlap), "hidden": overlap.hidden, "idle": overlap.idle, **shares}
