"""Flow matching for one expert: which noise levels it sees, what it is to predict, and text padded without waste.

A noisy latent is (1 - sigma) * clip + sigma * noise, and the model predicts noise - clip. Noise levels are spaced as
the sampler spaces them: sigma = shift * u / (1 + (shift - 1) * u) for even u; an expert sees its side of the boundary.

Shapes: B clips, C latent channels, F x H x W latent cells, L text positions, D text width.
"""

import math

import torch
import torch.nn.functional as F

from scripts.train_small.settings import SamplingSettings
from usp.attention import sdpa
from usp.kernels import Kernels
from usp.models.wan.config import TEXT_LEN
from usp.models.wan.rope import RopeTable
from usp.models.wan.transformer import WanTransformer, patchify, unpatchify

TIMESTEPS = 1000


def level_range(name: str, sampling: SamplingSettings) -> tuple[float, float]:
    """The u between which the expert `high` or `low` works."""
    boundary = even_level(sampling.boundary, sampling.shift)
    return (boundary, 1.0) if name == "high" else (0.0, boundary)


def noise_level(u: torch.Tensor, shift: float) -> torch.Tensor:
    """Even levels 0..1 to sigmas."""
    return shift * u / (1 + (shift - 1) * u)


def even_level(sigma: float, shift: float) -> float:
    """The inverse of `noise_level`."""
    return sigma / (shift - (shift - 1) * sigma)


class PaddedText:
    """Cross-attention to L positions as if to TEXT_LEN: the last one stands for all that are empty, which are alike."""

    def __init__(self, num_positions: int, device: torch.device) -> None:
        self.bias = torch.zeros(num_positions, device=device)
        self.bias[-1] = math.log(TEXT_LEN - num_positions + 1)

    def __call__(self, q_bshd: torch.Tensor, k_blhd: torch.Tensor, v_blhd: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q_bshd, k_blhd, v_blhd))
        bias = self.bias.to(q.dtype).repeat(q.shape[2], 1)  # [L] -> [S, L]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2)


def predict(
    model: WanTransformer,
    noisy: torch.Tensor,
    sigma: torch.Tensor,
    states: torch.Tensor,
    *,
    rope: RopeTable,
    cross_attention: PaddedText,
    kernels: Kernels | None = None,
) -> torch.Tensor:
    """The expert's velocity [B, C, F, H, W] for latents at noise levels [B] and states [B, L, D] with an empty end."""
    _, _, frames, height, width = noisy.shape
    out = model(
        patchify(noisy),
        timestep=(sigma * TIMESTEPS).floor(),  # the sampler's are whole numbers too
        text=model.project_text(states),
        rope=rope,
        self_attention=sdpa,
        cross_attention=cross_attention,
        kernels=kernels,
    )
    return unpatchify(out, token_grid=(frames, height // 2, width // 2))
