"""A simulated run, written down as a profiler would have recorded it, gives the simulator's own account."""

from dataclasses import asdict

import pytest

from tests.unit.profiles import Issued, Process, write_chrome, write_sqlite
from usp.costs import COPIES, Costs, nbytes
from usp.plan import AttentionPlan
from usp.ranges import layer_name, op_name, who
from usp.schedule import Kind
from usp.simulate import simulate, simulate_emulated
from usp.timeline import KERNELS, Timeline
from usp.trace_calls import calls_of
from usp.trace_read import read

CALLER = {
    ("produce", "", None): 40.0,
    ("consume", "", None): 30.0,
}  # so that profilers see where a call begins and ends
STREAMS = {"main": 7, "aux": 9, "copy": 13, "arrivals": 15}


def recorded(timeline: Timeline, rank: int) -> Process:
    """The host issues everything long before it runs, an operation every 10 us."""
    process, ranks = Process(100 + rank), range(timeline.plan.num_ranks)
    host, opened = -1e6, 0.0
    for event in (one for one in timeline.events if one.op.rank == rank):
        host += 10
        if event.op.kind is Kind.PRODUCE:
            opened = host + 5
        if event.op.kind is Kind.CONSUME:
            process.ranges.append((layer_name(0, who(rank, ranks)), opened, host - 5))
        if event.op.kind in (*KERNELS, *COPIES) and event.start < event.end:
            size = nbytes(timeline.plan, event.op) if event.op.kind in COPIES else 0
            stream = STREAMS[event.op.stream]
            process.issued.append(Issued(stream, event.start, event.end, host, op_name(event.op), size))
    return process


def plan(*tokens: int, widths=((2, 3, 1),), **changes) -> AttentionPlan:
    groups = tuple(widths) * (len(tokens) // len(widths))
    heads = sum(map(sum, groups))
    return AttentionPlan(tokens, heads, heads, 64, "bfloat16", groups, **changes)


PLANS = [
    plan(5000, 4000),
    plan(3000, 3000, 2000, direct=False, batch=2),
    plan(6000, 5000, widths=((2, 0, 2), (1, 2, 3)), attend_streams=2),
    plan(2000),
]


@pytest.mark.parametrize("number", range(len(PLANS)))
@pytest.mark.parametrize("kind", ["sqlite", "chrome"])
def test_the_report_agrees_with_the_simulator(tmp_path, number: int, kind: str) -> None:
    made = PLANS[number]
    timeline = simulate(made, Costs(link_gbps=40, measured=CALLER), calls=3)
    processes = [recorded(timeline, rank) for rank in timeline.ranks]
    if kind == "sqlite":
        recordings = read(write_sqlite(tmp_path / "a.sqlite", *processes))
    else:
        files = [write_chrome(tmp_path / f"{rank}.json", one) for rank, one in enumerate(processes)]
        recordings = [one for file in files for one in read(file)]
    check(timeline, calls_of(recordings))


def test_one_rank_with_emulated_peers_agrees_too(tmp_path) -> None:
    """Arrivals are replayed on a second copy stream of the same process."""
    timeline = simulate_emulated(plan(6000, 6000), 1, Costs(link_gbps=50, measured=CALLER))
    file = write_chrome(tmp_path / "a.json", recorded(timeline, 1))
    check(timeline, calls_of(read(file)))


def check(timeline: Timeline, calls) -> None:
    assert len(calls) == len(timeline.ranks) * timeline.num_calls
    for call in calls:
        found, wanted = asdict(call.overlap), asdict(timeline.overlap(call.rank, call.key[2]))
        # a profiler cannot tell a wait for a flag from one for an event of the same rank
        found["stall"] += call.overlap.idle
        wanted["stall"] += timeline.overlap(call.rank, call.key[2]).idle
        assert found == pytest.approx(wanted, abs=0.1), (call.rank, call.key)
