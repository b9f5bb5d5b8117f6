"""The small VAE: diffusers' AutoencoderKLWan with the Wan2.1 layout of names and strides (4, 8, 8), narrow.

Trained on clips drawn as it goes: absolute and squared error of the pixels, the thing's more than the background's, and
a weak pull of the latents towards a normal distribution. First on single pictures, then on 9 frames, which pass every
state that the convolutions carry on, last on whole clips.

Shapes: B clips, T frames, H x W pixels, C latent channels.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from diffusers import AutoencoderKLWan
from torch import nn

from scripts.train_small.data import draw_clips, draw_scenes
from scripts.train_small.device import is_bf16_faster, lower_precision
from scripts.train_small.judge import is_right, judge
from scripts.train_small.loop import Limits, Loop, Moment
from scripts.train_small.settings import LATENT_CHANNELS, VaeSettings
from scripts.train_small.world import FRAMES, Combination, Scene, all_combinations, trained_combinations

CURRICULUM = ((0.2, 1, 4), (0.75, 9, 1), (1.01, FRAMES, 1))  # until this share of the loop: frames, batches at once
QUIET = 0.1  # of the usual scale: what a residual branch adds at first
LOG_VARIANCES = (-30.0, 20.0)  # between which diffusers keeps them
JUDGED = 200  # clips of those measured
LOG_VARIANCE = -4.0  # of the latents at first
NOT_BACKGROUND = 0.02
MEASURING_SEED = 9_000_000_000


def new_vae(settings: VaeSettings) -> Any:
    vae = AutoencoderKLWan(base_dim=settings.encoder_dim, decoder_base_dim=settings.decoder_dim, z_dim=LATENT_CHANNELS)
    _initialise(vae)
    return vae


@torch.no_grad()
def _initialise(vae: Any) -> None:
    """Convolutions that keep the scale of what passes, residual branches nearly silent, latents nearly certain."""
    for name, layer in vae.named_modules():
        if isinstance(layer, nn.Conv2d | nn.Conv3d):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="linear")
            assert layer.bias is not None
            nn.init.zeros_(layer.bias)
            if name.endswith(("conv2", "attentions.0.proj")):
                layer.weight.mul_(QUIET)
    vae.quant_conv.weight[LATENT_CHANNELS:].mul_(QUIET)
    vae.quant_conv.bias[LATENT_CHANNELS:].fill_(LOG_VARIANCE)


def train_vae(
    folder: Path, settings: VaeSettings, *, seconds: float, seed: int, device: torch.device
) -> dict[str, Any]:
    """Train to the end and save `vae_weights.pt`: weights, and mean and deviation of the latents. Returns a report."""
    torch.manual_seed(seed)
    vae = new_vae(settings).to(device)
    limits = Limits(seconds, settings.max_steps)
    loop = Loop("vae", vae, folder=folder, limits=limits, rate=settings.rate, decay=0.998, seed=seed)
    in_bf16 = is_bf16_faster(lambda bf16: _try_step(vae, settings, device, 1.0, in_bf16=bf16), device)
    for progress in (0.0, 0.5):  # a shape of its own for cuDNN to try algorithms on, which need not be training time
        _try_step(vae, settings, device, progress, in_bf16=in_bf16)
    loop.run(lambda moment: _loss(vae, settings, moment, device, in_bf16=in_bf16))
    found = measure(loop.ema.model, settings, device)
    weights = {"weights": loop.ema.model.state_dict(), "latents_mean": found.mean, "latents_std": found.deviation}
    torch.save(weights, folder / "vae_weights.pt")
    return {
        "steps": loop.step,
        "seconds": round(loop.seconds, 1),
        "bf16": in_bf16,
        "psnr_db": round(found.psnr, 2),
        "right": round(found.right, 3),
        "deviation": [round(one, 3) for one in found.deviation],
    }


def trained_vae(folder: Path, settings: VaeSettings, device: torch.device) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """The trained VAE, frozen, and mean and deviation of its latents, [C] each."""
    saved = torch.load(folder / "vae_weights.pt", map_location="cpu", weights_only=True)
    vae = new_vae(settings)
    vae.load_state_dict(saved["weights"])
    mean, deviation = (torch.tensor(saved[name]) for name in ("latents_mean", "latents_std"))
    return vae.requires_grad_(False).eval().to(device), mean, deviation


def _try_step(vae: Any, settings: VaeSettings, device: torch.device, progress: float, *, in_bf16: bool) -> None:
    _loss(vae, settings, Moment(0, 0, progress), device, in_bf16=in_bf16).backward()
    vae.zero_grad()


def _loss(vae: Any, settings: VaeSettings, moment: Moment, device: torch.device, *, in_bf16: bool) -> torch.Tensor:
    frames, batches = next((frames, batches) for end, frames, batches in CURRICULUM if moment.progress < end)
    batch = batches * settings.batch
    pixels = _pixels(batch, trained_combinations(), seed=moment.seed, device=device, frames=frames)
    with lower_precision(device, enabled=in_bf16):
        mean, log_variance = (one.float() for one in encoded(vae, pixels))
        noise = torch.randn(mean.shape, generator=torch.Generator(device).manual_seed(moment.seed), device=device)
        made = decoded(vae, mean + (0.5 * log_variance).exp() * noise).float()
    divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).mean()
    return _pixel_error(made, pixels, settings.object_weight) + settings.kl_weight * divergence


def encoded(vae: Any, pixels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and log variance of the latents, as `vae.encode` gives them, but two pieces at once and not one for every
    four frames: the convolutions carry on what they need of the first frame, and the others need no further cut."""
    vae.clear_cache()
    parts = []
    for piece in _first_and_rest(pixels):
        vae._enc_conv_idx = [0]
        parts.append(vae.encoder(piece, feat_cache=vae._enc_feat_map, feat_idx=vae._enc_conv_idx))
    vae.clear_cache()
    mean, log_variance = vae.quant_conv(torch.cat(parts, dim=2)).chunk(2, dim=1)
    return mean, log_variance.clamp(*LOG_VARIANCES)


def decoded(vae: Any, latent: torch.Tensor) -> torch.Tensor:
    """As `vae.decode`, in two pieces likewise, but not clipped to -1..1: a pixel beyond the wrong end has to find its
    way back."""
    vae.clear_cache()
    parts = []
    for index, piece in enumerate(_first_and_rest(vae.post_quant_conv(latent))):
        vae._conv_idx = [0]
        state = {"feat_cache": vae._feat_map, "feat_idx": vae._conv_idx, "first_chunk": index == 0}
        parts.append(vae.decoder(piece, **state))
    vae.clear_cache()
    return torch.cat(parts, dim=2)


def _first_and_rest(frames: torch.Tensor) -> list[torch.Tensor]:
    return [piece for piece in (frames[:, :, :1], frames[:, :, 1:]) if piece.shape[2]]


def _pixel_error(made: torch.Tensor, pixels: torch.Tensor, object_weight: float) -> torch.Tensor:
    """Absolute plus squared error, weighted where a pixel differs from the corner, which is always background."""
    is_thing = (pixels - pixels[..., :1, :1]).abs().amax(dim=1, keepdim=True) > NOT_BACKGROUND
    error = (made - pixels).abs() + (made - pixels).square()
    return (error * (1 + (object_weight - 1) * is_thing)).mean()


@dataclass(frozen=True)
class Measured:
    """Mean and deviation of each latent channel, and how well clips come back: PSNR in dB, and the share that the judge
    still finds right in colour, shape and motion, since the PSNR of a whole picture says little of a small thing."""

    mean: list[float]
    deviation: list[float]
    psnr: float
    right: float


@torch.inference_mode()
def measure(vae: Any, settings: VaeSettings, device: torch.device) -> Measured:
    """Over fresh clips of all combinations.

    The deviation is that of latents as drawn, noise included, so that a channel which says nothing is not blown up.
    """
    means, variances, error, verdicts = [], [], 0.0, []
    batch = min(settings.batch, settings.measured_clips)
    count = settings.measured_clips // batch
    for index in range(count):
        scenes = _scenes(batch, all_combinations(), seed=MEASURING_SEED + index)
        pixels = draw_clips(scenes, seed=MEASURING_SEED + index, device=device, frames=FRAMES).pixels
        mean, log_variance = encoded(vae, pixels)
        made = decoded(vae, mean).clamp(-1, 1)
        error += float((made - pixels).square().mean()) / count
        means.append(mean.transpose(0, 1).flatten(1))  # [B, C, F, H, W] -> [C, B * F * H * W]
        variances.append(log_variance.transpose(0, 1).flatten(1).exp())
        for scene, clip in zip(scenes[: JUDGED - len(verdicts)], made, strict=False):
            shown = ((clip + 1) * 127.5).round().permute(1, 2, 3, 0)  # [3, T, H, W] -> [T, H, W, 3]
            verdicts.append(is_right(judge(shown), scene))
    values = torch.cat(means, dim=1).double()
    deviation = (values.var(dim=1) + torch.cat(variances, dim=1).double().mean(dim=1)).sqrt()
    psnr = 10 * math.log10(4.0 / error)  # pixels span 2
    return Measured(values.mean(dim=1).tolist(), deviation.tolist(), psnr, sum(verdicts) / len(verdicts))


def _scenes(batch: int, combinations: list[Combination], *, seed: int) -> list[Scene]:
    return draw_scenes(batch, combinations, random=Random(seed))


def _pixels(
    batch: int, combinations: list[Combination], *, seed: int, device: torch.device, frames: int
) -> torch.Tensor:
    return draw_clips(_scenes(batch, combinations, seed=seed), seed=seed, device=device, frames=frames).pixels
