"""The start-up check of a block's kernels: what is taken, what is refused, and that all ranks refuse together."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from tests.unit.test_norm_rope_kernel import interpreted_module
from usp.errors import UserError
from usp.kernels import Kernels, check, twins
from usp.kernels.check import why_no_kernels
from usp.launch import run

CPU = torch.device("cpu")
SHAPE = {"num_heads": 4, "head_dim": 32, "dtype": torch.bfloat16}


def why(kernels: Kernels, dtype: torch.dtype = torch.bfloat16) -> str | None:
    return check._why_wrong(kernels, check._runs(CPU, 4, 32, dtype))


def changed(kernel: Callable, change: Callable) -> Callable:
    return lambda *args, **how: tuple(map(change, kernel(*args, **how)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_kernels_pass_and_so_do_their_twins(dtype: torch.dtype) -> None:
    assert why(twins(), dtype) is None
    with interpreted_module("usp.kernels.norm_rope") as norms:
        assert why(replace(twins(), norm_rope=norms.norm_rope, rms_norm=norms.rms_norm), dtype) is None
    with interpreted_module("usp.kernels.residual_norm") as residual:
        assert why(replace(twins(), residual_norm=residual.residual_norm), dtype) is None


@pytest.mark.parametrize(
    "change",
    [torch.zeros_like, lambda x: x * torch.nan, lambda x: x * 1.1, lambda x: x.roll(1, dims=1)],
    ids=["zeros", "nan", "scaled", "rows moved"],
)
def test_a_kernel_that_computes_something_else_is_named(change: Callable) -> None:
    plain = twins()
    assert "the kernel of norm and RoPE is off by" in why(replace(plain, norm_rope=changed(plain.norm_rope, change)))
    broken = replace(plain, rms_norm=lambda *args, **how: change(plain.rms_norm(*args, **how)))
    assert "the kernel of RMSNorm is off by" in why(broken)
    broken = replace(plain, residual_norm=changed(plain.residual_norm, change))
    assert "the kernel of gated residual and norm is off by" in why(broken)


def test_an_affine_norm_that_forgets_its_bias_is_noticed() -> None:
    plain = twins()

    def forgetful(*args, bias=None, **how):
        return plain.residual_norm(*args, bias=None if bias is None else torch.zeros_like(bias), **how)

    assert "the kernel of residual and affine norm is off by" in why(replace(plain, residual_norm=forgetful))


def test_what_a_compiler_raises_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(device: torch.device) -> Kernels:
        raise RuntimeError("Failed to find C compiler.\nPlease specify via CC")

    monkeypatch.setattr(check, "kernels_for", missing)
    text = why_no_kernels(torch.device("cuda"), **SHAPE)
    assert text == "the kernels of a block fail on a tiny input (RuntimeError: Failed to find C compiler.)"
    assert why_no_kernels(CPU, **SHAPE) is None  # which has none


def test_all_ranks_refuse_what_one_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def gathered(into: list, own: object) -> None:
        into[:] = [None, None, "the kernels of a block fail"]

    monkeypatch.setattr(run.dist, "get_world_size", lambda: 3)
    monkeypatch.setattr(run.dist, "all_gather_object", gathered)
    with pytest.raises(UserError, match=r"rank 2: the kernels of a block fail; cpu.*, torch .*, (no )?Triton"):
        run.refuse(None, CPU)
