"""Where each buffer of a plan lies in each rank's arena, and the 2-D pieces that copies move. No torch.

The flags come first, at places that no plan changes; the plan's buffers follow. Every rank can
compute every rank's offsets, so a peer is addressed as (its base, our arithmetic).

A region of a buffer [B, rows, heads, D] is one `Piece` where its bytes repeat at one pitch, else one piece a sample.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from usp.plan import ALIGNMENT, FLAG_STRIDE, ITEMSIZE, MAX_GROUPS, MAX_RANKS, AttentionPlan
from usp.schedule import Flag, Region, result_rows

BACK_FLAGS = MAX_GROUPS * MAX_RANKS * FLAG_STRIDE
HEADER_BYTES = BACK_FLAGS + MAX_RANKS * FLAG_STRIDE

Buffer = tuple[str | int, ...]
Shape = tuple[int, int, int, int]  # B, rows, heads, D


@dataclass(frozen=True)
class Piece:
    """`height` rows of `width` bytes, `pitch` apart, from `offset` on in an arena."""

    offset: int
    pitch: int
    width: int
    height: int


def flag_offset(flag: Flag) -> int:
    """The flag's word in its owner's arena; the same under every plan."""
    if flag.name == "back":  # one for each writer, raised after its last return
        return BACK_FLAGS + flag.writer * FLAG_STRIDE
    assert flag.group < MAX_GROUPS
    return (flag.group * MAX_RANKS + flag.writer) * FLAG_STRIDE


def flag_offsets() -> range:
    """Every flag's word, for the release of parked waits."""
    return range(0, HEADER_BYTES, FLAG_STRIDE)


@dataclass(frozen=True)
class Placement:
    """One rank's buffers under one plan."""

    plan: AttentionPlan
    rank: int

    @cached_property
    def shapes(self) -> dict[Buffer, Shape]:
        """Every buffer and its shape, in the order in which they lie; q and k that travel together are neighbours."""
        return dict(self._shapes())

    @cached_property
    def offsets(self) -> dict[Buffer, int]:
        offsets, end = {}, HEADER_BYTES
        for buffer, shape in self.shapes.items():
            if not self._follows_its_q(buffer):
                end = -(-end // ALIGNMENT) * ALIGNMENT
            offsets[buffer] = end
            end += math.prod(shape) * self.itemsize
        return offsets

    @property
    def nbytes(self) -> int:
        """Size of the arena that the plan needs at this rank."""
        if not self.shapes:
            return HEADER_BYTES
        last = next(reversed(self.shapes))
        return self.offsets[last] + math.prod(self.shapes[last]) * self.itemsize

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.plan.dtype]

    def strides(self, buffer: Buffer) -> Shape:
        """In elements, of the contiguous buffer."""
        _, rows, heads, dim = self.shapes[buffer]
        return rows * heads * dim, heads * dim, dim, 1

    def pieces(self, region: Region) -> list[Piece]:
        """The region over the whole batch. Buffers with several columns are `out`, whose columns are heads."""
        batch, num_rows, heads, dim = self.shapes[region.buffer]
        row_bytes, (top, bottom) = heads * dim * self.itemsize, region.rows
        start = self.offsets[region.buffer] + top * row_bytes
        if region.buffer != ("out",):  # whole rows, which lie one after another
            return [Piece(start, num_rows * row_bytes, (bottom - top) * row_bytes, batch)]
        left, right = (col * dim * self.itemsize for col in region.cols)
        samples = range(batch)
        return [
            Piece(start + sample * num_rows * row_bytes + left, row_bytes, right - left, bottom - top)
            for sample in samples
        ]

    def joint_piece(self, q: Region) -> Piece:
        """q's region together with the same rows of the k that follows it."""
        (piece,) = self.pieces(q)
        return Piece(piece.offset, piece.pitch, piece.width, 2 * piece.height)

    def _shapes(self) -> Iterator[tuple[Buffer, Shape]]:
        plan, rank = self.plan, self.rank
        batch, dim, num_own = plan.batch, plan.head_dim, plan.token_counts[rank]
        for group in plan.groups(rank):
            yield ("slot", "q", group.index), (batch, plan.num_tokens, group.count, dim)
            yield ("slot", "k", group.index), (batch, plan.num_kv_rows, group.kv_count, dim)
            yield ("slot", "v", group.index), (batch, plan.num_kv_rows, group.kv_count, dim)
        for peer in plan.peers(rank) if num_own else ():
            for group in plan.groups(peer):
                yield ("send", "q", peer, group.index), (batch, num_own, group.count, dim)
                yield ("send", "k", peer, group.index), (batch, num_own, group.kv_count, dim)
        for group in () if plan.direct else plan.groups(rank):
            for peer in plan.senders(rank):
                yield ("kept", group.index, peer), (batch, plan.token_counts[peer], group.count, dim)
        rows = plan.num_tokens if plan.direct else num_own
        if rows:
            yield ("out",), (batch, rows, plan.num_heads, dim)

    def _follows_its_q(self, buffer: Buffer) -> bool:
        return self.plan.joint_qk and buffer[:2] in (("slot", "k"), ("send", "k"))

    @property
    def result_rows(self) -> tuple[int, int]:
        return result_rows(self.plan, self.rank)


def arena_sizes(plan: AttentionPlan) -> tuple[int, ...]:
    """Bytes that each rank's arena needs for a plan."""
    return tuple(Placement(plan, rank).nbytes for rank in range(plan.num_ranks))
