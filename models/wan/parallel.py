"""Wan over a (cfg, ulysses) mesh: the one file of the model that knows ranks.

A rank embeds, transforms and projects its own tokens; self-attention reaches the others' through the exchange; with a
cfg axis of 2 each half of the ranks computes one guidance branch. Every rank ends with the whole guided prediction.
Costs one gather of out_patch_dim-wide tokens per step, beside the exchange inside the blocks.
"""

import torch

from usp.attention import Attention
from usp.collectives import all_gather, broadcast
from usp.exchange import CollectiveExchange
from usp.layout import split_offsets
from usp.mesh import Mesh
from usp.models.wan.clip import Clip
from usp.models.wan.config import TransformerConfig
from usp.models.wan.rope import rope_table
from usp.models.wan.sampling import Prompt
from usp.models.wan.transformer import WanTransformer, patchify, unpatchify
from usp.ulysses import UlyssesAttention

BRANCHES = ("positive", "negative")  # by index on the cfg axis


class ParallelDenoiser:
    """Predicts for a whole clip with the ranks of a mesh. One per clip size; every rank calls `predict` alike."""

    def __init__(
        self,
        clip: Clip,
        config: TransformerConfig,
        *,
        mesh: Mesh,
        exchange: CollectiveExchange,
        attention: Attention,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.clip, self.mesh, self.dtype = clip, mesh, dtype
        self.exchange, self.attention = exchange, attention
        self.self_attention = UlyssesAttention(exchange, attention=attention)
        counts, index = exchange.token_counts, mesh.ulysses.index
        self.start = split_offsets(counts)[index]
        self.stop = self.start + counts[index]
        self.rope = rope_table(clip.token_grid, config.head_dim).rows(self.start, self.stop).to(device)

    def predict(
        self, model: WanTransformer, latent: torch.Tensor, *, timestep: float, guidance: float, prompt: Prompt
    ) -> torch.Tensor:
        """Guided prediction for [1, C, F, H, W], fp32: u + g(c - u) for any g, but g == 1 skips the branch u."""
        own = patchify(latent.to(self.dtype))[:, self.start : self.stop]
        time = torch.full((1,), timestep, device=latent.device)  # no copy from the host, which would wait
        if guidance == 1:
            guided = self._positive_only(model, own, time, prompt)
        else:
            positive, negative = self._both_branches(model, own, time, prompt)
            guided = combine(positive.float(), negative.float(), guidance)
        return unpatchify(self.exchange.gather_tokens(guided), token_grid=self.clip.token_grid)

    def _both_branches(
        self, model: WanTransformer, own: torch.Tensor, time: torch.Tensor, prompt: Prompt
    ) -> tuple[torch.Tensor, torch.Tensor]:
        cfg = self.mesh.cfg
        if cfg.size == 1:
            positive, negative = (self._branch(model, own, time, prompt, branch) for branch in BRANCHES)
        else:
            mine = self._branch(model, own, time, prompt, BRANCHES[cfg.index])
            positive, negative = all_gather(mine, shapes=[tuple(mine.shape)] * cfg.size, axis=cfg)
        return positive, negative

    def _positive_only(
        self, model: WanTransformer, own: torch.Tensor, time: torch.Tensor, prompt: Prompt
    ) -> torch.Tensor:
        cfg = self.mesh.cfg
        if cfg.index == 0:
            mine = self._branch(model, own, time, prompt, "positive")
        else:  # the other half of the ranks idles in the broadcast
            mine = own.new_empty(*own.shape[:2], model.config.out_patch_dim)
        return mine.float() if cfg.size == 1 else broadcast(mine, source=0, axis=cfg).float()

    def _branch(
        self, model: WanTransformer, own: torch.Tensor, time: torch.Tensor, prompt: Prompt, branch: str
    ) -> torch.Tensor:
        text = prompt.project(model, branch)
        self.exchange.at(layer=0)
        return model(
            own,
            timestep=time,
            text=text,
            rope=self.rope,
            self_attention=self.self_attention,
            cross_attention=self.attention,
        )


def combine(positive: torch.Tensor, negative: torch.Tensor, guidance: float) -> torch.Tensor:
    """Classifier-free guidance, u + g(c - u), in the arithmetic and order that every mesh uses."""
    return negative + guidance * (positive - negative)
