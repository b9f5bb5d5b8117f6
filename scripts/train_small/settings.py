"""Sizes and recipe, in one place: what is trained, on how much, for how long. FULL is the packaged model.

The arithmetic behind FULL, per clip: 80 tokens, an expert of 3.9 M parameters, so 6 * 80 * 3.9 M = 1.9 GFLOP for one
training step and 16 * 2 * 2 * 80 * 3.9 M = 20 GFLOP for one sampling of 16 guided steps. In bytes: the weights of all
parts in 16 bits are 22 MB; a latent is 10 kB and its text 8 kB, so a cache of 131,072 clips takes 2.3 GB.
The VAE's widest layers pass 17 * 64 * 64 * 16 numbers, 2.2 MB in bf16, some sixty times forwards.
"""

from dataclasses import dataclass

from usp.models.wan.config import TransformerConfig

RECORD = "training.json"  # in the packaged folder: made by training, unlike the random checkpoint
LATENT_CHANNELS = 16
TEXT_POSITIONS = 40  # of a caption in training; the others of the model's 512 are one zero, counted as often


@dataclass(frozen=True)
class VaeSettings:
    encoder_dim: int = 12
    decoder_dim: int = 16
    batch: int = 64
    rate: float = 1e-3
    kl_weight: float = 1e-4
    object_weight: float = 8.0  # of an error on the thing that moves, beside one on the background
    max_steps: int = 30_000
    measured_clips: int = 2048  # for the mean and deviation of the latents


@dataclass(frozen=True)
class TextSettings:
    width: int = 96
    layers: int = 2
    heads: int = 4
    batch: int = 1024
    rate: float = 2e-3
    max_steps: int = 2500


@dataclass(frozen=True)
class ExpertSettings:
    layers: int = 6
    heads: int = 8
    head_dim: int = 24
    ffn: int = 768
    batch: int = 256
    rate: float = 1e-3
    max_steps: int = 60_000
    cached_clips: int = 131_072
    dropped_prompts: float = 0.12  # share of clips trained without their caption, for guidance
    wrong_words: float = 0.15  # chance that a caption names another colour, shape or motion; guidance undoes it
    ema_decay: float = 0.999


@dataclass(frozen=True)
class SamplingSettings:
    """What usp_defaults.json and model_index.json of the packaged model say."""

    steps: int = 16
    shift: float = 3.0
    boundary: float = 0.875
    guidance_high: float = 4.0
    guidance_low: float = 3.0


@dataclass(frozen=True)
class Settings:
    vae: VaeSettings = VaeSettings()
    text: TextSettings = TextSettings()
    expert: ExpertSettings = ExpertSettings()
    sampling: SamplingSettings = SamplingSettings()
    seed: int = 0
    minutes: float = 12.5  # of all training; each stage has its share

    @property
    def transformer(self) -> TransformerConfig:
        expert = self.expert
        return TransformerConfig(
            num_layers=expert.layers,
            num_heads=expert.heads,
            head_dim=expert.head_dim,
            ffn_dim=expert.ffn,
            text_dim=self.text.width,
        )


SHARES = {"vae": 0.36, "text": 0.03, "cache": 0.08, "high": 0.25, "low": 0.28}  # of the minutes, at most
FULL = Settings()
SMOKE = Settings(
    vae=VaeSettings(encoder_dim=3, decoder_dim=3, batch=2, max_steps=3, measured_clips=4),
    text=TextSettings(width=32, layers=1, batch=16, max_steps=3),
    expert=ExpertSettings(layers=2, heads=4, head_dim=12, ffn=96, batch=4, max_steps=3, cached_clips=4),
    sampling=SamplingSettings(steps=4),
    minutes=5.0,
)
