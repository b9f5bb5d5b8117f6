"""What one exchanged attention moves: shares, head groups and where every buffer lies. Plain arithmetic, no torch.

Every rank builds the same plan and compares its hash once; from then on all sizes, offsets and flags of all ranks are
pure functions of it. Used by the schedule, the checker, the simulator and the executors.

Legend: B batch, S tokens of all ranks, S_r of rank r, H query heads, K key/value heads, D head dim, P ranks, G groups.
"""

import hashlib
from dataclasses import dataclass
from functools import cached_property, lru_cache

from usp.grouping import TILE_ROWS, choose_widths, spread_widths
from usp.layout import split_counts, split_offsets

MAX_RANKS, MAX_GROUPS = 16, 32
ALIGNMENT = 256  # bytes, of every buffer in an arena
FLAG_STRIDE = 64  # bytes: one cache line each
ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class HeadGroup:
    """Heads that rank `rank` attends in one launch: query heads [start, start + count), and their key/value heads."""

    rank: int
    index: int
    start: int
    count: int
    kv_start: int
    kv_count: int


@dataclass(frozen=True)
class AttentionPlan:
    """Shares and groups of one attention shape. Raises ValueError for what cannot be planned.

    `group_widths[r]` are the key/value heads of each group of rank r, all ranks with equally many groups, some empty.
    `prefix` and `suffix` are key/value rows before and after the tokens that every rank holds and nobody sends.
    `direct`: attention writes rows straight to their place in a token-major buffer of all heads; otherwise its output
    is copied once, into blocks that are returned.
    """

    token_counts: tuple[int, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    group_widths: tuple[tuple[int, ...], ...]
    batch: int = 1
    prefix: int = 0
    suffix: int = 0
    direct: bool = True
    attend_streams: int = 1

    def __post_init__(self) -> None:
        _check(self)

    @property
    def num_ranks(self) -> int:
        return len(self.token_counts)

    @property
    def num_groups(self) -> int:
        return len(self.group_widths[0])

    @property
    def num_tokens(self) -> int:
        return sum(self.token_counts)

    @property
    def num_kv_rows(self) -> int:
        """Rows of a key or value slot: prefix, tokens, suffix."""
        return self.prefix + self.num_tokens + self.suffix

    @property
    def heads_per_kv(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def joint_qk(self) -> bool:
        """Whether q and k of a block have one shape, so that one 2-D copy carries both."""
        return self.num_heads == self.num_kv_heads and self.prefix == self.suffix == 0

    def tokens(self, rank: int) -> range:
        start = self._token_offsets[rank]
        return range(start, start + self.token_counts[rank])

    def groups(self, rank: int) -> tuple[HeadGroup, ...]:
        """The groups of a rank that hold heads, in the order in which they are attended."""
        return self._groups[rank]

    def peers(self, rank: int) -> tuple[int, ...]:
        """The other ranks, starting after this one, so that not all send to the same one at once."""
        return tuple((rank + step) % self.num_ranks for step in range(1, self.num_ranks))

    def senders(self, rank: int) -> tuple[int, ...]:
        """Peers with tokens, from which a rank with heads receives, and to which it returns."""
        return tuple(peer for peer in self.peers(rank) if self.token_counts[peer])

    @cached_property
    def hash(self) -> str:
        fields = [getattr(self, name) for name in self.__dataclass_fields__]
        return hashlib.sha256(repr(fields).encode()).hexdigest()[:16]

    @cached_property
    def _token_offsets(self) -> tuple[int, ...]:
        return split_offsets(self.token_counts)

    @cached_property
    def _groups(self) -> tuple[tuple[HeadGroup, ...], ...]:
        ratio, start, all_groups = self.heads_per_kv, 0, []
        for rank, widths in enumerate(self.group_widths):
            own = []
            for index, width in enumerate(widths):
                if width:
                    own.append(HeadGroup(rank, index, start * ratio, width * ratio, start, width))
                start += width
            all_groups.append(tuple(own))
        return tuple(all_groups)


@lru_cache(maxsize=256)
def make_plan(
    *,
    token_counts: tuple[int, ...],
    num_heads: int,
    head_dim: int,
    dtype: str,
    num_kv_heads: int | None = None,
    num_groups: int | None = None,
    group_widths: tuple[int, ...] | None = None,
    batch: int = 1,
    prefix: int = 0,
    suffix: int = 0,
    direct: bool = True,
    attend_streams: int = 1,
) -> AttentionPlan:
    """A plan with the usual shares: heads split at key/value heads, groups by `usp.grouping` unless counted here.

    `group_widths` are the key/value heads of each group, where every rank has as many.
    """
    kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    counts = split_counts(kv_heads, len(token_counts))
    if group_widths is not None:
        widths = (group_widths,) * len(token_counts)
    elif num_groups is None:
        tokens, ratio = sum(token_counts), max(1, num_heads // max(1, kv_heads))
        tiles = ratio * batch * -(-tokens // TILE_ROWS)
        most = choose_widths(counts[0], tiles_per_head=tiles, num_tokens=tokens, num_ranks=len(token_counts))
        fewer = (*most[:-2], *_one_less(most[-2:]))
        widths = tuple(most if count == counts[0] else fewer for count in counts)
    else:
        widths = tuple(spread_widths(count, num_groups) for count in counts)
    return AttentionPlan(
        *(token_counts, num_heads, kv_heads, head_dim, dtype, widths, batch, prefix, suffix, direct, attend_streams)
    )


def _one_less(widths: tuple[int, ...]) -> tuple[int, ...]:
    """For ranks with one head less than the first: the group before the last is cut, or the only one."""
    return (widths[0] - 1, *widths[1:])


def _check(plan: AttentionPlan) -> None:
    if not 1 <= plan.num_ranks <= MAX_RANKS:
        raise ValueError(f"{plan.num_ranks} ranks; a plan takes 1 to {MAX_RANKS}")
    if plan.num_kv_heads < 1 or plan.num_heads % plan.num_kv_heads:
        raise ValueError(f"{plan.num_heads} query heads are no multiple of {plan.num_kv_heads} key/value heads")
    if plan.dtype not in ITEMSIZE:
        raise ValueError(f"dtype {plan.dtype}; use one of {', '.join(ITEMSIZE)}")
    if min(plan.token_counts) < 0 or plan.num_tokens < 1 or min(plan.head_dim, plan.batch) < 1:
        raise ValueError(f"tokens {plan.token_counts}, head_dim {plan.head_dim}, batch {plan.batch}: nothing to attend")
    if min(plan.prefix, plan.suffix) < 0:
        raise ValueError(f"prefix {plan.prefix} and suffix {plan.suffix} count rows, so they are at least 0")
    if len(plan.group_widths) != plan.num_ranks or len({len(widths) for widths in plan.group_widths}) != 1:
        raise ValueError(f"group widths {plan.group_widths}: give every rank the same number of groups")
    covered = sum(map(sum, plan.group_widths))
    if plan.num_groups < 1 or min(map(min, plan.group_widths)) < 0 or covered != plan.num_kv_heads:
        raise ValueError(f"group widths {plan.group_widths} cover {covered} of {plan.num_kv_heads} key/value heads")
    if plan.num_groups > MAX_GROUPS:
        raise ValueError(f"{plan.num_groups} head groups; a plan takes at most {MAX_GROUPS}")
    if plan.attend_streams not in (1, 2):
        raise ValueError(f"attend_streams is {plan.attend_streams}; use 1, or 2 for alternating groups")
