"""Times the operations of an executor where they run: two CUDA events around each, on its own stream.

The result is a timeline as the simulator makes it, measured. Each event costs its stream about a microsecond. Used by
scripts/emulated_link.py.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

import torch

from usp.costs import MEASURED, Key, key
from usp.execute import Call, Executor
from usp.ipc.engine import MAIN
from usp.overlap import Span
from usp.plan import AttentionPlan
from usp.schedule import Kind, Op
from usp.timeline import WAITS, Event, Timeline

HEAD_START_CYCLES = 12_000_000  # about 6 ms in which the host issues ahead
WORK = (Kind.FILL, Kind.PLACE, Kind.ATTEND, Kind.KEEP)


@dataclass(frozen=True)
class Timed:
    op: Op
    span: Span  # microseconds since the call's start on the main stream


def time_call(executor: Executor, call: Call, *, kinds: Sequence[Kind] | None = None) -> list[Timed]:
    """Issue the operations, or those of some kinds, and wait for them. The executor has no ranges."""
    streams = executor.engine.streams
    torch.cuda.synchronize()
    with torch.cuda.stream(streams[MAIN]):
        torch.cuda._sleep(HEAD_START_CYCLES)
    start = _mark(streams[MAIN])
    marks = []
    for op, step in zip(executor.ops, executor.steps, strict=True):
        if kinds is None or op.kind in kinds:
            before = _mark(streams[op.stream])
            step(call)
            marks.append((op, before, _mark(streams[op.stream])))
    torch.cuda.synchronize()
    return [Timed(op, (_us(start, before), _us(start, after))) for op, before, after in marks]


def durations(timed: Iterable[Timed]) -> dict[Key, float]:
    """The median of each kind of operation, in microseconds, as `Costs.measured` wants them."""
    found: defaultdict[Key, list[float]] = defaultdict(list)
    for one in timed:
        found[key(one.op)].append(one.span[1] - one.span[0])
    return {name: median(all_) for name, all_ in found.items()}


def timeline_of(plan: AttentionPlan, calls: Sequence[Sequence[Timed]]) -> Timeline:
    """One rank's measured calls, each on a clock of its own."""
    return Timeline(plan, tuple(event for number, call in enumerate(calls, 1) for event in _events(call, number)))


def _events(call: Sequence[Timed], number: int) -> list[Event]:
    rank, end = call[0].op.rank, max(one.span[1] for one in call if one.op.stream == MAIN)
    # A wait for an event or a flag ends when its stream goes on; where nothing was awaited it has no length.
    found = [Event(one.op, number, *one.span, MEASURED) for one in call if one.op.kind not in WAITS or _stood(one)]
    begin = Event(Op(Kind.PRODUCE, rank, MAIN), number, 0.0, 0.0, MEASURED)
    return [begin, *found, Event(Op(Kind.CONSUME, rank, MAIN), number, end, end, MEASURED)]


def _stood(one: Timed) -> bool:
    return one.span[1] > one.span[0]


def _mark(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record(stream)
    return event


def _us(start: torch.cuda.Event, end: torch.cuda.Event) -> float:
    return start.elapsed_time(end) * 1e3
