"""The placement kernel moves what its torch twin moves, bit for bit, and touches nothing else.

Without a GPU in Triton's interpreter, over addresses of this process; with one also on it.
"""

import importlib.util
import mmap
import os
import random
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import usp.kernels
from tests.unit.test_destinations import EVERY_RANK, executor
from usp.destinations import HeadRun, alignment, head_table
from usp.fill import fill_from, make_placer
from usp.ipc.errors import SetupError
from usp.kernels import load_place_heads
from usp.kernels.reference import place_heads_reference
from usp.plan import AttentionPlan
from usp.transport import _why_no_kernel as why_no_kernel

POISON = 0x5A
NO_GPU = not torch.cuda.is_available()
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(NO_GPU, reason="needs a GPU")])]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(scope="module")
def interpreted() -> ModuleType:
    """A copy of the kernel's module for the interpreter: Triton decides that for good while it decorates.

    Triton's own library is decorated above, where it is imported, so that the same process can also compile.
    """
    spec = importlib.util.find_spec("usp.kernels.place")
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        spec.loader.exec_module(module)
    return module


@pytest.fixture
def place_heads(request: pytest.FixtureRequest, device: str):
    return request.getfixturevalue("interpreted").place_heads if device == "cpu" else load_place_heads()


@dataclass(frozen=True)
class Case:
    """`widths` are the heads of each destination in turn; those of a negative width are left out."""

    batch: int
    num_rows: int
    head_dim: int
    widths: tuple[int, ...]
    dtype: torch.dtype
    fused: bool

    @property
    def num_heads(self) -> int:
        return sum(map(abs, self.widths))


def random_case(source: random.Random) -> Case:
    widths = tuple(source.choice((-2, -1, 1, 2, 3)) for _ in range(source.randint(1, 4)))
    return Case(
        batch=source.randint(1, 3),
        num_rows=source.choice((1, 2, 31, 32, 33, 70)),
        head_dim=source.choice((1, 3, 8, 12, 64, 128)),
        widths=widths,
        dtype=source.choice(DTYPES),
        fused=source.random() < 0.7,
    )


def random_bits(*shape: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """Every bit pattern, NaNs among them: what is moved is not to be interpreted."""
    raw = torch.randint(0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), dtype=torch.uint8)
    return raw.view(dtype).to(device)


def source_rows(case: Case, device: str) -> torch.Tensor:
    """[B, S_r, H, D], alone or as v in a fused projection's output of which this rank has the middle rows."""
    if not case.fused:
        return random_bits(case.batch, case.num_rows, case.num_heads, case.head_dim, dtype=case.dtype, device=device)
    fused = random_bits(
        case.batch, case.num_rows + 5, 3 * case.num_heads, case.head_dim, dtype=case.dtype, device=device
    )
    return fused[:, 3 : 3 + case.num_rows, 2 * case.num_heads :]


def poisoned(case: Case, device: str) -> tuple[torch.Tensor, list[HeadRun]]:
    """Memory, and runs in it: slots of more rows than are written, as between a prefix and others' tokens."""
    start, runs, taken = 0, [], 0
    slot_rows = case.num_rows + 7
    sizes = [case.batch * slot_rows * max(width, 0) * case.head_dim for width in case.widths]
    memory = torch.full(((sum(sizes) + 64) * case.dtype.itemsize,), POISON, dtype=torch.uint8, device=device)
    items = memory.view(case.dtype)
    for width, size in zip(case.widths, sizes, strict=True):
        if width > 0:
            slot = items[taken : taken + size].view(case.batch, slot_rows, width, case.head_dim)
            runs.append((start, slot[:, 4 : 4 + case.num_rows]))
        start, taken = start + abs(width), taken + size
    return memory, runs


@contextmanager
def sparse_memory(nbytes: int) -> Iterator[torch.Tensor]:
    fd = os.memfd_create("sparse", os.MFD_CLOEXEC)
    try:
        os.truncate(fd, nbytes)
        yield torch.frombuffer(mmap.mmap(fd, nbytes), dtype=torch.uint8)
    finally:
        os.close(fd)


@pytest.mark.parametrize("device", DEVICES)
def test_kernel_and_twin_leave_the_same_bytes_in_all_of_the_memory(place_heads, device: str) -> None:
    seed = random.randrange(2**31)
    source = random.Random(seed)
    for _ in range(80):
        case = random_case(source)
        x = source_rows(case, device)
        (found, runs), (expected, same_runs) = poisoned(case, device), poisoned(case, device)
        place_heads(x, head_table(runs, num_heads=case.num_heads, device=device))
        place_heads_reference(x, same_runs)
        assert torch.equal(found, expected), f"{case} of seed {seed}"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(2, 0, 3, 8), (0, 5, 3, 8), (1, 5, 0, 8)])
def test_nothing_to_place_is_no_launch(place_heads, device: str, shape: tuple[int, ...]) -> None:
    memory = torch.full((64,), POISON, dtype=torch.uint8, device=device)
    table = torch.tensor([[memory.data_ptr(), 0, 0]] * shape[2], dtype=torch.int64, device=device).reshape(-1, 3)
    place_heads(torch.zeros(shape, device=device), table)
    assert (memory == POISON).all()


@pytest.mark.parametrize("device", DEVICES)
def test_heads_that_are_not_dense_are_refused(place_heads, device: str) -> None:
    table = torch.zeros(2, 3, dtype=torch.int64, device=device)
    for x in (torch.zeros(1, 4, 2, 16, device=device)[..., ::2], torch.zeros(1, 4, 4, 8, device=device)[:, :, ::2]):
        with pytest.raises(AssertionError, match="dense_heads"):
            place_heads(x, table)


@pytest.mark.parametrize("distance", [2**30 + 64, 2**31 + 64])  # the products need more than 32 bits; the stride too
@pytest.mark.parametrize("far", ["source rows", "source samples", "target rows", "target samples"])
def test_offsets_beyond_31_bits_are_not_cut(interpreted: ModuleType, far: str, distance: int) -> None:
    """Four rows or samples far apart, in memory of which only the touched pages exist."""
    origin = 2**31  # before it lies what a wrapped offset would reach
    along_rows = far.endswith("rows")
    shape, strides = ((1, 4, 1, 64), (64, distance)) if along_rows else ((4, 1, 1, 64), (distance, 64))
    with sparse_memory(2 * (origin + 4 * distance)) as memory:
        apart = memory.view(torch.bfloat16).as_strided(shape, (*strides, 64, 1), origin)
        near = random_bits(*shape, dtype=torch.bfloat16, device="cpu")
        expected = near.clone().view(torch.int16)
        if far.startswith("source"):
            apart.copy_(near)
            near.zero_()
        source, target = (apart, near) if far.startswith("source") else (near, apart)
        interpreted.place_heads(source, head_table([(0, target)], num_heads=1))
        assert torch.equal(target.contiguous().view(torch.int16), expected)


@pytest.mark.parametrize(
    ("shift", "pitch", "dtype", "expected"),
    [(0, 64, torch.bfloat16, 16), (1, 64, torch.bfloat16, 2), (0, 36, torch.bfloat16, 8), (2, 64, torch.float32, 8)],
)
def test_a_source_is_read_as_wide_as_its_address_and_strides_allow(
    interpreted: ModuleType, shift: int, pitch: int, dtype: torch.dtype, expected: int
) -> None:
    x = torch.zeros(1000, dtype=dtype).as_strided((2, 3, 2, 16), (4 * pitch, pitch, 16, 1), shift)
    assert interpreted._source_alignment(x) == expected


@pytest.mark.parametrize(("plan", "rank"), EVERY_RANK)
def test_filling_by_kernel_equals_filling_block_by_block(
    interpreted: ModuleType, monkeypatch: pytest.MonkeyPatch, plan: AttentionPlan, rank: int
) -> None:
    monkeypatch.setattr("usp.fill.load_place_heads", lambda: interpreted.place_heads)
    dtype, shape = getattr(torch, plan.dtype), (plan.batch, plan.token_counts[rank])
    q, k = (torch.randn(*shape, heads, plan.head_dim).to(dtype) for heads in (plan.num_heads, plan.num_kv_heads))
    by_kernel, by_block = executor(plan, rank), executor(plan, rank)
    if plan.token_counts[rank]:  # else there is no fill in the schedule
        fill_from(q.transpose(2, 3).contiguous().transpose(2, 3), k, by_kernel=True)(by_kernel.fill_blocks)
        fill_from(q, k)(by_block.fill_blocks)
    assert all(torch.equal(view, by_block.views[buffer]) for buffer, view in by_kernel.views.items())


def test_a_wrong_dtype_is_refused_before_the_kernel_overruns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("usp.fill.load_place_heads", lambda: pytest.fail)
    plan, rank = EVERY_RANK[2]
    q, k = (torch.zeros(plan.batch, plan.token_counts[rank], h, 12) for h in (plan.num_heads, plan.num_kv_heads))
    with pytest.raises(ValueError, match=r"q is torch\.float32 .* hold torch\.bfloat16"):
        fill_from(q, k, by_kernel=True)(executor(plan, rank).fill_blocks)


def test_own_heads_are_placed_alike_by_kernel_and_by_torch(
    interpreted: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("usp.fill.load_place_heads", lambda: interpreted.place_heads)
    case = Case(2, 40, 16, (-3, 1, 3, 2, -4), torch.bfloat16, fused=True)  # before and behind: heads of other ranks
    v = source_rows(case, "cpu")
    (by_kernel, runs), (by_torch, same_runs) = poisoned(case, "cpu"), poisoned(case, "cpu")
    make_placer(runs, num_heads=case.num_heads, by_kernel=True)(v)
    make_placer(same_runs, num_heads=case.num_heads, by_kernel=False)(v)
    assert torch.equal(by_kernel, by_torch) and not (by_kernel == POISON).all()


def test_a_gpu_without_triton_is_told_at_construction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "usp.kernels.place", raising=False)
    monkeypatch.delattr(usp.kernels, "place", raising=False)
    monkeypatch.setitem(sys.modules, "triton", None)
    rows = torch.zeros(1, 2, 1, 8)
    with pytest.raises(SetupError, match=r"Triton is not installed; pip install 'triton>=3\.4', or choose"):
        make_placer([(0, rows)], num_heads=1, by_kernel=True)


def test_the_start_says_why_a_kernel_does_not_run(interpreted: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cpu")
    monkeypatch.setattr("usp.fill.load_place_heads", lambda: interpreted.place_heads)
    assert why_no_kernel(device) is None
    monkeypatch.setattr("usp.fill.load_place_heads", lambda: lambda x, table: None)
    assert why_no_kernel(device) == "its Triton kernel computes nonsense"

    def fails(x: torch.Tensor, table: torch.Tensor) -> None:
        raise FileNotFoundError("no C compiler")

    monkeypatch.setattr("usp.fill.load_place_heads", lambda: fails)
    assert why_no_kernel(device) == "its Triton kernel fails: FileNotFoundError: no C compiler"
    monkeypatch.undo()
    monkeypatch.delitem(sys.modules, "usp.kernels.place", raising=False)
    monkeypatch.delattr(usp.kernels, "place", raising=False)
    monkeypatch.setitem(sys.modules, "triton", None)
    assert "Triton is not installed" in why_no_kernel(device)


@pytest.mark.parametrize(("head_dim", "align", "access"), [(128, 16, "v4.b32"), (12, 8, "v2.b32"), (1, 2, "b16")])
def test_the_compiled_kernel_moves_as_many_bytes_at_once_as_the_heads_allow(
    head_dim: int, align: int, access: str, monkeypatch: pytest.MonkeyPatch, tmp_path
) -> None:
    """Compiled for Hopper, which needs no GPU: 16 bytes for bf16 heads of 128, 8 for heads of 12."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from usp.kernels.place import ROWS_PER_PROGRAM, _place_heads

    if not isinstance(_place_heads, triton.JITFunction):
        pytest.skip("TRITON_INTERPRET is set, so nothing can be compiled")
    assert alignment(head_dim, itemsize=2) == align
    constants = {"HEAD_DIM": head_dim, "ROWS": ROWS_PER_PROGRAM, "COLS": triton.next_power_of_2(head_dim)}
    constants |= {"SOURCE_ALIGN": align, "TARGET_ALIGN": align}
    signature = {"x_ptr": "*bf16", "table_ptr": "*i64", "num_heads": "i32", "num_rows": "i32"}
    signature |= {"batch_stride": "i64", "row_stride": "i64"} | dict.fromkeys(constants, "constexpr")
    compiled = triton.compile(ASTSource(_place_heads, signature, constants), target=GPUTarget("cuda", 90, 32))
    assert set(re.findall(r"ld\.global\.(\S+)", compiled.asm["ptx"])) == {"b64", access}  # the table, and the rows
    assert set(re.findall(r"st\.global\.(\S+)", compiled.asm["ptx"])) == {access}
