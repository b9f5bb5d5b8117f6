"""The checker: correct schedules pass, every planted fault is found, and what it says is the shortest proof.

A mutation weakens one edge on one rank, in every call: an event, signal or wait is dropped, or a signal is given too
early, or a wait comes too late. None may go unnoticed, so the schedule holds no edge that it does not need.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from usp.check import check, check_plan
from usp.layout import split_counts
from usp.order import Trace, calls, freeing, joined, meeting
from usp.plan import AttentionPlan, make_plan
from usp.schedule import Kind, Op, Region, build
from usp.sweep import main, plans, successor

EARLIER, LATER = (Kind.SIGNAL, Kind.RECORD), (Kind.WAIT, Kind.AWAIT)
Mutation = Callable[[list[Op]], list[Op]]


def plan(ranks: int, *, tokens: int = 7, heads: int = 4, groups: int = 2, **others) -> AttentionPlan:
    fields = {"num_heads": heads * ranks, "head_dim": 8, "dtype": "bfloat16", "num_groups": groups, **others}
    return make_plan(token_counts=split_counts(tokens, ranks), **fields)


def violations(made: AttentionPlan, rank: int, mutate: Mutation) -> list[str]:
    """What is found in three calls, a meeting and the end, if one rank runs a changed list."""
    parts = calls(made, 3)
    parts[rank] = [(op, call, made) for call in (1, 2, 3) for op in mutate(list(build(made, rank)))]
    return [str(one) for one in check(Trace(joined(parts, meeting(made, 3), freeing(made, 4))))]


def mutations(ops: tuple[Op, ...]) -> Iterator[tuple[str, Mutation]]:
    for index, op in enumerate(ops):
        if op.kind in EARLIER + LATER:
            yield f"drop {op}", lambda ops, index=index: ops[:index] + ops[index + 1 :]
            place = _next_work(ops, index)
            if place is not None:
                yield f"move {op}", lambda ops, index=index, place=place: _moved(ops, index, place)


def _next_work(ops: tuple[Op, ...], index: int) -> int | None:
    """The nearest operation on the same stream that the edge protects: before a signal, after a wait."""
    op = ops[index]
    places = range(index - 1, -1, -1) if op.kind in EARLIER else range(index + 1, len(ops))
    return next((p for p in places if ops[p].stream == op.stream and ops[p].kind not in EARLIER + LATER), None)


def _moved(ops: list[Op], index: int, place: int) -> list[Op]:
    rest = ops[:index] + ops[index + 1 :]
    return [*rest[:place], ops[index], *rest[place:]]


def test_the_sweep_passes_and_says_so(capsys) -> None:
    assert main(["--ranks", "1", "2", "3", "4"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("240 plans, 0 with violations")


@pytest.mark.long
def test_the_sweep_of_12_and_16_ranks_passes() -> None:
    assert main(["--ranks", "12", "16"]) == 0


@pytest.mark.parametrize("streams", [1, 2])
@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize(("ranks", "groups"), [(2, 1), (2, 2), (2, 3), (3, 2), (4, 2)])
def test_every_weakened_edge_is_found(ranks: int, groups: int, direct: bool, streams: int) -> None:
    made = plan(ranks, groups=groups, direct=direct, attend_streams=streams)
    for rank in range(ranks) if ranks < 4 else (0, 3):
        for name, mutate in mutations(build(made, rank)):
            assert violations(made, rank, mutate), f"{name} of {made} goes unnoticed"


@pytest.mark.parametrize("features", [{"prefix": 2, "suffix": 1}, {"num_kv_heads": 3}, {"tokens": 2}, {"heads": 1}])
def test_every_weakened_edge_is_found_in_unusual_plans(features: dict) -> None:
    """Prefix and suffix; grouped queries; a rank without tokens; one head a rank in two groups, so one is empty."""
    made = plan(3, **features)
    for rank in range(3):
        for name, mutate in mutations(build(made, rank)):
            assert violations(made, rank, mutate), f"{name} of {made} goes unnoticed"


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("ranks", [5, 6, 8])
def test_every_kind_of_weakened_edge_is_found_at_more_ranks(ranks: int) -> None:
    """One of each symmetry class: kind, stream, flag or event, group."""
    made, seen = plan(ranks, tokens=4 * ranks + 1, groups=3), set()
    for name, mutate in mutations(build(made, 1)):
        kind = name.partition("[")[0] + name.partition("]")[0][-1]
        if kind not in seen:
            seen.add(kind)
            assert violations(made, 1, mutate), name


def test_another_plan_without_a_meeting_is_a_race() -> None:
    """Found by a prototype: own returns still read, and a peer's send of the new plan lands on a result being read."""
    made = plan(2)
    other = successor(made)
    with_meeting = joined(calls(made, 2), meeting(made, 2), calls(other, 2, first=3), meeting(made, 4))
    without = joined(calls(made, 2), calls(other, 2, first=3), meeting(made, 4))
    assert not check(Trace(with_meeting))
    found = check(Trace(without))
    assert found and all(one.kind == "race" and "the arena of rank" in one.message for one in found)


def test_freeing_without_a_meeting_is_a_race() -> None:
    made = plan(2)
    assert {one.kind for one in check(Trace(joined(calls(made, 2), freeing(made, 3))))} == {"race"}


def test_an_attention_output_that_is_dropped_while_it_is_returned_is_a_race() -> None:
    """Found by a prototype: without `out=`, the allocator hands the dropped output to the next launch."""
    made = plan(2, direct=False)

    def return_from_fresh(ops: list[Op]) -> list[Op]:
        fresh = Region(0, ("fresh", "main"), (0, made.num_tokens))
        return [replace(op, reads=(fresh,)) if op.kind is Kind.RETURN else op for op in ops]

    found = violations(made, 0, return_from_fresh)
    assert any("race: nothing orders two accesses to fresh/main of rank 0" in text for text in found)


@pytest.mark.parametrize("kind", [Kind.SEND, Kind.RETURN, Kind.FILL, Kind.PLACE, Kind.KEEP])
def test_a_copy_that_is_missing_or_done_twice_is_found(kind: Kind) -> None:
    made = plan(3, direct=kind is not Kind.KEEP, prefix=1)
    for index, op in enumerate(build(made, 0)):
        if op.kind is kind:
            dropped = violations(made, 0, lambda ops, index=index: ops[:index] + ops[index + 1 :])
            doubled = violations(made, 0, lambda ops, index=index: [*ops[: index + 1], *ops[index:]])
            assert any(text.startswith("missing") for text in dropped), op
            assert any(text.startswith("twice") for text in doubled), op


def test_rows_sent_to_the_wrong_place_are_found() -> None:
    made = plan(3)

    def shifted(ops: list[Op]) -> list[Op]:
        index = next(i for i, op in enumerate(ops) if op.kind is Kind.SEND)
        region = ops[index].writes[0]
        wrong = replace(region, rows=(region.rows[0] + 1, region.rows[1] + 1))
        return [*ops[:index], replace(ops[index], writes=(wrong,)), *ops[index + 1 :]]

    found = violations(made, 0, shifted)
    assert {text.partition(":")[0] for text in found} >= {"missing", "twice"}


def test_waits_issued_before_the_sends_that_others_need_are_a_deadlock() -> None:
    """Each stream's own order is as it was; on one hardware queue per rank everybody waits for ever."""
    made = plan(2, groups=1)
    main_first = [sorted(build(made, rank), key=lambda op: op.stream == "copy") for rank in (0, 1)]
    found = check(Trace([[(op, 1, made) for op in ops] for ops in main_first]))
    assert [one.kind for one in found] == ["deadlock"] and "in issue order" in found[0].message
    assert len(found[0].chain) == 2 and all("WAIT full" in line for line in found[0].chain)


def test_a_race_is_told_with_the_shortest_chain_that_shows_it() -> None:
    made = plan(2, groups=1)
    index = next(i for i, op in enumerate(build(made, 0)) if op.event == "filled" and op.kind is Kind.AWAIT)
    told = violations(made, 0, lambda ops: ops[:index] + ops[index + 1 :])[0].splitlines()
    assert told[0] == "race: nothing orders two accesses to send/q/1/0 of rank 0"
    assert "FILL qk" in told[2] and "SEND qk group 0 -> rank 1" in told[3]


@pytest.mark.parametrize("ranks", [1, 2, 5, 8])
def test_the_schedule_is_a_pure_function_and_copies_every_cell_once(ranks: int) -> None:
    for made in list(plans(range(ranks, ranks + 1)))[::7]:
        assert build(made, 0) == build.__wrapped__(made, 0)
        assert not check_plan(made)
