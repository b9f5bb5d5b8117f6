"""Norm and RoPE in one kernel give the bits of the one after the other, and touch nothing else.

Without a GPU in Triton's interpreter, over addresses of this process; with one also on it, at real sizes.
"""

import importlib.util
import random
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
import triton.runtime.interpreter
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import usp.kernels
from tests.rotation import apply_rope
from tests.unit.test_place_kernel import DEVICES, POISON, sparse_memory
from usp.destinations import FillBlock, FillBlocks, head_table
from usp.ipc.errors import SetupError
from usp.kernels import kernels_for, reference
from usp.models.wan.rope import RopeTable

EPS = 1e-6
GPU_CASES = 6
EXACT = {"mul.rn.f32", "add.rn.f32", "sub.rn.f32"}  # rounded one by one, whatever the assembler would like
POINTERS = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int64: "*i64"}
APPROXIMATE = (
    4 * 2.0**-23
)  # a GPU's division and its inverse root may each be off by two units, which fp32 results show
CUTTING_CAST = triton.runtime.interpreter._convert_float


@contextmanager
def interpreted_module(name: str) -> Iterator[ModuleType]:
    """A copy of a kernel's module for the interpreter, and of Triton's own library: Triton decides while it decorates.

    The interpreter cuts fp32 to bf16 where a GPU rounds, so that cast is torch's while the copy is in use.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        module, library = module_copy(name), module_copy("triton.language.standard")
    with pytest.MonkeyPatch.context() as patch, triton_language_restored():
        for function in ("sum", "zeros"):
            setattr(tl, function, getattr(library, function))
        patch.setattr(triton.runtime.interpreter, "_convert_float", rounding_cast)
        yield module


@contextmanager
def triton_language_restored() -> Iterator[None]:
    """The interpreter leaves its own functions in the language behind, with which nothing compiles."""
    parts = (tl, tl.core, tl.math, tl.tensor, tl.dtype, tl.core.tensor_descriptor_base)
    saved = [dict(vars(part)) for part in parts]
    yield
    for part, before in zip(parts, saved, strict=True):
        for name in [name for name, value in vars(part).items() if before.get(name) is not value]:
            if name in before:
                setattr(part, name, before[name])
            else:
                delattr(part, name)


def module_copy(name: str) -> ModuleType:
    spec = importlib.util.find_spec(name)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rounding_cast(values: np.ndarray, source: tl.dtype, target: tl.dtype, mode: object) -> np.ndarray:
    if (source, target) != (tl.float32, tl.bfloat16):
        return CUTTING_CAST(values, source, target, mode)
    return torch.from_numpy(np.ascontiguousarray(values)).bfloat16().view(torch.uint16).numpy()


@pytest.fixture
def interpreted() -> Iterator[ModuleType]:
    with interpreted_module("usp.kernels.norm_rope") as module:
        yield module


@pytest.fixture
def kernels(request: pytest.FixtureRequest, device: str) -> ModuleType:
    if device == "cpu":
        return request.getfixturevalue("interpreted")
    return importlib.import_module("usp.kernels.norm_rope")


@dataclass(frozen=True)
class Case:
    """`widths` are the heads of q and of k in each block in turn."""

    batch: int
    num_rows: int
    head_dim: int
    widths: tuple[tuple[int, int], ...]
    dtype: torch.dtype = torch.bfloat16
    weight_dtype: torch.dtype = torch.bfloat16

    @property
    def num_heads(self) -> tuple[int, int]:
        q_widths, k_widths = zip(*self.widths, strict=True)
        return sum(q_widths), sum(k_widths)


def random_case(source: random.Random, device: str) -> Case:
    equal = source.random() < 0.7
    widths = [(source.randint(1, 3), source.randint(1, 2)) for _ in range(source.randint(1, 4))]
    dtype = source.choice((torch.float32, torch.bfloat16, torch.bfloat16, torch.float16))
    return Case(
        batch=source.randint(1, 2),
        num_rows=source.choice((1, 2, 5) if device == "cpu" else (1, 31, 333)),
        head_dim=source.choice((2, 6, 12, 16, 128)),
        widths=tuple((q, q) if equal else (q, k) for q, k in widths),
        dtype=dtype,
        weight_dtype=source.choice((dtype, torch.float32)),
    )


def real_cases() -> list[Case]:
    """A14B's, 5B's and 1.3B's heads, in the groups of 2, 4 and 8 ranks."""
    groups = ((4, 8, 8), (2, 6, 6, 6), (1, 2, 2, 5))
    return [
        Case(1, rows, 128, tuple((width, width) for width in (*widths, heads - sum(widths))))
        for heads, rows in ((40, 4_725), (24, 1_001), (12, 63))
        for widths in groups
        if sum(widths) < heads
    ]


@dataclass(frozen=True)
class Inputs:
    fused: torch.Tensor  # [B, S_r + 3, H + 2K, D]: this rank has the middle rows
    q: torch.Tensor
    k: torch.Tensor
    q_weight: torch.Tensor
    k_weight: torch.Tensor
    rope: RopeTable

    def both(self) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
        return (self.q, self.q_weight), (self.k, self.k_weight)


def inputs(case: Case, device: str) -> Inputs:
    num_heads, num_kv_heads = case.num_heads
    heads = num_heads + 2 * num_kv_heads
    fused = torch.randn(case.batch, case.num_rows + 3, heads, case.head_dim, device=device).to(case.dtype)
    mine = fused[:, 2 : 2 + case.num_rows]
    weights = [
        (torch.rand(count * case.head_dim, device=device) + 0.5).to(case.weight_dtype) for count in case.num_heads
    ]
    angles = torch.rand(case.num_rows, case.head_dim // 2, device=device) * 100
    q, k = mine[:, :, :num_heads], mine[:, :, num_heads : num_heads + num_kv_heads]
    return Inputs(fused, q, k, *weights, RopeTable(angles.cos(), angles.sin()))


def poisoned_blocks(case: Case, device: str) -> tuple[torch.Tensor, FillBlocks]:
    """Memory, and blocks in it of more rows than are written, as between a prefix and others' tokens."""
    slot_rows = case.num_rows + 3
    sizes = [case.batch * slot_rows * heads * case.head_dim for width in case.widths for heads in width]
    memory = torch.full(((sum(sizes) + 64) * case.dtype.itemsize,), POISON, dtype=torch.uint8, device=device)
    pieces = iter(memory.view(case.dtype)[: sum(sizes)].split(sizes))
    blocks, starts = FillBlocks(), (0, 0)
    for width in case.widths:
        slots = [next(pieces).view(case.batch, slot_rows, heads, case.head_dim)[:, 1:-2] for heads in width]
        blocks.append(FillBlock(starts[0], width[0], *slots, starts[1], width[1]))
        starts = (starts[0] + width[0], starts[1] + width[1])
    return memory, blocks


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


def cases(device: str) -> tuple[int, list[Case]]:
    seed = random.randrange(2**31)
    source = random.Random(seed)
    torch.manual_seed(seed)
    if device == "cuda":
        return seed, real_cases() + [random_case(source, device) for _ in range(GPU_CASES)]
    return seed, [Case(1, 2, 128, ((20, 20), (20, 20)))] + [random_case(source, device) for _ in range(25)]


@pytest.mark.parametrize("device", DEVICES)
def test_blocks_hold_the_bits_of_the_norm_followed_by_rope(kernels: ModuleType, device: str) -> None:
    """All of the memory is compared, and the input stays as it was."""
    seed, some = cases(device)
    for case in some:
        given = inputs(case, device)
        before = bits(given.fused).clone()
        (found, blocks), (expected, same_blocks) = poisoned_blocks(case, device), poisoned_blocks(case, device)
        kernels.norm_rope(given.q, given.k, given.q_weight, given.k_weight, *given.rope, eps=EPS, blocks=blocks)
        q, k = (apply_rope(kernels.rms_norm(x, weight, eps=EPS), given.rope) for x, weight in given.both())
        for block in same_blocks:
            block.q_dst.copy_(q[:, :, block.head_start : block.head_start + block.head_count])
            block.k_dst.copy_(k[:, :, block.kv_head_start : block.kv_head_start + block.kv_head_count])
        assert torch.equal(found, expected), f"{case} of seed {seed}"
        assert torch.equal(bits(given.fused), before), f"{case} of seed {seed}"


@pytest.mark.parametrize("device", DEVICES)
def test_in_place_only_q_and_k_of_the_given_rows_change(kernels: ModuleType, device: str) -> None:
    seed, some = cases(device)
    for case in some[:12]:
        given = inputs(case, device)
        expected = given.fused.clone()
        mine = expected[:, 2 : 2 + case.num_rows]
        num_heads, num_kv_heads = case.num_heads
        for x, (start, count) in zip(given.both(), ((0, num_heads), (num_heads, num_kv_heads)), strict=True):
            mine[:, :, start : start + count] = apply_rope(kernels.rms_norm(*x, eps=EPS), given.rope)
        kernels.norm_rope(given.q, given.k, given.q_weight, given.k_weight, *given.rope, eps=EPS)
        assert torch.equal(bits(given.fused), bits(expected)), f"{case} of seed {seed}"


@pytest.mark.parametrize("device", DEVICES)
def test_the_norm_errs_at_most_twice_as_much_as_torchs(kernels: ModuleType, device: str) -> None:
    seed, some = cases(device)
    for case in some:
        given = inputs(case, device)
        x, weight = given.q * 3, given.q_weight
        flat, size = x.flatten(2), weight.shape
        exact = F.rms_norm(flat.double(), size, weight.double(), EPS)
        torchs = F.rms_norm(flat, size, weight, EPS)
        out = torch.full_like(x, float("nan"))
        assert kernels.rms_norm(x, weight, eps=EPS, out=out) is out
        allowed = 2 * (torchs.double() - exact).abs().max() + APPROXIMATE * exact.abs().max()
        assert (out.flatten(2).double() - exact).abs().max() <= allowed, f"{case} of seed {seed}"


@pytest.mark.parametrize("device", DEVICES)
def test_a_row_has_the_same_bits_alone_and_among_others(kernels: ModuleType, device: str) -> None:
    seed, some = cases(device)
    for case in some[:8]:
        x = inputs(case, device)
        together = kernels.rms_norm(x.q, x.q_weight, eps=EPS)
        row = random.randrange(case.num_rows)
        alone = kernels.rms_norm(x.q[:, row : row + 1].contiguous(), x.q_weight, eps=EPS)
        assert torch.equal(bits(alone), bits(together[:, row : row + 1])), f"{case} of seed {seed}"


@pytest.mark.parametrize("device", DEVICES)
def test_heads_without_an_address_are_left_out(kernels: ModuleType, device: str) -> None:
    given = inputs(Case(2, 3, 12, ((6, 6),)), device)
    expected = apply_rope(kernels.rms_norm(given.q, given.q_weight, eps=EPS), given.rope)
    memory = torch.full((2, 4, 3, 12), float("nan"), dtype=torch.bfloat16, device=device)
    table = head_table([(1, memory[:, 1:, :2]), (5, memory[:, :3, 2:])], num_heads=6)
    kernels._launch((given.q,), (given.q_weight,), (table,), given.rope, eps=EPS, to_table=True)
    assert torch.equal(memory[:, 1:, :2], expected[:, :, 1:3]) and memory[:, 0, :2].isnan().all()
    assert torch.equal(memory[:, :3, 2:], expected[:, :, 5:]) and memory[:, 3, 2:].isnan().all()


@pytest.mark.parametrize("far", ["rows", "samples"])
@pytest.mark.parametrize("distance", [2**30 + 64, 2**31 + 64])  # the products need more than 32 bits; the stride too
def test_offsets_beyond_31_bits_are_not_cut(interpreted: ModuleType, far: str, distance: int) -> None:
    """Four rows or samples far apart, in memory of which only the touched pages exist; in place."""
    origin = 2**31  # before it lies what a wrapped offset would reach
    shape, strides = ((1, 4, 1, 64), (64, distance)) if far == "rows" else ((4, 1, 1, 64), (distance, 64))
    with sparse_memory(2 * (origin + 4 * distance)) as memory:
        apart = memory.view(torch.bfloat16).as_strided(shape, (*strides, 64, 1), origin)
        near = torch.randn(shape).bfloat16()
        apart.copy_(near)
        weight, angles = torch.ones(64).bfloat16(), torch.rand(shape[1], 32)
        for x in (apart, near):
            interpreted.norm_rope(x, x.clone(), weight, weight, angles.cos(), angles.sin(), eps=EPS)
        assert torch.equal(apart, near)


def test_the_twin_computes_what_the_transformer_computes() -> None:
    given = inputs(Case(2, 5, 12, ((2, 1), (2, 1))), "cpu")
    expected = [
        apply_rope(F.rms_norm(x.flatten(2), weight.shape, weight, EPS).unflatten(2, (-1, 12)), given.rope)
        for x, weight in given.both()
    ]
    _, blocks = poisoned_blocks(Case(2, 5, 12, ((4, 2),)), "cpu")
    arguments = (given.q, given.k, given.q_weight, given.k_weight, *given.rope)
    reference.norm_rope_reference(*arguments, eps=EPS, blocks=blocks)
    assert torch.equal(blocks[0].q_dst, expected[0]) and torch.equal(blocks[0].k_dst, expected[1])
    assert all(map(torch.equal, reference.norm_rope_reference(*arguments, eps=EPS), expected))


def test_blocks_of_another_shape_are_refused(interpreted: ModuleType) -> None:
    given, (_, blocks) = inputs(Case(1, 2, 6, ((4, 4),)), "cpu"), poisoned_blocks(Case(1, 3, 6, ((4, 4),)), "cpu")
    with pytest.raises(ValueError, match=r"q is torch\.bfloat16 \(1, 2, 4, 6\); the blocks to fill hold"):
        interpreted.norm_rope(given.q, given.k, given.q_weight, given.k_weight, *given.rope, eps=EPS, blocks=blocks)


def test_no_rows_are_no_launch(interpreted: ModuleType) -> None:
    x, weight, angles = torch.zeros(1, 0, 4, 6).bfloat16(), torch.ones(24), torch.zeros(0, 3)
    interpreted.norm_rope(x, x.clone(), weight, weight, angles, angles, eps=EPS)
    assert interpreted.rms_norm(x, weight, eps=EPS).shape == x.shape


def test_a_cpu_gets_the_twins_and_a_gpu_without_triton_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kernels_for(torch.device("cpu")).norm_rope is reference.norm_rope_reference
    for name in ("norm_rope", "residual_norm"):
        monkeypatch.delitem(sys.modules, f"usp.kernels.{name}", raising=False)
        monkeypatch.delattr(usp.kernels, name, raising=False)
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(SetupError, match=r"Triton is not installed; pip install 'triton>=3\.4'"):
        kernels_for(torch.device("cuda"))


class Recorder:
    """Stands for a kernel and keeps what it was launched with."""

    def __getitem__(self, grid: tuple[int, ...]) -> "Recorder":
        return self

    def __call__(self, *args: object, **options: object) -> None:
        self.args, self.options = args, options


def compile_as_launched(module: ModuleType, name: str, launch: Callable[[], object]) -> dict[str, str]:
    """What the launcher asks for, compiled for Hopper, which needs no GPU."""
    kernel, recorder = getattr(module, name), Recorder()
    if not isinstance(kernel, triton.JITFunction):
        pytest.skip("TRITON_INTERPRET is set, so nothing can be compiled")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, name, recorder)
        launch()
    given = list(zip(kernel.params, recorder.args, strict=False))
    signature = {parameter.name: parameter.annotation_type or POINTERS[arg.dtype] for parameter, arg in given}
    aligned = {
        (parameter.num,): [["tt.divisibility", 16]]
        for parameter, arg in given
        if isinstance(arg, torch.Tensor) and not parameter.do_not_specialize and arg.data_ptr() % 16 == 0
    }
    constants = {name: value for name, value in recorder.options.items() if name in kernel.arg_names}
    options = {name: value for name, value in recorder.options.items() if name not in constants}
    source = ASTSource(kernel, signature | dict.fromkeys(constants, "constexpr"), constants, aligned)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm


def compiled_variant(variant: str) -> dict[str, str]:
    """Two rows of A14B's q and k."""
    from usp.kernels import norm_rope

    case = Case(1, 2, 128, ((40, 40 if "together" in variant else 8),))
    given, (_, blocks) = inputs(case, "cpu"), poisoned_blocks(case, "cpu")

    def launch() -> None:
        if variant == "norm alone":
            norm_rope.rms_norm(given.q, given.q_weight, eps=EPS)
        else:
            to = blocks if "blocks" in variant else None
            norm_rope.norm_rope(given.q, given.k, given.q_weight, given.k_weight, *given.rope, eps=EPS, blocks=to)

    return compile_as_launched(norm_rope, "_norm_rope", launch)


VARIANTS = ["together to blocks", "one by one to blocks", "together in place", "norm alone"]


def test_compiled_rows_move_16_bytes_at_once_without_contraction(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    """A contracted multiply-add rounds once where torch rounds twice."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for variant in VARIANTS:
        asm = compiled_variant(variant)
        assert set(re.findall(r"\b(?:mul|add|sub|fma)\.(?:\w+\.)*f32", asm["ptx"])) <= EXACT, variant
        table_loads = {"b64"} if "blocks" in variant else set()
        assert set(re.findall(r"ld\.global\.(\S+)", asm["ptx"])) == {"v4.b32"} | table_loads, variant
        assert set(re.findall(r"st\.global\.(\S+)", asm["ptx"])) == {"v4.b32"}, variant
        assert "ttg.convert_layout" not in asm["ttgir"], variant


def test_squares_are_summed_in_one_order_in_every_variant(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    (orders,) = {summed_layouts(compiled_variant(variant)["ttgir"]) for variant in VARIANTS}
    assert len(orders) == 1


def summed_layouts(ttgir: str) -> tuple[tuple[str, str], ...]:
    """Of each sum in turn, the tile's layout before and after it is flattened: which thread adds what to what."""
    layouts = dict(re.findall(r"^(#\w+) = (.*)$", ttgir, re.MULTILINE))
    pairs = re.findall(r"tt\.reshape .* allow_reorder : tensor<\w+, (#\w+)> -> tensor<\w+, (#\w+)>", ttgir)
    return tuple((layouts[before], layouts[after]) for before, after in pairs)
