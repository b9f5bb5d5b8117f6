"""What writes q, k and own v rows to their places: one kernel launch on a GPU, a copy for each run of heads elsewhere.

Used by the executor for v, and for q and k by callers whose norm and RoPE have written them already.
"""

from collections.abc import Callable

import torch

from usp.destinations import FillBlocks, HeadRun, head_table
from usp.exchange import dense_heads
from usp.kernels import load_place_heads
from usp.kernels.reference import place_heads_reference

FillAll = Callable[[FillBlocks], object]  # what it returns is not used


def make_placer(
    runs: list[HeadRun], *, num_heads: int, by_kernel: bool | None = None
) -> Callable[[torch.Tensor], None]:
    """What copies those of x's heads that are in a run. By kernel where the runs are on a GPU, unless told."""
    if by_kernel is None:
        by_kernel = any(rows.is_cuda for _, rows in runs)
    if not by_kernel:
        return lambda x: place_heads_reference(x, runs)
    place_heads, table = load_place_heads(), head_table(runs, num_heads=num_heads)
    return lambda x: place_heads(x, table)


def fill_from(q: torch.Tensor, k: torch.Tensor, *, by_kernel: bool | None = None) -> FillAll:
    """A fill that copies q and k [B, S_r, heads, D]; on a GPU in two launches, whatever the ranks and groups."""
    return _kernel_fill(q, k) if (q.is_cuda if by_kernel is None else by_kernel) else _copy_fill(q, k)


def _copy_fill(q: torch.Tensor, k: torch.Tensor) -> FillAll:
    def fill(blocks: FillBlocks) -> None:
        blocks.check(q=q, k=k)
        place_heads_reference(q, [(block.head_start, block.q_dst) for block in blocks])
        place_heads_reference(k, [(block.kv_head_start, block.k_dst) for block in blocks])

    return fill


def _kernel_fill(q: torch.Tensor, k: torch.Tensor) -> FillAll:
    place_heads = load_place_heads()

    def fill(blocks: FillBlocks) -> None:
        blocks.check(q=q, k=k)
        place_heads(dense_heads(q), blocks.tables.q)
        place_heads(dense_heads(k), blocks.tables.k)

    return fill
