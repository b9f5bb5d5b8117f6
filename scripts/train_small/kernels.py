"""What a block runs besides products and attention while it trains: the twins, with fewer launches."""

from typing import Any

import torch

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
    q: torch.Tensor, k: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, *rope: Any, **how: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    return norm_rope_reference(q, k, q_weight.to(q.dtype), k_weight.to(k.dtype), *rope, **how)


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, *rest: Any, **how: Any) -> torch.Tensor:
    return rms_norm_reference(x, weight.to(x.dtype), *rest, **how)
