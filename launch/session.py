"""One load of a checkpoint, and the videos made with it: encode, load, then sample and save each prompt.

Rank 0 alone encodes text, decodes and writes; every rank reaches every collective.
"""

import hashlib
import logging
import os
import time
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from usp.attention import Attention
from usp.collectives import agree, broadcast_host, meet
from usp.exchange import CollectiveExchange
from usp.launch.capture import capture_from
from usp.launch.device import DTYPES, release_memory, synchronize
from usp.launch.encode import encode_on_first_rank
from usp.launch.files import output_paths
from usp.launch.guard import Guard
from usp.launch.job import Job
from usp.launch.phases import Phases
from usp.launch.progress import open_progress
from usp.launch.request import Request
from usp.mesh import Mesh
from usp.models.wan.checkpoint.loader import load_transformer
from usp.models.wan.parallel import ParallelDenoiser
from usp.models.wan.sampling import ExpertName, Experts, Prompt, SamplingConfig, initial_noise, make_scheduler, sample
from usp.models.wan.transformer import WanTransformer

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Ranks:
    """This rank among the others: its number, the mesh, the exchange of its Ulysses group, its kernel and device."""

    rank: int
    mesh: Mesh
    exchange: CollectiveExchange
    attention: Attention
    device: torch.device


class Session:
    def __init__(self, request: Request, job: Job, ranks: Ranks, *, phases: Phases, guard: Guard) -> None:
        self.request, self.job, self.ranks, self.phases, self.guard = request, job, ranks, phases, guard
        self.capture = capture_from(os.environ, num_steps=request.steps, device=ranks.device)
        self.experts = make_experts(request, ranks.device)
        self.scheduler: Any = None
        self.denoiser = ParallelDenoiser(
            request.clip,
            request.checkpoint.high.config,
            mesh=ranks.mesh,
            exchange=ranks.exchange,
            attention=ranks.attention,
            device=ranks.device,
            dtype=DTYPES[request.dtype],
        )

    def make_videos(self) -> list[dict[str, object]]:
        """Sample and save every prompt; what rank 0 reports of each. Collective."""
        ranks = self.ranks
        with self.phases.phase("encoding the prompts"):
            states = encode_on_first_rank(self.request, self.job, rank=ranks.rank, device=ranks.device)
        with self.phases.phase("loading the weights"):
            vae = self._load()
            states = broadcast_host(states).to(ranks.device)
        return [self._make_video(index, states, vae) for index in range(len(self.job.prompts))]

    def _load(self) -> Any:
        """Whatever will be used and stays, so that a bad file stops the run before any step. Rank 0's VAE."""
        request = self.request
        self.scheduler = make_scheduler(request.checkpoint.scheduler, shift=request.shift)
        names: tuple[ExpertName, ...] = ("high",) if request.checkpoint.low is None else ("high", "low")
        for name in names[:1] if request.offload_model else names:
            self.experts.get(name)
        if self.ranks.rank != 0:
            return None
        from usp.models.wan.checkpoint.loader import load_vae

        return load_vae(request.checkpoint, device=self.ranks.device, dtype=torch.float32)

    def _make_video(self, index: int, states: torch.Tensor, vae: Any) -> dict[str, object]:
        seed, is_last = self.job.seed(index), index == len(self.job.prompts) - 1
        prompt = Prompt(states[index][None], states[-1][None] if self.request.guided else None)
        try:
            with self.phases.phase("sampling"):
                latents, seconds = self._sample(seed, prompt)
                digest = _digest(latents)
                agree({"latents_sha256": digest}, what="ranks ended with different latents")
        finally:  # whoever handles an error may need the room
            prompt.drop()
        if self.request.offload_model or is_last:  # decoding needs the room
            self.experts.drop()
            release_memory(self.ranks.device)
        if self.ranks.rank != 0:
            return {}
        log.info("latents sha256 %s (seed %d)", digest, seed)
        file = self._save(vae, latents, index)
        prompt_text = self.job.prompts[index]
        return {"prompt": prompt_text, "seed": seed, "file": file, "latents_sha256": digest, "step_seconds": seconds}

    def _sample(self, seed: int, prompt: Prompt) -> tuple[torch.Tensor, list[float]]:
        """Final latents, and the seconds of each step."""
        steps, device = self.request.steps, self.ranks.device
        noise = self._noise(seed)
        marks = [time.perf_counter()]
        with open_progress(steps, rank=self.ranks.rank, label="sampling") as progress:

            def before_step(step: int, expert: ExpertName) -> None:
                self.phases.detail(f"sampling, step {step + 1} of {steps}, {expert}-noise expert")
                self.ranks.exchange.at(step=step)
                self.capture.before(step)

            def after_step(step: int, expert: ExpertName) -> None:
                synchronize(device)
                self.ranks.exchange.check()
                self.capture.after(step)
                marks.append(time.perf_counter())
                progress.advance()

            hooks = {"before_step": before_step, "after_step": after_step}
            latents = sample(
                noise,
                config=sampling_config(self.request),
                scheduler=self.scheduler,
                experts=self.experts,
                denoiser=self.denoiser,
                prompt=prompt,
                **hooks,
            )
        return latents, [round(end - start, 6) for start, end in pairwise(marks)]

    def _noise(self, seed: int) -> torch.Tensor:
        """Rank 0's, on every rank."""
        shape = (1, self.request.checkpoint.high.config.in_channels, *self.request.clip.latent_size)
        noise = initial_noise(shape, seed=seed) if self.ranks.rank == 0 else torch.empty(shape)
        return broadcast_host(noise).to(self.ranks.device)

    def _save(self, vae: Any, latents: torch.Tensor, index: int) -> str:
        from usp.launch.save import save_results

        job, request = self.job, self.request
        paths = output_paths(
            request, prompt=job.prompts[index], seed=job.seed(index), index=index, num_prompts=len(job.prompts)
        )
        with self.phases.phase("decoding and saving"):
            save_results(vae, latents, paths, request=request, guard=self.guard)
        log.info("video in %s", paths.video)
        return str(paths.video)


def make_experts(request: Request, device: torch.device) -> Experts:
    checkpoint, dtype = request.checkpoint, DTYPES[request.dtype]
    files = {"high": checkpoint.high} | ({"low": checkpoint.low} if checkpoint.low else {})
    loaders = {name: partial(_load_together, one, device=device, dtype=dtype) for name, one in files.items()}
    return Experts(loaders, keep_one=request.offload_model)  # type: ignore[arg-type]


def _load_together(files: Any, *, device: torch.device, dtype: torch.dtype) -> WanTransformer:
    """All ranks load at the same places of a run, and one that reads more slowly than others does not stand still."""
    model = load_transformer(files, device=device, dtype=dtype)
    meet()
    return model


def sampling_config(request: Request) -> SamplingConfig:
    return SamplingConfig(
        request.steps, request.shift, request.boundary_ratio, request.guidance_high, request.guidance_low
    )


def _digest(latents: torch.Tensor) -> str:
    return hashlib.sha256(latents.float().cpu().contiguous().numpy().tobytes()).hexdigest()
