"""One rank alone, with its peers played by a stream of its own: the rank's list, and what the peers would send it.

On one GPU there is no peer to copy to. There the rank's own sends go to pinned host memory on the copy engine, and a
second engine replays the arrivals from pinned memory and raises their flags. A peer is taken to be as fast as the rank
itself: what the peer sends after its own event is sent after the rank's event of the same name.
"""

from collections.abc import Iterator
from dataclasses import replace

from usp.costs import ARRIVALS
from usp.plan import AttentionPlan
from usp.schedule import Kind, Op, Schedule, build

BEGUN = "begun"  # recorded where the rank has no event of its own to start the arrivals


def emulated(plan: AttentionPlan, rank: int) -> Schedule:
    """`build(plan, rank)`, with the copies and signals of all peers to `rank` on the stream `arrivals`."""
    return tuple(_merged(plan, rank))


def _merged(plan: AttentionPlan, rank: int) -> Iterator[Op]:
    arrivals = _arrivals(plan, rank)
    for op in build(plan, rank):
        yield op
        if op.kind is Kind.PRODUCE and BEGUN in arrivals:
            yield Op(Kind.RECORD, rank, "main", event=BEGUN)
            yield from _after(BEGUN, rank, arrivals)
        elif op.kind is Kind.RECORD and op.event in arrivals:
            yield from _after(op.event, rank, arrivals)


def _after(event: str, rank: int, arrivals: dict[str, list[Op]]) -> Iterator[Op]:
    yield Op(Kind.AWAIT, rank, ARRIVALS, event=event)
    yield from arrivals[event]


def _arrivals(plan: AttentionPlan, rank: int) -> dict[str, list[Op]]:
    """What the peers send to `rank`, by the event that lets it go; group by group, as one engine would carry it."""
    own_events = {op.event for op in build(plan, rank) if op.kind is Kind.RECORD}
    found: dict[str, list[Op]] = {}
    for peer in plan.peers(rank):
        event = BEGUN
        for op in build(plan, peer):
            if op.kind is Kind.AWAIT and op.stream == "copy" and op.event in own_events:
                event = op.event
            elif _reaches(op, rank):
                found.setdefault(event, []).append(replace(op, rank=rank, stream=ARRIVALS))
    for ops in found.values():
        ops.sort(key=lambda op: op.group)  # stable: one peer's copies stay before its signal
    return found


def _reaches(op: Op, rank: int) -> bool:
    if op.kind is Kind.SIGNAL:
        return op.flag is not None and op.flag.owner == rank
    return op.kind in (Kind.SEND, Kind.RETURN) and op.peer == rank
