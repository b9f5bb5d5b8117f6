"""What is fused changes no bit: every combination of fused and separate paths, on 1, 2 and 4 ranks, gives one latent.

Four layers of A14B's width, four steps, both experts' worth of text, on the GPU; ranks share it over ipc.
"""

import hashlib
from dataclasses import replace
from itertools import product

import pytest
import torch

from scripts.real_size_steps import random_expert
from tests.multi_gpu.ranks import RankEnv, mesh_of
from tests.rotation import apply_rope
from usp.attention import choose_attention
from usp.exchange import CollectiveExchange
from usp.ipc.cuda import CudaProvider
from usp.ipc.cuda_engine import CudaEngine
from usp.ipc.rendezvous import GroupRendezvous
from usp.kernels import Kernels, kernels_for
from usp.kernels.reference import place_heads_reference
from usp.layout import MeshShape
from usp.models.wan import transformer
from usp.models.wan.clip import Clip
from usp.models.wan.config import TransformerConfig
from usp.models.wan.parallel import ParallelDenoiser
from usp.models.wan.rope import RopeTable
from usp.models.wan.sampling import Experts, Prompt, SamplingConfig, initial_noise, make_scheduler, sample
from usp.pipeline import PipelinedExchange

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.timeout(600),
]
CLIP = Clip(17, 480, 832)  # 7,800 tokens
CONFIG = TransformerConfig(num_layers=4)
DEVICE = torch.device("cuda")


def separate_norm_rope(kernels: Kernels):
    """The norm, then RoPE in torch, then a copy to each block."""

    def norm_rope(q, k, q_weight, k_weight, cos, sin, *, eps, blocks=None):
        rope = RopeTable(cos, sin)
        q, k = (apply_rope(kernels.rms_norm(x, w, eps=eps), rope) for x, w in ((q, q_weight), (k, k_weight)))
        if blocks is not None:
            place_heads_reference(q, [(block.head_start, block.q_dst) for block in blocks])
            place_heads_reference(k, [(block.kv_head_start, block.k_dst) for block in blocks])
        return q, k

    return norm_rope


def separate_residual_norm(kernels: Kernels):
    """The sum in torch, then the norm."""

    def residual_norm(x, y=None, gate=None, **others):
        if y is not None:
            x = (x.float() + (y.float() if gate is None else y * gate)).type_as(x)
        return kernels.residual_norm(x, **others)

    return residual_norm


class Forgetful(Prompt):
    """Projects the text at every step."""

    def project(self, model, branch):
        self.drop()
        return super().project(model, branch)


class Counted:
    """An attention that must have been called; hides what the model could fill."""

    def __init__(self, attention) -> None:
        self.attention = attention

    def __call__(self, q, k, v):
        return self.attention(q, k, v)


def latents(denoiser, model, attention, *, qkv: bool, norm_rope: bool, chained: bool, text: bool, filled: bool) -> str:
    kernels = kernels_for(DEVICE)
    if not norm_rope:
        kernels = replace(kernels, norm_rope=separate_norm_rope(kernels))
    if not chained:
        kernels = replace(kernels, residual_norm=separate_residual_norm(kernels))
    if qkv:
        model.fuse()
    else:
        for block in model.blocks:
            for layer in (block.attn1.to_q, block.attn1.to_k, block.attn1.to_v):
                layer.weight = torch.nn.Parameter(layer.weight.clone(), requires_grad=False)
    denoiser.self_attention = attention if filled else Counted(attention)
    states = torch.randn(2, 1, 512, CONFIG.text_dim, generator=torch.Generator().manual_seed(3)).bfloat16().to(DEVICE)
    noise = initial_noise((1, CONFIG.in_channels, *CLIP.latent_size), seed=0).to(DEVICE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformer, "kernels_for", lambda device: kernels)
        found = sample(
            noise,
            config=SamplingConfig(4, 12.0, None, guidance_high=4.0, guidance_low=3.0),
            scheduler=make_scheduler({}, shift=12.0),
            experts=Experts({"high": lambda: model}, keep_one=False),
            denoiser=denoiser,
            prompt=(Prompt if text else Forgetful)(states[0], states[1]),
        )
    assert found.isfinite().all()
    return hashlib.sha256(found.cpu().numpy().tobytes()).hexdigest()


def all_combinations(env: RankEnv) -> dict[tuple[bool, ...], str]:
    mesh = mesh_of(MeshShape(1, env.world))
    backend = choose_attention("auto", device=DEVICE, dtype=torch.bfloat16, head_dim=128).backend
    exchange = CollectiveExchange(CLIP.num_tokens, axis=mesh.ulysses)
    if env.world > 1:
        exchange = PipelinedExchange(
            CLIP.num_tokens,
            axis=mesh.ulysses,
            rendezvous=GroupRendezvous(mesh.ulysses.group),
            provider=CudaProvider(DEVICE),
            make_engine=CudaEngine,
        )
    model = random_expert(CONFIG, seed=1, device=DEVICE)
    names = ("qkv", "norm_rope", "chained", "text", "filled")
    with exchange:
        denoiser = ParallelDenoiser(
            CLIP, CONFIG, mesh=mesh, exchange=exchange, attention=backend, device=DEVICE, dtype=torch.bfloat16
        )
        attention = denoiser.self_attention
        combinations = product((True, False), repeat=len(names))
        return {one: latents(denoiser, model, attention, **dict(zip(names, one, strict=True))) for one in combinations}


def test_every_combination_on_every_number_of_ranks_gives_the_same_latents(ranks) -> None:
    found = {world: ranks(world).run(all_combinations, limit_s=300.0) for world in (1, 2, 4)}
    expected = found[1][0][True, True, True, True, True]
    wrong = [
        f"{world} ranks, rank {rank}, {one}: {digest[:12]}"
        for world, answers in found.items()
        for rank, answer in enumerate(answers)
        for one, digest in answer.items()
        if digest != expected
    ]
    assert not wrong, "\n".join([f"expected {expected[:12]}", *wrong])
