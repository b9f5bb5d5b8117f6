"""Which heads are attended, and travel, together. Plain arithmetic, the same on every rank.

Only the first group's sends and the last group's returns cannot hide, so small ends help. But a launch of attention
takes whole waves of tiles: at 75,600 tokens a head fills 4.48 waves of 132 and costs 5, two heads fill 8.95 and cost 9,
so odd ends may lose more than they hide. The rule counts both, in waves, and takes the cheapest shape. Measured on one
H200, 75,600 tokens, P = 4, kernels of a call alone: 2-6-2 heads 39.5 ms, 2-2-2-2-2 39.9, 1-3-3-2-1 41.1, 1-8-1 42.4
(docs/log.md, 2026-12-01). Used by the plan.
"""

from collections.abc import Iterator

from usp.layout import split_counts

TILE_ROWS, NUM_SMS = 128, 132  # of the attention kernels on Hopper
MOST_GROUPS = 6  # that the rule makes
WIDEST_END = 4  # heads
# In waves of attention, whose time grows with the sequence as the bytes of a head do, so the length cancels out:
SEND_WAVES, RETURN_WAVES = 0.17, 0.055  # one head's q, k, v, and its result, over NVLink 4 at 375 GB/s
SLOW_LINK = 7.0  # times as long over PCIe 5, where the inner groups are to hide as well
GROUP_TOKEN_WAVES = 1200  # launch, waits and signals of a group, about 15 us; over tokens, since waves then last longer

Widths = tuple[int, ...]


def choose_widths(num_heads: int, *, tiles_per_head: int, num_tokens: int, num_ranks: int) -> Widths:
    """Heads of each group, of the cheapest shape; `tiles_per_head` counts the query tiles of one key/value head."""
    if min(num_heads, num_tokens, num_ranks) < 1:
        return (num_heads,)  # nothing to weigh; whether it can be planned is the plan's to say
    heads = (num_ranks - 1) / num_ranks * tiles_per_head * TILE_ROWS / num_tokens  # that travel, of one
    send, give_back = heads * SEND_WAVES, heads * RETURN_WAVES

    def cost(widths: Widths) -> float:
        """When a call ends, in waves, and what its inner groups would wait over a slow link."""
        waves = [-(-width * tiles_per_head // NUM_SMS) + GROUP_TOKEN_WAVES / num_tokens for width in widths]
        ends = send * widths[0] + give_back * widths[-1]
        return sum(waves) + ends + _inner_wait(widths, waves, SLOW_LINK * send)

    return min(_shapes(num_heads), key=lambda widths: (cost(widths), len(widths), widths))


def _inner_wait(widths: Widths, waves: list[float], send: float) -> float:
    """How long attention waits for groups behind the first, each sent after the one before."""
    arrived = now = send * widths[0]
    waited = 0.0
    for width, before in zip(widths[1:], waves, strict=False):
        arrived, now = arrived + send * width, now + before
        waited += max(0.0, arrived - now)
        now = max(now, arrived)
    return waited


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
            for count in range(1, MOST_GROUPS - 1) if inner % unit == 0 else ():
                if inner // unit >= count:
                    yield (first, *(unit * share for share in split_counts(inner // unit, count)), last)
