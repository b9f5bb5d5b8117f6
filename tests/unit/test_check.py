"""The checker: correct schedules pass, every planted fault is found, and what it says is the shortest proof.

A mutation weakens one edge on one rank, in every call: an event, signal or wait is dropped, or a signal is given too
early, or a wait comes too late. Or it moves one piece of work past the nearest other one that touches the same memory.
None may go unnoticed, so the schedule holds no edge that it does not need, and its order of work is all needed.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import combinations, product
from math import prod
from random import Random

import pytest

from usp.check import check, check_plan, violations
from usp.layout import split_counts
from usp.order import Step, Trace, calls, freeing, joined, meeting
from usp.plan import AttentionPlan, make_plan
from usp.schedule import Kind, Op, Region, build
from usp.sweep import covering, main, plans, swept

EARLIER, LATER = (Kind.SIGNAL, Kind.RECORD), (Kind.WAIT, Kind.AWAIT)
Mutation = Callable[[list[Op]], list[Op]]


def plan(ranks: int, *, tokens: int = 7, heads: int = 4, groups: int = 2, **others) -> AttentionPlan:
    fields = {"num_heads": heads * ranks, "head_dim": 8, "dtype": "bfloat16", "num_groups": groups, **others}
    return make_plan(token_counts=split_counts(tokens, ranks), **fields)


def successor(made: AttentionPlan) -> AttentionPlan:
    """Another shape for the same ranks, as a second clip size in one process makes it."""
    return plan(made.num_ranks, tokens=2 * made.num_tokens + 1, heads=5, direct=not made.direct)


def mutated(made: AttentionPlan, rank: int, mutate: Mutation) -> Trace:
    """Three calls, a meeting and the end, in which one rank runs a changed list."""
    parts = calls(made, 3)
    parts[rank] = [(op, call, made) for call in (1, 2, 3) for op in mutate(list(build(made, rank)))]
    return Trace(joined(parts, meeting(made, 3), freeing(made, 4)))


def found_in(made: AttentionPlan, rank: int, mutate: Mutation) -> list[str]:
    return [str(one) for one in check(mutated(made, rank, mutate))]


def notices(made: AttentionPlan, rank: int, mutate: Mutation) -> bool:
    return next(violations(mutated(made, rank, mutate)), None) is not None


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


def reorderings(ops: tuple[Op, ...]) -> Iterator[tuple[str, Mutation]]:
    """Each piece of work behind the next one, and before the last one, that must not change places with it."""
    for index, op in enumerate(ops):
        behind = (p for p in range(index + 1, len(ops)) if _conflict(op, ops[p]))
        before = (p for p in range(index - 1, -1, -1) if _conflict(op, ops[p]))
        for place in filter(lambda place: place is not None, (next(behind, None), next(before, None))):
            name = f"{op} moved past {ops[place]}"
            yield name, lambda ops, index=index, place=place: _moved(ops, index, place)


def _conflict(one: Op, other: Op) -> bool:
    pairs = [*product(one.writes, other.reads + other.writes), *product(one.reads, other.writes)]
    return any(mine.overlaps(theirs) for mine, theirs in pairs)


def _moved(ops: list[Op], index: int, place: int) -> list[Op]:
    rest = ops[:index] + ops[index + 1 :]
    return [*rest[:place], ops[index], *rest[place:]]


def test_the_sweep_passes_and_says_so(capsys) -> None:
    assert main(["--ranks", "1", "2", "3", "4"]) == 0
    count = sum(len(swept(ranks)) for ranks in (1, 2, 3, 4))
    assert capsys.readouterr().out.splitlines()[-1].startswith(f"{count} plans, 0 with violations")


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_sweep_of_12_and_16_ranks_passes() -> None:
    assert main(["--ranks", "12", "16"]) == 0


FEATURES = (
    *(lambda made: made.num_tokens, lambda made: made.num_kv_heads, lambda made: made.num_groups),
    *(lambda made: made.heads_per_kv, lambda made: (made.prefix, made.suffix)),
    *(lambda made: made.direct, lambda made: made.attend_streams),
)


@pytest.mark.parametrize("ranks", range(1, 9))
def test_every_three_features_meet_in_the_sweep(ranks: int) -> None:
    """Plans whose number of groups the rule made come on top of those that are counted."""
    seen = [tuple(feature(made) for feature in FEATURES) for made in plans([ranks])]
    values = [sorted(set(column)) for column in zip(*seen, strict=True)]
    values[2] = [1, 2, 3, 5]
    assert [len(some) for some in values[2:]] == [4, 3, 4, 2, 2] and len(values[1]) >= 3
    for some in combinations(range(len(FEATURES)), 3):
        shown = {tuple(row[column] for column in some) for row in seen}
        assert shown >= set(product(*(values[column] for column in some)))


@pytest.mark.parametrize("tokens", [75_600, 32_760])
@pytest.mark.parametrize("ranks", range(1, 9))
def test_the_plans_of_a14b_are_in_the_sweep(ranks: int, tokens: int) -> None:
    """In the groups that the rule chooses: several from two ranks on."""
    checked = [made for made, _ in swept(ranks)]
    for direct, streams in product((True, False), (1, 2)):
        fields = {"num_heads": 40, "head_dim": 128, "dtype": "bfloat16", "direct": direct, "attend_streams": streams}
        made = make_plan(token_counts=split_counts(tokens, ranks), **fields)
        assert made in checked and (made.num_groups > 1) is (ranks > 1)


def test_plans_of_every_kind_follow_each_other_in_the_sweep() -> None:
    pairs = [pair for ranks in range(2, 9) for pair in swept(ranks)]
    kinds = list(product((True, False), (1, 2)))
    shown = {tuple((made.direct, made.attend_streams) for made in pair) for pair in pairs}
    assert shown == set(product(kinds, kinds))
    assert {tuple(made.num_groups for made in pair) for pair in pairs} >= set(product((1, 2, 3, 5), repeat=2))
    assert all(one != other and one.num_ranks == other.num_ranks for one, other in pairs)


@pytest.mark.parametrize(("sizes", "strength"), [((2, 3, 2), 2), ((3, 3, 3, 3), 2), ((2, 4, 3, 2), 3), ((5, 1, 2), 1)])
def test_covering_rows_show_every_combination(sizes: tuple[int, ...], strength: int) -> None:
    rows = covering(sizes, strength, Random(7))
    for some in combinations(range(len(sizes)), strength):
        shown = {tuple(row[column] for column in some) for row in rows}
        assert shown == set(product(*(range(sizes[column]) for column in some)))
    assert rows == covering(sizes, strength, Random(7)) and len(rows) < prod(sizes)


UNUSUAL = [{"prefix": 2, "suffix": 1}, {"num_kv_heads": 3}, {"tokens": 2}, {"heads": 1}]
# Prefix and suffix; grouped queries; a rank without tokens; one head a rank in two groups, so one is empty


@pytest.mark.parametrize("streams", [1, 2])
@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize(("ranks", "groups"), [(2, 1), (2, 2), (2, 3), (3, 2), (4, 2)])
def test_every_weakened_edge_is_found(ranks: int, groups: int, direct: bool, streams: int) -> None:
    made = plan(ranks, groups=groups, direct=direct, attend_streams=streams)
    for rank in range(ranks):
        for name, mutate in mutations(build(made, rank)):
            assert notices(made, rank, mutate), f"{name} of {made} goes unnoticed"


@pytest.mark.parametrize("features", UNUSUAL)
def test_every_weakened_edge_is_found_in_unusual_plans(features: dict) -> None:
    made = plan(3, **features)
    for rank in range(3):
        for name, mutate in mutations(build(made, rank)):
            assert notices(made, rank, mutate), f"{name} of {made} goes unnoticed"


@pytest.mark.parametrize("streams", [1, 2])
@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize(("ranks", "groups"), [(1, 1), (1, 2), (1, 3), (2, 1), (2, 2), (2, 3), (3, 2), (4, 2)])
def test_all_work_moved_past_work_on_the_same_memory_is_found(
    ranks: int, groups: int, direct: bool, streams: int
) -> None:
    made, kinds = plan(ranks, groups=groups, direct=direct, attend_streams=streams, prefix=2), set()
    for rank in range(ranks):
        for name, mutate in reorderings(build(made, rank)):
            assert notices(made, rank, mutate), f"{name} of {made} goes unnoticed"
            kinds.add(name.partition(": ")[2].partition(" ")[0])
    assert {"PRODUCE", "FILL", "PLACE", "ATTEND", "CONSUME"} <= kinds and ("KEEP" in kinds) is not direct
    assert ranks == 1 or {"SEND", "RETURN"} <= kinds


@pytest.mark.parametrize("features", UNUSUAL)
@pytest.mark.parametrize("direct", [True, False])
def test_all_moved_work_is_found_in_unusual_plans(direct: bool, features: dict) -> None:
    made = plan(3, direct=direct, **features)
    for rank in range(3):
        for name, mutate in reorderings(build(made, rank)):
            assert notices(made, rank, mutate), f"{name} of {made} goes unnoticed"


class Run:
    """Three calls on symbols, in a random order that the edges allow: does the caller read what it should?

    A cell holds where its value comes from: (call, tensor, rank, row), or for an attention output its group, the query,
    and all keys and values.
    """

    def __init__(self, made: AttentionPlan, rank: int, mutate: Mutation, rng: Random) -> None:
        lists = calls(made, 3)
        lists[rank] = [(op, call, made) for call in (1, 2, 3) for op in mutate(list(build(made, rank)))]
        self.plan, self.rng, self.trace = made, rng, Trace(lists)
        self.memory: dict[tuple, object] = {}

    def is_right(self) -> bool:
        done: set[Step] = set()
        waiting = {stream: list(steps) for stream, steps in self._streams()}
        while waiting:
            able = [stream for stream, steps in waiting.items() if done.issuperset(steps[0].before)]
            if not able:
                return False
            stream = self.rng.choice(able)
            step = waiting[stream].pop(0)
            done.add(step)
            if not self._do(step):
                return False
            waiting = {stream: steps for stream, steps in waiting.items() if steps}
        return True

    def _streams(self) -> Iterator[tuple[tuple[int, str], list[Step]]]:
        for stream in {step.stream for step in self.trace.steps}:
            yield stream, [step for step in self.trace.steps if step.stream == stream]

    def _do(self, step: Step) -> bool:
        op = step.op
        if op.kind is Kind.CONSUME:
            return all(self._is_right(step.call, cell) for region in op.reads for cell in cells(region))
        for number, region in enumerate(op.writes):
            values = [self._value(step, region, number, cell) for cell in cells(region)]
            self.memory.update(zip(cells(region), values, strict=True))
        return True

    def _value(self, step: Step, region: Region, number: int, cell: tuple) -> object:
        op, (rank, buffer, row, col), read = step.op, cell, self.memory.get
        place = row - region.rows[0]
        match op.kind:
            case Kind.PRODUCE:
                return (step.call, buffer[0], rank, row)
            case Kind.PLACE if op.what == "kv":
                return (step.call, buffer[1], "end", row)
            case Kind.FILL | Kind.PLACE:
                return read((op.rank, (buffer[1],), place, 0))
            case Kind.SEND:
                return read((op.rank, op.reads[number].buffer, op.reads[number].rows[0] + place, 0))
            case Kind.ATTEND:
                keys = [read(key) for slot in op.reads[1:] for key in cells(slot)]
                return ((rank, op.group), read((rank, op.reads[0].buffer, row, 0)), tuple(keys))
            case Kind.KEEP:
                peer = rank if buffer == ("out",) else buffer[2]
                return read((rank, op.reads[0].buffer, self.plan.tokens(peer).start + place, 0))
            case Kind.RETURN:
                source = op.reads[0]
                return read((source.rank, source.buffer, source.rows[0] + place, col if self.plan.direct else 0))
        raise AssertionError(op.kind)

    def _is_right(self, call: int, cell: tuple) -> bool:
        rank, _, row, col = cell
        groups = (one for peer in range(self.plan.num_ranks) for one in self.plan.groups(peer))
        group = next(one for one in groups if one.start <= col < one.start + one.count)
        own = row - self.plan.tokens(rank).start if self.plan.direct else row
        keys = tuple(key for what in "kv" for key in self._rows(call, what))
        return self.memory.get(cell) == ((group.rank, group.index), (call, "q", rank, own), keys)

    def _rows(self, call: int, what: str) -> list[tuple]:
        middle = [(call, what, r, row) for r, count in enumerate(self.plan.token_counts) for row in range(count)]
        ends = [(call, what, "end", row) for row in range(self.plan.num_kv_rows)]
        return [*ends[: self.plan.prefix], *middle, *ends[self.plan.prefix + len(middle) :]]


def cells(region: Region) -> list[tuple]:
    return [(region.rank, region.buffer, row, col) for row in range(*region.rows) for col in range(*region.cols)]


@pytest.mark.parametrize("streams", [1, 2])
@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_what_passes_after_any_move_still_gives_the_caller_the_right_rows(
    ranks: int, direct: bool, streams: int
) -> None:
    """In every order that is tried. Of what does not pass, much is seen to go wrong."""
    made = plan(ranks, tokens=2 * ranks, heads=2, direct=direct, attend_streams=streams, prefix=1, suffix=1)
    rng, passed, failed = Random(f"{ranks} {direct} {streams}"), 0, 0
    for _ in range(150):
        rank = rng.randrange(ranks)
        index, place = (rng.randrange(len(build(made, rank))) for _ in range(2))
        mutate = partial(_moved, index=index, place=place)
        if not notices(made, rank, mutate):
            passed += 1
            assert all(Run(made, rank, mutate, rng).is_right() for _ in range(3)), (build(made, rank)[index], place)
        else:
            failed += not Run(made, rank, mutate, rng).is_right()
    assert passed >= 5 and failed >= 5


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
            assert notices(made, 1, mutate), name


def test_another_plan_without_a_meeting_is_a_race() -> None:
    """Found by a prototype: own returns still read, and a peer's send of the new plan lands on a result being read."""
    made = plan(2)
    other = successor(made)
    with_meeting = joined(calls(made, 2), meeting(made, 2), calls(other, 2, first=3), meeting(made, 4))
    without = joined(calls(made, 2), calls(other, 2, first=3), meeting(made, 4))
    assert not check(Trace(with_meeting))
    found = check(Trace(without))
    assert found and all(one.kind == "race" and "the arena of rank" in one.message for one in found)


def test_a_plan_that_comes_back_is_laid_out_anew() -> None:
    """Its two stints are apart: each is ordered with what lies between, unless the second meeting is missing."""
    made = plan(2)
    other = successor(made)
    parts = [calls(made, 2), meeting(made, 2), calls(other, 2, first=3), meeting(other, 4), calls(made, 2, first=5)]
    assert not check(Trace(joined(*parts, meeting(made, 6), freeing(made, 7))))
    found = check(Trace(joined(*parts[:3], parts[4], meeting(made, 6), freeing(made, 7))))
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

    found = found_in(made, 0, return_from_fresh)
    assert any("race: nothing orders two accesses to fresh/main of rank 0" in text for text in found)


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("kind", [Kind.PLACE, Kind.CONSUME])
def test_what_an_earlier_call_left_is_stale(kind: Kind, direct: bool) -> None:
    """All of it is ordered, so only the call that wrote it tells: v placed behind attention, a result read too soon."""
    made = plan(2, direct=direct, prefix=2)

    def moved(ops: list[Op]) -> list[Op]:
        those, rest = ([op for op in ops if (op.kind is kind) is chosen] for chosen in (True, False))
        anchor = Kind.ATTEND if kind is Kind.PLACE else Kind.PRODUCE
        place = 1 + max(index for index, op in enumerate(rest) if op.kind is anchor)
        return [*rest[:place], *those, *rest[place:]]

    found = found_in(made, 0, moved)
    assert all(text.startswith("stale") for text in found)
    assert any("are read unwritten" in text and "call 1" in text for text in found)
    assert any("as another call or group left it" in text and "call 3" in text for text in found)


def test_the_output_of_another_group_is_stale() -> None:
    """One rank alone: the second launch of attention overwrites what the first one's KEEP has not read yet."""
    made = plan(1, direct=False)

    def late(ops: list[Op]) -> list[Op]:
        keep, launch = (max(i for i, op in enumerate(ops) if op.kind is kind) for kind in (Kind.KEEP, Kind.ATTEND))
        first = next(i for i, op in enumerate(ops) if op.kind is Kind.KEEP)
        assert first < launch < keep
        return _moved(ops, first, launch)

    found = found_in(made, 0, late)
    assert len(found) == 3 and all("stale: fresh/main of rank 0" in text for text in found)
    assert "ATTEND group 1" in found[0] and "KEEP group 0" in found[0]


def test_what_is_missing_is_counted_also_in_a_plan_of_full_size() -> None:
    made = plan(2, tokens=75_601, heads=20, groups=3)
    index = next(i for i, op in enumerate(build(made, 0)) if (op.kind, op.what, op.group) == (Kind.SEND, "v", 1))
    found = found_in(made, 0, lambda ops: ops[:index] + ops[index + 1 :])
    for call in (1, 2, 3):
        assert f"missing: 37801 of 75601 cells of slot/v/1 are not written in call {call}" in found
    assert "stale: 37801 of 75601 cells of slot/v/1 of rank 1 are read unwritten" in found[3]


@pytest.mark.parametrize("kind", [Kind.SEND, Kind.RETURN, Kind.FILL, Kind.PLACE, Kind.KEEP])
def test_a_copy_that_is_missing_or_done_twice_is_found(kind: Kind) -> None:
    made = plan(3, direct=kind is not Kind.KEEP, prefix=1)
    for index, op in enumerate(build(made, 0)):
        if op.kind is kind:
            dropped = found_in(made, 0, lambda ops, index=index: ops[:index] + ops[index + 1 :])
            doubled = found_in(made, 0, lambda ops, index=index: [*ops[: index + 1], *ops[index:]])
            assert any(text.startswith("missing") for text in dropped), op
            assert any(text.startswith("twice") for text in doubled), op


def test_rows_sent_to_the_wrong_place_are_found() -> None:
    made = plan(3)

    def shifted(ops: list[Op]) -> list[Op]:
        index = next(i for i, op in enumerate(ops) if op.kind is Kind.SEND)
        region = ops[index].writes[0]
        wrong = replace(region, rows=(region.rows[0] + 1, region.rows[1] + 1))
        return [*ops[:index], replace(ops[index], writes=(wrong,)), *ops[index + 1 :]]

    found = found_in(made, 0, shifted)
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
    told = found_in(made, 0, lambda ops: ops[:index] + ops[index + 1 :])[0].splitlines()
    assert told[0] == "race: nothing orders two accesses to send/q/1/0 of rank 0"
    assert "FILL qk" in told[2] and "SEND qk group 0 -> rank 1" in told[3]


@pytest.mark.parametrize("ranks", [1, 2, 5, 8])
def test_the_schedule_is_a_pure_function_and_copies_every_cell_once(ranks: int) -> None:
    for made in list(plans(range(ranks, ranks + 1)))[::7]:
        assert build(made, 0) == build.__wrapped__(made, 0)
        assert not check_plan(made)
