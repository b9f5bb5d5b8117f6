"""Many clips at once through our own sampling loop, from a checkpoint folder, on one device.

Shapes: B prompts, C latent channels, F x H x W latent cells, L text positions, T frames of pixels.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from scripts.train_small.world import FRAMES, SIDE
from usp.attention import sdpa
from usp.kernels import twins
from usp.models.wan.checkpoint.folder import open_checkpoint
from usp.models.wan.checkpoint.loader import load_text_encoder, load_tokenizer, load_transformer, load_vae
from usp.models.wan.clip import Clip
from usp.models.wan.parallel import combine
from usp.models.wan.rope import RopeTable, rope_table
from usp.models.wan.sampling import Experts, Prompt, SamplingConfig, initial_noise, make_scheduler, sample
from usp.models.wan.text import encode_prompts
from usp.models.wan.transformer import WanTransformer, patchify, unpatchify
from usp.models.wan.vae import denormalise

CLIP = Clip(FRAMES, SIDE, SIDE)
BATCH = 64


class BatchDenoiser:
    """Predicts for a batch of whole latents, both guidance branches one after the other."""

    def __init__(self, rope: RopeTable) -> None:
        self.rope = rope

    def predict(
        self, model: WanTransformer, latent: torch.Tensor, *, timestep: float, guidance: float, prompt: Prompt
    ) -> torch.Tensor:
        """[B, C, F, H, W] -> the guided prediction, as `usp.models.wan.parallel` combines it."""
        tokens = patchify(latent)
        positive = self._branch(model, tokens, timestep, prompt, "positive")
        if guidance != 1:
            positive = combine(positive, self._branch(model, tokens, timestep, prompt, "negative"), guidance)
        return unpatchify(positive, token_grid=CLIP.token_grid)

    def _branch(
        self, model: WanTransformer, tokens: torch.Tensor, timestep: float, prompt: Prompt, branch: str
    ) -> torch.Tensor:
        return model(
            tokens,
            timestep=torch.full((len(tokens),), timestep, device=tokens.device),
            text=prompt.project(model, branch),
            rope=self.rope,
            self_attention=sdpa,
            cross_attention=sdpa,
            kernels=twins(),
        )


@dataclass(frozen=True)
class Guidance:
    high: float
    low: float


class Sampler:
    """A checkpoint, loaded in fp32, and what it makes of prompts."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        self.checkpoint, self.device = open_checkpoint(folder), device
        fp32 = torch.float32
        self.vae = load_vae(self.checkpoint, device=device, dtype=fp32)
        self.text_encoder = load_text_encoder(self.checkpoint, device=device, dtype=fp32)
        self.tokenizer = load_tokenizer(self.checkpoint)
        files = {"high": self.checkpoint.high, "low": self.checkpoint.low}
        models = {
            name: load_transformer(one, device=device, dtype=fp32) for name, one in files.items() if one is not None
        }
        self.experts = Experts({name: lambda name=name: models[name] for name in models}, keep_one=False)  # type: ignore[misc]
        rope = rope_table(CLIP.token_grid, self.checkpoint.high.config.head_dim)
        self.denoiser = BatchDenoiser(rope.to(device))

    def clips(self, prompts: list[str], *, first_seed: int, guidance: Guidance, steps: int) -> torch.Tensor:
        """[B, T, H, W, 3] of 0..255; prompt i has the noise of seed `first_seed + i`, as in a prompt file."""
        parts = []
        for start in range(0, len(prompts), BATCH):
            part = prompts[start : start + BATCH]
            latents = self._latents(part, first_seed=first_seed + start, guidance=guidance, steps=steps)
            parts.append(self.pixels(latents))
        return torch.cat(parts)

    def _latents(self, prompts: list[str], *, first_seed: int, guidance: Guidance, steps: int) -> torch.Tensor:
        shape = (1, self.checkpoint.high.config.in_channels, *CLIP.latent_size)
        noise = torch.cat([initial_noise(shape, seed=first_seed + index) for index in range(len(prompts))])
        defaults = self.checkpoint.defaults
        states = encode_prompts(self.text_encoder, self.tokenizer, [*prompts, ""], dtype=torch.float32)
        ratio = self.checkpoint.boundary_ratio
        return sample(
            noise.to(self.device),
            config=SamplingConfig(steps, defaults["shift"], ratio, guidance.high, guidance.low),
            scheduler=make_scheduler(self.checkpoint.scheduler, shift=defaults["shift"]),
            experts=self.experts,
            denoiser=self.denoiser,
            prompt=Prompt(states[:-1], states[-1:].expand(len(prompts), -1, -1)),
        )

    @torch.inference_mode()
    def pixels(self, latents: torch.Tensor) -> torch.Tensor:
        """[B, C, F, H, W] -> [B, T, H, W, 3] of 0..255, as they are written to a file."""
        pixels = self.vae.decode(denormalise(latents, self.vae)).sample  # [B, 3, T, H, W] in -1..1
        return ((pixels + 1) * 127.5).round().clamp(0, 255).permute(0, 2, 3, 4, 1).cpu()
