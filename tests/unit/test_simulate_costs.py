"""Modelled durations against plain arithmetic and the measurements behind them; groupings against forecasts."""

import json
from dataclasses import replace

import pytest

from usp.costs import ATTENTION_TFLOPS, Costs, nbytes, read_measured
from usp.errors import UserError
from usp.overlap import Overlap
from usp.plan import AttentionPlan, make_plan
from usp.schedule import Kind, Op, build
from usp.simulate import simulate

TOKENS = 75_600


def a14b(ranks: int, groups: tuple[int, ...], **changes) -> AttentionPlan:
    tokens = (TOKENS // ranks,) * ranks
    return replace(AttentionPlan(tokens, 40, 40, 128, "bfloat16", (groups,) * ranks), **changes)


def ops(plan: AttentionPlan, kind: Kind, rank: int = 0) -> list[Op]:
    return [op for op in build(plan, rank) if op.kind is kind]


def last_call(plan: AttentionPlan, costs: Costs | None = None) -> Overlap:
    timeline = simulate(plan, costs or Costs())
    return timeline.overlap(timeline.slowest(3), 3)


@pytest.mark.parametrize(("ranks", "gigabytes"), [(2, 0.77), (4, 0.58), (8, 0.34)])
def test_copies_of_one_rank_and_block_hold_the_counted_bytes(ranks: int, gigabytes: float) -> None:
    plan = make_plan(token_counts=(TOKENS // ranks,) * ranks, num_heads=40, head_dim=128, dtype="bfloat16")
    sent = sum(nbytes(plan, op) for kind in (Kind.SEND, Kind.RETURN) for op in ops(plan, kind))
    assert (
        sent == 4 * TOKENS // ranks * 40 * 128 * 2 * (ranks - 1) // ranks
    )  # q, k, v and the result, but for own heads
    assert sent / 1e9 == pytest.approx(gigabytes, abs=0.006)


@pytest.mark.parametrize(("heads", "tflops"), ATTENTION_TFLOPS)
def test_attention_takes_as_long_as_it_was_measured(heads: int, tflops: float) -> None:
    plan = AttentionPlan((TOKENS,), heads, heads, 128, "bfloat16", ((heads,),))
    us = Costs(launch_us=0).duration(plan, ops(plan, Kind.ATTEND)[0]).us
    assert us == pytest.approx(4 * heads * TOKENS**2 * 128 / tflops / 1e6)


def test_a_launch_of_few_tiles_takes_a_whole_wave() -> None:
    one, full = (
        Costs(launch_us=0).duration(plan, ops(plan, Kind.ATTEND)[0]).us / plan.num_kv_rows
        for plan in (AttentionPlan((tokens,), 1, 1, 128, "bfloat16", ((1,),)) for tokens in (128, 132 * 128))
    )
    assert one == pytest.approx(full)


def test_attention_reads_prefix_and_suffix_and_every_sample() -> None:
    plan = AttentionPlan((20_000, 13_000), 6, 3, 64, "float32", ((1,), (2,)), 2, 30, 12)
    flops = 4 * (2 * 2) * 2 * 33_000 * 33_042 * 64
    rate = 700 * (8 * 258 / (132 * 16)) / (8 * 591 / (132 * 36))  # 2,064 tiles in 16 waves; rated with 4,728 in 36
    costs = Costs(launch_us=0, attention_tflops=((8, 700.0),))
    assert costs.duration(plan, ops(plan, Kind.ATTEND, 1)[0]).us == pytest.approx(flops / rate / 1e6)


def test_copies_cost_bytes_rows_and_one_overhead_per_sample() -> None:
    plan = AttentionPlan((1000, 500), 6, 3, 64, "float32", ((1,), (2,)), 3)
    costs = Costs(link_gbps=100, copy_overhead_us=5, row_overhead_bytes=512)
    by_what = {op.what: costs.duration(plan, op).us for op in ops(plan, Kind.SEND)}
    assert by_what["v"] == pytest.approx(15 + 3 * 1000 * (2 * 256 + 512) / 1e5)  # two kv heads of 256 bytes a row
    assert by_what["q"] == pytest.approx(15 + 3 * 1000 * 4 * 256 / 1e5)
    assert by_what["k"] == pytest.approx(15 + 3 * 1000 * 2 * 256 / 1e5)
    returned = costs.duration(plan, ops(plan, Kind.RETURN)[0]).us
    assert returned == pytest.approx(15 + 3 * 500 * (2 * 256 + 512) / 1e5)  # two query heads a row


@pytest.mark.parametrize("direct", [True, False])
def test_kernels_read_and_write_what_they_move(direct: bool) -> None:
    plan = AttentionPlan((1000, 500), 6, 3, 64, "float32", ((1,), (2,)), 3, 7, 0, direct)
    costs = Costs(fill_tbps=1, memory_tbps=2, launch_us=3)
    assert costs.duration(plan, ops(plan, Kind.FILL)[0]).us == pytest.approx(3 + 2 * 3 * 1000 * (6 + 3) * 256 / 1e6)
    own_v, prefix = ops(plan, Kind.PLACE, 1)
    assert costs.duration(plan, own_v).us == pytest.approx(3 + 2 * 3 * 500 * 2 * 256 / 2e6)
    assert costs.duration(plan, prefix).us == pytest.approx(3 + 2 * 3 * 7 * 2 * 2 * 256 / 2e6)  # k and v of two heads
    kept = [costs.duration(plan, op).us for op in ops(plan, Kind.KEEP, 1)]
    assert kept == ([] if direct else [pytest.approx(3 + 2 * 3 * 1500 * 4 * 256 / 2e6)])


def test_the_fill_takes_as_long_as_it_was_measured() -> None:
    plan = a14b(2, (20,))
    assert Costs(launch_us=0).duration(plan, ops(plan, Kind.FILL)[0]).us == pytest.approx(2 * 210, rel=0.03)


@pytest.mark.parametrize(
    ("ranks", "groups", "share"),
    [(2, (2, 5, 6, 5, 2), 0.90), (2, (4,) * 5, 0.80), (4, (1, 3, 3, 2, 1), 0.90), (8, (1, 2, 2), 0.75)],
)
def test_all_but_the_ends_of_the_forecast_share_of_the_copies_is_inner(ranks, groups, share) -> None:
    overlap = last_call(a14b(ranks, groups), Costs(copy_overhead_us=0, latency_us=0))
    assert overlap.inner_communication / overlap.communication == pytest.approx(share, abs=0.002)
    assert overlap.inner_hidden_share == pytest.approx(1, abs=0.01)
    assert overlap.hidden_share > share  # the first group's v leaves under the fill


def test_small_ends_beat_equal_groups_on_two_ranks() -> None:
    small_ends, equal, whole = (last_call(a14b(2, groups)) for groups in ((2, 5, 6, 5, 2), (4,) * 5, (20,)))
    assert small_ends.total < equal.total < whole.total
    assert small_ends.exposed < equal.exposed < whole.exposed


def test_small_ends_expose_least_on_four_ranks() -> None:
    small_ends = last_call(a14b(4, (1, 3, 3, 2, 1)))
    others = [last_call(a14b(4, groups)) for groups in ((2,) * 5, (5, 5), (2, 3, 3, 2), (1, 3, 3, 3), (10,))]
    assert small_ends.exposed < min(other.exposed for other in others)
    assert small_ends.total < min(other.total for other in others[-2:])


def test_group_rule_beats_one_group_wherever_it_makes_several() -> None:
    for ranks in (2, 4, 8):
        plan = make_plan(token_counts=(TOKENS // ranks,) * ranks, num_heads=40, head_dim=128, dtype="bfloat16")
        assert plan.num_groups > 1
        assert last_call(plan).total < last_call(a14b(ranks, (40 // ranks,))).total


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"link_gbps": 0.0}, "link_gbps is 0.0"),
        ({"fill_tbps": float("nan")}, "fill_tbps is nan"),
        ({"launch_us": -1.0}, "launch_us is -1.0"),
        ({"row_overhead_bytes": -2.0}, "row_overhead_bytes is -2.0"),
        ({"attention_tflops": ()}, r"attention_tflops is \(\)"),
        ({"attention_tflops": ((4, 1.0), (2, 1.0))}, "heads rising"),
    ],
)
def test_impossible_costs_are_refused_with_their_value(changes, words) -> None:
    with pytest.raises(UserError, match=words):
        Costs(**changes)


def test_a_measured_duration_wins_over_the_model_and_says_so(tmp_path) -> None:
    path = tmp_path / "measured.json"
    entries = [{"kind": "attend", "group": 1, "us": 7}, {"kind": "send", "what": "v", "us": 2.5}]
    path.write_text(json.dumps(entries))
    costs, plan = Costs(measured=read_measured(path)), a14b(2, (10, 10))
    labels = [costs.duration(plan, op).label for op in ops(plan, Kind.ATTEND)]
    assert labels == ["modelled", "measured"] and costs.duration(plan, ops(plan, Kind.ATTEND)[1]).us == 7
    assert {op.what: costs.duration(plan, op).us == 2.5 for op in ops(plan, Kind.SEND)} == {"v": True, "qk": False}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "measured.json"),
        ("3", "JSON list"),
        ('[{"kind": "dance", "us": 1}]', "'dance'"),
        ('[{"kind": "send"}]', "us"),
        ('[{"kind": "send", "us": -1}]', "-1 us"),
        ('[{"kind": "send", "us": NaN}]', "nan us"),
    ],
)
def test_a_bad_table_of_durations_is_refused_by_name(tmp_path, content: str, words: str) -> None:
    path = tmp_path / "measured.json"
    path.write_text(content)
    with pytest.raises(UserError, match=words) as error:
        read_measured(path)
    assert "measured.json" in str(error.value)
