"""What the Wan tests do on ranks: load a tiny checkpoint, predict or sample on a mesh, and hand tensors back."""

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch

from tests.multi_gpu.ranks import RankEnv, mesh_of
from usp.attention import sdpa
from usp.exchange import CollectiveExchange
from usp.layout import MeshShape
from usp.mesh import Mesh
from usp.models.wan.checkpoint.folder import Checkpoint, open_checkpoint
from usp.models.wan.checkpoint.loader import load_transformer
from usp.models.wan.clip import Clip
from usp.models.wan.config import TransformerConfig
from usp.models.wan.parallel import ParallelDenoiser
from usp.models.wan.sampling import Experts, Prompt, SamplingConfig, initial_noise, make_scheduler, sample
from usp.models.wan.transformer import WanTransformer
from usp.transport import Transport, make_exchange

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Case:
    """One sampling run. `states` are the text embeddings [2, L, text_dim]: positive, negative."""

    folder: Path
    clip: Clip
    states: torch.Tensor
    steps: int = 4
    shift: float = 12.0
    guidance_high: float = 4.0
    guidance_low: float = 3.0
    seed: int = 1
    exchange: str = "gloo"


@dataclass
class Counts:
    """What one rank did during a run."""

    forwards: int = 0
    exchanges: int = 0
    experts: tuple[str, ...] = ()


def run_sampling(env: RankEnv, shape: MeshShape, cases: list[Case]) -> list[tuple[torch.Tensor, Counts]]:
    """Final latents of each case on this mesh, and what this rank did for it."""
    mesh = mesh_of(shape)
    return [_sampled(case, mesh) for case in cases]


def run_forward(
    env: RankEnv,
    shape: MeshShape,
    folder: Path,
    clip: Clip,
    latent: torch.Tensor,
    states: torch.Tensor,
    timestep: float,
    exchange: str = "gloo",
) -> torch.Tensor:
    """One unguided prediction for the whole clip."""
    _, model = _load(folder, "high")
    mesh = mesh_of(shape)
    with _exchange(exchange, clip, mesh) as swap, torch.inference_mode():
        denoiser = _denoiser(clip, model.config, mesh, swap)
        return denoiser.predict(model, latent, timestep=timestep, guidance=1, prompt=Prompt(states, None))


def _sampled(case: Case, mesh: Mesh) -> tuple[torch.Tensor, Counts]:
    with _exchange(case.exchange, case.clip, mesh) as swap:
        return _sample(case, mesh, swap)


def _exchange(name: str, clip: Clip, mesh: Mesh) -> CollectiveExchange:
    return make_exchange(Transport(name, "asked for", "gloo"), clip.num_tokens, mesh=mesh, device=CPU)


def _sample(case: Case, mesh: Mesh, swap: CollectiveExchange) -> tuple[torch.Tensor, Counts]:
    checkpoint, high = _load(case.folder, "high")
    counts, seen = Counts(), []
    experts = Experts({name: lambda name=name: _load(case.folder, name)[1] for name in ("high", "low")}, keep_one=False)
    denoiser = _denoiser(case.clip, high.config, mesh, swap)
    _count_exchanges(denoiser, counts)
    hooks = [experts.get(name).register_forward_hook(lambda *_: _bump(counts)) for name in _names(checkpoint)]
    latents = sample(
        initial_noise((1, high.config.in_channels, *case.clip.latent_size), seed=case.seed),
        config=SamplingConfig(case.steps, case.shift, checkpoint.boundary_ratio, case.guidance_high, case.guidance_low),
        scheduler=make_scheduler(checkpoint.scheduler, shift=case.shift),
        experts=experts,
        denoiser=denoiser,
        prompt=Prompt(case.states[:1], case.states[1:]),
        before_step=lambda step, expert: seen.append(expert),
    )
    for hook in hooks:
        hook.remove()
    return latents, replace(counts, experts=tuple(seen))


def _denoiser(clip: Clip, config: TransformerConfig, mesh: Mesh, swap: CollectiveExchange) -> ParallelDenoiser:
    return ParallelDenoiser(clip, config, mesh=mesh, exchange=swap, attention=sdpa, device=CPU, dtype=torch.float32)


def _count_exchanges(denoiser: ParallelDenoiser, counts: Counts) -> None:
    plain = denoiser.exchange.scatter_heads

    def counting(x: torch.Tensor, **options: int) -> torch.Tensor:
        counts.exchanges += 1
        return plain(x, **options)

    denoiser.exchange.scatter_heads = counting  # type: ignore[method-assign]


def _bump(counts: Counts) -> None:
    counts.forwards += 1


def _names(checkpoint: Checkpoint) -> tuple[str, ...]:
    return ("high",) if checkpoint.low is None else ("high", "low")


@cache  # ranks live through many tests
def _load(folder: Path, name: str) -> tuple[Checkpoint, WanTransformer]:
    checkpoint = open_checkpoint(folder)
    files = checkpoint.high if name == "high" else checkpoint.low
    assert files is not None
    return checkpoint, load_transformer(files, device=CPU, dtype=torch.float32)
