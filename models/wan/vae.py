"""From latents to pixels, a few frames at a time, through the VAE of `diffusers`.

The decoder carries causal state from one latent frame to the next, so frames come out in order while memory stays that
of one step: it does not grow with the clip. Used by the rank that saves.
"""

from collections.abc import Iterator
from typing import Any

import torch


def denormalise(latent_bcfhw: torch.Tensor, vae: Any) -> torch.Tensor:
    """Undo the per-channel mean and std that the transformer works in; arithmetic as in the reference pipeline."""
    mean, std = (
        torch.tensor(values, device=latent_bcfhw.device, dtype=latent_bcfhw.dtype).view(1, -1, 1, 1, 1)
        for values in (vae.config.latents_mean, vae.config.latents_std)
    )
    return latent_bcfhw / (1.0 / std) + mean


@torch.inference_mode()
def decode_chunks(vae: Any, latent_bcfhw: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield frames [F, H, W, 3] in -1..1 of a latent [1, C, F', H', W']: first one frame, then four per latent frame.

    The same calls in the same order as `AutoencoderKLWan.decode`, which keeps all frames on the device instead.
    """
    z = denormalise(latent_bcfhw.to(vae.dtype), vae)
    vae.clear_cache()
    try:
        x = vae.post_quant_conv(z)
        for frame in range(x.shape[2]):
            vae._conv_idx = [0]
            state = {"feat_cache": vae._feat_map, "feat_idx": vae._conv_idx, "first_chunk": frame == 0}
            pixels = vae.decoder(x[:, :, frame : frame + 1], **state).clamp(-1.0, 1.0)
            yield pixels[0].permute(1, 2, 3, 0)  # [1, 3, F, H, W] -> [F, H, W, 3]
    finally:
        vae.clear_cache()
