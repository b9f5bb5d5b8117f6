"""The residual sum and the LayerNorm that follows it, in one pass over the tokens.

Each row is read once and written once, for the stream and for the normed rows. Used around every part of a block.

Legend: B batch, S_r tokens of this rank, C model width.
"""

import math

import torch
import triton
import triton.language as tl

from usp.destinations import WIDEST_ACCESS

CHUNK_COLUMNS = 1024  # of a row, held as one tile: four warps times 16 bytes a thread in bf16


@triton.jit  # type: ignore[untyped-decorator]
def _load_chunk(ptr: tl.tensor, offset: tl.tensor, CHUNK: tl.constexpr, ALIGN: tl.constexpr) -> tl.tensor:
    return tl.load(tl.multiple_of(ptr + offset, ALIGN) + tl.arange(0, CHUNK))


@triton.jit  # type: ignore[untyped-decorator]
def _load_chunks(
    ptr: tl.tensor, offset: tl.tensor, DIM: tl.constexpr, CHUNK: tl.constexpr, ALIGN: tl.constexpr
) -> tl.tuple:
    chunks = ()
    for chunk in tl.static_range(DIM // CHUNK):
        chunks += (_load_chunk(ptr, offset + chunk * CHUNK, CHUNK, ALIGN),)  # type: ignore[assignment]
    return chunks


@triton.jit  # type: ignore[untyped-decorator]
def _add(
    xs: tl.tuple,
    ys: tl.tuple,
    gate_ptr: tl.tensor,
    offset: tl.tensor,
    DIM: tl.constexpr,
    CHUNK: tl.constexpr,
    ALIGN: tl.constexpr,
    HAS_GATE: tl.constexpr,
) -> tl.tuple:
    """x + y * gate, rounded to the dtype of x as the stream is."""
    sums = ()
    for chunk in tl.static_range(DIM // CHUNK):
        y = ys[chunk].to(tl.float32)
        if HAS_GATE:
            y = y * _load_chunk(gate_ptr, offset + chunk * CHUNK, CHUNK, ALIGN)
        sums += ((xs[chunk].to(tl.float32) + y).to(xs[chunk].dtype),)  # type: ignore[assignment]
    return sums


@triton.jit  # type: ignore[untyped-decorator]
def _moments(xs: tl.tuple, eps: tl.float32, DIM: tl.constexpr, CHUNK: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Mean and 1 / standard deviation; the squares are summed in a second pass, over what is left of the mean."""
    total, squares = tl.zeros((CHUNK,), tl.float32), tl.zeros((CHUNK,), tl.float32)
    for chunk in tl.static_range(DIM // CHUNK):
        total += xs[chunk].to(tl.float32)
    mean = tl.sum(total) / DIM
    for chunk in tl.static_range(DIM // CHUNK):
        centred = xs[chunk].to(tl.float32) - mean
        squares += centred * centred
    return mean, tl.rsqrt(tl.sum(squares) / DIM + eps)


# Not specialised on where rows lie: the layout of a tile, and with it the order of the sum, is the same everywhere.
@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=[
        *("x_ptr", "y_ptr", "gate_ptr", "scale_ptr", "shift_ptr", "sum_ptr", "h_ptr"),
        *("num_rows", "gate_stride", "scale_stride", "shift_stride"),
    ]
)
def _residual_norm(
    x_ptr: tl.tensor,
    y_ptr: tl.tensor,
    gate_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    shift_ptr: tl.tensor,
    sum_ptr: tl.tensor,
    h_ptr: tl.tensor,
    num_rows: tl.int32,
    gate_stride: tl.int64,
    scale_stride: tl.int64,
    shift_stride: tl.int64,
    eps: tl.float32,
    DIM: tl.constexpr,
    CHUNK: tl.constexpr,
    ALIGN: tl.constexpr,
    VECTOR_ALIGN: tl.constexpr,
    HAS_Y: tl.constexpr,
    HAS_GATE: tl.constexpr,
    AFFINE: tl.constexpr,
    MODULATED: tl.constexpr,
) -> None:
    """Reads x and, with HAS_Y, y [B, S_r, C] dense; fp32 vectors: gate, scale and shift one a sample, weight and bias.

    Writes x + y * gate to `sum` [B, S_r, C], which may be x, and its norm to h [B, S_r, C]. All in this rank's memory;
    seen by what follows on the same stream.
    """
    item = x_ptr.dtype.element_ty
    sample, row = tl.program_id(1).to(tl.int64), tl.program_id(0).to(tl.int64)
    start = (sample * num_rows + row) * DIM  # 64-bit: a long clip has more than 2^31 elements
    cols = tl.arange(0, CHUNK)
    # All rows are on their way before the first is needed.
    sums = _load_chunks(x_ptr, start, DIM, CHUNK, ALIGN)
    if HAS_Y:
        ys = _load_chunks(y_ptr, start, DIM, CHUNK, ALIGN)
        sums = _add(sums, ys, gate_ptr, sample * gate_stride, DIM, CHUNK, VECTOR_ALIGN, HAS_GATE)
    mean, inverse = _moments(sums, eps, DIM, CHUNK)
    for chunk in tl.static_range(DIM // CHUNK):
        h = (sums[chunk].to(tl.float32) - mean) * inverse
        if AFFINE:
            at = chunk * CHUNK + cols
            h = h * tl.load(weight_ptr + at) + tl.load(bias_ptr + at)
        if MODULATED:
            scale = _load_chunk(scale_ptr, sample * scale_stride + chunk * CHUNK, CHUNK, VECTOR_ALIGN)
            shift = _load_chunk(shift_ptr, sample * shift_stride + chunk * CHUNK, CHUNK, VECTOR_ALIGN)
            h = h * (1.0 + scale) + shift
        here = start + chunk * CHUNK
        if HAS_Y:
            tl.store(tl.multiple_of(sum_ptr + here, ALIGN) + cols, sums[chunk])
        tl.store(tl.multiple_of(h_ptr + here, ALIGN) + cols, h.to(item))


def residual_norm(
    x_bsc: torch.Tensor,
    y_bsc: torch.Tensor | None = None,
    gate: torch.Tensor | None = None,
    *,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    shift: torch.Tensor | None = None,
    eps: float,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(x + y * gate, its LayerNorm times weight plus bias, times 1 + scale, plus shift), each [B, S_r, C].

    x and y are dense and of one dtype, to which the sum is rounded, and the norm once at its end. Weight and bias are
    fp32 [C]; gate, scale and shift fp32 [B or 1, 1, C], parts of a wider tensor if need be. Without y the first result
    is x itself. The sum goes to `out`, which may be x, or to a new tensor. Enqueued on the current stream.
    """
    batch, num_rows, dim = x_bsc.shape
    h = torch.empty_like(x_bsc)
    out = x_bsc if y_bsc is None else torch.empty_like(x_bsc) if out is None else out
    _check_rows(x_bsc, h if y_bsc is None else y_bsc, out)
    _check_vectors(dim, gate, weight, bias, scale, shift)
    assert (weight is None) == (bias is None) and (scale is None) == (shift is None)
    assert gate is None or y_bsc is not None
    if x_bsc.numel() == 0:
        return out, h
    chunk = min(CHUNK_COLUMNS, dim & -dim)  # a power of two that divides the row, so that no tile is cut
    with torch.cuda.device_of(x_bsc):
        _residual_norm[(num_rows, batch)](
            x_bsc,
            x_bsc if y_bsc is None else y_bsc,
            *(x_bsc if vector is None else vector for vector in (gate, weight, bias, scale, shift)),
            out,
            h,
            num_rows,
            *(_sample_stride(vector) for vector in (gate, scale, shift)),
            eps,
            DIM=dim,
            CHUNK=chunk,
            ALIGN=math.gcd(WIDEST_ACCESS, chunk * x_bsc.element_size()),
            VECTOR_ALIGN=_vector_alignment(gate, scale, shift),
            HAS_Y=y_bsc is not None,
            HAS_GATE=gate is not None,
            AFFINE=weight is not None,
            MODULATED=scale is not None,
            num_warps=max(1, chunk * 4 // CHUNK_COLUMNS),
            enable_fp_fusion=False,  # torch rounds products before it adds them
        )
    return out, h


def _check_rows(x_bsc: torch.Tensor, *others: torch.Tensor) -> None:
    assert x_bsc.is_contiguous()
    for rows in others:
        assert rows.shape == x_bsc.shape and rows.dtype == x_bsc.dtype and rows.is_contiguous()


def _check_vectors(dim: int, *vectors: torch.Tensor | None) -> None:
    for vector in vectors:
        assert vector is None or (vector.dtype == torch.float32 and vector.stride(-1) == 1 and vector.shape[-1] == dim)


def _sample_stride(vector: torch.Tensor | None) -> int:
    return 0 if vector is None or vector.shape[0] == 1 else vector.stride(0)


def _vector_alignment(*vectors: torch.Tensor | None) -> int:
    steps = [step for one in vectors if one is not None for step in (one.data_ptr(), 4 * one.stride(0))]
    return math.gcd(WIDEST_ACCESS, *steps)
