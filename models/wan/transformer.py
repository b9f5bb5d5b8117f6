"""The Wan text-to-video transformer, over tokens: [B, S, patch_dim] in, [B, S, out_patch_dim] out.

Everything except self-attention is local to a token, so the model takes the tokens it is given (a whole clip or a
rank's share) and a `self_attention` callable that knows whom to ask for the rest. Parameter names are those of the
Diffusers checkpoints; arithmetic and rounding follow the reference, `diffusers.WanTransformer3DModel`: norms,
modulation and residual sums in fp32, everything else in the dtype of the weights. What lies between the products and
attention is done by `usp.kernels`: each pass reads and writes a row once.

Shapes: B batch, S tokens, L text positions, H heads, D head dim, C = H * D model width.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from usp.attention import Attention
from usp.destinations import FillBlocks
from usp.kernels import Kernels, kernels_for, twins
from usp.models.wan.config import PATCH_SIZE, TransformerConfig
from usp.models.wan.fused import fuse_rows, fused_rows
from usp.models.wan.rope import RopeTable
from usp.ulysses import UlyssesAttention

PROJECTED_ROWS = 4096


class Addend(NamedTuple):
    """What is still to be added to the residual stream: y * gate, or y alone; [B, S, C] and fp32 [B, 1, C]."""

    y: torch.Tensor
    gate: torch.Tensor | None


class TextKV(NamedTuple):
    """Keys and values of the text for one block, [B, L, H, D] each: the same at every step."""

    k: torch.Tensor
    v: torch.Tensor


class WanTransformer(nn.Module):
    """One expert. Build it under `torch.device("meta")` and load weights, or in place for tests."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.patch_embedding = PatchEmbedding(config.in_channels, config.dim)
        self.condition_embedder = ConditionEmbedder(config)
        self.blocks = nn.ModuleList(WanBlock(config) for _ in range(config.num_layers))
        self.norm_out = nn.LayerNorm(config.dim, eps=config.eps, elementwise_affine=False)
        self.proj_out = nn.Linear(config.dim, config.out_patch_dim)
        self.scale_shift_table = nn.Parameter(torch.empty(1, 2, config.dim))

    def fuse(self) -> None:
        """Lay the weights of products over the same input beside each other, so that one product does for them."""
        for block in self._blocks():
            block.attn1.fuse()

    def project_text(self, text_blc: torch.Tensor) -> list[TextKV]:
        """Encoder states [B, L, text_dim] -> keys and values of every block. Once per prompt and expert."""
        context = self.condition_embedder.text_embedder(text_blc)
        return [block.attn2.project_text(context) for block in self._blocks()]

    def forward(
        self,
        tokens_bsp: torch.Tensor,
        *,
        timestep: torch.Tensor,
        text: list[TextKV],
        rope: RopeTable,
        self_attention: Attention,
        cross_attention: Attention,
        kernels: Kernels | None = None,
    ) -> torch.Tensor:
        """Predict for [B, S, patch_dim] tokens at `timestep` [B]; `rope` has S rows. Returns [B, S, out_patch_dim].

        `kernels` are those of the device if left out; under autograd their twins, which can be differentiated.
        """
        if kernels is None:
            kernels = twins() if torch.is_grad_enabled() else kernels_for(tokens_bsp.device)
        x, addend = self.patch_embedding(tokens_bsp), None
        time, modulation = self.condition_embedder(timestep, dtype=x.dtype)
        for block, text_kv in zip(self._blocks(), text, strict=True):
            x, addend = block(
                x,
                addend,
                modulation=modulation,
                text_kv=text_kv,
                rope=rope,
                self_attention=self_attention,
                cross_attention=cross_attention,
                kernels=kernels,
            )
        shift, scale = (self.scale_shift_table + time[:, None]).float().chunk(2, dim=1)
        _, h = add_and_norm(kernels, x, addend, self.norm_out, scale=scale, shift=shift)
        return project_rows(self.proj_out, h)

    def _blocks(self) -> list["WanBlock"]:
        return list(self.blocks)  # type: ignore[arg-type]


class WanBlock(nn.Module):
    """Self-attention, cross-attention to the text, feed-forward; each around a residual stream [B, S, C].

    A block hands its last addend to the next one, whose first norm reads the stream anyway.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        dim, eps = config.dim, config.eps
        self.norm1 = nn.LayerNorm(dim, eps=eps, elementwise_affine=False)
        self.attn1 = SelfAttention(config)
        self.norm2 = nn.LayerNorm(dim, eps=eps) if config.cross_attn_norm else nn.Identity()
        self.attn2 = CrossAttention(config)
        self.norm3 = nn.LayerNorm(dim, eps=eps, elementwise_affine=False)
        self.ffn = FeedForward(dim, config.ffn_dim)
        self.scale_shift_table = nn.Parameter(torch.empty(1, 6, dim))

    def forward(
        self,
        x: torch.Tensor,
        addend: Addend | None,
        *,
        modulation: torch.Tensor,
        text_kv: TextKV,
        rope: RopeTable,
        self_attention: Attention,
        cross_attention: Attention,
        kernels: Kernels,
    ) -> tuple[torch.Tensor, Addend]:
        """The stream without this block's last addend, and that addend. Without gradients x is written over."""
        shift1, scale1, gate1, shift3, scale3, gate3 = (self.scale_shift_table + modulation.float()).chunk(6, dim=1)
        x, h = add_and_norm(kernels, x, addend, self.norm1, scale=scale1, shift=shift1)
        addend = Addend(self.attn1(h, rope=rope, attention=self_attention, kernels=kernels), gate1)
        x, h = add_and_norm(kernels, x, addend, self.norm2)
        addend = Addend(self.attn2(h, text_kv, attention=cross_attention, kernels=kernels), None)
        x, h = add_and_norm(kernels, x, addend, self.norm3, scale=scale3, shift=shift3)
        del addend  # a tensor of the stream's size, while the widest layer works
        return x, Addend(self.ffn(h), gate3)


def add_and_norm(
    kernels: Kernels,
    x: torch.Tensor,
    addend: Addend | None,
    norm: nn.Module,
    *,
    scale: torch.Tensor | None = None,
    shift: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The stream with what was still to be added, in place unless gradients are wanted, and its LayerNorm, modulated;
    [B, S, C] both."""
    y, gate = addend or (None, None)
    if not isinstance(norm, nn.LayerNorm):
        assert y is not None and gate is not None and scale is None
        x = (x.float() + y * gate).type_as(x)
        return x, norm(x)
    weight, bias = (None if one is None else one.float() for one in (norm.weight, norm.bias))
    out = None if y is None or torch.is_grad_enabled() else x
    vectors = {"weight": weight, "bias": bias, "scale": scale, "shift": shift}
    return kernels.residual_norm(x, y, gate, **vectors, eps=norm.eps, out=out)


class WanAttention(nn.Module):
    """The projections and norms that both attentions have. q and k are normed over all heads together."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        dim = config.dim
        self.head_dim, self.eps = config.head_dim, config.eps
        self.to_q, self.to_k, self.to_v = (nn.Linear(dim, dim) for _ in range(3))
        self.to_out = nn.ModuleList([nn.Linear(dim, dim)])
        self.norm_q = nn.RMSNorm(dim, eps=config.eps)
        self.norm_k = nn.RMSNorm(dim, eps=config.eps)

    def split_heads(self, x_bsc: torch.Tensor) -> torch.Tensor:
        return x_bsc.unflatten(-1, (-1, self.head_dim))  # [B, S, C] -> [B, S, H, D]

    def project_out(self, x_bshd: torch.Tensor) -> torch.Tensor:
        return self.to_out[0](x_bshd.flatten(2))


class SelfAttention(WanAttention):
    def fuse(self) -> None:
        fuse_rows(self.to_q, self.to_k, self.to_v)

    def forward(self, x: torch.Tensor, *, rope: RopeTable, attention: Attention, kernels: Kernels) -> torch.Tensor:
        q, k, v = (self.split_heads(one) for one in self._project(x))
        weights = self.norm_q.weight, self.norm_k.weight

        def norm_rope(blocks: FillBlocks | None = None) -> tuple[torch.Tensor, torch.Tensor]:
            return kernels.norm_rope(q, k, *weights, rope.cos, rope.sin, eps=self.eps, blocks=blocks)

        if isinstance(attention, UlyssesAttention) and attention.is_pipelined:
            out = attention.filled(v, norm_rope, num_heads=q.shape[2])
        else:
            out = attention(*norm_rope(), v)
        return self.project_out(out)

    def _project(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """q, k, v [B, S, C], slices of one product where the weights lie beside each other."""
        fused = fused_rows(self.to_q, self.to_k, self.to_v)
        if fused is None:
            return self.to_q(x), self.to_k(x), self.to_v(x)
        return F.linear(x, *fused).chunk(3, dim=-1)


class CrossAttention(WanAttention):
    """Own tokens against the whole text, which every rank holds: nothing is exchanged."""

    def project_text(self, context_blc: torch.Tensor) -> TextKV:
        k = self.split_heads(self.norm_k(self.to_k(context_blc)))
        return TextKV(k, self.split_heads(self.to_v(context_blc)))

    def forward(self, x: torch.Tensor, text_kv: TextKV, *, attention: Attention, kernels: Kernels) -> torch.Tensor:
        q = kernels.rms_norm(self.split_heads(self.to_q(x)), self.norm_q.weight, eps=self.eps)
        return self.project_out(attention(q, text_kv.k, text_kv.v))


class FeedForward(nn.Module):
    def __init__(self, dim: int, ffn_dim: int) -> None:
        super().__init__()
        up = nn.Module()
        up.proj = nn.Linear(dim, ffn_dim)
        self.net = nn.ModuleList([up, nn.Identity(), nn.Linear(ffn_dim, dim)])  # the names of the checkpoint

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net[2](F.gelu(self.net[0].proj(x), approximate="tanh"))  # type: ignore[operator]


class PatchEmbedding(nn.Module):
    """The checkpoint's Conv3d of stride = kernel, applied to tokens: one linear layer over a flattened patch."""

    def __init__(self, in_channels: int, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim, in_channels, *PATCH_SIZE))
        self.bias = nn.Parameter(torch.empty(dim))

    def forward(self, tokens_bsp: torch.Tensor) -> torch.Tensor:
        return F.linear(tokens_bsp, self.weight.flatten(1), self.bias)


class ConditionEmbedder(nn.Module):
    """The step, as one vector and as the six modulation vectors of a block; the text, at model width."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.freq_dim = config.freq_dim
        self.time_embedder = TwoLinear(config.freq_dim, config.dim, activation="silu")
        self.time_proj = nn.Linear(config.dim, 6 * config.dim)
        self.text_embedder = TwoLinear(config.text_dim, config.dim, activation="gelu_tanh")

    def forward(self, timestep: torch.Tensor, *, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """[B] -> ([B, C], [B, 6, C])"""
        waves = timestep_waves(timestep, self.freq_dim).to(self.time_embedder.linear_1.weight.dtype)
        time = self.time_embedder(waves).to(dtype)
        return time, self.time_proj(F.silu(time)).unflatten(1, (6, -1))


class TwoLinear(nn.Module):
    def __init__(self, in_dim: int, dim: int, *, activation: str) -> None:
        super().__init__()
        self.linear_1, self.linear_2 = nn.Linear(in_dim, dim), nn.Linear(dim, dim)
        self.activation = nn.SiLU() if activation == "silu" else nn.GELU(approximate="tanh")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear_2(self.activation(self.linear_1(x)))


def project_rows(layer: nn.Linear, x_bsc: torch.Tensor) -> torch.Tensor:
    """`layer(x)`, always as products of PROJECTED_ROWS rows, so that a token's bits do not depend on how many ranks
    share the clip: for a narrow output cuBLAS splits the sum over columns by the number of rows."""
    chunks = x_bsc.flatten(0, 1).split(PROJECTED_ROWS)
    padded = (F.pad(chunk, (0, 0, 0, PROJECTED_ROWS - len(chunk))) for chunk in chunks)
    out = torch.cat([layer(chunk)[: len(rows)] for chunk, rows in zip(padded, chunks, strict=True)])
    return out.unflatten(0, x_bsc.shape[:2])


def timestep_waves(timestep: torch.Tensor, freq_dim: int) -> torch.Tensor:
    """[B] -> [B, freq_dim]: cosines, then sines, of geometrically spaced frequencies, fp32."""
    half = freq_dim // 2
    exponents = -math.log(10000) * torch.arange(half, dtype=torch.float32, device=timestep.device) / half
    angles = timestep[:, None].float() * torch.exp(exponents)
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


def patchify(latent_bcfhw: torch.Tensor) -> torch.Tensor:
    """[B, C, F, H, W] -> [B, S, C * 1 * 2 * 2], tokens in (frame, row, column) order."""
    batch, channels, frames, height, width = latent_bcfhw.shape
    pt, ph, pw = PATCH_SIZE
    cut = latent_bcfhw.reshape(batch, channels, frames // pt, pt, height // ph, ph, width // pw, pw)
    # [B, C, F, pt, H, ph, W, pw] -> [B, F, H, W, C, pt, ph, pw] -> [B, S, C * pt * ph * pw]
    return cut.permute(0, 2, 4, 6, 1, 3, 5, 7).flatten(4).flatten(1, 3)


def unpatchify(tokens_bsp: torch.Tensor, *, token_grid: tuple[int, int, int]) -> torch.Tensor:
    """[B, S, 1 * 2 * 2 * C] -> [B, C, F, H, W]. The final projection puts channels last, unlike the embedding."""
    pt, ph, pw = PATCH_SIZE
    frames, height, width = token_grid
    # [B, S, pt * ph * pw * C] -> [B, F, H, W, pt, ph, pw, C] -> [B, C, F, pt, H, ph, W, pw]
    cut = tokens_bsp.unflatten(1, token_grid).unflatten(-1, (pt, ph, pw, -1)).permute(0, 7, 1, 4, 2, 5, 3, 6)
    return cut.reshape(tokens_bsp.shape[0], -1, frames * pt, height * ph, width * pw)
