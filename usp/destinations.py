"""Where each head's rows go, as tensors to copy into and as device tables for kernels.

A kernel takes a table as one argument, so one launch serves any number of ranks and groups, of any widths, at any
batch. Built once per plan; handed to `fill_all`, and used by the executor for its own v rows.

Legend: B batch, S_r tokens of this rank, H query heads, K key/value heads, D head dim.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch

WIDEST_ACCESS = 16  # bytes that a GPU thread loads or stores at once

HeadRun = tuple[int, torch.Tensor]  # first head, and its and its successors' rows [B, S_r, heads, D]


@dataclass(frozen=True)
class FillBlock:
    """Where the fill writes the rows of q and k for one run of heads: own slot rows, or a peer's send block.

    `q_dst` is [B, S_r, head_count, D]; `k_dst` [B, S_r, kv_head_count, D] starts at key/value head `kv_head_start`.
    Unpacks as `head_start, head_count, q_dst, k_dst`, which says all where q and k have equally many heads.
    """

    head_start: int
    head_count: int
    q_dst: torch.Tensor
    k_dst: torch.Tensor
    kv_head_start: int
    kv_head_count: int

    def __iter__(self) -> Iterator[int | torch.Tensor]:
        return iter((self.head_start, self.head_count, self.q_dst, self.k_dst))


class FillBlocks(list[FillBlock]):
    """Every block of a call. Together they hold each head once, so a fill may use the blocks or the tables."""

    def check(self, *, q: torch.Tensor, k: torch.Tensor) -> None:
        """Raise ValueError unless q and k are what the blocks hold; copies would broadcast and kernels overrun."""
        batch, num_rows, _, head_dim = self[0].q_dst.shape
        num_heads, num_kv_heads = sum(block.head_count for block in self), sum(block.kv_head_count for block in self)
        for name, rows, heads in (("q", q, num_heads), ("k", k, num_kv_heads)):
            shape = (batch, num_rows, heads, head_dim)
            if rows.shape != shape or rows.dtype != self[0].q_dst.dtype:
                raise ValueError(
                    f"{name} is {rows.dtype} {tuple(rows.shape)}; the blocks to fill hold {self[0].q_dst.dtype} {shape}"
                )

    @cached_property
    def tables(self) -> "Destinations":
        """The same places for kernels; made when first asked for, since most fills want one or the other."""
        return destinations(self)


@dataclass(frozen=True)
class Destinations:
    """Tables of all heads: q [H, 3] and k [K, 3], laid out as `head_table` says."""

    q: torch.Tensor
    k: torch.Tensor


def destinations(blocks: list[FillBlock]) -> Destinations:
    """Tables for all of a call's blocks, of which there is at least one."""
    q_runs = [(block.head_start, block.q_dst) for block in blocks]
    k_runs = [(block.kv_head_start, block.k_dst) for block in blocks]
    num_heads, num_kv_heads = sum(block.head_count for block in blocks), sum(block.kv_head_count for block in blocks)
    return Destinations(head_table(q_runs, num_heads=num_heads), head_table(k_runs, num_heads=num_kv_heads))


def head_table(runs: Iterable[HeadRun], *, num_heads: int, device: torch.device | str | None = None) -> torch.Tensor:
    """[num_heads, 3] int64 beside the rows, or on `device`: address of head h's row 0, batch stride, row stride.

    The address is in bytes, the strides in elements. A head in no run has address 0, which kernels skip. Address and
    strides are multiples of `alignment` bytes. The table holds nothing alive: it is good as long as the rows are.
    """
    runs = list(runs)
    entries = [(0, 0, 0)] * num_heads
    for start, rows in runs:
        _check_rows(rows)
        for head in range(rows.shape[2]):
            assert entries[start + head][0] == 0, "a head has one place"
            one = rows[:, :, head]
            entries[start + head] = (one.data_ptr(), one.stride(0), one.stride(1))
    if device is None:
        assert runs, "without rows nothing tells the device"
        device = runs[0][1].device
    return torch.tensor(entries, dtype=torch.int64, device=device).reshape(num_heads, 3)


def alignment(head_dim: int, itemsize: int) -> int:
    """Bytes that divide every address and stride in a table of such heads, as far as an access can be wide."""
    return math.gcd(WIDEST_ACCESS, head_dim * itemsize)


def _check_rows(rows: torch.Tensor) -> None:
    itemsize, head_dim = rows.element_size(), rows.shape[3]
    if head_dim > 1 and rows.stride(3) != 1:
        raise ValueError(f"elements of a head lie {rows.stride(3)} apart; a kernel writes them one after another")
    unit = alignment(head_dim, itemsize)
    steps = [rows.data_ptr(), *(stride * itemsize for stride in rows.stride()[:3])]
    if any(step % unit for step in steps):
        raise ValueError(
            f"heads of {head_dim} x {itemsize} bytes are written {unit} bytes at a time, "
            f"but their address and strides are {steps} bytes"
        )
