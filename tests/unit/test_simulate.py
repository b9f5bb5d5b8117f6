"""The simulator against timelines worked out by hand, a plain reference, and rules that every timeline obeys."""

import json
import random
from dataclasses import replace
from itertools import chain, pairwise, product

import pytest

from usp.costs import COPIES, Costs, key, nbytes
from usp.emulate import emulated
from usp.order import Trace, calls
from usp.overlap import intersection, length, union
from usp.plan import AttentionPlan, make_plan
from usp.schedule import Kind, build
from usp.simulate import StuckError, play, simulate, simulate_emulated
from usp.timeline import KERNELS, WAITS, Event, Timeline

ROUND = {
    ("fill", "qk", None): 10.0,
    ("place", "v", None): 2.0,
    ("send", "v", None): 3.0,
    ("send", "qk", None): 6.0,
    ("attend", "", None): 20.0,
    ("return", "", None): 4.0,
}


def free_costs(**changes) -> Costs:
    """No overheads, and round durations."""
    return replace(Costs(signal_us=0, latency_us=0, event_us=0, measured=ROUND), **changes)


def two_ranks(*widths: int, **changes) -> AttentionPlan:
    plan = AttentionPlan((8, 8), 2 * sum(widths), 2 * sum(widths), 4, "float32", (widths, widths))
    return replace(plan, **changes)


def spans(timeline: Timeline, rank: int, kind: Kind, call: int = 1) -> list[tuple[float, float]]:
    return [
        event.span
        for event in timeline.events
        if (event.op.rank, event.op.kind, event.call) == (rank, kind, call) and event.op.stream != "arrivals"
    ]


def random_plan(rng: random.Random) -> AttentionPlan:
    """Uneven everything: ranks without tokens, ranks without heads, empty groups, grouped queries, prefixes."""
    ranks, groups, ratio = rng.randint(1, 5), rng.randint(1, 4), rng.choice((1, 1, 3))
    widths = [tuple(rng.choice((0, 1, 2)) for _ in range(groups)) for _ in range(ranks)]
    widths[rng.randrange(ranks)] = (1,) * groups
    tokens = [rng.choice((0, 1, 700, 2000)) for _ in range(ranks)]
    tokens[rng.randrange(ranks)] = 300
    kv_heads = sum(map(sum, widths))
    return AttentionPlan(
        *(tuple(tokens), kv_heads * ratio, kv_heads, 64, rng.choice(("float32", "bfloat16")), tuple(widths)),
        *(rng.randint(1, 2), rng.choice((0, 5)), rng.choice((0, 7)), rng.random() < 0.5, rng.randint(1, 2)),
    )


@pytest.mark.parametrize("call", [1, 2, 3])
def test_one_group_on_two_ranks_takes_as_long_as_by_hand(call: int) -> None:
    timeline = simulate(two_ranks(2), free_costs())
    base = 40.0 * (call - 1)
    for rank in (0, 1):
        assert timeline.window(rank, call) == (base, base + 40)
        assert spans(timeline, rank, Kind.SEND, call) == [(base, base + 3), (base + 10, base + 16)]
        assert spans(timeline, rank, Kind.ATTEND, call) == [(base + 16, base + 36)]
        assert spans(timeline, rank, Kind.RETURN, call) == [(base + 36, base + 40)]
        overlap = timeline.overlap(rank, call)
        assert (overlap.total, overlap.work, overlap.attention) == (40, 32, 20)
        # v leaves under the fill, and two of the six microseconds of q and k under the placing of v
        assert (overlap.communication, overlap.exposed, overlap.hidden) == (13, 8, 5)
        assert (overlap.stall, overlap.idle, overlap.inner_hidden_share) == (0, 0, None)


def test_two_groups_hide_the_second_sends_and_the_first_returns() -> None:
    timeline = simulate(two_ranks(1, 1), free_costs(measured={**ROUND, ("attend", "", 1): 30.0}))
    overlap = timeline.overlap(1, 1)
    assert spans(timeline, 1, Kind.SEND) == [(0, 3), (10, 16), (16, 19), (19, 25)]
    assert spans(timeline, 1, Kind.ATTEND) == [(16, 36), (36, 66)]
    assert spans(timeline, 1, Kind.RETURN) == [(36, 40), (66, 70)]
    assert (overlap.total, overlap.work, overlap.exposed, overlap.hidden) == (70, 62, 8, 18)
    assert (overlap.inner_communication, overlap.inner_hidden_share) == (13, 1.0)


def test_signals_events_and_latency_delay_as_by_hand() -> None:
    timeline = simulate(two_ranks(2), free_costs(signal_us=1, latency_us=1, event_us=2))
    assert spans(timeline, 0, Kind.SEND) == [(2, 5), (12, 18)]
    assert spans(timeline, 0, Kind.SIGNAL) == [(18, 19), (46, 47)]
    assert spans(timeline, 0, Kind.WAIT) == [(12, 20), (40, 48)]
    overlap = timeline.overlap(0, 1)
    assert (overlap.total, overlap.work, overlap.exposed, overlap.hidden, overlap.stall) == (48, 32, 10, 3, 6)


def test_a_late_peer_is_a_stall_and_not_communication() -> None:
    # 400 bytes of q and k a token, read and written at 8,000 bytes a microsecond: the fills take 10 and 30
    plan = AttentionPlan((100, 300), 2, 2, 25, "float32", ((1,), (1,)))
    table = {entry: us for entry, us in ROUND.items() if entry[0] != "fill"}
    timeline = simulate(plan, free_costs(fill_tbps=0.008, launch_us=0, measured=table), calls=1)
    early, late = timeline.overlap(0, 1), timeline.overlap(1, 1)
    assert (early.total, early.work, early.exposed, early.stall) == (56, 32, 10, 14)
    assert (late.total, late.work, late.exposed, late.stall) == (60, 52, 8, 0)
    assert timeline.slowest(1) == 1
    assert early.communication == 3 + 6 + 6 + 4 + 4
    assert (early.outside, late.outside) == (4, 0)  # the early rank's return ends after its own call


@pytest.mark.parametrize("gbps", [375, 53, 8])
def test_equal_shares_have_no_copies_outside_the_call_and_unequal_ones_do(gbps: int) -> None:
    """At 720p on two ranks: the rank with fewer tokens is done while its returns to the other still run."""
    shape = {"num_heads": 40, "head_dim": 128, "dtype": "bfloat16"}
    even, uneven = (make_plan(token_counts=counts, **shape) for counts in ((37_800, 37_800), (60_000, 15_600)))
    costs = Costs(link_gbps=gbps)
    for timeline in (simulate(even, costs), *(simulate_emulated(even, rank, costs) for rank in (0, 1))):
        for rank, call in product(timeline.ranks, (1, 2, 3)):
            overlap = timeline.overlap(rank, call)
            assert (overlap.outside, overlap.inner_outside) == pytest.approx((0, 0), abs=1e-6)
            assert_copies_are_accounted_for(timeline, rank, call)
    for timeline in (simulate(uneven, costs), *(simulate_emulated(uneven, rank, costs) for rank in (0, 1))):
        for rank, call in product(timeline.ranks, (1, 2, 3)):
            assert_copies_are_accounted_for(timeline, rank, call)
    late = simulate_emulated(uneven, 1, costs, calls=1)
    overlap, end = late.overlap(1, 1), late.window(1, 1)[1]
    after = union((max(one.start, end), one.end) for one in late.events if one.op.kind in COPIES and one.end > end)
    assert overlap.outside == pytest.approx(length(after)) and overlap.outside > 0
    assert overlap.hidden_share < (overlap.communication - overlap.exposed) / overlap.communication


def test_a_rank_without_heads_only_sends_and_waits() -> None:
    plan = AttentionPlan((8, 8), 2, 2, 4, "float32", ((2,), (0,)))
    timeline = simulate(plan, free_costs(), calls=1)
    full, empty = timeline.overlap(0, 1), timeline.overlap(1, 1)
    assert (full.total, full.work, full.exposed, full.stall) == (36, 32, 4, 0)
    assert (empty.total, empty.work, empty.exposed, empty.stall, empty.attention) == (40, 10, 10, 20, 0)


def test_a_rank_without_tokens_only_receives_and_returns() -> None:
    plan = AttentionPlan((8, 0), 2, 2, 4, "float32", ((1,), (1,)))
    timeline = simulate(plan, free_costs(), calls=1)
    full, empty = timeline.overlap(0, 1), timeline.overlap(1, 1)
    assert (full.total, full.work, full.exposed, full.stall, full.hidden) == (40, 32, 4, 4, 9)
    assert (empty.total, empty.work, empty.exposed, empty.stall, empty.hidden) == (36, 20, 9, 7, 0)
    assert (empty.outside, full.outside) == (4, 0)  # its return ends after its own call


def test_the_host_delays_what_it_has_not_issued() -> None:
    slow = simulate(two_ranks(2), free_costs(issue_us=5), calls=1)
    place = {id(op): number for number, op in enumerate(build(two_ranks(2), 0), 1)}
    for event in slow.events:
        if event.op.rank == 0:
            assert event.start >= 5 * place[id(event.op)]
    assert slow.overlap(0, 1).total > simulate(two_ranks(2), free_costs(), calls=1).overlap(0, 1).total


@pytest.mark.parametrize("seed", range(12))
def test_every_operation_starts_as_early_as_a_plain_reference_says(seed: int) -> None:
    plan = replace(random_plan(random.Random(seed)), attend_streams=1)
    costs = Costs(shared_ingress=False, issue_us=0.5)
    found = chain.from_iterable(event.span for event in simulate(plan, costs, calls=2).events)
    assert list(found) == pytest.approx(list(chain.from_iterable(reference(plan, costs, 2))))


def reference(plan: AttentionPlan, costs: Costs, count: int) -> list[tuple[float, float]]:
    """Repeats the rules over the lists until nothing moves any more."""
    ops = [(op, call) for rank in range(plan.num_ranks) for call in range(1, count + 1) for op in build(plan, rank)]
    issue = [
        costs.issue_us * place
        for rank in range(plan.num_ranks)
        for place in range(1, count * len(build(plan, rank)) + 1)
    ]
    times: list[tuple[float, float]] = []
    while True:
        recorded, streams, after = {}, {}, []
        ended = zip(ops, times, strict=False)
        raised = {(op.flag, call): end for (op, call), (_, end) in ended if op.kind is Kind.SIGNAL}
        for place, (op, call) in enumerate(ops):
            start = end = max(streams.get((op.rank, op.stream), 0.0), issue[place])
            if op.kind is Kind.WAIT:
                end = max(start, raised.get((op.flag, call), 0.0) + costs.latency_us)
            elif op.kind is Kind.AWAIT:
                end = max(start, recorded[op.rank, op.event, call] + costs.event_us)
            else:
                end = start + costs.duration(plan, op).us
            if op.kind is Kind.RECORD:
                recorded[op.rank, op.event, call] = end
            streams[op.rank, op.stream] = end
            after.append((start, end))
        if after == times:
            return times
        times = after


@pytest.mark.parametrize("seed", range(25))
def test_every_timeline_adds_up(seed: int) -> None:
    rng = random.Random(100 + seed)
    plan, costs = random_plan(rng), Costs(issue_us=rng.choice((0.0, 2.0)), shared_ingress=rng.random() < 0.5)
    rank = rng.randrange(plan.num_ranks)
    for timeline in (simulate(plan, costs), simulate_emulated(plan, rank, costs)):
        assert_adds_up(timeline, costs)


def assert_copies_are_accounted_for(timeline: Timeline, rank: int, call: int) -> None:
    """Hidden is what runs beside a kernel of the rank from the call's begin to its end."""
    overlap, window = timeline.overlap(rank, call), union([timeline.window(rank, call)])
    own = [one for one in timeline.events if one.op.rank == rank and one.op.kind in KERNELS]
    events = [one for one in timeline.events if one.op.kind in COPIES and rank in (one.op.rank, one.op.peer)]
    copies = union(one.span for one in events if one.call == call)
    hidden = length(intersection(intersection(copies, window), union(one.span for one in own)))
    assert (overlap.communication, overlap.hidden) == pytest.approx((length(copies), hidden), abs=1e-6)
    assert min(overlap.exposed, overlap.outside) >= 0
    assert -1e-6 <= overlap.inner_hidden <= overlap.hidden + 1e-6


def assert_adds_up(timeline: Timeline, costs: Costs) -> None:
    for rank in timeline.ranks:
        for call in (1, 2, 3):
            overlap = timeline.overlap(rank, call)
            assert_copies_are_accounted_for(timeline, rank, call)
            parts = (overlap.work, overlap.exposed, overlap.stall, overlap.idle)
            assert sum(parts) == pytest.approx(overlap.total) and min(parts) > -1e-6
            assert -1e-6 <= overlap.inner_exposed <= overlap.exposed + 1e-6
    for event in timeline.events:
        if event.op.kind not in WAITS:
            assert event.end - event.start == pytest.approx(costs.duration(timeline.plan, event.op).us)
    for lane in by_stream(timeline).values():
        assert all(one.end <= other.start + 1e-9 for one, other in pairwise(lane))


def by_stream(timeline: Timeline) -> dict[tuple[int, str], list[Event]]:
    lanes: dict[tuple[int, str], list[Event]] = {}
    for event in timeline.events:
        lanes.setdefault((event.op.rank, event.op.stream), []).append(event)
    return lanes


@pytest.mark.parametrize("seed", range(8))
def test_the_order_in_which_ranks_are_listed_changes_nothing(seed: int) -> None:
    plan = random_plan(random.Random(200 + seed))
    listed = calls(plan, 2)
    forward, backward = (play(Trace(lists), plan, Costs()) for lists in (listed, listed[::-1]))
    assert sorted(by_stream(forward).items()) == sorted(by_stream(backward).items())


def test_a_rank_receives_one_copy_at_a_time_only_if_the_costs_say_so() -> None:
    plan = AttentionPlan((4000, 1, 9000), 6, 6, 64, "float32", ((2,), (2,), (2,)))
    apart, together = (simulate(plan, Costs(shared_ingress=shared)) for shared in (True, False))
    assert not overlapping_arrivals(apart)
    assert overlapping_arrivals(together)


def overlapping_arrivals(timeline: Timeline) -> bool:
    for rank in timeline.ranks:
        copies = [
            event for event in timeline.events if event.op.kind in (Kind.SEND, Kind.RETURN) and event.op.peer == rank
        ]
        ordered = sorted(event.span for event in copies)
        if any(one[1] > other[0] + 1e-9 for one, other in pairwise(ordered)):
            return True
    return False


def test_two_attend_streams_share_the_sms_and_fill_each_others_last_wave() -> None:
    # 591 tiles a head: one head is 4.48 waves and leaves half of the fifth one empty
    one, two = (
        simulate(
            make_plan(token_counts=(37_800, 37_800), num_heads=8, head_dim=128, dtype="bfloat16", **streams), Costs()
        )
        for streams in ({"num_groups": 4}, {"num_groups": 4, "attend_streams": 2})
    )
    busy = [sum(end - start for start, end in spans(timeline, 0, Kind.ATTEND)) for timeline in (one, two)]
    assert busy[0] == pytest.approx(busy[1])
    assert 0.9 * one.overlap(0, 3).total < two.overlap(0, 3).total < 0.99 * one.overlap(0, 3).total


@pytest.mark.parametrize(("call", "reason"), [(1, "waits for call 2, rank 1 copy: SIGNAL"), (2, "nobody signals it")])
def test_a_dropped_signal_raises_what_the_checker_says(call: int, reason: str) -> None:
    plan = two_ranks(1, 1)
    listed = calls(plan, 2)
    lost = next(place for place, (op, now, _) in enumerate(listed[1]) if op.kind is Kind.SIGNAL and now == call)
    del listed[1][lost]
    with pytest.raises(StuckError, match=rf"deadlock: call {call}, rank 0 main: WAIT full\[0\]\[1\].*{reason}"):
        play(Trace(listed), plan, Costs())


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_emulated_peers_are_as_fast_as_real_ones(ranks: int) -> None:
    plan = make_plan(token_counts=(6000,) * ranks, num_heads=10 * ranks, head_dim=128, dtype="bfloat16", num_groups=5)
    costs = Costs(latency_us=0, event_us=0, signal_us=0)
    whole, alone = simulate(plan, costs), simulate_emulated(plan, ranks - 1, costs)
    assert alone.ranks == (ranks - 1,)
    assert alone.overlap(ranks - 1, 3).total == pytest.approx(whole.overlap(ranks - 1, 3).total)
    assert alone.overlap(ranks - 1, 3).exposed == pytest.approx(whole.overlap(ranks - 1, 3).exposed)


@pytest.mark.parametrize("seed", range(8))
def test_emulated_arrivals_are_what_the_peers_send(seed: int) -> None:
    plan = random_plan(random.Random(300 + seed))
    rank = seed % plan.num_ranks
    arriving = [op for op in emulated(plan, rank) if op.stream == "arrivals" and op.kind is not Kind.AWAIT]
    sent = [
        replace(op, rank=rank, stream="arrivals")
        for peer in plan.peers(rank)
        for op in build(plan, peer)
        if (op.kind is Kind.SIGNAL and op.flag.owner == rank)
        or (op.kind in (Kind.SEND, Kind.RETURN) and op.peer == rank)
    ]
    assert sorted(map(str, arriving)) == sorted(map(str, sent))
    assert [op for op in emulated(plan, rank) if op.stream != "arrivals" and op.event != "begun"] == list(
        build(plan, rank)
    )


def test_durations_of_emulated_peers_are_measured_by_their_own_name() -> None:
    table = {("send", "v", None): 5.0, ("peer_send", "v", 1): 7.0}
    timeline = simulate_emulated(two_ranks(1, 1), 0, Costs(measured=table))
    found = {key(event.op): (event.end - event.start, event.label) for event in timeline.events if event.op.what == "v"}
    assert found["send", "v", 0] == found["send", "v", 1] == (pytest.approx(5.0), "measured")
    assert found["peer_send", "v", 1] == (pytest.approx(7.0), "measured")
    assert found["peer_send", "v", 0][1] == "modelled"


def test_the_json_holds_every_event_and_account() -> None:
    timeline = simulate(two_ranks(1, 1), free_costs())
    read = json.loads(timeline.json())
    assert len(read["events"]) == len(timeline.events) == 3 * sum(len(build(two_ranks(1, 1), rank)) for rank in (0, 1))
    assert {(one["rank"], one["call"]) for one in read["calls"]} == {
        (rank, call) for rank in (0, 1) for call in (1, 2, 3)
    }
    for one in read["calls"]:
        assert one["total"] == timeline.overlap(one["rank"], one["call"]).total
        assert one["hidden"] + one["exposed"] + one["outside"] == one["communication"]
    assert {event["label"] for event in read["events"] if event["kind"] == "attend"} == {"measured"}


@pytest.mark.parametrize("seed", range(6))
def test_the_chrome_trace_has_disjoint_events_and_an_arrow_for_each_wait(seed: int) -> None:
    timeline = simulate(random_plan(random.Random(400 + seed)), Costs())
    events = json.loads(timeline.chrome_trace())["traceEvents"]
    lanes: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in events:
        if event["ph"] == "X":
            lanes.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    for lane in lanes.values():
        assert all(one[1] <= other[0] + 1e-6 for one, other in pairwise(sorted(lane)))
    starts, ends = ({one["id"]: one for one in events if one["ph"] == phase} for phase in "sf")
    assert len(starts) == sum(event.op.kind is Kind.WAIT for event in timeline.events)
    assert starts.keys() == ends.keys() and all(starts[one]["ts"] <= ends[one]["ts"] for one in starts)
    assert all(starts[one]["pid"] != ends[one]["pid"] for one in starts)


def test_the_text_has_a_row_per_rank_and_per_stream() -> None:
    timeline = simulate(two_ranks(1, 1, attend_streams=2), free_costs())
    text = timeline.text()
    rows = [line.split() for line in text.splitlines()]
    assert [row[:2] for row in rows if row[1:2] and row[1] in ("main", "aux", "copy")] == [
        [rank, stream] for rank in "01" for stream in ("main", "aux", "copy")
    ]
    size = sum(nbytes(timeline.plan, op) for op in build(timeline.plan, 0) if op.kind in (Kind.SEND, Kind.RETURN))
    assert f"{size / 1e9:.3f}" in next(row for row in rows if row[:2] == ["0", "copy"])
    assert "groups 1-1" in text and "call 3 of 3" in text
