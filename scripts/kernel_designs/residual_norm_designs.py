"""Other ways to add a gated residual, norm and modulate, for rows of 5120 in bf16, batch 1.

Used by bench_kernels.py --designs. Every design reads and writes what the package's kernel does; those that leave the
vectors out show what these cost.
"""

# ruff: noqa: N803, C901  compile-time arguments of kernels are UPPER_CASE; a kernel of many switches

import torch
import triton
import triton.language as tl

from kernel_designs.compare import Arguments, Design

DIM = 5120


@triton.jit
def _rows(
    x_ptr, y_ptr, gate_ptr, scale_ptr, shift_ptr, sum_ptr, h_ptr, num_rows, eps,
    C: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr, PERSISTENT: tl.constexpr, STORE_EARLY: tl.constexpr,
    AHEAD: tl.constexpr, KEEP: tl.constexpr, LOAD_EVICT: tl.constexpr, STORE_EVICT: tl.constexpr,
    VECTORS: tl.constexpr,
):  # fmt: skip
    """ROWS rows at a time share gate, scale and shift; with PERSISTENT a program does every so manieth ROWS rows.

    STORE_EARLY writes the sum before the norm. AHEAD loads the vectors of the next tile before this tile is stored.
    KEEP loads all vectors before a barrier, since the assembler would defer them, and holds them in registers.
    """
    chunks: tl.constexpr = C // N
    cols = tl.arange(0, N)
    steps = tl.cdiv(num_rows, ROWS)
    stop = steps if PERSISTENT else tl.program_id(0) + 1
    gates, scales, shifts = (), (), ()
    if KEEP:
        for c in tl.static_range(chunks):
            gates += (tl.load(gate_ptr + c * N + cols),)
            scales += (tl.load(scale_ptr + c * N + cols),)
            shifts += (tl.load(shift_ptr + c * N + cols),)
        tl.debug_barrier()
    for step in range(tl.program_id(0), stop, tl.num_programs(0)):
        first = step.to(tl.int64) * ROWS
        xs, ys, sums, means, inverses = (), (), (), (), ()
        for c in tl.static_range(chunks):
            for r in tl.static_range(ROWS):
                here, live = (first + r) * C + c * N + cols, first + r < num_rows if ROWS > 1 else True
                xs += (tl.load(x_ptr + here, mask=live, other=0.0, eviction_policy=LOAD_EVICT),)
                ys += (tl.load(y_ptr + here, mask=live, other=0.0, eviction_policy=LOAD_EVICT),)
        for c in tl.static_range(chunks):
            gate = 0.5
            if VECTORS:
                gate = gates[c] if KEEP else tl.load(gate_ptr + c * N + cols)
            for r in tl.static_range(ROWS):
                x, y = xs[c * ROWS + r].to(tl.float32), ys[c * ROWS + r].to(tl.float32)
                sums += ((x + y * gate).to(tl.bfloat16),)
        if STORE_EARLY:
            for c in tl.static_range(chunks):
                for r in tl.static_range(ROWS):
                    here, live = (first + r) * C + c * N + cols, first + r < num_rows if ROWS > 1 else True
                    tl.store(sum_ptr + here, sums[c * ROWS + r], mask=live, eviction_policy=STORE_EVICT)
        for r in tl.static_range(ROWS):
            total, squares = tl.zeros((N,), tl.float32), tl.zeros((N,), tl.float32)
            for c in tl.static_range(chunks):
                total += sums[c * ROWS + r].to(tl.float32)
            mean = tl.sum(total) / C
            for c in tl.static_range(chunks):
                centred = sums[c * ROWS + r].to(tl.float32) - mean
                squares += centred * centred
            means += (mean,)
            inverses += (tl.rsqrt(tl.sum(squares) / C + eps),)
        scale, shift = 0.5, 0.5
        if VECTORS and AHEAD:
            scale, shift = tl.load(scale_ptr + cols), tl.load(shift_ptr + cols)
        for c in tl.static_range(chunks):
            if KEEP:
                scale, shift = scales[c], shifts[c]
            elif VECTORS and not AHEAD:
                scale, shift = tl.load(scale_ptr + c * N + cols), tl.load(shift_ptr + c * N + cols)
            next_scale, next_shift = scale, shift
            if VECTORS and AHEAD and c + 1 < chunks:
                next_scale = tl.load(scale_ptr + (c + 1) * N + cols)
                next_shift = tl.load(shift_ptr + (c + 1) * N + cols)
            for r in tl.static_range(ROWS):
                here, live = (first + r) * C + c * N + cols, first + r < num_rows if ROWS > 1 else True
                x = sums[c * ROWS + r]
                if not STORE_EARLY:
                    tl.store(sum_ptr + here, x, mask=live, eviction_policy=STORE_EVICT)
                h = (x.to(tl.float32) - means[r]) * inverses[r] * (1.0 + scale) + shift
                tl.store(h_ptr + here, h.to(tl.bfloat16), mask=live, eviction_policy=STORE_EVICT)
            scale, shift = next_scale, next_shift


@triton.jit
def _one_tile(
    x_ptr, y_ptr, gate_ptr, scale_ptr, shift_ptr, sum_ptr, h_ptr, num_rows, eps, C: tl.constexpr, N: tl.constexpr
):
    """The whole row as one tile of N >= C columns, of which the last ones are masked."""
    cols = tl.arange(0, N)
    mask = cols < C
    here = tl.program_id(0).to(tl.int64) * C + cols
    x, y = (tl.load(x_ptr + here, mask=mask, other=0.0), tl.load(y_ptr + here, mask=mask, other=0.0))
    gate = tl.load(gate_ptr + cols, mask=mask, other=0.0)
    x = (x.to(tl.float32) + y.to(tl.float32) * gate).to(tl.bfloat16)
    tl.store(sum_ptr + here, x, mask=mask)
    mean = tl.sum(x.to(tl.float32)) / C
    centred = tl.where(mask, x.to(tl.float32) - mean, 0.0)
    h = centred * tl.rsqrt(tl.sum(centred * centred) / C + eps)
    scale, shift = tl.load(scale_ptr + cols, mask=mask, other=0.0), tl.load(shift_ptr + cols, mask=mask, other=0.0)
    tl.store(h_ptr + here, (h * (1.0 + scale) + shift).to(tl.bfloat16), mask=mask)


def _launch(kernel, arguments: Arguments, *, programs: int, columns: int = 1024, warps: int = 4, **options) -> None:
    options = {"C": DIM, "N": columns, "num_warps": warps, "enable_fp_fusion": False} | options
    kernel[(programs,)](**arguments, num_rows=arguments["x_ptr"].shape[1], eps=1e-6, **options)


def _chunked(rows: int = 1, *, per_multiprocessor: int = 0, **options) -> Design:
    flags = dict.fromkeys(("STORE_EARLY", "AHEAD", "KEEP"), False) | {
        "LOAD_EVICT": "",
        "STORE_EVICT": "",
        "VECTORS": True,
    }
    flags |= {"ROWS": rows, "PERSISTENT": per_multiprocessor > 0} | options

    def run(arguments: Arguments) -> None:
        programs = triton.cdiv(arguments["x_ptr"].shape[1], rows)
        if per_multiprocessor:
            properties = torch.cuda.get_device_properties(arguments["x_ptr"].device)
            programs = min(programs, per_multiprocessor * properties.multi_processor_count)
        _launch(_rows, arguments, programs=programs, **flags)

    return run


def _whole(warps: int) -> Design:
    def run(arguments: Arguments) -> None:
        _launch(_one_tile, arguments, programs=arguments["x_ptr"].shape[1], columns=8192, warps=warps)

    return run


DESIGNS: dict[str, Design] = {
    "1 row, 4 warps": _chunked(),
    "1 row, 8 warps": _chunked(warps=8),
    "1 row, sum stored early": _chunked(STORE_EARLY=True),
    "1 row, vectors ahead": _chunked(AHEAD=True),
    "1 row, 8 warps, early, ahead": _chunked(warps=8, STORE_EARLY=True, AHEAD=True),
    "1 row, evict first on load": _chunked(LOAD_EVICT="evict_first"),
    "1 row, evict first on load and store": _chunked(LOAD_EVICT="evict_first", STORE_EVICT="evict_first"),
    "1 row, 80 registers": _chunked(maxnreg=80),
    "2 rows, 4 warps": _chunked(2),
    "2 rows, 8 warps": _chunked(2, warps=8),
    "2 rows, 8 warps, early, ahead": _chunked(2, warps=8, STORE_EARLY=True, AHEAD=True),
    "2 rows, 8 warps, evict first on load": _chunked(2, warps=8, LOAD_EVICT="evict_first"),
    "4 rows, 8 warps": _chunked(4, warps=8),
    "4 rows, 16 warps": _chunked(4, warps=16),
    "persistent, 1 row, 5 a multiprocessor": _chunked(per_multiprocessor=5),
    "persistent, 2 rows, 8 warps, 2 a multiprocessor": _chunked(2, per_multiprocessor=2, warps=8),
    "1 row, 8 warps, vectors kept": _chunked(warps=8, KEEP=True),
    "2 rows, 8 warps, vectors kept": _chunked(2, warps=8, KEEP=True),
    "persistent, 8 warps, vectors kept, 2 a multiprocessor": _chunked(per_multiprocessor=2, warps=8, KEEP=True),
    "one masked tile, 8 warps": _whole(8),
    "one masked tile, 16 warps": _whole(16),
}

WITHOUT: dict[str, Design] = {  # other results, by intent
    "without vectors": _chunked(VECTORS=False),
    "without vectors, 2 rows, 8 warps": _chunked(2, warps=8, VECTORS=False),
}
