"""Rows of every head to the head's own place, in one launch.

Each byte is read once and written once. Used for own v rows, and for q and k that were normed and rotated elsewhere.

Legend: B batch, S_r tokens of this rank, H heads, D head dim.
"""

import math

import torch
import triton
import triton.language as tl

from usp.destinations import WIDEST_ACCESS, alignment

ROWS_PER_PROGRAM = 32


@triton.jit  # type: ignore[untyped-decorator]
def _place_heads(
    x_ptr: tl.tensor,
    table_ptr: tl.tensor,
    num_heads: int,
    num_rows: int,
    batch_stride: int,
    row_stride: int,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    SOURCE_ALIGN: tl.constexpr,
    TARGET_ALIGN: tl.constexpr,
) -> None:
    """Reads x [B, S_r, H, D] in this rank's memory, dense in heads and D, and the table [H, 3] of `head_table`.

    Writes the rows of head h, all samples, to table[h] in the memory of the arena: own slots and own send blocks.
    Heads with address 0 are left out. What was written is seen by what follows on the same stream; by the copy stream
    after the event `filled`, by a second attend stream after the event `placed`.
    """
    # Heads run fastest: programs that run together read whole rows.
    head = tl.program_id(0) % num_heads
    tile = tl.program_id(0) // num_heads
    sample = tl.program_id(1).to(tl.int64)
    address = tl.load(table_ptr + 3 * head)
    if address != 0:
        item = x_ptr.dtype.element_ty
        to_batch_stride, to_row_stride = tl.load(table_ptr + 3 * head + 1), tl.load(table_ptr + 3 * head + 2)
        rows = tile.to(tl.int64) * ROWS + tl.arange(0, ROWS)  # 64-bit: offsets pass 2^31 in a fused QKV of a long clip
        cols = tl.arange(0, COLS)
        mask = (rows < num_rows)[:, None] & (cols < HEAD_DIM)[None, :]
        # The hints let 16 bytes travel at once: addresses from a table look unaligned to the compiler.
        source = tl.multiple_of(x_ptr + sample * batch_stride + head * HEAD_DIM, SOURCE_ALIGN)
        source_rows = tl.multiple_of(rows * row_stride, SOURCE_ALIGN * 8 // item.primitive_bitwidth)
        target = tl.multiple_of(address.to(tl.pointer_type(item)) + sample * to_batch_stride, TARGET_ALIGN)
        target_rows = tl.multiple_of(rows * to_row_stride, TARGET_ALIGN * 8 // item.primitive_bitwidth)
        values = tl.load(source + source_rows[:, None] + cols[None, :], mask=mask)
        tl.store(target + target_rows[:, None] + cols[None, :], values, mask=mask)


def place_heads(x_bshd: torch.Tensor, table: torch.Tensor) -> None:
    """Copy x [B, S_r, H, D], whose rows may be far apart, to the places of table [H, 3] (`head_table`).

    The rows behind the table are of x's dtype, B, S_r and D: the caller's to guarantee. Enqueued on the current stream.
    """
    batch, num_rows, num_heads, head_dim = x_bshd.shape
    assert table.shape == (num_heads, 3) and table.dtype == torch.int64 and table.is_contiguous()
    assert x_bshd.stride(3) == 1 and (num_heads == 1 or x_bshd.stride(2) == head_dim), "see dense_heads"
    if x_bshd.numel() == 0:
        return
    tiles = -(-num_rows // ROWS_PER_PROGRAM)
    with torch.cuda.device_of(x_bshd):
        _place_heads[(tiles * num_heads, batch)](
            x_bshd,
            table,
            num_heads,
            num_rows,
            *x_bshd.stride()[:2],
            HEAD_DIM=head_dim,
            ROWS=ROWS_PER_PROGRAM,
            COLS=triton.next_power_of_2(head_dim),
            SOURCE_ALIGN=_source_alignment(x_bshd),
            TARGET_ALIGN=alignment(head_dim, x_bshd.element_size()),
        )


def _source_alignment(x_bshd: torch.Tensor) -> int:
    """Bytes that divide the address of every row of every head of x, as far as an access can be wide."""
    head_bytes = x_bshd.shape[3] * x_bshd.element_size()
    strides = (stride * x_bshd.element_size() for stride in x_bshd.stride()[:2])
    return math.gcd(WIDEST_ACCESS, x_bshd.data_ptr(), head_bytes, *strides)
