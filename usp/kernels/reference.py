"""What the kernels compute, in plain torch: the path of ranks without a GPU, and what tests compare kernels with."""

from collections.abc import Iterable

import torch
import torch.nn.functional as F

from usp.destinations import FillBlocks, HeadRun


def place_heads_reference(x_bshd: torch.Tensor, runs: Iterable[HeadRun]) -> None:
    """Copy the rows [B, S_r, H, D] of every head in a run to its place; heads in no run stay where they are."""
    for start, rows in runs:
        rows.copy_(x_bshd[:, :, start : start + rows.shape[2]])


def norm_rope_reference(
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
    """As `usp.kernels.norm_rope.norm_rope`, but what it returns is new, and the inputs stay."""
    q = turn_pairs(rms_norm_reference(q_bshd, q_weight, eps=eps), rope_cos, rope_sin)
    k = turn_pairs(rms_norm_reference(k_bshd, k_weight, eps=eps), rope_cos, rope_sin)
    if blocks is not None:
        blocks.check(q=q, k=k)
        place_heads_reference(q, [(block.head_start, block.q_dst) for block in blocks])
        place_heads_reference(k, [(block.kv_head_start, block.k_dst) for block in blocks])
    return q, k


def rms_norm_reference(
    x_bshd: torch.Tensor, weight: torch.Tensor, *, eps: float, out: torch.Tensor | None = None
) -> torch.Tensor:
    """As `usp.kernels.norm_rope.rms_norm`."""
    normed = F.rms_norm(x_bshd.flatten(2), weight.shape, weight, eps).unflatten(2, x_bshd.shape[2:])
    return normed if out is None else out.copy_(normed)


def turn_pairs(x_bshd: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn every (even, odd) pair of columns by its angle [S_r, D/2], in fp32; the result has the dtype of x."""
    even, odd = x_bshd.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos[:, None], sin[:, None]  # [S_r, D/2] -> [S_r, 1, D/2]
    out = torch.empty_like(x_bshd)
    out[..., 0::2] = even * cos - odd * sin
    out[..., 1::2] = even * sin + odd * cos
    return out


def residual_norm_reference(
    x_bsc: torch.Tensor,
    y_bsc: torch.Tensor | None = None,
    gate: torch.Tensor | None = None,
    *,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    shift: torch.Tensor | None = None,
    eps: float,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `usp.kernels.residual_norm.residual_norm`."""
    x = x_bsc
    if y_bsc is not None:
        total = x.float() + (y_bsc.float() if gate is None else y_bsc * gate)
        x = total.type_as(x) if out is None else out.copy_(total)
    h = F.layer_norm(x.float(), x.shape[-1:], weight, bias, eps)
    if scale is not None and shift is not None:
        h = h * (1 + scale) + shift
    return x, h.type_as(x)
