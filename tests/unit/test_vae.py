"""Decoding in chunks: the bits of the reference's decode, each time, for every number of latent frames (D18)."""

import pytest
import torch

from tests.tiny import tiny_checkpoint
from usp.models.wan.checkpoint.folder import open_checkpoint
from usp.models.wan.checkpoint.loader import load_vae
from usp.models.wan.vae import decode_chunks, denormalise


@pytest.fixture(scope="module")
def vae():
    return load_vae(open_checkpoint(tiny_checkpoint()), device=torch.device("cpu"), dtype=torch.float32)


def _reference(vae, latent: torch.Tensor) -> torch.Tensor:
    mean, std = (torch.tensor(v).view(1, -1, 1, 1, 1) for v in (vae.config.latents_mean, vae.config.latents_std))
    with torch.no_grad():
        return vae.decode(latent / (1.0 / std) + mean, return_dict=False)[0]


@pytest.mark.parametrize("latent_frames", [1, 2, 5])
def test_chunks_joined_are_the_reference_decode_bit_for_bit_and_again(vae, latent_frames: int) -> None:
    latent = torch.randn(1, 16, latent_frames, 4, 6)
    expected = _reference(vae, latent)[0].permute(1, 2, 3, 0)
    for _ in range(2):  # no state is left from the first time
        chunks = list(decode_chunks(vae, latent))
        assert [len(chunk) for chunk in chunks] == [1] + [4] * (latent_frames - 1)
        assert torch.equal(torch.cat(chunks), expected)


def test_a_decode_that_was_given_up_leaves_no_state(vae) -> None:
    latent = torch.randn(1, 16, 3, 2, 2)
    next(iter(decode_chunks(vae, latent)))
    assert torch.equal(torch.cat(list(decode_chunks(vae, latent))), _reference(vae, latent)[0].permute(1, 2, 3, 0))


def test_normalising_what_was_denormalised_restores_it(vae) -> None:
    latent = torch.randn(1, 16, 2, 3, 4)
    mean, std = (torch.tensor(v).view(1, -1, 1, 1, 1) for v in (vae.config.latents_mean, vae.config.latents_std))
    assert torch.allclose((denormalise(latent, vae) - mean) / std, latent, atol=1e-5)


@pytest.mark.gpu
def test_peak_memory_of_decoding_does_not_grow_with_the_frames() -> None:
    """D18."""
    device = torch.device("cuda")
    vae = load_vae(open_checkpoint(tiny_checkpoint(vae_base_dim=32)), device=device, dtype=torch.float32)
    peaks = []
    for frames in (17, 33, 65):
        latent = torch.randn(1, 16, (frames - 1) // 4 + 1, 60, 104, device=device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        for chunk in decode_chunks(vae, latent):
            chunk.cpu()
        peaks.append(torch.cuda.max_memory_allocated())
    assert peaks[2] <= peaks[0] * 1.01, peaks
