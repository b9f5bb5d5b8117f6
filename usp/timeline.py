"""When every operation of every rank ran: accounting, and the same as text, JSON and Chrome trace.

Made by the simulator, drawn by usp/draw.py. Times are microseconds.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from usp.costs import COPIES, MEASURED, nbytes
from usp.overlap import Overlap, Span, Spans, account, exposed_spans, union
from usp.plan import AttentionPlan
from usp.schedule import Kind, Op
from usp.tables import OVERLAP_HEADER, describe, ms, overlap_cells, percent, table

KERNELS = (Kind.PRODUCE, Kind.FILL, Kind.PLACE, Kind.ATTEND, Kind.KEEP, Kind.CONSUME)
WAITS = (Kind.WAIT, Kind.AWAIT)
STREAMS = ("main", "aux", "copy", "arrivals")


@dataclass(frozen=True)
class Event:
    """One operation of one call. A wait lasts from when its stream came to it; `source` is what let it go on."""

    op: Op
    call: int
    start: float
    end: float
    label: str  # measured or modelled
    source: "Event | None" = None

    @property
    def span(self) -> Span:
        return self.start, self.end

    @property
    def name(self) -> str:
        parts = [self.op.kind.value, self.op.what, self.op.event]
        parts += [f"group {self.op.group}"] if self.op.group >= 0 else []
        parts += [f"-> rank {self.op.peer}"] if self.op.peer >= 0 else []
        if self.op.flag is not None:
            parts.append(f"{self.op.flag.name} of rank {self.op.flag.owner} by rank {self.op.flag.writer}")
        return " ".join(filter(None, parts))


@dataclass(frozen=True)
class Timeline:
    """Every event of all ranks and calls, rank by rank in issue order."""

    plan: AttentionPlan
    events: tuple[Event, ...]

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted({event.op.rank for event in self.events}))

    @cached_property
    def num_calls(self) -> int:
        return max(event.call for event in self.events)

    def streams(self, rank: int) -> tuple[str, ...]:
        present = {event.op.stream for event in self.events if event.op.rank == rank}
        return tuple(stream for stream in STREAMS if stream in present)

    def window(self, rank: int, call: int) -> Span:
        """From when q, k and v exist to when the caller may read the result."""
        found = {event.op.kind: event for event in self._of(rank) if event.call == call}
        return found[Kind.PRODUCE].end, found[Kind.CONSUME].start

    def overlap(self, rank: int, call: int) -> Overlap:
        copies = [event for event in self._copies(rank) if event.call == call]
        attention = (event for event in self._of(rank) if event.op.kind is Kind.ATTEND and event.call == call)
        return account(
            self.window(rank, call),
            work=self._work(rank),
            attention=_union(attention),
            copies=_union(copies),
            inner=_union(event for event in copies if not self._is_end(event.op)),
            waits=_union(event for event in self._of(rank) if event.op.kind is Kind.WAIT),
        )

    def exposed(self, rank: int, call: int) -> Spans:
        copies = _union(event for event in self._copies(rank) if event.call == call)
        return exposed_spans(self.window(rank, call), work=self._work(rank), copies=copies)

    def slowest(self, call: int) -> int:
        return max(self.ranks, key=lambda rank: (self.overlap(rank, call).total, -rank))

    def text(self) -> str:
        """Tables of the last call, which no start-up disturbs: per rank, and per rank and stream."""
        lines = [describe(self.plan), f"call {self.num_calls} of {self.num_calls}, times in ms; {self._labels()}", ""]
        by_rank = [[str(rank), *overlap_cells(self.overlap(rank, self.num_calls))] for rank in self.ranks]
        lines += [*table(OVERLAP_HEADER, by_rank), "", *table(STREAM_HEADER, list(self._stream_rows())), ""]
        return "\n".join(lines)

    def json(self) -> str:
        """Accounts of every rank and call, and every event."""
        accounts = [
            {"rank": rank, "call": call, **_account(self.overlap(rank, call))}
            for call in range(1, self.num_calls + 1)
            for rank in self.ranks
        ]
        events = [_fields(event) for event in self.events]
        return json.dumps({"unit": "us", "plan": asdict(self.plan), "calls": accounts, "events": events}, indent=1)

    def chrome_trace(self) -> str:
        """For Perfetto: a process per rank, a thread per stream, an arrow from each signal to the wait it ends."""
        return json.dumps({"displayTimeUnit": "ms", "traceEvents": list(self._trace_events())})

    def _trace_events(self) -> Iterator[dict[str, Any]]:
        for rank in self.ranks:
            yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
            for stream in self.streams(rank):
                thread = STREAMS.index(stream)
                yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": thread, "args": {"name": stream}}
        for number, event in enumerate(self.events):
            if event.start < event.end:
                yield {"ph": "X", **_place(event), "ts": event.start, "dur": event.end - event.start, **_details(event)}
            if event.op.kind is Kind.WAIT and event.source is not None:
                arrow = {"cat": "flag", "name": event.op.flag.name if event.op.flag else "", "id": number}
                yield {"ph": "s", **_place(event.source), "ts": event.source.start, **arrow}
                yield {"ph": "f", "bp": "e", **_place(event), "ts": event.end, **arrow}

    def _stream_rows(self) -> Iterator[list[str]]:
        for rank in self.ranks:
            total = self.overlap(rank, self.num_calls).total
            for stream in self.streams(rank):
                own = [one for one in self._of(rank) if one.op.stream == stream and one.call == self.num_calls]
                yield [str(rank), stream, *_stream_cells(self.plan, own, total)]

    def _labels(self) -> str:
        timed = [event for event in self.events if event.start < event.end and event.op.kind not in WAITS]
        measured = sum(event.label == MEASURED for event in timed)
        return f"{measured} of {len(timed)} durations measured, the others modelled"

    def _of(self, rank: int) -> list[Event]:
        return self._by_rank[rank]

    @cached_property
    def _by_rank(self) -> dict[int, list[Event]]:
        return {rank: [event for event in self.events if event.op.rank == rank] for rank in self.ranks}

    def _work(self, rank: int) -> Spans:
        return self._work_by_rank[rank]

    @cached_property
    def _work_by_rank(self) -> dict[int, Spans]:
        return {rank: _union(one for one in self._of(rank) if one.op.kind in KERNELS) for rank in self.ranks}

    def _copies(self, rank: int) -> list[Event]:
        """From and to a rank."""
        return [one for one in self.events if one.op.kind in COPIES and rank in (one.op.rank, one.op.peer)]

    def _is_end(self, op: Op) -> bool:
        """Whether a copy is a first group's send or a last group's return."""
        ends = self.plan.groups(op.writes[0].rank if op.kind is Kind.SEND else op.reads[0].rank)
        return op.group == ends[0 if op.kind is Kind.SEND else -1].index


STREAM_HEADER = ["rank", "stream", "busy", "share", "waits", "copies", "GB", "GB/s"]


def _stream_cells(plan: AttentionPlan, events: list[Event], total: float) -> list[str]:
    busy, waits = _time(event for event in events if event.op.kind not in WAITS), _time(_those(events, WAITS))
    copies = _those(events, COPIES)
    size, copying = sum(nbytes(plan, event.op) for event in copies), _time(copies)
    speed = f"{size / copying / 1e3:.0f}" if copying else "-"
    times = [ms(busy), percent(busy / total if total else None), ms(waits)]
    return [*times, str(len(copies)), f"{size / 1e9:.3f}", speed]


def _those(events: Iterable[Event], kinds: Sequence[Kind]) -> list[Event]:
    return [event for event in events if event.op.kind in kinds]


def _time(events: Iterable[Event]) -> float:
    return sum(event.end - event.start for event in events)


def _union(events: Iterable[Event]) -> Spans:
    return union(event.span for event in events)


def _account(overlap: Overlap) -> dict[str, float | None]:
    shares = {"hidden_share": overlap.hidden_share, "inner_hidden_share": overlap.inner_hidden_share}
    return {**asdict(overlap), "hidden": overlap.hidden, "idle": overlap.idle, **shares}


def _fields(event: Event) -> dict[str, Any]:
    op = event.op
    place = {"rank": op.rank, "stream": op.stream, "call": event.call, "kind": op.kind.value}
    return {**place, "name": event.name, "start": event.start, "end": event.end, "label": event.label}


def _place(event: Event) -> dict[str, int]:
    return {"pid": event.op.rank, "tid": STREAMS.index(event.op.stream)}


def _details(event: Event) -> dict[str, Any]:
    return {"name": event.name, "cat": event.op.kind.value, "args": {"call": event.call, "duration": event.label}}
