"""A guided prediction enqueues its work and goes on: nothing waits for the device, no pageable memory is copied."""

from collections import Counter

import pytest
import torch
import torch.distributed as dist

from scripts.real_size_steps import random_expert
from usp.attention import choose_attention
from usp.exchange import CollectiveExchange
from usp.layout import MeshShape
from usp.mesh import make_mesh
from usp.models.wan.clip import Clip
from usp.models.wan.config import TransformerConfig
from usp.models.wan.parallel import ParallelDenoiser
from usp.models.wan.sampling import Prompt

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cuStreamSynchronize", "cudaMemcpy")


@pytest.fixture
def lone_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@torch.inference_mode()
def test_a_prediction_neither_waits_nor_copies_from_pageable_memory(lone_group) -> None:
    device, clip, config = torch.device("cuda", 0), Clip(5, 240, 416), TransformerConfig(num_layers=2)
    mesh = make_mesh(MeshShape(1, 1), device_type="cpu")
    denoiser = ParallelDenoiser(
        clip,
        config,
        mesh=mesh,
        exchange=CollectiveExchange(clip.num_tokens, axis=mesh.ulysses),
        attention=choose_attention("auto", device=device, dtype=torch.bfloat16, head_dim=128).backend,
        device=device,
        dtype=torch.bfloat16,
    )
    model = random_expert(config, seed=1, device=device)
    states = torch.randn(2, 1, 512, config.text_dim, device=device).bfloat16()
    prompt, latent = Prompt(states[0], states[1]), torch.randn(1, 16, *clip.latent_size, device=device)

    def predict() -> torch.Tensor:
        return denoiser.predict(model, latent, timestep=500.0, guidance=4.0, prompt=prompt)

    for _ in range(2):
        predict()
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        predict()
        torch.zeros(1).to(device)  # planted: this one must be seen
        torch.cuda.synchronize()
    found = Counter(event.name for event in profiler.events())
    pageable = sum(count for name, count in found.items() if "Pageable" in name)
    waits = {name: count for name, count in found.items() if name.startswith(WAITS) and not name.endswith("Async")}
    assert pageable == 1, found
    # the planted copy waits for its stream, and the line behind it for the device
    assert sum(waits.values()) <= 2 and sum(waits.values()) >= 1, waits
