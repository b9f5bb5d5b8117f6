"""Decides whether a schedule is right before it runs: races, deadlock, all written exactly once, and read after that.

Takes the lists of all ranks for several calls and orders them by happens-before (usp/order.py). Nothing is sampled: a
plan that passes has no run in which two conflicting accesses meet, or in which an operation reads what an earlier call
or another group left behind. `python -m usp.check` sweeps plans.
"""

import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import combinations, product

from usp.order import Step, Stream, Trace, calls, freeing, joined, meeting, stuck_in_issue_order
from usp.plan import AttentionPlan
from usp.schedule import Region, arena_regions, result_rows

OUTSIDE_ARENA = ("q", "k", "v", "fresh")  # buffers of the caller and of the allocator
CALLS = 3  # in a row: from the third on nothing new can happen

Memory = tuple[object, ...]  # a buffer in one rank's memory while one plan has laid it out
Access = tuple[Step, Region, bool]  # whether it writes


@dataclass(frozen=True)
class Violation:
    """What is wrong, and the shortest chain of operations that shows it."""

    kind: str  # race, deadlock, missing, twice, stale
    message: str
    chain: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n  ".join([f"{self.kind}: {self.message}", *self.chain])


def check_plan(plan: AttentionPlan, *, then: AttentionPlan | None = None) -> list[Violation]:
    """Several calls of a plan, then, after a meeting, of another one in the same arena, then the end."""
    parts = [calls(plan, CALLS), meeting(plan, CALLS)]
    if then is not None:
        parts += [calls(then, 2, first=CALLS + 1), meeting(then, CALLS + 2)]
    return check(Trace(joined(*parts, freeing(then or plan, CALLS + 3))))


def check(trace: Trace) -> list[Violation]:
    """Every violation in a trace; [] if there is none."""
    return list(violations(trace))


def violations(trace: Trace) -> Iterator[Violation]:
    """The same one by one: the first is there long before the last."""
    stuck = list(_deadlocks(trace))
    yield from stuck
    if not stuck:  # steps that never start have no place in the order
        yield from _coverage(trace)
        yield from _accesses(trace)
        yield from _races_between_plans(trace)


def _deadlocks(trace: Trace) -> Iterator[Violation]:
    for step, reason in trace.stuck:
        yield Violation("deadlock", f"{step} never starts: {reason}")
    if not trace.stuck:
        stopped = stuck_in_issue_order(trace)
        if stopped:
            lines = tuple(f"rank {step.op.rank} stops at {step}" for step in stopped)
            yield Violation("deadlock", "in issue order, as on one hardware queue per rank, nobody can go on", lines)


def _coverage(trace: Trace) -> Iterator[Violation]:
    """Each cell of each slot and result is written by exactly one operation of a call."""
    written: defaultdict[Memory, list[tuple[Step, Region]]] = defaultdict(list)
    for step in trace.steps:
        for region in step.op.writes:
            written[step.stint, step.call, region.rank, region.buffer].append((step, region))
    runs = {(step.stint, step.call): step.plan for step in trace.steps if step.plan}
    for (stint, call), plan in sorted(runs.items()):
        for rank in range(plan.num_ranks):
            for whole in _to_be_covered(plan, rank):
                yield from _cover(whole, written[stint, call, rank, whole.buffer], call)


def _to_be_covered(plan: AttentionPlan, rank: int) -> Iterator[Region]:
    for region in arena_regions(plan, rank):
        if region.buffer == ("out",):
            rows = result_rows(plan, rank)
            if rows[0] < rows[1]:
                yield Region(rank, region.buffer, rows, region.cols)
        else:
            yield region


def _cover(whole: Region, writes: list[tuple[Step, Region]], call: int) -> Iterator[Violation]:
    inside = [(step, _clipped(region, whole)) for step, region in writes if region.overlaps(whole)]
    left = [whole]
    for step, region in inside:
        rest = _without(left, region)
        if _area(left) - _area(rest) < region.area:
            first = next(one for one, there in inside if there.overlaps(region))
            yield Violation("twice", f"{_name(whole)} is written twice in call {call}", (str(first), str(step)))
        left = rest
    if left:
        cells = f"{_area(left)} of {whole.area} cells of {_name(whole)}"
        yield Violation("missing", f"{cells} are not written in call {call}")


def _clipped(region: Region, whole: Region) -> Region:
    rows = max(region.rows[0], whole.rows[0]), min(region.rows[1], whole.rows[1])
    cols = max(region.cols[0], whole.cols[0]), min(region.cols[1], whole.cols[1])
    return Region(region.rank, region.buffer, rows, cols)


def _without(regions: Iterable[Region], taken: Region) -> list[Region]:
    """What of the regions lies outside `taken`."""
    return [part for one in regions for part in (_around(one, taken) if one.overlaps(taken) else (one,))]


def _around(one: Region, hole: Region) -> list[Region]:
    """Above, below, to the left and to the right of an overlapping hole."""
    (top, bottom), (left, right) = one.rows, one.cols
    up, down = max(top, hole.rows[0]), min(bottom, hole.rows[1])
    west, east = max(left, hole.cols[0]), min(right, hole.cols[1])
    sides = (top, up, left, right), (down, bottom, left, right), (up, down, left, west), (up, down, east, right)
    return [Region(one.rank, one.buffer, (n, s), (w, e)) for n, s, w, e in sides if n < s and w < e]


def _area(regions: Iterable[Region]) -> int:
    return sum(region.area for region in regions)


def _accesses(trace: Trace) -> Iterator[Violation]:
    """Conflicting accesses of one plan that no chain orders, and reads of what another call or group left."""
    touched: defaultdict[Memory, list[Access]] = defaultdict(list)
    for step in trace.line:
        accesses = [(region, False) for region in step.op.reads] + [(region, True) for region in step.op.writes]
        for region, writes in accesses:
            yield from _look_back(step, region, touched[_memory(step, region)], writes=writes)
        for region, writes in accesses:
            touched[_memory(step, region)].append((step, region, writes))


def _memory(step: Step, region: Region) -> Memory:
    """What the caller and the allocator own is the same memory whatever the plan."""
    return None if region.buffer[0] in OUTSIDE_ARENA else step.stint, region.rank, region.buffer


def _look_back(step: Step, region: Region, touched: list[Access], *, writes: bool) -> Iterator[Violation]:
    """Back to the ordered writes that cover the region: what conflicts with it before them conflicts with them too."""
    unmet, name = [region], f"{_name(region)} of rank {region.rank}"
    for other, there, also_writes in reversed(touched):
        if (writes or also_writes) and there.overlaps(region):
            if not step.follows(other):
                yield Violation("race", f"nothing orders two accesses to {name}", _witness(other, step))
            elif also_writes:
                seen, unmet = unmet, _without(unmet, there)
                if not writes and seen != unmet and not _is_meant_for(other, step):
                    text = f"{name} is read as another call or group left it"
                    yield Violation("stale", text, (str(other), str(step)))
                if not unmet:
                    return
    if not writes:
        yield Violation("stale", f"{_area(unmet)} of {region.area} cells of {name} are read unwritten", (str(step),))


def _is_meant_for(writer: Step, reader: Step) -> bool:
    """Of one call, and of one group where both are for one."""
    groups = {writer.op.group, reader.op.group}
    return writer.call == reader.call and (len(groups) == 1 or -1 in groups)


def _races_between_plans(trace: Trace) -> Iterator[Violation]:
    """Two plans lay their buffers over the same arena: every access of one is ordered with every one of the other.

    Order is monotone along a stream, so the last access of each stream and the first one of each suffice.
    """
    stints: dict[tuple[int, int], dict[Stream, list[Step]]] = {}
    for step in trace.steps:
        for region in (*step.op.reads, *step.op.writes):
            if region.buffer[0] not in OUTSIDE_ARENA:
                stints.setdefault((region.rank, step.stint), {}).setdefault(step.stream, []).append(step)
    for ((rank, _), one), ((other_rank, _), other) in combinations(stints.items(), 2):
        if rank == other_rank and not _precedes(one, other) and not _precedes(other, one):
            for last, first in product((steps[-1] for steps in one.values()), (steps[0] for steps in other.values())):
                if not first.follows(last):
                    text = f"nothing orders two accesses to the arena of rank {rank}"
                    yield Violation("race", text, _witness(last, first))


def _precedes(earlier: dict[Stream, list[Step]], later: dict[Stream, list[Step]]) -> bool:
    return all(first[0].follows(last[-1]) for last in earlier.values() for first in later.values())


def _witness(one: Step, other: Step) -> tuple[str, ...]:
    """Both steps, each with its shortest way back to the nearest step that precedes both."""
    back, ahead = _ways_back(one), _ways_back(other)
    common = [step for step in back if step in ahead]
    if not common:
        return (str(one), str(other))
    nearest = min(common, key=lambda step: len(back[step]) + len(ahead[step]))
    return (
        f"after {nearest}:",
        "  " + " => ".join(map(str, back[nearest])),
        "  " + " => ".join(map(str, ahead[nearest])),
    )


def _ways_back(step: Step) -> dict[Step, list[Step]]:
    """For each step that precedes `step`, the shortest chain from just after it to `step`."""
    ways, layer = {step: [step]}, [step]
    while layer:
        following = []
        for one in layer:
            for earlier in one.before:
                if earlier not in ways:
                    ways[earlier] = [earlier, *ways[one]]
                    following.append(earlier)
        layer = following
    return {earlier: way[1:] or way for earlier, way in ways.items()}


def _name(region: Region) -> str:
    return "/".join(map(str, region.buffer))


if __name__ == "__main__":
    from usp.sweep import main

    sys.exit(main())
