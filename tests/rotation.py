"""Interleaved RoPE in plain torch: what kernels and models are compared with."""

import torch

from usp.models.wan.rope import RopeTable


def apply_rope(x_bshd: torch.Tensor, rope: RopeTable) -> torch.Tensor:
    """Turn every (even, odd) pair of columns by its angle, in fp32; the result has the dtype of the input."""
    even, odd = x_bshd.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = rope.cos[:, None], rope.sin[:, None]  # [S, D/2] -> [S, 1, D/2]
    out = torch.empty_like(x_bshd)
    out[..., 0::2] = even * cos - odd * sin
    out[..., 1::2] = even * sin + odd * cos
    return out
