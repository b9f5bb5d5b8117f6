"""The start-up check of the kernels of a block: each runs once on a few rows and must agree with its twin.

Compiles them, too, so that a compiler which is missing is noticed before any weight loads. Used by a run's set-up.

Shapes: S_r rows, H heads, D head dim, C = H * D.
"""

from collections.abc import Callable, Sequence

import torch

from usp.kernels import Kernels, kernels_for, twins

NUM_ROWS = 3
UNITS, FP32_UNITS = 4, 64  # in the last place of the largest value: kernel and twin sum thousands in another order
EPS = 1e-6
SEED = 0

Run = Callable[[Kernels], Sequence[torch.Tensor]]


def why_no_kernels(device: torch.device, *, num_heads: int, head_dim: int, dtype: torch.dtype) -> str | None:
    """None if all agree, or if there are none on this device; else a clause. What a compiler raises is an answer."""
    if device.type != "cuda":
        return None
    try:
        return _why_wrong(kernels_for(device), _runs(device, num_heads, head_dim, dtype))
    except Exception as error:
        first_line = next(iter(str(error).strip().splitlines()), "no message")
        return f"the kernels of a block fail on a tiny input ({type(error).__name__}: {first_line})"


def _runs(device: torch.device, num_heads: int, head_dim: int, dtype: torch.dtype) -> dict[str, Run]:
    generator, dim = torch.Generator(device).manual_seed(SEED), num_heads * head_dim

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    q, k = draw(1, NUM_ROWS, 3 * num_heads, head_dim).to(dtype).split(num_heads, dim=2)[:2]
    weights = [draw(dim).to(dtype) for _ in "qk"]
    x, y, angles = draw(1, NUM_ROWS, dim).to(dtype), draw(1, NUM_ROWS, dim).to(dtype), draw(NUM_ROWS, head_dim // 2)
    gate, scale, shift, weight, bias = draw(5, 1, 1, dim)
    affine = {"weight": weight.flatten(), "bias": bias.flatten()}
    return {
        "norm and RoPE": lambda one: one.norm_rope(q.clone(), k.clone(), *weights, angles.cos(), angles.sin(), eps=EPS),
        "RMSNorm": lambda one: (one.rms_norm(q.contiguous(), weights[0], eps=EPS),),
        "gated residual and norm": lambda one: one.residual_norm(x, y, gate, scale=scale, shift=shift, eps=EPS),
        "residual and affine norm": lambda one: one.residual_norm(x, y, **affine, eps=EPS),
    }


def _why_wrong(kernels: Kernels, runs: dict[str, Run]) -> str | None:
    for name, run in runs.items():
        for found, wanted in zip(run(kernels), run(twins()), strict=True):
            error = float((found.float() - wanted.float()).abs().max())
            units = FP32_UNITS if wanted.dtype == torch.float32 else UNITS
            allowed = units * torch.finfo(wanted.dtype).eps * float(wanted.float().abs().max())
            if not error <= allowed:  # NaN is wrong, too
                return f"the kernel of {name} is off by {error:.3g} from plain torch, where {allowed:.3g} is allowed"
    return None
