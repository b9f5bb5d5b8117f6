"""What a block runs besides products and attention while it trains: the twins, with fewer launches."""

import torch

from usp.destinations import FillBlocks
from usp.kernels import Kernels
from usp.kernels.reference import norm_rope_reference, residual_norm_reference, rms_norm_reference


def training_kernels(*, compiled: bool = False) -> Kernels:
    """Norm weights take the dtype of their rows, which torch then norms in one kernel. `compiled` fuses more, after a
    minute of compiling."""
    kernels = (_norm_rope, _rms_norm, residual_norm_reference)
    if compiled:
        return Kernels(*(torch.compile(one, dynamic=False) for one in kernels))
    return Kernels(*kernels)


def _norm_rope(
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
    weights = (weight.to(q_bshd.dtype) for weight in (q_weight, k_weight))
    return norm_rope_reference(q_bshd, k_bshd, *weights, rope_cos, rope_sin, eps=eps, blocks=blocks)


def _rms_norm(
    x_bshd: torch.Tensor, weight: torch.Tensor, *, eps: float, out: torch.Tensor | None = None
) -> torch.Tensor:
    return rms_norm_reference(x_bshd, weight.to(x_bshd.dtype), eps=eps, out=out)
