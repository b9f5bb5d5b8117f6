"""`python -m usp.check`: proves the schedules of many plans, up to 8 ranks in well under a minute, up to 16 if asked.

For each number of ranks, every three features meet in every combination of their values: token shares, heads, groups
(counted, or by the rule), grouped queries, prefix and suffix, both output modes, one and two attend streams. The plans
of real clips come on top, whose groups the rule makes. Each plan is followed in the same arena by another of the list.
"""

import argparse
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import combinations, product
from random import Random

from usp.check import check_plan
from usp.layout import split_counts
from usp.plan import AttentionPlan, make_plan

GROUPS, QUERY_HEADS_PER_KV, ENDS = (None, 1, 2, 3, 5), (1, 2, 5), ((0, 0), (7, 0), (0, 4), (3, 5))
CLIP_TOKENS, CLIP_HEADS = (75_600, 32_760), (40, 24, 12)  # 720p and 480p, 81 frames; Wan A14B, 5B and 1.3B
MANY_RANKS = 8  # beyond, where a plan takes long to check, every two features meet instead of three
TRIES = 24

Values = tuple[tuple[int, int], ...]  # (feature, number of its value), in the order of features


def plans(ranks: Iterable[int]) -> Iterator[AttentionPlan]:
    """Plans of a few tokens and heads, in a mixed order that is always the same."""
    for num_ranks in ranks:
        tokens_of = (4 * num_ranks, 45, num_ranks + 1, max(1, num_ranks - 1))  # the last leaves one rank without any
        heads_of = sorted({num_ranks, 2 * num_ranks + 1, max(1, num_ranks - 1), 5 * num_ranks})
        sizes = [len(tokens_of), len(heads_of), len(GROUPS), len(QUERY_HEADS_PER_KV), len(ENDS), 2, 2]
        strength = 3 if num_ranks <= MANY_RANKS else 2
        for tokens, heads, groups, ratio, ends, kept, aux in covering(sizes, strength, Random(num_ranks)):
            yield make_plan(
                token_counts=split_counts(tokens_of[tokens], num_ranks),
                num_heads=heads_of[heads] * QUERY_HEADS_PER_KV[ratio],
                num_kv_heads=heads_of[heads],
                head_dim=8,
                dtype="bfloat16",
                num_groups=GROUPS[groups],
                prefix=ENDS[ends][0],
                suffix=ENDS[ends][1],
                direct=not kept,
                attend_streams=1 + aux,
            )


def clip_plans(ranks: Iterable[int]) -> Iterator[AttentionPlan]:
    """Those of real clips in the groups that the rule chooses."""
    for num_ranks, tokens, heads, direct, streams in product(ranks, CLIP_TOKENS, CLIP_HEADS, (True, False), (1, 2)):
        yield make_plan(
            token_counts=split_counts(tokens, num_ranks),
            num_heads=heads,
            head_dim=128,
            dtype="bfloat16",
            direct=direct,
            attend_streams=streams,
        )


def swept(num_ranks: int) -> list[tuple[AttentionPlan, AttentionPlan]]:
    """Every plan of a number of ranks, each with the one that follows it in the same arena."""
    found = [*plans([num_ranks]), *clip_plans([num_ranks])]
    Random(num_ranks).shuffle(found)
    return list(zip(found, [*found[1:], found[0]], strict=True))


def covering(num_values: Sequence[int], strength: int, rng: Random) -> list[tuple[int, ...]]:
    """Rows, one number below `num_values[i]` in column i, so that any `strength` columns show all their combinations.

    Each row holds one combination that no row has yet, and otherwise what brings the most new ones in some tries.
    """
    columns = list(combinations(range(len(num_values)), strength))
    missing: dict[Values, None] = {
        tuple(zip(some, values, strict=True)): None
        for some in columns
        for values in product(*(range(num_values[column]) for column in some))
    }
    rows = []
    while missing:
        first = dict(next(iter(missing)))
        tries = [tuple(first.get(i, rng.randrange(n)) for i, n in enumerate(num_values)) for _ in range(TRIES)]
        new = [[key for key in _shown(row, columns) if key in missing] for row in tries]
        best = max(range(TRIES), key=lambda number: len(new[number]))
        rows.append(tries[best])
        for key in new[best]:
            del missing[key]
    return rows


def _shown(row: tuple[int, ...], columns: Iterable[tuple[int, ...]]) -> Iterator[Values]:
    return (tuple((column, row[column]) for column in some) for some in columns)


def first_violation(plans: tuple[AttentionPlan, AttentionPlan]) -> str | None:
    """What is wrong with a plan followed by another; None if nothing is."""
    found = check_plan(plans[0], then=plans[1])
    return f"{plans[0]}\nthen {plans[1]}\n{found[0]}" if found else None


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m usp.check", description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", help="numbers of ranks (default: 1 to 8)")
    parser.add_argument("--workers", type=int, default=2, help="processes that check side by side")
    args = parser.parse_args(argv)
    start, bad, count = time.monotonic(), 0, 0
    for ranks in args.ranks or range(1, 9):
        pairs = swept(ranks)
        with ProcessPoolExecutor(args.workers) as pool:
            violations = [text for text in pool.map(first_violation, pairs, chunksize=8) if text]
        print(f"{ranks:2d} ranks: {len(pairs)} plans, {len(violations)} with violations")
        print("".join(f"{text}\n" for text in violations[:3]), end="")
        bad, count = bad + len(violations), count + len(pairs)
    print(f"{count} plans, {bad} with violations, {time.monotonic() - start:.1f} s")
    return 1 if bad else 0
