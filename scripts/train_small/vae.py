"""The small VAE: diffusers' AutoencoderKLWan with the Wan2.1 layout of names and strides (4, 8, 8), narrow.

Trained on clips drawn as it goes: absolute and squared error of the pixels, the thing's more than the background's, and
a weak pull of the latents towards a normal distribution. First on single pictures, then on 9 frames, which pass every
state that the convolutions carry on, last on whole clips.

Shapes: B clips, T frames, H x W pixels, C latent channels.
"""

from pathlib import Path
from random import Random
from typing import Any

import torch
from diffusers import AutoencoderKLWan
from torch import nn

from scripts.train_small.data import draw_clips, draw_scenes
from scripts.train_small.device import is_bf16_faster, lower_precision
from scripts.train_small.loop import Limits, Loop, Moment
from scripts.train_small.settings import LATENT_CHANNELS, VaeSettings
from scripts.train_small.world import FRAMES, Combination, all_combinations, trained_combinations

CURRICULUM = ((0.3, 1, 4), (0.65, 9, 1), (1.01, FRAMES, 1))  # until this share of the loop: frames, batches at once
QUIET = 0.1  # of the usual scale: what a residual branch adds at first
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
    in_bf16 = is_bf16_faster(lambda bf16: _try_step(vae, settings, device, in_bf16=bf16), device)
    loop.run(lambda moment: _loss(vae, settings, moment, device, in_bf16=in_bf16))
    mean, deviation, psnr = measure(loop.ema.model, settings, device)
    weights = {"weights": loop.ema.model.state_dict(), "latents_mean": mean, "latents_std": deviation}
    torch.save(weights, folder / "vae_weights.pt")
    return {"steps": loop.step, "seconds": round(loop.seconds, 1), "psnr_db": round(psnr, 2), "bf16": in_bf16}


def trained_vae(folder: Path, settings: VaeSettings, device: torch.device) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """The trained VAE, frozen, and mean and deviation of its latents, [C] each."""
    saved = torch.load(folder / "vae_weights.pt", map_location="cpu", weights_only=True)
    vae = new_vae(settings)
    vae.load_state_dict(saved["weights"])
    mean, deviation = (torch.tensor(saved[name]) for name in ("latents_mean", "latents_std"))
    return vae.requires_grad_(False).eval().to(device), mean, deviation


def _try_step(vae: Any, settings: VaeSettings, device: torch.device, *, in_bf16: bool) -> None:
    _loss(vae, settings, Moment(0, 0, 1.0), device, in_bf16=in_bf16).backward()
    vae.zero_grad()


def _loss(vae: Any, settings: VaeSettings, moment: Moment, device: torch.device, *, in_bf16: bool) -> torch.Tensor:
    frames, batches = next((frames, batches) for end, frames, batches in CURRICULUM if moment.progress < end)
    batch = batches * settings.batch
    pixels = _pixels(batch, trained_combinations(), seed=moment.seed, device=device, frames=frames)
    with lower_precision(device, enabled=in_bf16):
        latent = vae.encode(pixels).latent_dist
        noise = torch.randn(
            latent.mean.shape, generator=torch.Generator(device).manual_seed(moment.seed), device=device
        )
        made = _decoded(vae, latent.mean + latent.std * noise).float()
    mean, log_variance = latent.mean.float(), latent.logvar.float()
    divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).mean()
    return _pixel_error(made, pixels, settings.object_weight) + settings.kl_weight * divergence


def _decoded(vae: Any, latent: torch.Tensor) -> torch.Tensor:
    """As `vae.decode`, but not clipped to -1..1: a pixel beyond the wrong end has to find its way back."""
    vae.clear_cache()
    x, parts = vae.post_quant_conv(latent), []
    for frame in range(x.shape[2]):
        vae._conv_idx = [0]
        state = {"feat_cache": vae._feat_map, "feat_idx": vae._conv_idx, "first_chunk": frame == 0}
        parts.append(vae.decoder(x[:, :, frame : frame + 1], **state))
    vae.clear_cache()
    return torch.cat(parts, dim=2)


def _pixel_error(made: torch.Tensor, pixels: torch.Tensor, object_weight: float) -> torch.Tensor:
    """Absolute plus squared error, weighted where a pixel differs from the corner, which is always background."""
    is_thing = (pixels - pixels[..., :1, :1]).abs().amax(dim=1, keepdim=True) > NOT_BACKGROUND
    error = (made - pixels).abs() + (made - pixels).square()
    return (error * (1 + (object_weight - 1) * is_thing)).mean()


@torch.inference_mode()
def measure(vae: Any, settings: VaeSettings, device: torch.device) -> tuple[list[float], list[float], float]:
    """Mean and deviation of each latent channel over fresh clips, and the PSNR (dB) of what comes back of them."""
    latents, error = [], 0.0
    batch = min(settings.batch, settings.measured_clips)
    count = settings.measured_clips // batch
    for index in range(count):
        pixels = _pixels(batch, all_combinations(), seed=MEASURING_SEED + index, device=device, frames=FRAMES)
        latent = vae.encode(pixels).latent_dist.mean
        error += float((vae.decode(latent).sample - pixels).square().mean()) / count
        latents.append(latent.transpose(0, 1).flatten(1))  # [B, C, F, H, W] -> [C, B * F * H * W]
    values = torch.cat(latents, dim=1).double()
    psnr = 10 * torch.log10(torch.tensor(4.0 / error))  # pixels span 2
    return values.mean(dim=1).tolist(), values.std(dim=1).tolist(), float(psnr)


def _pixels(
    batch: int, combinations: list[Combination], *, seed: int, device: torch.device, frames: int
) -> torch.Tensor:
    scenes = draw_scenes(batch, combinations, random=Random(seed))
    return draw_clips(scenes, seed=seed, device=device, frames=frames).pixels
