"""One attention call of one rank as a profiler saw it: its window, work and copies, and the account of them.

Made by usp/trace_calls.py from recordings; added up by usp/trace_report.py, drawn by usp/trace_draw.py. Times are
microseconds on the clock that all recordings share.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from usp.overlap import Overlap, Span, Spans, account, exposed_spans, union
from usp.ranges import Mark

Key = tuple[int, int, int]  # step or -1, layer, which of the equal ones


@dataclass(frozen=True)
class Marked:
    """An attention launch or a copy of a call; `mark` is None if the file does not tell which. `inner`: see Overlap."""

    span: Span
    nbytes: int
    mark: Mark | None
    inner: bool = False


@dataclass(frozen=True)
class Call:
    """One attention call of one rank: `own` copies it issued, `arrivals` its peers' to it, as far as recorded."""

    rank: int
    ranks: tuple[int, ...]
    key: Key
    window: Span
    work: Spans
    waits: Spans
    attends: tuple[Marked, ...]
    own: tuple[Marked, ...]
    arrivals: tuple[Marked, ...] = ()

    @property
    def step(self) -> int:
        return self.key[0]

    @cached_property
    def copies(self) -> Spans:
        return spans_of(self.own + self.arrivals)

    @cached_property
    def overlap(self) -> Overlap:
        return account(
            self.window,
            work=self.work,
            attention=spans_of(self.attends),
            copies=self.copies,
            inner=spans_of(copy for copy in self.own + self.arrivals if copy.inner),
            waits=self.waits,
        )

    def exposed(self) -> Spans:
        return exposed_spans(self.window, work=self.work, copies=self.copies)

    def arrivals_at(self, rank: int) -> tuple[Marked, ...]:
        index = self.ranks.index(rank)
        return tuple(copy for copy in self.own if copy.mark is not None and copy.mark.peer == index)


def with_inner(copies: list[Marked]) -> tuple[Marked, ...]:
    """Inner are all but the first group's sends to each peer, and the last group's returns."""
    groups: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
    for mark in (copy.mark for copy in copies if copy.mark is not None):
        groups[_side(mark)].append(mark.number)
    return tuple(
        replace(copy, inner=copy.mark is not None and not _is_end(copy.mark, groups[_side(copy.mark)]))
        for copy in copies
    )


def _side(mark: Mark) -> tuple[str, int]:
    return mark.kind, mark.peer if mark.kind == "send" else -1


def _is_end(mark: Mark, groups: list[int]) -> bool:
    return mark.number == (min(groups) if mark.kind == "send" else max(groups))


def spans_of(copies: Iterable[Marked]) -> Spans:
    return union(copy.span for copy in copies)
