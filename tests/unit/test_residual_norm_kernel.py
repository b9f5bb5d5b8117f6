"""The sum has the bits of torch's multiply and add, the norm is as exact as torch's, and its bits need no residual.

Without a GPU in Triton's interpreter, over addresses of this process; with one also on it, at real sizes.
"""

import importlib
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

from tests.unit.test_norm_rope_kernel import (
    APPROXIMATE,
    EXACT,
    bits,
    compile_as_launched,
    interpreted_module,
    summed_layouts,
)
from tests.unit.test_place_kernel import DEVICES
from usp.kernels.reference import residual_norm_reference

EPS = 1e-6


@pytest.fixture
def interpreted() -> Iterator[ModuleType]:
    with interpreted_module("usp.kernels.residual_norm") as module:
        yield module


@pytest.fixture
def kernels(request: pytest.FixtureRequest, device: str) -> ModuleType:
    if device == "cpu":
        return request.getfixturevalue("interpreted")
    return importlib.import_module("usp.kernels.residual_norm")


@dataclass(frozen=True)
class Case:
    batch: int
    num_rows: int
    dim: int
    dtype: torch.dtype
    gated: bool
    affine: bool
    modulated: bool
    shared: bool  # one modulation for all samples


@dataclass
class Inputs:
    x: torch.Tensor
    y: torch.Tensor
    gate: torch.Tensor | None = None
    norm: dict[str, torch.Tensor] = field(default_factory=dict)


def random_case(source: random.Random, device: str) -> Case:
    return Case(
        batch=source.randint(1, 3),
        num_rows=source.choice((1, 2, 7) if device == "cpu" else (1, 63, 1_001)),
        dim=source.choice((8, 48, 72, 1536) if device == "cpu" else (48, 72, 1536, 3072, 5120)),
        dtype=source.choice((torch.float32, torch.bfloat16, torch.bfloat16, torch.float16)),
        gated=source.random() < 0.7,
        affine=source.random() < 0.4,
        modulated=source.random() < 0.6,
        shared=source.random() < 0.5,
    )


def cases(device: str) -> tuple[int, list[Case]]:
    seed = random.randrange(2**31)
    source = random.Random(seed)
    torch.manual_seed(seed)
    wan = [Case(1, 2, 5120, torch.bfloat16, gated, not gated, gated, shared=False) for gated in (True, False)]
    return seed, wan + [random_case(source, device) for _ in range(25 if device == "cpu" else 10)]  # each is compiled


def inputs(case: Case, device: str) -> Inputs:
    """A stream far from zero in places, as Wan's is: what a variance of one pass would lose."""
    shape = (case.batch, case.num_rows, case.dim)
    x, y = ((torch.randn(shape, device=device) * 3 + offset).to(case.dtype) for offset in (7, 0))
    given = Inputs(x, y)
    samples = 1 if case.shared else case.batch
    shift, scale, gate = torch.randn(samples, 6, case.dim, device=device).chunk(6, dim=1)[1:4]
    if case.gated:
        given.gate = gate
    if case.affine:
        given.norm |= {
            "weight": torch.rand(case.dim, device=device) + 0.5,
            "bias": torch.randn(case.dim, device=device),
        }
    if case.modulated:
        given.norm |= {"scale": scale, "shift": shift}
    return given


def torch_norm(x: torch.Tensor, norm: dict[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """LayerNorm and modulation of x in `dtype`."""
    wide = {name: vector.to(dtype) for name, vector in norm.items()}
    h = F.layer_norm(x.to(dtype), x.shape[-1:], wide.get("weight"), wide.get("bias"), EPS)
    return h * (1 + wide["scale"]) + wide["shift"] if "scale" in wide else h


@pytest.mark.parametrize("device", DEVICES)
def test_the_sum_has_the_bits_of_a_separate_multiply_and_add(kernels: ModuleType, device: str) -> None:
    """In place and to poisoned memory; y and the vectors stay as they were."""
    seed, some = cases(device)
    for case in some:
        given = inputs(case, device)
        product = given.y.float() if given.gate is None else given.y * given.gate
        expected = (given.x.float() + product).to(case.dtype)
        before = [bits(one).clone() for one in (given.x, given.y, *given.norm.values())]
        out = torch.full_like(given.x, float("nan"))
        elsewhere, h = kernels.residual_norm(given.x, given.y, given.gate, **given.norm, eps=EPS, out=out)
        assert elsewhere is out and torch.equal(bits(out), bits(expected)), f"{case} of seed {seed}"
        after = [bits(one) for one in (given.x, given.y, *given.norm.values())]
        assert all(map(torch.equal, before, after)), f"{case} of seed {seed}"
        in_place, again = kernels.residual_norm(given.x, given.y, given.gate, **given.norm, eps=EPS, out=given.x)
        assert in_place is given.x and torch.equal(bits(given.x), bits(expected)), f"{case} of seed {seed}"
        assert torch.equal(bits(h), bits(again)), f"{case} of seed {seed}"


@pytest.mark.parametrize("device", DEVICES)
def test_the_norm_errs_at_most_twice_as_much_as_torchs(kernels: ModuleType, device: str) -> None:
    seed, some = cases(device)
    for case in some:
        given = inputs(case, device)
        x, h = kernels.residual_norm(given.x, given.y, given.gate, **given.norm, eps=EPS)
        exact = torch_norm(x, given.norm, torch.float64)
        torchs = torch_norm(x, given.norm, torch.float32).to(case.dtype)
        allowed = 2 * (torchs.double() - exact).abs().max() + APPROXIMATE * exact.abs().max()
        assert (h.double() - exact).abs().max() <= allowed, f"{case} of seed {seed}"


@pytest.mark.parametrize("device", DEVICES)
def test_the_norm_has_the_same_bits_without_the_residual_and_row_by_row(kernels: ModuleType, device: str) -> None:
    seed, some = cases(device)
    for case in some[:12]:
        given = inputs(case, device)
        x, h = kernels.residual_norm(given.x, given.y, given.gate, **given.norm, eps=EPS)
        same, alone = kernels.residual_norm(x, **given.norm, eps=EPS)
        assert same is x and torch.equal(bits(h), bits(alone)), f"{case} of seed {seed}"
        row = random.randrange(case.num_rows)
        _, one = kernels.residual_norm(x[:, row : row + 1].contiguous(), **given.norm, eps=EPS)
        assert torch.equal(bits(one), bits(h[:, row : row + 1])), f"{case} of seed {seed}"


def test_the_twin_computes_what_the_block_of_diffusers_computes() -> None:
    from diffusers.models.normalization import FP32LayerNorm

    for seed in range(10):
        torch.manual_seed(seed)
        given = inputs(Case(2, 5, 48, torch.bfloat16, True, seed % 2 == 0, True, shared=False), "cpu")
        norm = FP32LayerNorm(48, eps=EPS, elementwise_affine="weight" in given.norm)
        norm.load_state_dict({name: given.norm[name] for name in norm.state_dict()})
        x = (given.x.float() + given.y * given.gate).type_as(given.x)
        h = (norm(x.float()) * (1 + given.norm["scale"]) + given.norm["shift"]).type_as(x)
        found = residual_norm_reference(given.x, given.y, given.gate, **given.norm, eps=EPS)
        assert torch.equal(found[0], x) and torch.equal(found[1], h)
        assert torch.equal(residual_norm_reference(given.x, given.y, eps=EPS)[0], given.x + given.y)


def test_no_rows_are_no_launch(interpreted: ModuleType) -> None:
    x = torch.zeros(2, 0, 48)
    assert all(one.shape == x.shape for one in interpreted.residual_norm(x, x, eps=EPS))


VARIANTS = ["gated and modulated", "added and affine", "norm alone"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_compiled_rows_move_16_bytes_at_once_without_contraction(
    variant: str, monkeypatch: pytest.MonkeyPatch, tmp_path
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    asm = compiled_variant(variant)
    assert set(re.findall(r"\b(?:mul|add|sub|fma)\.(?:\w+\.)*f32", asm["ptx"])) <= EXACT
    assert set(re.findall(r"(?:ld|st)\.global\.(\S+)", asm["ptx"])) == {"v4.b32"}
    assert "ttg.convert_layout" not in asm["ttgir"]


def test_rows_are_summed_in_one_order_in_every_variant(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    (orders,) = {summed_layouts(compiled_variant(variant)["ttgir"]) for variant in VARIANTS}
    assert len(orders) == 2 and len(set(orders)) == 1


def compiled_variant(variant: str) -> dict[str, str]:
    """Two rows of A14B."""
    from usp.kernels import residual_norm

    flags = ["gated" in variant, "affine" in variant, "modulated" in variant]
    given = inputs(Case(1, 2, 5120, torch.bfloat16, *flags, shared=False), "cpu")
    rows = (given.x,) if variant == "norm alone" else (given.x, given.y, given.gate)
    return compile_as_launched(
        residual_norm, "_residual_norm", lambda: residual_norm.residual_norm(*rows, **given.norm, eps=EPS)
    )
