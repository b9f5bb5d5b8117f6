"""A guided prediction enqueues its work and goes on: nothing waits for the device, no pageable memory is copied."""

from collections import Counter
from collections.abc import Callable

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
    nothing = seen(lambda: None)
    planted = seen(lambda: torch.zeros(1).to(device))  # pageable, and waits for its stream
    assert planted == nothing + Counter(pageable=1, waits=1), (nothing, planted)
    assert seen(predict) == nothing


def seen(function: Callable[[], object]) -> Counter[str]:
    """Copies of pageable memory and host waits while it runs, those of the profiler included."""
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        function()
        torch.cuda.synchronize()
    names = [event.name for event in profiler.events()]
    waits = [name for name in names if name.startswith(WAITS) and not name.endswith("Async")]
    return Counter(pageable=sum("Pageable" in name for name in names), waits=len(waits))
