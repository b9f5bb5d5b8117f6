"""`python -m usp.check`: proves the schedules of many plans, up to 8 ranks in well under a minute, up to 16 if asked.

Every combination of ranks, token shares, heads and groups; the other features (grouped queries, prefix and suffix, both
output modes, one and two attend streams) take turns, so that each meets every number of ranks. Each plan is followed
in the same arena by another one.
"""

import argparse
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import cycle, product

from usp.check import check_plan
from usp.layout import split_counts
from usp.plan import AttentionPlan, make_plan

GROUPS = (1, 2, 3, 5)
QUERY_HEADS_PER_KV, ENDS = (1, 2, 5), ((0, 0), (7, 0), (0, 4), (3, 5))


def plans(ranks: range) -> Iterator[AttentionPlan]:
    features = cycle(product(QUERY_HEADS_PER_KV, ENDS, (True, False), (1, 2)))
    for num_ranks in ranks:
        tokens_of = (4 * num_ranks, 45, num_ranks + 1, max(1, num_ranks - 1))  # the last leaves one rank without any
        heads_of = sorted({num_ranks, 2 * num_ranks + 1, max(1, num_ranks - 1), 5 * num_ranks})
        for tokens, heads, groups in product(tokens_of, heads_of, GROUPS):
            ratio, (prefix, suffix), direct, streams = next(features)
            yield make_plan(
                token_counts=split_counts(tokens, num_ranks),
                num_heads=heads * ratio,
                num_kv_heads=heads,
                head_dim=8,
                dtype="bfloat16",
                num_groups=groups,
                prefix=prefix,
                suffix=suffix,
                direct=direct,
                attend_streams=streams,
            )


def successor(plan: AttentionPlan) -> AttentionPlan:
    """Another shape for the same ranks: what a second clip size in one process looks like."""
    return make_plan(
        token_counts=split_counts(2 * plan.num_tokens + 1, plan.num_ranks),
        num_heads=plan.num_ranks + 2,
        head_dim=8,
        dtype="bfloat16",
        num_groups=2,
        direct=not plan.direct,
    )


def first_violation(plan: AttentionPlan) -> str | None:
    """What is wrong with a plan followed by its successor; None if nothing is."""
    found = check_plan(plan, then=successor(plan))
    return f"{plan}\n{found[0]}" if found else None


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m usp.check", description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", help="numbers of ranks (default: 1 to 8)")
    parser.add_argument("--workers", type=int, default=2, help="processes that check side by side")
    args = parser.parse_args(argv)
    start, bad, count = time.monotonic(), 0, 0
    for ranks in args.ranks or range(1, 9):
        swept = list(plans(range(ranks, ranks + 1)))
        with ProcessPoolExecutor(args.workers) as pool:
            violations = [text for text in pool.map(first_violation, swept, chunksize=8) if text]
        print(f"{ranks:2d} ranks: {len(swept)} plans, {len(violations)} with violations")
        print("".join(f"{text}\n" for text in violations[:3]), end="")
        bad, count = bad + len(violations), count + len(swept)
    print(f"{count} plans, {bad} with violations, {time.monotonic() - start:.1f} s")
    return 1 if bad else 0
