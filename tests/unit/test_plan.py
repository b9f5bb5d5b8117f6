"""The plan: group shapes, shares at key/value heads, hash, and what cannot be planned."""

import subprocess
import sys
from dataclasses import replace

import pytest

from usp.grouping import choose_widths, spread_widths
from usp.layout import split_counts
from usp.plan import AttentionPlan, make_plan


def plan(ranks: int = 3, tokens: int = 10, heads: int = 7, **others) -> AttentionPlan:
    fields = {"num_heads": heads, "head_dim": 8, "dtype": "bfloat16", **others}
    return make_plan(token_counts=split_counts(tokens, ranks), **fields)


def default_groups(heads: int, *, tokens: int, ranks: int) -> tuple[int, ...]:
    return choose_widths(heads, tiles_per_head=-(-tokens // 128), num_tokens=tokens, num_ranks=ranks)


def waves(widths: tuple[int, ...], tokens: int) -> int:
    return sum(-(-width * -(-tokens // 128) // 132) for width in widths)


@pytest.mark.parametrize(("ranks", "heads"), [(2, 20), (4, 10), (8, 5)])
@pytest.mark.parametrize("tokens", [75_600, 32_760])
def test_groups_of_a14b_have_small_ends_and_waste_no_wave(ranks: int, heads: int, tokens: int) -> None:
    widths = default_groups(heads, tokens=tokens, ranks=ranks)
    assert sum(widths) == heads and len(widths) >= 3
    assert widths[0] <= 2 and widths[-1] <= 2
    assert waves(widths, tokens) <= waves((heads,), tokens) + 2


def test_two_heads_at_720p_go_before_one() -> None:
    """One head fills 4.48 of 5 waves, two fill 8.95 of 9."""
    assert default_groups(10, tokens=75_600, ranks=4) == (2, 6, 2)


def test_inner_groups_are_cut_so_that_they_hide_over_a_slow_link_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over NVLink the sends of 16 heads hide under the attention of two; over PCIe they do not."""
    assert default_groups(20, tokens=75_600, ranks=2) == (2, 8, 8, 2)
    monkeypatch.setattr("usp.grouping.SLOW_LINK", 1.0)
    assert default_groups(20, tokens=75_600, ranks=2) == (2, 16, 2)


def test_short_sequences_are_not_cut() -> None:
    """At 1,000 tokens a group of 20 heads is 1.2 waves; any cut costs more than it hides."""
    for ranks in (2, 4, 8):
        assert default_groups(40 // ranks, tokens=1_000, ranks=ranks) == (40 // ranks,)


@pytest.mark.parametrize("heads", range(1, 42))
@pytest.mark.parametrize("tokens", [1, 45, 4_000, 75_600])
def test_chosen_widths_cover_all_heads_in_few_groups(heads: int, tokens: int) -> None:
    widths = default_groups(heads, tokens=tokens, ranks=4)
    assert sum(widths) == heads and 1 <= len(widths) <= 6 and min(widths) >= 1


@pytest.mark.parametrize("heads", [11, 41, 7])
def test_ranks_with_a_head_less_have_as_many_groups(heads: int) -> None:
    made = plan(4, tokens=75_600, heads=heads)
    assert len({len(widths) for widths in made.group_widths}) == 1
    assert [sum(widths) for widths in made.group_widths] == list(split_counts(heads, 4))


@pytest.mark.parametrize("heads", range(13))
@pytest.mark.parametrize("groups", range(1, 8))
def test_widths_cover_all_heads(heads: int, groups: int) -> None:
    widths = spread_widths(heads, groups)
    assert sum(widths) == heads and len(widths) == groups and min(widths) >= 0


@pytest.mark.parametrize(("heads", "kv_heads", "ranks"), [(40, 8, 3), (40, 40, 7), (6, 2, 4), (5, 5, 2)])
def test_groups_of_all_ranks_partition_the_heads_at_key_value_borders(heads: int, kv_heads: int, ranks: int) -> None:
    made = plan(ranks, heads=heads, num_kv_heads=kv_heads, num_groups=3)
    groups = [group for rank in range(ranks) for group in made.groups(rank)]
    assert [head for g in groups for head in range(g.start, g.start + g.count)] == list(range(heads))
    assert [head for g in groups for head in range(g.kv_start, g.kv_start + g.kv_count)] == list(range(kv_heads))
    assert all(g.start * kv_heads == g.kv_start * heads and g.count for g in groups)


def test_given_widths_are_every_ranks() -> None:
    made = plan(2, heads=8, group_widths=(1, 2, 1))
    assert made.group_widths == ((1, 2, 1), (1, 2, 1))
    with pytest.raises(ValueError, match="cover 6 of 8"):
        plan(2, heads=8, group_widths=(1, 2))
    with pytest.raises(ValueError, match="cover 8 of 7"):
        plan(2, heads=7, group_widths=(1, 3))


def test_the_hash_is_of_every_field_and_of_nothing_else() -> None:
    made = plan()
    fields = "token_counts=(4, 3, 3), num_heads=7, head_dim=8, dtype='bfloat16'"
    program = f"from usp.plan import make_plan; print(make_plan({fields}).hash)"
    elsewhere = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=100)
    assert elsewhere.stdout.strip() == made.hash
    changed = [replace(made, batch=2), replace(made, prefix=1), replace(made, dtype="float32"), plan(tokens=11)]
    changed += [
        replace(made, direct=False),
        replace(made, attend_streams=2),
        plan(num_groups=2),
        replace(made, head_dim=16),
    ]
    assert len({made.hash, *(one.hash for one in changed)}) == len(changed) + 1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"token_counts": (1,) * 17}, "17 ranks; a plan takes 1 to 16"),
        ({"num_heads": 7, "num_kv_heads": 2}, "7 query heads are no multiple of 2"),
        ({"dtype": "int64"}, "dtype int64"),
        ({"token_counts": (0, 0)}, "nothing to attend"),
        ({"prefix": -1}, "at least 0"),
        ({"attend_streams": 3}, "use 1, or 2"),
    ],
)
def test_what_cannot_be_planned_is_refused_with_its_numbers(fields: dict, message: str) -> None:
    usual = {"token_counts": (2, 2), "num_heads": 4, "head_dim": 8, "dtype": "float32"}
    with pytest.raises(ValueError, match=message):
        make_plan(**{**usual, **fields})


def test_groups_that_do_not_cover_the_heads_are_refused() -> None:
    with pytest.raises(ValueError, match="cover 6 of 7"):
        replace(plan(), group_widths=((3,), (2,), (1,)))
    with pytest.raises(ValueError, match="same number of groups"):
        replace(plan(), group_widths=((3,), (2, 0), (2,)))
