"""Other ways to norm and turn q and k into blocks, for rows of 40 heads of 128 in bf16, batch 1.

Used by bench_kernels.py --designs. Every design reads the same tables and writes the same blocks as the package's
kernel; those that leave a stage out show what the stage costs.
"""

# ruff: noqa: N803, C901  compile-time arguments of kernels are UPPER_CASE; a kernel of many switches

import torch
import triton
import triton.language as tl

from kernel_designs.compare import Arguments, Design

HEADS, HEAD_DIM = 40, 128
DIM = HEADS * HEAD_DIM


@triton.jit
def _rotate(x, cos, sin, N: tl.constexpr, D: tl.constexpr):
    even, odd = tl.split(x.reshape(N, D // 2, 2))
    return tl.join(even * cos - odd * sin, even * sin + odd * cos).reshape(N, D)


@triton.jit
def _angles(table_ptr, row, N: tl.constexpr, D: tl.constexpr):
    row_ptr = tl.multiple_of(table_ptr + row * (D // 2), 16)
    return tl.load(row_ptr + tl.arange(0, D // 2)[None, :] + tl.zeros((N, 1), tl.int32))


@triton.jit
def _targets(table_ptr, first_head, N: tl.constexpr):
    entry = table_ptr + 3 * (first_head + tl.arange(0, N))
    return tl.load(entry), tl.load(entry + 2)


@triton.jit
def _store(address, to_row, row, y, D: tl.constexpr, EVICT: tl.constexpr):
    target = tl.multiple_of(address.to(tl.pointer_type(tl.bfloat16)) + row * to_row, [16])
    tl.store(target[:, None] + tl.arange(0, D)[None, :], y.to(tl.bfloat16), eviction_policy=EVICT)


@triton.jit
def _chunked(
    q_ptr, k_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr, q_to_ptr, k_to_ptr, num_rows, row_stride, eps,
    H: tl.constexpr, D: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr, HALVES: tl.constexpr,
    EARLY_WEIGHT: tl.constexpr, EARLY_TABLE: tl.constexpr, FENCE: tl.constexpr, LOAD_EVICT: tl.constexpr,
    STORE_EVICT: tl.constexpr, NORM: tl.constexpr, ROPE: tl.constexpr, TABLE: tl.constexpr,
):  # fmt: skip
    """Tiles of N heads in registers; ROWS rows a program; q and k alternate, or with HALVES q runs before k.

    The assembler defers loads of what is needed late, up to the next barrier; FENCE puts one before the row's loads.
    """
    chunks: tl.constexpr = H // N
    program = tl.program_id(0)
    of_k = program >= tl.num_programs(0) // 2 if HALVES else program % 2 == 1
    x_ptr, weight_ptr, table_ptr = q_ptr, q_weight_ptr, q_to_ptr
    if of_k:
        x_ptr, weight_ptr, table_ptr = k_ptr, k_weight_ptr, k_to_ptr
    program = program % (tl.num_programs(0) // 2) if HALVES else program // 2
    first = program.to(tl.int64) * ROWS
    inside = tl.arange(0, N)[:, None] * D + tl.arange(0, D)[None, :]
    tiles, weights, places, scales, cosines, sines = (), (), (), (), (), ()
    for c in tl.static_range(chunks):
        if EARLY_WEIGHT:
            weights += (tl.load(weight_ptr + c * N * D + inside),)
        if EARLY_TABLE:
            places += (_targets(table_ptr, c * N, N),)
    for r in tl.static_range(ROWS):
        if ROPE:
            row = tl.minimum(first + r, num_rows - 1)
            cosines += (_angles(cos_ptr, row, N, D),)
            sines += (_angles(sin_ptr, row, N, D),)
    if FENCE:
        tl.debug_barrier()
    for r in tl.static_range(ROWS):
        row_ptr = tl.multiple_of(x_ptr + (first + r) * row_stride, 16)
        live = first + r < num_rows if ROWS > 1 else True
        for c in tl.static_range(chunks):
            tiles += (tl.load(row_ptr + c * N * D + inside, mask=live, other=0.0, eviction_policy=LOAD_EVICT),)
    for r in tl.static_range(ROWS):
        squares = tl.zeros((N, D), tl.float32)
        if NORM:
            for c in tl.static_range(chunks):
                x = tiles[r * chunks + c].to(tl.float32)
                squares += x * x
            scales += (tl.rsqrt(tl.sum(squares) / (H * D) + eps),)
    for c in tl.static_range(chunks):
        if NORM:
            weight = (weights[c] if EARLY_WEIGHT else tl.load(weight_ptr + c * N * D + inside)).to(tl.float32)
        if TABLE:
            address, to_row = places[c] if EARLY_TABLE else _targets(table_ptr, c * N, N)
        else:
            address, to_row = tl.load(table_ptr) + (c * N + tl.arange(0, N)) * D * 2, H * D
        for r in tl.static_range(ROWS):
            y = tiles[r * chunks + c].to(tl.float32)
            if NORM:
                y = y * scales[r] * weight
            if ROPE:
                y = _rotate(y.to(tl.bfloat16).to(tl.float32), cosines[r], sines[r], N, D)
            if ROWS == 1:
                _store(address, to_row, first, y, D, STORE_EVICT)
            elif first + r < num_rows:
                _store(address, to_row, first + r, y, D, STORE_EVICT)


@triton.jit
def _norm_turn_store(
    tiles, scale, cos, sin, weight_ptr, table_ptr, row, H: tl.constexpr, D: tl.constexpr, N: tl.constexpr
):
    inside = tl.arange(0, N)[:, None] * D + tl.arange(0, D)[None, :]
    for c in tl.static_range(H // N):
        y = tiles[c].to(tl.float32) * scale * tl.load(weight_ptr + c * N * D + inside).to(tl.float32)
        y = _rotate(y.to(tl.bfloat16).to(tl.float32), cos, sin, N, D)
        address, to_row = _targets(table_ptr, c * N, N)
        _store(address, to_row, row, y, D, "")


@triton.jit
def _load_row(x_ptr, row, row_stride, H: tl.constexpr, D: tl.constexpr, N: tl.constexpr):
    inside = tl.arange(0, N)[:, None] * D + tl.arange(0, D)[None, :]
    row_ptr = tl.multiple_of(x_ptr + row * row_stride, 16)
    tiles = ()
    for c in tl.static_range(H // N):
        tiles += (tl.load(row_ptr + c * N * D + inside),)
    return tiles


@triton.jit
def _scale(tiles, eps, H: tl.constexpr, D: tl.constexpr, N: tl.constexpr):
    squares = tl.zeros((N, D), tl.float32)
    for c in tl.static_range(H // N):
        squares += tiles[c].to(tl.float32) * tiles[c].to(tl.float32)
    return tl.rsqrt(tl.sum(squares) / (H * D) + eps)


@triton.jit
def _q_and_k(
    q_ptr, k_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr, q_to_ptr, k_to_ptr, num_rows, row_stride, eps,
    H: tl.constexpr, D: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """q and k of a row in one program: cos and sin are loaded once for both."""
    row = tl.program_id(0).to(tl.int64)
    q, k = _load_row(q_ptr, row, row_stride, H, D, N), _load_row(k_ptr, row, row_stride, H, D, N)
    cos, sin = _angles(cos_ptr, row, N, D), _angles(sin_ptr, row, N, D)
    _norm_turn_store(q, _scale(q, eps, H, D, N), cos, sin, q_weight_ptr, q_to_ptr, row, H, D, N)
    _norm_turn_store(k, _scale(k, eps, H, D, N), cos, sin, k_weight_ptr, k_to_ptr, row, H, D, N)


@triton.jit
def _read_twice(
    q_ptr, k_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr, q_to_ptr, k_to_ptr, num_rows, row_stride, eps,
    H: tl.constexpr, D: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """The row is not kept: once for the sum, and again, from the cache, for the rest."""
    program = tl.program_id(0)
    x_ptr, weight_ptr, table_ptr = q_ptr, q_weight_ptr, q_to_ptr
    if program % 2 == 1:
        x_ptr, weight_ptr, table_ptr = k_ptr, k_weight_ptr, k_to_ptr
    row = (program // 2).to(tl.int64)
    inside = tl.arange(0, N)[:, None] * D + tl.arange(0, D)[None, :]
    row_ptr = tl.multiple_of(x_ptr + row * row_stride, 16)
    squares = tl.zeros((N, D), tl.float32)
    for c in range(H // N):
        x = tl.load(tl.multiple_of(row_ptr + c * N * D, 16) + inside, eviction_policy="evict_last").to(tl.float32)
        squares += x * x
    scale = tl.rsqrt(tl.sum(squares) / (H * D) + eps)
    cos, sin = _angles(cos_ptr, row, N, D), _angles(sin_ptr, row, N, D)
    for c in range(H // N):
        x = tl.load(tl.multiple_of(row_ptr + c * N * D, 16) + inside, eviction_policy="evict_first").to(tl.float32)
        y = x * scale * tl.load(weight_ptr + c * N * D + inside).to(tl.float32)
        address, to_row = _targets(table_ptr, c * N, N)
        _store(address, to_row, row, _rotate(y.to(tl.bfloat16).to(tl.float32), cos, sin, N, D), D, "")


@triton.jit
def _high(pairs):
    return (pairs & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _low(pairs):
    return (pairs << 16).to(tl.float32, bitcast=True)


@triton.jit
def _round(x):
    return x.to(tl.bfloat16).to(tl.float32)


@triton.jit
def _pack(even, odd):
    low = even.to(tl.bfloat16).to(tl.uint16, bitcast=True).to(tl.int32)
    return low | (odd.to(tl.bfloat16).to(tl.uint16, bitcast=True).to(tl.int32) << 16)


@triton.jit
def _packed(
    q_ptr, k_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr, q_to_ptr, k_to_ptr, num_rows, row_stride, eps,
    H: tl.constexpr, D: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """A pair of bf16 is one int32 and is taken apart by shifts."""
    program = tl.program_id(0)
    x_ptr, weight_ptr, table_ptr = q_ptr, q_weight_ptr, q_to_ptr
    if program % 2 == 1:
        x_ptr, weight_ptr, table_ptr = k_ptr, k_weight_ptr, k_to_ptr
    row = (program // 2).to(tl.int64)
    words: tl.constexpr = D // 2
    inside = tl.arange(0, N)[:, None] * words + tl.arange(0, words)[None, :]
    row_ptr = tl.multiple_of((x_ptr + row * row_stride).to(tl.pointer_type(tl.int32)), 16)
    weights = tl.multiple_of((weight_ptr + row * 0).to(tl.pointer_type(tl.int32)), 16)
    tiles = ()
    squares = tl.zeros((N, words), tl.float32)
    for c in tl.static_range(H // N):
        pairs = tl.load(row_ptr + c * N * words + inside)
        tiles += (pairs,)
        squares += _low(pairs) * _low(pairs) + _high(pairs) * _high(pairs)
    scale = tl.rsqrt(tl.sum(squares) / (H * D) + eps)
    cos, sin = _angles(cos_ptr, row, N, D), _angles(sin_ptr, row, N, D)
    for c in tl.static_range(H // N):
        weight = tl.load(weights + c * N * words + inside)
        even, odd = _round(_low(tiles[c]) * scale * _low(weight)), _round(_high(tiles[c]) * scale * _high(weight))
        address, to_row = _targets(table_ptr, c * N, N)
        target = address + row * to_row * 2
        target = tl.multiple_of(target.to(tl.pointer_type(tl.int32)), [16])[:, None] + tl.arange(0, words)[None, :]
        tl.store(target, _pack(even * cos - odd * sin, even * sin + odd * cos))


@triton.jit
def _one_tile(
    q_ptr, k_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr, q_to_ptr, k_to_ptr, num_rows, row_stride, eps,
    H: tl.constexpr, D: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """The whole row as one tile of N >= H heads, of which the last ones are masked."""
    program = tl.program_id(0)
    x_ptr, weight_ptr, table_ptr = q_ptr, q_weight_ptr, q_to_ptr
    if program % 2 == 1:
        x_ptr, weight_ptr, table_ptr = k_ptr, k_weight_ptr, k_to_ptr
    row = (program // 2).to(tl.int64)
    heads, cols = tl.arange(0, N), tl.arange(0, D)
    inside, mask = heads[:, None] * D + cols[None, :], (heads < H)[:, None]
    x = tl.load(tl.multiple_of(x_ptr + row * row_stride, 16) + inside, mask=mask, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x) / (H * D) + eps)
    y = x * scale * tl.load(weight_ptr + inside, mask=mask, other=0.0).to(tl.float32)
    y = _rotate(_round(y), _angles(cos_ptr, row, N, D), _angles(sin_ptr, row, N, D), N, D)
    entry = table_ptr + 3 * heads
    address, to_row = tl.load(entry, mask=heads < H, other=0), tl.load(entry + 2, mask=heads < H, other=0)
    target = tl.multiple_of(address.to(tl.pointer_type(tl.bfloat16)) + row * to_row, [16])[:, None] + cols[None, :]
    tl.store(target, y.to(tl.bfloat16), mask=mask)


@triton.jit
def _persistent(
    q_ptr, k_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr, q_to_ptr, k_to_ptr, num_rows, row_stride, eps,
    H: tl.constexpr, D: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """As many programs as fit the GPU, each over every so manieth row; weight and table stay in registers."""
    program = tl.program_id(0)
    x_ptr, weight_ptr, table_ptr = q_ptr, q_weight_ptr, q_to_ptr
    if program % 2 == 1:
        x_ptr, weight_ptr, table_ptr = k_ptr, k_weight_ptr, k_to_ptr
    inside = tl.arange(0, N)[:, None] * D + tl.arange(0, D)[None, :]
    weights, places = (), ()
    for c in tl.static_range(H // N):
        weights += (tl.load(weight_ptr + c * N * D + inside),)
        places += (_targets(table_ptr, c * N, N),)
    for index in range(program // 2, num_rows, tl.num_programs(0) // 2):
        row = index.to(tl.int64)
        tiles = _load_row(x_ptr, row, row_stride, H, D, N)
        cos, sin = _angles(cos_ptr, row, N, D), _angles(sin_ptr, row, N, D)
        scale = _scale(tiles, eps, H, D, N)
        for c in tl.static_range(H // N):
            y = _round(tiles[c].to(tl.float32) * scale * weights[c].to(tl.float32))
            address, to_row = places[c]
            _store(address, to_row, row, _rotate(y, cos, sin, N, D), D, "")


def _launch(kernel, arguments: Arguments, *, programs: int, heads: int = 8, warps: int = 4, **options) -> None:
    options = {"H": HEADS, "D": HEAD_DIM, "N": heads, "num_warps": warps, "enable_fp_fusion": False} | options
    q = arguments["q_ptr"]
    kernel[(programs,)](**arguments, num_rows=q.shape[1], row_stride=q.stride(1), eps=1e-6, **options)


def _pair(kernel, **options) -> Design:
    return lambda arguments: _launch(kernel, arguments, programs=2 * arguments["q_ptr"].shape[1], **options)


def _rows(rows: int = 1, **options) -> Design:
    flags = dict.fromkeys(("HALVES", "EARLY_WEIGHT", "EARLY_TABLE", "FENCE"), False) | {
        "LOAD_EVICT": "",
        "STORE_EVICT": "",
    }
    flags |= dict.fromkeys(("NORM", "ROPE", "TABLE"), True) | {"ROWS": rows} | options

    def run(arguments: Arguments) -> None:
        programs = 2 * triton.cdiv(arguments["q_ptr"].shape[1], rows)
        _launch(_chunked, arguments, programs=programs, **flags)

    return run


def _fixed(kernel, per_multiprocessor: int, **options) -> Design:
    def run(arguments: Arguments) -> None:
        count = torch.cuda.get_device_properties(arguments["q_ptr"].device).multi_processor_count
        _launch(kernel, arguments, programs=2 * (count * per_multiprocessor // 2), **options)

    return run


def _each_row(kernel, **options) -> Design:
    return lambda arguments: _launch(kernel, arguments, programs=arguments["q_ptr"].shape[1], **options)


DESIGNS: dict[str, Design] = {
    "8 heads a tile, 4 warps": _rows(),
    "q before k": _rows(HALVES=True),
    "weight early": _rows(EARLY_WEIGHT=True),
    "table early": _rows(EARLY_TABLE=True),
    "weight and table early": _rows(EARLY_WEIGHT=True, EARLY_TABLE=True),
    "fence": _rows(FENCE=True),
    "fence, weight and table early": _rows(FENCE=True, EARLY_WEIGHT=True, EARLY_TABLE=True),
    "fence, weight and table early, 8 warps": _rows(FENCE=True, EARLY_WEIGHT=True, EARLY_TABLE=True, warps=8),
    "fence, 2 rows, 8 warps": _rows(2, FENCE=True, warps=8),
    "2 warps, 4 heads a tile": _rows(heads=4, warps=2),
    "8 warps": _rows(warps=8),
    "8 warps, weight and table early": _rows(warps=8, EARLY_WEIGHT=True, EARLY_TABLE=True),
    "2 rows": _rows(2),
    "2 rows, 8 warps": _rows(2, warps=8),
    "4 rows, 8 warps": _rows(4, warps=8),
    "evict first on load": _rows(LOAD_EVICT="evict_first"),
    "evict first on load and store": _rows(LOAD_EVICT="evict_first", STORE_EVICT="evict_first"),
    "64 registers": _rows(maxnreg=64),
    "evict first on load, weight and table early": _rows(LOAD_EVICT="evict_first", EARLY_WEIGHT=True, EARLY_TABLE=True),
    "q and k in one program": _each_row(_q_and_k),
    "read twice": _pair(_read_twice),
    "packed pairs": _pair(_packed),
    "one masked tile, 8 warps": _pair(_one_tile, heads=64, warps=8),
    "persistent, 3 a multiprocessor": _fixed(_persistent, 3),
    "persistent, 4 a multiprocessor": _fixed(_persistent, 4, maxnreg=128),
}

WITHOUT: dict[str, Design] = {  # other results, by intent
    "without norm": _rows(NORM=False),
    "without rope": _rows(ROPE=False),
    "without norm and rope": _rows(NORM=False, ROPE=False),
    "without norm, rope and table": _rows(NORM=False, ROPE=False, TABLE=False),
}
