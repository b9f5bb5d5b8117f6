"""Which heads are attended, and travel, together. Plain arithmetic, the same on every rank.

Only the first group's sends and the last group's returns cannot hide, so small ends help. But a launch of attention
takes whole waves of tiles: at 75,600 tokens a head fills 4.48 waves of 132 and costs 5, two heads fill 8.95 and cost 9,
so odd ends lose more than they hide. The rule counts both, in waves, and takes the cheapest shape. Measured on one
H200 at P = 4: 2-2-2-2-2 heads take 43.6 ms a call, 1-3-3-2-1 44.0 (docs/log.md, 2026-12-01). Used by the plan.
"""

from collections.abc import Iterator

from usp.layout import split_counts

TILE_ROWS, NUM_SMS = 128, 132  # of the attention kernels on Hopper
MAX_GROUPS = 6
WIDEST_END = 4  # heads
# In waves of attention, whose time grows with the sequence as the bytes of a head do, so the length cancels out:
SEND_WAVES, RETURN_WAVES = 0.17, 0.055  # one head's q, k, v, and its result, over NVLink 4 at 375 GB/s
GROUP_TOKEN_WAVES = 1200  # launch, waits and signals of a group, about 15 us; over tokens, since waves then last longer

Widths = tuple[int, ...]


def choose_widths(num_heads: int, *, tiles_per_head: int, num_tokens: int, num_ranks: int) -> Widths:
    """Heads of each group, cheapest first; `tiles_per_head` counts the query tiles that one head of the plan brings."""

    def cost(widths: Widths) -> float:
        waves = sum(-(-width * tiles_per_head // NUM_SMS) for width in widths)
        others = (num_ranks - 1) / num_ranks
        ends = others * (SEND_WAVES * widths[0] + RETURN_WAVES * widths[-1]) * tiles_per_head * TILE_ROWS / num_tokens
        return waves + ends + GROUP_TOKEN_WAVES / num_tokens * len(widths)

    return min(_shapes(num_heads), key=lambda widths: (cost(widths), len(widths), widths))


def spread_widths(num_heads: int, num_groups: int) -> Widths:
    """A given number of groups: about even, the ends smaller; some empty if there are fewer heads."""
    weights = [1] if num_groups == 1 else [1, *[2] * (num_groups - 2), 1 if num_groups > 2 else 2]
    exact = [num_heads * weight / sum(weights) for weight in weights]
    widths = [int(share) for share in exact]
    by_remainder = sorted(range(num_groups), key=lambda group: widths[group] - exact[group])
    for group in by_remainder[: num_heads - sum(widths)]:
        widths[group] += 1
    return tuple(widths)


def _shapes(num_heads: int) -> Iterator[Widths]:
    """One group; or two ends, and inner groups of about equal size, in units of up to WIDEST_END heads."""
    yield (num_heads,)
    ends = range(1, WIDEST_END + 1)
    for first, last in ((first, last) for first in ends for last in ends):
        inner = num_heads - first - last
        if inner == 0:
            yield (first, last)
        for unit in ends if inner > 0 else ():
            for count in range(1, MAX_GROUPS - 1) if inner % unit == 0 else ():
                if inner // unit >= count:
                    yield (first, *(unit * share for share in split_counts(inner // unit, count)), last)
