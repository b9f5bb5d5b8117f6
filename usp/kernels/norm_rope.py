"""RMSNorm over all heads of a row, then interleaved RoPE, in one pass; or the norm alone.

Each row is read once and written once. Used for q and k of self-attention, in place or straight into the blocks of an
exchange, and without RoPE for q of cross-attention.

Legend: B batch, S_r tokens of this rank, H heads, D head dim, C = H * D.
"""

import torch
import triton
import triton.language as tl

from usp.destinations import FillBlocks, alignment

CHUNK_COLUMNS = 1024  # of a row, held as one tile: four warps times 16 bytes a thread in bf16


@triton.jit  # type: ignore[untyped-decorator]
def _rotate(x: tl.tensor, cos: tl.tensor, sin: tl.tensor, HEADS: tl.constexpr, COLS: tl.constexpr) -> tl.tensor:
    even, odd = tl.split(x.reshape(HEADS, COLS // 2, 2))
    return tl.join(even * cos - odd * sin, even * sin + odd * cos).reshape(HEADS, COLS)


@triton.jit  # type: ignore[untyped-decorator]
def _angles(
    table_ptr: tl.tensor,
    row: tl.tensor,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    COLS: tl.constexpr,
    ALIGN: tl.constexpr,
) -> tl.tensor:
    """Row of a table [S_r, D/2] as [HEADS, COLS/2], every head alike: it arrives in the layout of the pairs."""
    pairs = tl.arange(0, COLS // 2)[None, :]
    row_ptr = tl.multiple_of(table_ptr + row * (HEAD_DIM // 2), ALIGN)
    return tl.load(row_ptr + pairs + tl.zeros((HEADS, 1), tl.int32), mask=pairs < HEAD_DIM // 2, other=0.0)


# Not specialised on where rows lie: the layout of a tile, and with it the order of the sum, is the same everywhere.
@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=[
        *("q_ptr", "k_ptr", "cos_ptr", "sin_ptr", "q_to_ptr", "k_to_ptr"),
        *("num_rows", "batch_stride", "row_stride", "to_batch_stride", "to_row_stride"),
    ]
)
def _norm_rope(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    q_weight_ptr: tl.tensor,
    k_weight_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    q_to_ptr: tl.tensor,
    k_to_ptr: tl.tensor,
    num_rows: tl.int32,
    batch_stride: tl.int64,
    row_stride: tl.int64,
    to_batch_stride: tl.int64,
    to_row_stride: tl.int64,
    eps: tl.float32,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    CHUNK_HEADS: tl.constexpr,
    COLS: tl.constexpr,
    ALIGN: tl.constexpr,
    ROPE_ALIGN: tl.constexpr,
    PAIR: tl.constexpr,
    ROPE: tl.constexpr,
    TO_TABLE: tl.constexpr,
) -> None:
    """Reads q and, with PAIR, k [B, S_r, H, D], dense in heads and D, weights [C], cos and sin [S_r, D/2] fp32.

    Writes the rows of head h to table[h] of a `head_table` [H, 3], in the memory of the arena (own slots and own send
    blocks; heads with address 0 are left out), or without TO_TABLE to [B, S_r, H, D] dense in heads, which may be the
    input. What was written is seen by what follows on the same stream; by the copy stream after the event `filled`.
    """
    item = q_ptr.dtype.element_ty
    chunk_size: tl.constexpr = CHUNK_HEADS * HEAD_DIM
    program, sample = tl.program_id(0), tl.program_id(1).to(tl.int64)
    source, weight_ptr, to_ptr = q_ptr, q_weight_ptr, q_to_ptr
    if PAIR:
        # q and k of a row run together: the second finds cos and sin in the cache.
        if program % 2 == 1:
            source, weight_ptr, to_ptr = k_ptr, k_weight_ptr, k_to_ptr
        program = program // 2
    row = program.to(tl.int64)  # 64-bit: offsets pass 2^31 in a fused QKV of a long clip
    heads, cols = tl.arange(0, CHUNK_HEADS), tl.arange(0, COLS)
    inside = heads[:, None] * HEAD_DIM + cols[None, :]
    mask = (cols < HEAD_DIM)[None, :]
    # The hints let 16 bytes travel at once: addresses that are not specialised look unaligned to the compiler.
    row_ptr = tl.multiple_of(source + sample * batch_stride + row * row_stride, ALIGN)

    # The angles and all of the row are on their way before the sum, whose barrier would hold later loads back.
    if ROPE:
        cos = _angles(cos_ptr, row, CHUNK_HEADS, HEAD_DIM, COLS, ROPE_ALIGN)
        sin = _angles(sin_ptr, row, CHUNK_HEADS, HEAD_DIM, COLS, ROPE_ALIGN)
    tiles = ()
    for chunk in tl.static_range(NUM_HEADS // CHUNK_HEADS):
        x = tl.load(row_ptr + chunk * chunk_size + inside, mask=mask, other=0.0)
        tiles += (x,)  # type: ignore[assignment]
    squares = tl.zeros((CHUNK_HEADS, COLS), tl.float32)
    for chunk in tl.static_range(NUM_HEADS // CHUNK_HEADS):
        squares += tiles[chunk].to(tl.float32) * tiles[chunk].to(tl.float32)
    scale = tl.rsqrt(tl.sum(squares) / (NUM_HEADS * HEAD_DIM) + eps)

    for chunk in tl.static_range(NUM_HEADS // CHUNK_HEADS):
        weight = tl.load(weight_ptr + chunk * chunk_size + inside, mask=mask, other=0.0)
        y = tiles[chunk].to(tl.float32) * scale * weight.to(tl.float32)
        if ROPE:
            y = _rotate(y.to(item).to(tl.float32), cos, sin, CHUNK_HEADS, COLS)
        if TO_TABLE:
            entry = to_ptr + 3 * (chunk * CHUNK_HEADS + heads)
            address, to_batch, to_row = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
            target = address.to(tl.pointer_type(item)) + sample * to_batch + row * to_row
            target = tl.multiple_of(target, [ALIGN])[:, None] + cols[None, :]
            tl.store(target, y.to(item), mask=mask & (address != 0)[:, None])
        else:
            target = tl.multiple_of(to_ptr + sample * to_batch_stride + row * to_row_stride, ALIGN)
            tl.store(target + chunk * chunk_size + inside, y.to(item), mask=mask)


def norm_rope(
    q_bshd: torch.Tensor,
    k_bshd: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    rope_cos: torch.Tensor,
    rope_sin: torch.Tensor,
    *,
    eps: float,
    blocks: FillBlocks | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Norm and turn q [B, S_r, H, D] and k [B, S_r, K, D]: into `blocks`, or without them in place. Returns q and k.

    Weights are [H * D] and [K * D]; cos and sin [S_r, D/2] fp32. The norm runs over all heads of a row and is rounded
    to the dtype of q before the turn. With blocks q and k stay as they are; raises ValueError where the blocks hold
    another shape or dtype. Enqueued on the current stream.
    """
    if blocks is not None:
        blocks.check(q=q_bshd, k=k_bshd)
    q_to, k_to = (q_bshd, k_bshd) if blocks is None else (blocks.tables.q, blocks.tables.k)
    rope = (rope_cos, rope_sin)
    if q_bshd.shape == k_bshd.shape and q_bshd.stride() == k_bshd.stride() and q_weight.dtype == k_weight.dtype:
        _launch((q_bshd, k_bshd), (q_weight, k_weight), (q_to, k_to), rope, eps=eps, to_table=blocks is not None)
    else:
        _launch((q_bshd,), (q_weight,), (q_to,), rope, eps=eps, to_table=blocks is not None)
        _launch((k_bshd,), (k_weight,), (k_to,), rope, eps=eps, to_table=blocks is not None)
    return q_bshd, k_bshd


def rms_norm(
    x_bshd: torch.Tensor, weight: torch.Tensor, *, eps: float, out: torch.Tensor | None = None
) -> torch.Tensor:
    """RMSNorm of x [B, S_r, H, D] over H and D together, weight [H * D]; `out` may be x, None is a new tensor."""
    out = torch.empty(x_bshd.shape, dtype=x_bshd.dtype, device=x_bshd.device) if out is None else out
    assert out.shape == x_bshd.shape and out.dtype == x_bshd.dtype
    _launch((x_bshd,), (weight,), (out,), None, eps=eps, to_table=False)
    return out


def _launch(
    inputs: tuple[torch.Tensor, ...],
    weights: tuple[torch.Tensor, ...],
    targets: tuple[torch.Tensor, ...],
    rope: tuple[torch.Tensor, torch.Tensor] | None,
    *,
    eps: float,
    to_table: bool,
) -> None:
    """One launch over one tensor, or over two of equal shapes and strides."""
    x, target = inputs[0], targets[0]
    batch, num_rows, num_heads, head_dim = x.shape
    if x.numel() == 0:
        return
    align = alignment(head_dim, x.element_size())
    for rows in inputs if to_table else inputs + targets:
        _check_rows(rows, align)
    for one in weights:
        assert one.shape == (num_heads * head_dim,) and one.is_contiguous()
    cos, sin = rope or (x, x)
    if rope:
        assert cos.shape == sin.shape == (num_rows, head_dim // 2) and cos.is_contiguous() and sin.is_contiguous()
        assert cos.dtype == sin.dtype == torch.float32 and head_dim % 2 == 0
    cols = triton.next_power_of_2(head_dim)
    chunk_heads = _chunk_heads(num_heads, cols)
    with torch.cuda.device_of(x):
        _norm_rope[(num_rows * len(inputs), batch)](
            x,
            inputs[-1],
            weights[0],
            weights[-1],
            cos,
            sin,
            target,
            targets[-1],
            num_rows,
            *x.stride()[:2],
            *target.stride()[:2],
            eps,
            NUM_HEADS=num_heads,
            HEAD_DIM=head_dim,
            CHUNK_HEADS=chunk_heads,
            COLS=cols,
            ALIGN=align,
            ROPE_ALIGN=alignment(head_dim // 2, 4),
            PAIR=len(inputs) == 2,
            ROPE=rope is not None,
            TO_TABLE=to_table,
            num_warps=max(1, chunk_heads * cols * 4 // CHUNK_COLUMNS),
            enable_fp_fusion=False,  # torch rounds products before it adds them
        )


def _chunk_heads(num_heads: int, cols: int) -> int:
    """Heads of one tile: a power of two that divides the heads, so that no tile is cut."""
    return min(max(1, CHUNK_COLUMNS // cols), num_heads & -num_heads)


def _check_rows(rows: torch.Tensor, align: int) -> None:
    """A misaligned row would be summed in another order, and get other bits."""
    head_dim, itemsize = rows.shape[3], rows.element_size()
    assert rows.stride(3) == 1 and (rows.shape[2] == 1 or rows.stride(2) == head_dim), "see dense_heads"
    assert rows.data_ptr() % align == 0 and all(stride * itemsize % align == 0 for stride in rows.stride()[:2])
