"""What bench_kernels.py times: real sizes of Wan2.2 A14B, each with a check and with what it is compared with.

Rows are bf16, batch 1. q, k and v are slices of one fused projection's output; blocks of the exchange lie one behind
another, each dense, as in an arena.
"""

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from usp.destinations import FillBlock, FillBlocks, HeadRun, head_table
from usp.kernels import Kernels, load_place_heads
from usp.kernels.reference import place_heads_reference, residual_norm_reference, rms_norm_reference, turn_pairs

HEADS, HEAD_DIM = 40, 128
DIM = HEADS * HEAD_DIM
EPS = 1e-6
DEVICE = torch.device("cuda")


@dataclass(frozen=True)
class Workload:
    """`nbytes` are the rows' bytes, read and written; weights, angles and tables are not counted."""

    name: str
    nbytes: int
    run: Callable[[], object]
    check: Callable[[], None]  # raises AssertionError; leaves inputs as they were or as `run` leaves them
    others: dict[str, Callable[[], object]] = field(default_factory=dict)


@dataclass(frozen=True)
class Projected:
    """q and k of a fused projection, with what norms and turns them."""

    fused: torch.Tensor  # [1, S_r, 3 * H, D]
    q_weight: torch.Tensor
    k_weight: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor

    @classmethod
    def random(cls, num_rows: int) -> "Projected":
        fused = torch.randn(1, num_rows, 3 * HEADS, HEAD_DIM, device=DEVICE, dtype=torch.bfloat16)
        weights = ((torch.rand(DIM, device=DEVICE) + 0.5).bfloat16() for _ in range(2))
        angles = torch.rand(num_rows, HEAD_DIM // 2, device=DEVICE) * 100
        return cls(fused, *weights, angles.cos(), angles.sin())

    @property
    def q(self) -> torch.Tensor:
        return self.fused[:, :, :HEADS]

    @property
    def k(self) -> torch.Tensor:
        return self.fused[:, :, HEADS : 2 * HEADS]

    @property
    def v(self) -> torch.Tensor:
        return self.fused[:, :, 2 * HEADS :]

    def arguments(self) -> tuple[torch.Tensor, ...]:
        return self.q, self.k, self.q_weight, self.k_weight, self.cos, self.sin


@dataclass(frozen=True)
class Slots:
    """Blocks of `heads_each` heads over two buffers, one for q and one for k."""

    q: torch.Tensor
    k: torch.Tensor
    blocks: FillBlocks

    @classmethod
    def empty(cls, num_rows: int, heads_each: int) -> "Slots":
        q, k = (torch.empty(num_rows * DIM, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
        size, blocks = num_rows * heads_each * HEAD_DIM, FillBlocks()
        for index, (one, other) in enumerate(zip(q.split(size), k.split(size), strict=True)):
            rows = [part.view(1, num_rows, heads_each, HEAD_DIM) for part in (one, other)]
            blocks.append(FillBlock(index * heads_each, heads_each, *rows, index * heads_each, heads_each))
        return cls(q, k, blocks)

    def tables(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.blocks.tables.q, self.blocks.tables.k

    def poison(self) -> None:
        self.q.fill_(float("nan"))
        self.k.fill_(float("nan"))

    def holds(self, q: torch.Tensor, k: torch.Tensor) -> bool:
        """The same bits: q and k [1, S_r, H, D]."""
        return all(
            torch.equal(rows, x[:, :, block.head_start : block.head_start + block.head_count])
            for block in self.blocks
            for rows, x in ((block.q_dst, q), (block.k_dst, k))
        )


def norm_rope_workload(kernels: Kernels, num_rows: int, heads_each: int, num_ranks: int) -> Workload:
    given, slots = Projected.random(num_rows), Slots.empty(num_rows, heads_each)

    def run() -> None:
        kernels.norm_rope(*given.arguments(), eps=EPS, blocks=slots.blocks)

    def check() -> None:
        before = given.fused.clone()
        slots.poison()
        run()
        pairs = ((given.q, given.q_weight), (given.k, given.k_weight))
        q, k = (turn_pairs(kernels.rms_norm(x, weight, eps=EPS), given.cos, given.sin) for x, weight in pairs)
        assert slots.holds(q, k), "not the bits of the norm followed by RoPE"
        assert torch.equal(given.fused, before), "the input has changed"

    others = flashinfer_if_it_runs(lambda: flashinfer_norm_rope(given, num_ranks))
    others |= {"torch": lambda: torch_norm_rope(given, slots)}
    name = f"norm_rope {num_rows:,} x {DIM}, runs of {heads_each * HEAD_DIM}"
    return Workload(name, 2 * 2 * num_rows * DIM * 2, run, check, others)


def torch_norm_rope(given: Projected, slots: Slots) -> None:
    for x, weight, name in ((given.q, given.q_weight, "q_dst"), (given.k, given.k_weight, "k_dst")):
        turned = turn_pairs(rms_norm_reference(x, weight, eps=EPS), given.cos, given.sin)
        place_heads_reference(turned, [(block.head_start, getattr(block, name)) for block in slots.blocks])


def flashinfer_if_it_runs(make: Callable[[], Callable[[], None]]) -> dict[str, Callable[[], object]]:
    """FlashInfer compiles at its first call, for which not every machine has the tools."""
    if importlib.util.find_spec("flashinfer") is None:
        return {}
    try:
        return {"flashinfer": make()}
    except Exception as error:  # any: a library beside the one that is measured
        print(f"flashinfer left out: {type(error).__name__}: {str(error)[-300:]}", file=sys.stderr)
        return {}


def flashinfer_norm_rope(given: Projected, num_ranks: int) -> Callable[[], None]:
    """Two norms, one RoPE over q and k, and the copies of this rank's own share of the heads into its slots."""
    from flashinfer.norm import rmsnorm
    from flashinfer.rope import apply_rope_with_cos_sin_cache_inplace

    q, k = given.q.flatten(2)[0], given.k.flatten(2)[0]  # [1, S_r, H, D] -> [S_r, C]
    q_out, k_out = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k))
    own = DIM // num_ranks
    q_own, k_own = (torch.empty(len(x), own, device=DEVICE, dtype=x.dtype) for x in (q, k))
    positions = torch.arange(len(q), device=DEVICE, dtype=torch.int32)
    table = torch.cat([given.cos, given.sin], dim=1)

    def run() -> None:
        rmsnorm(q, given.q_weight, EPS, out=q_out)
        rmsnorm(k, given.k_weight, EPS, out=k_out)
        apply_rope_with_cos_sin_cache_inplace(positions, q_out, k_out, HEAD_DIM, table, is_neox=False)
        q_own.copy_(q_out[:, :own])
        k_own.copy_(k_out[:, :own])

    run()
    expected = turn_pairs(rms_norm_reference(given.q, given.q_weight, eps=EPS), given.cos, given.sin)
    error = (q_out - expected.flatten(2)[0]).abs().max().item()
    assert error < 0.1, f"flashinfer computes something else, by {error}"
    return run


def flashinfer_norm(rows: torch.Tensor, weight: torch.Tensor) -> Callable[[], None]:
    from flashinfer.norm import rmsnorm

    out = torch.empty_like(rows)

    def run() -> None:
        rmsnorm(rows, weight, EPS, out=out)

    run()
    return run


def norm_workload(kernels: Kernels, num_rows: int) -> Workload:
    """Of q of cross-attention: dense, to a new place, so that repeats see the same input."""
    x = torch.randn(1, num_rows, HEADS, HEAD_DIM, device=DEVICE, dtype=torch.bfloat16)
    weight, out = (torch.rand(DIM, device=DEVICE) + 0.5).bfloat16(), torch.empty_like(x)

    def run() -> None:
        kernels.rms_norm(x, weight, eps=EPS, out=out)

    def check() -> None:
        out.fill_(float("nan"))
        run()
        exact = rms_norm_reference(x.double(), weight.double(), eps=EPS)
        allowed = 2 * (rms_norm_reference(x, weight, eps=EPS) - exact).abs().max()
        assert (out - exact).abs().max() <= allowed, "errs more than twice as much as torch"

    others = flashinfer_if_it_runs(lambda: flashinfer_norm(x.view(num_rows, DIM), weight))
    others |= {"torch": lambda: rms_norm_reference(x, weight, eps=EPS)}
    return Workload(f"rms_norm {num_rows:,} x {DIM}", 2 * num_rows * DIM * 2, run, check, others)


def place_workload(num_rows: int, heads_each: int, num_ranks: int) -> Workload:
    """v of a rank's own heads, into its own slots."""
    v, own = Projected.random(num_rows).v, HEADS // num_ranks
    memory = torch.empty(num_rows * own * HEAD_DIM, device=DEVICE, dtype=torch.bfloat16)
    parts = memory.split(num_rows * heads_each * HEAD_DIM)
    runs: list[HeadRun] = [
        (index * heads_each, part.view(1, num_rows, heads_each, HEAD_DIM)) for index, part in enumerate(parts)
    ]
    place_heads, table = load_place_heads(), head_table(runs, num_heads=HEADS)

    def check() -> None:
        memory.fill_(float("nan"))
        place_heads(v, table)
        for start, rows in runs:
            assert torch.equal(rows, v[:, :, start : start + heads_each]), "not the rows that were read"

    name = f"place_heads {num_rows:,} x {own * HEAD_DIM}, runs of {heads_each * HEAD_DIM}"
    others = {"torch": lambda: place_heads_reference(v, runs)}
    return Workload(name, 2 * num_rows * own * HEAD_DIM * 2, lambda: place_heads(v, table), check, others)


def residual_workload(kernels: Kernels, num_rows: int, kind: str) -> Workload:
    """`kind` is "gated, modulated", "added, affine" or "norm alone"; the sum goes to a place of its own."""
    x, y, out = (torch.randn(1, num_rows, DIM, device=DEVICE, dtype=torch.bfloat16) for _ in range(3))
    shift, scale, gate = torch.randn(1, 6, DIM, device=DEVICE).chunk(6, dim=1)[:3]
    weight, bias = torch.rand(DIM, device=DEVICE) + 0.5, torch.randn(DIM, device=DEVICE)
    norm = {"weight": weight, "bias": bias} if "affine" in kind else {"scale": scale, "shift": shift}
    arguments = (x,) if kind == "norm alone" else (x, y, gate if "gated" in kind else None)

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        return kernels.residual_norm(*arguments, **norm, eps=EPS, out=None if kind == "norm alone" else out)

    def check() -> None:
        out.fill_(float("nan"))
        total, h = run()
        expected, torchs = residual_norm_reference(*arguments, **norm, eps=EPS)
        assert torch.equal(total, expected), "the sum is not torch's"
        exact = float64_norm(expected, norm)
        assert (h - exact).abs().max() <= 2 * (torchs - exact).abs().max(), "the norm errs more than twice as much"

    others = {"torch": lambda: residual_norm_reference(*arguments, **norm, eps=EPS)}
    passes = 2 if kind == "norm alone" else 4
    return Workload(f"residual_norm {num_rows:,} x {DIM}, {kind}", passes * num_rows * DIM * 2, run, check, others)


def float64_norm(x: torch.Tensor, norm: dict[str, torch.Tensor]) -> torch.Tensor:
    wide = {name: vector.double() for name, vector in norm.items()}
    h = torch.nn.functional.layer_norm(x.double(), x.shape[-1:], wide.get("weight"), wide.get("bias"), EPS)
    return h * (1 + wide["scale"]) + wide["shift"] if "scale" in wide else h


def copy_of(nbytes: int) -> Callable[[], object]:
    """A dense copy that reads and writes `nbytes` together: the rate that everything is held against."""
    source, target = (torch.empty(nbytes // 4, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    return lambda: target.copy_(source)
