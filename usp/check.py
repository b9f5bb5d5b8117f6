"""Decides whether a schedule is right before it runs: races, deadlock, and every byte written exactly once.

Takes the lists of all ranks for several calls and orders them by happens-before (usp/order.py). Nothing is sampled: a
plan that passes has no run in which two conflicting accesses meet. `python -m usp.check` sweeps plans.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations

from usp.order import Step, Trace, calls, freeing, joined, meeting, stuck_in_issue_order
from usp.plan import AttentionPlan
from usp.schedule import Region, arena_regions, result_rows

OUTSIDE_ARENA = ("q", "k", "v", "fresh")  # buffers of the caller and of the allocator
CALLS = 3  # in a row: from the third on nothing new can happen


@dataclass(frozen=True)
class Violation:
    """What is wrong, and the shortest chain of operations that shows it."""

    kind: str  # race, deadlock, missing, twice
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
    found = list(_deadlocks(trace))
    if found:
        return found  # steps that never start have no place in the order
    return [*_coverage(trace), *_races(trace), *_races_between_plans(trace)]


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
    written: dict[tuple[AttentionPlan, int, int, tuple[str | int, ...]], list[tuple[Step, Region]]] = {}
    for step in trace.steps:
        for region in step.op.writes if step.plan else ():
            key = (step.plan, step.call, region.rank, region.buffer)
            written.setdefault(key, []).append((step, region))  # type: ignore[arg-type]
    runs = {(step.plan, step.call) for step in trace.steps if step.plan}
    for plan, call in sorted(runs, key=lambda run: run[1]):
        for rank in range(plan.num_ranks):
            for whole in _to_be_covered(plan, rank):
                yield from _cover(whole, written.get((plan, call, rank, whole.buffer), []), call)


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
    twice = [(first, second) for (first, one), (second, other) in combinations(inside, 2) if one.overlaps(other)]
    for first, second in twice:
        yield Violation("twice", f"{_name(whole)} is written twice in call {call}", (str(first), str(second)))
    written = _num_cells(inside) if twice else sum(region.area for _, region in inside)
    missing = whole.area - written
    if missing > 0:
        yield Violation("missing", f"{missing} of {whole.area} cells of {_name(whole)} are not written in call {call}")


def _num_cells(writes: list[tuple[Step, Region]]) -> int:
    """Cells that any of the writes covers; one by one, so only for what is wrong already."""
    return len({(row, col) for _, region in writes for row in range(*region.rows) for col in range(*region.cols)})


def _clipped(region: Region, whole: Region) -> Region:
    rows = max(region.rows[0], whole.rows[0]), min(region.rows[1], whole.rows[1])
    cols = max(region.cols[0], whole.cols[0]), min(region.cols[1], whole.cols[1])
    return Region(region.rank, region.buffer, rows, cols)


def _races(trace: Trace) -> Iterator[Violation]:
    """Conflicting accesses of one plan that no chain orders."""
    touched: dict[tuple[object, ...], list[tuple[Step, Region, bool]]] = {}
    for step in trace.steps:
        for regions, is_write in ((step.op.reads, False), (step.op.writes, True)):
            for region in regions if step.plan else ():
                # what the caller and the allocator own is the same memory whatever the plan
                plan = None if region.buffer[0] in OUTSIDE_ARENA else step.plan
                touched.setdefault((plan, region.rank, region.buffer), []).append((step, region, is_write))
    for accesses in touched.values():
        for (one, where, writes), (other, there, also_writes) in combinations(accesses, 2):
            conflict = (writes or also_writes) and one is not other and where.overlaps(there)
            if conflict and not (one.follows(other) or other.follows(one)):
                yield _race(one, other, f"{_name(where)} of rank {where.rank}")


def _races_between_plans(trace: Trace) -> Iterator[Violation]:
    """Two plans lay their buffers over the same arena: every access of one is ordered with every one of the other.

    Order is monotone along a stream, so the last access of each stream and the first one of each suffice.
    """
    by_plan: dict[tuple[int, object], dict[tuple[int, str], list[Step]]] = {}
    for step in trace.steps:
        for region in (*step.op.reads, *step.op.writes):
            if region.buffer[0] not in OUTSIDE_ARENA:
                by_plan.setdefault((region.rank, step.plan), {}).setdefault(step.stream, []).append(step)
    for (rank, plan), (other_rank, other) in combinations(by_plan, 2):
        if rank == other_rank:
            lasts = [steps[-1] for steps in by_plan[rank, plan].values()]
            firsts = [steps[0] for steps in by_plan[rank, other].values()]
            for last in lasts:
                for first in firsts:
                    if not first.follows(last) and not _precedes(by_plan[rank, other], by_plan[rank, plan]):
                        yield _race(last, first, f"the arena of rank {rank}")


def _precedes(earlier: dict[tuple[int, str], list[Step]], later: dict[tuple[int, str], list[Step]]) -> bool:
    return all(first[0].follows(last[-1]) for last in earlier.values() for first in later.values())


def _race(one: Step, other: Step, where: str) -> Violation:
    return Violation("race", f"nothing orders two accesses to {where}", _witness(one, other))


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
