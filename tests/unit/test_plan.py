"""The plan: group shapes, shares at key/value heads, hash, and what cannot be planned."""

import subprocess
import sys
from dataclasses import replace

import pytest

from usp.layout import split_counts
from usp.plan import AttentionPlan, default_num_groups, group_widths, make_plan


def plan(ranks: int = 3, tokens: int = 10, heads: int = 7, **others) -> AttentionPlan:
    fields = {"num_heads": heads, "head_dim": 8, "dtype": "bfloat16", **others}
    return make_plan(token_counts=split_counts(tokens, ranks), **fields)


@pytest.mark.parametrize(
    ("heads", "expected"), [(20, (2, 5, 6, 5, 2)), (10, (1, 3, 3, 2, 1)), (5, (1, 2, 2)), (2, (1, 1)), (1, (1,))]
)
def test_the_groups_of_a14b_at_720p_have_small_ends(heads: int, expected: tuple[int, ...]) -> None:
    assert group_widths(heads, default_num_groups(heads, heads, num_tokens=75_600)) == expected


def test_short_sequences_are_not_cut_below_two_waves() -> None:
    """20 heads of 4,000 tokens are 4.8 waves of 132 tiles, so two groups; of 1,000 tokens, 1.2 waves, so one."""
    assert default_num_groups(20, 20, num_tokens=4_000) == 2
    assert default_num_groups(20, 20, num_tokens=1_000) == 1


@pytest.mark.parametrize("heads", range(13))
@pytest.mark.parametrize("groups", range(1, 8))
def test_widths_cover_all_heads(heads: int, groups: int) -> None:
    widths = group_widths(heads, groups)
    assert sum(widths) == heads and len(widths) == groups and min(widths) >= 0


@pytest.mark.parametrize(("heads", "kv_heads", "ranks"), [(40, 8, 3), (40, 40, 7), (6, 2, 4), (5, 5, 2)])
def test_groups_of_all_ranks_partition_the_heads_at_key_value_borders(heads: int, kv_heads: int, ranks: int) -> None:
    made = plan(ranks, heads=heads, num_kv_heads=kv_heads, num_groups=3)
    groups = [group for rank in range(ranks) for group in made.groups(rank)]
    assert [head for g in groups for head in range(g.start, g.start + g.count)] == list(range(heads))
    assert [head for g in groups for head in range(g.kv_start, g.kv_start + g.kv_count)] == list(range(kv_heads))
    assert all(g.start * kv_heads == g.kv_start * heads and g.count for g in groups)


def test_the_hash_is_of_every_field_and_of_nothing_else() -> None:
    made = plan()
    fields = "token_counts=(4, 3, 3), num_heads=7, head_dim=8, dtype='bfloat16'"
    program = f"from usp.plan import make_plan; print(make_plan({fields}).hash)"
    elsewhere = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=20)
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
