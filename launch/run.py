"""The heavy part of a run, on every rank: meet, encode the text, load, sample, decode, save.

Rank 0 alone encodes text and saves; the others never import what only that needs. Every rank reaches every collective.
"""

import hashlib
import logging
import time
from datetime import timedelta
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from usp.attention import sdpa
from usp.collectives import agree, broadcast_host
from usp.launch.device import DTYPES, backends, describe, prepare_device, release_memory, synchronize
from usp.launch.files import OutputPaths, atomic_write, output_paths
from usp.launch.guard import Guard
from usp.launch.job import Job, agree_on_job
from usp.launch.phases import Phases
from usp.launch.progress import open_progress
from usp.launch.report import encode_report, run_facts
from usp.launch.request import Request
from usp.launch.world import World, start_process_group, stop_process_group
from usp.mesh import Mesh, make_mesh
from usp.models.wan.checkpoint.loader import load_transformer
from usp.models.wan.config import TEXT_LEN
from usp.models.wan.parallel import ParallelDenoiser
from usp.models.wan.sampling import ExpertName, Experts, Prompt, SamplingConfig, initial_noise, make_scheduler, sample
from usp.transport import Transport, choose_transport

log = logging.getLogger(__name__)

# A collective may wait this long for a rank that loads or decodes; a rank that dies is noticed at once.
PATIENCE = timedelta(hours=2)


def run(request: Request, world: World, guard: Guard) -> None:
    """Make every video of the request. Collective; raises on the rank where something fails."""
    phases = Phases(guard)
    if request.load_latents is not None:
        _decode_only(request, world, phases, guard)
    else:
        _generate(request, world, phases, guard)


def _generate(request: Request, world: World, phases: Phases, guard: Guard) -> None:
    with phases.phase("meeting the other ranks"):
        device = prepare_device(request, world)
        guard.store = start_process_group(world, backend=backends(device), timeout=PATIENCE)
        job = agree_on_job(request)
        transport = choose_transport(request.exchange, device=device)
        mesh = make_mesh(request.mesh, device_type=transport.mesh_device)
    _announce(request, job, transport, device)
    session = _Session(request, job, world, mesh=mesh, device=device, phases=phases, guard=guard)
    results = session.make_videos()
    if request.report is not None and world.rank == 0:
        facts = run_facts(request, job, world, transport=transport, device=device)
        facts |= {"seconds": _rounded(phases.seconds), "videos": results, "peak_memory_bytes": _peak_memory(device)}
        atomic_write(request.report, encode_report(facts), guard=guard)
    with phases.phase("waiting for rank 0 to save"):
        dist.barrier()
        stop_process_group()


class _Session:
    """One load of a checkpoint and the videos made with it."""

    def __init__(
        self,
        request: Request,
        job: Job,
        world: World,
        *,
        mesh: Mesh,
        device: torch.device,
        phases: Phases,
        guard: Guard,
    ) -> None:
        self.request, self.job, self.rank, self.mesh, self.device = request, job, world.rank, mesh, device
        self.phases, self.guard = phases, guard
        self.dtype = DTYPES[request.dtype]
        self.config = SamplingConfig(
            request.steps, request.shift, request.boundary_ratio, request.guidance_high, request.guidance_low
        )
        self.experts = _experts(request, device, self.dtype)
        self.scheduler: Any = None

    def make_videos(self) -> list[dict[str, object]]:
        """Sample and save every prompt; what rank 0 reports of each."""
        with self.phases.phase("encoding the prompts"):
            states = _encode_on_first_rank(self.request, self.job, self.rank, self.device)
        with self.phases.phase("loading the weights"):
            vae = _load_vae(self.request, self.device) if self.rank == 0 else None
            self.scheduler = make_scheduler(self.request.checkpoint.scheduler, shift=self.request.shift)
            self._preload()
            states = broadcast_host(states).to(self.device)
        return [self._make_video(index, states, vae) for index in range(len(self.job.prompts))]

    def _make_video(self, index: int, states: torch.Tensor, vae: Any) -> dict[str, object]:
        seed, num_prompts = self.job.seed(index), len(self.job.prompts)
        prompt = Prompt(states[index][None], states[-1][None] if self.request.guided else None)
        with self.phases.phase("sampling"):
            latents, steps = self._sample(seed, prompt)
            digest = _digest(latents)
            agree({"latents_sha256": digest}, what="ranks disagree on the result, so a GPU or a link is at fault")
        prompt.drop()
        if self.request.offload_model or index == num_prompts - 1:  # decoding needs the room
            self.experts.drop()
            release_memory(self.device)
        if self.rank != 0:
            return {}
        text = self.job.prompts[index]
        paths = output_paths(self.request, prompt=text, seed=seed, index=index, num_prompts=num_prompts)
        log.info("latents sha256 %s (seed %d)", digest, seed)
        self._save(vae, latents, paths)
        return {"prompt": text, "seed": seed, "file": str(paths.video), "latents_sha256": digest, "step_seconds": steps}

    def _sample(self, seed: int, prompt: Prompt) -> tuple[torch.Tensor, list[float]]:
        request, clip = self.request, self.request.clip
        model_config = request.checkpoint.high.config
        denoiser = ParallelDenoiser(
            clip, model_config, mesh=self.mesh, attention=sdpa, device=self.device, dtype=self.dtype
        )
        shape = (1, model_config.in_channels, *clip.latent_size)
        noise = initial_noise(shape, seed=seed) if self.rank == 0 else torch.empty(shape)
        noise = broadcast_host(noise).to(self.device)
        marks = [time.perf_counter()]

        def before_step(step: int, expert: ExpertName) -> None:
            self.phases.detail(f"sampling, step {step + 1} of {request.steps}, {expert}-noise expert")

        with open_progress(request.steps, rank=self.rank, label="sampling") as progress:

            def after_step(step: int, expert: ExpertName) -> None:
                synchronize(self.device)
                marks.append(time.perf_counter())
                progress.advance()

            latents = sample(
                noise,
                config=self.config,
                scheduler=self.scheduler,
                experts=self.experts,
                denoiser=denoiser,
                prompt=prompt,
                before_step=before_step,
                after_step=after_step,
            )
        return latents, [round(end - start, 6) for start, end in pairwise(marks)]

    def _save(self, vae: Any, latents: torch.Tensor, paths: OutputPaths) -> None:
        from usp.launch.save import save_latents, save_video

        with self.phases.phase("saving"):
            if paths.latents is not None:
                save_latents(latents, paths.latents, guard=self.guard)
        with self.phases.phase("decoding and saving"):
            save_video(vae, latents, paths, request=self.request, guard=self.guard)
        log.info("video in %s", paths.video)

    def _preload(self) -> None:
        """Load before sampling whatever will be used and stays; fails before any step if a file is bad."""
        names: tuple[ExpertName, ...] = ("high",) if self.request.checkpoint.low is None else ("high", "low")
        for name in names[:1] if self.request.offload_model else names:
            self.experts.get(name)


def _experts(request: Request, device: torch.device, dtype: torch.dtype) -> Experts:
    checkpoint = request.checkpoint
    loaders = {"high": partial(load_transformer, checkpoint.high, device=device, dtype=dtype)}
    if checkpoint.low is not None:
        loaders["low"] = partial(load_transformer, checkpoint.low, device=device, dtype=dtype)
    return Experts(loaders, keep_one=request.offload_model)  # type: ignore[arg-type]


def _encode_on_first_rank(request: Request, job: Job, rank: int, device: torch.device) -> torch.Tensor:
    """[N (+ 1 for the negative prompt), 512, text_dim] on the CPU: rank 0's values, the others' room for them."""
    texts = [*job.prompts, request.negative_prompt] if request.guided else list(job.prompts)
    if rank != 0:
        return torch.empty(len(texts), TEXT_LEN, request.checkpoint.high.config.text_dim, dtype=DTYPES[request.dtype])
    from usp.models.wan.checkpoint.loader import load_text_encoder, load_tokenizer
    from usp.models.wan.text import encode_prompts

    where = torch.device("cpu") if request.t5_cpu else device
    # UMT5 overflows in fp16
    encoder_dtype = torch.float32 if request.dtype == "fp32" else torch.bfloat16
    encoder = load_text_encoder(request.checkpoint, device=where, dtype=encoder_dtype)
    tokenizer = load_tokenizer(request.checkpoint)
    states = encode_prompts(encoder, tokenizer, texts, dtype=DTYPES[request.dtype]).cpu()
    del encoder
    release_memory(device)
    return states


def _load_vae(request: Request, device: torch.device) -> Any:
    from usp.models.wan.checkpoint.loader import load_vae

    return load_vae(request.checkpoint, device=device, dtype=torch.float32)


def _decode_only(request: Request, world: World, phases: Phases, guard: Guard) -> None:
    """Make the video of a saved latents file: what is left to do after a run that failed in decoding."""
    from usp.launch.save import load_latents, save_video

    assert request.load_latents is not None
    with phases.phase("loading the decoder"):
        device = prepare_device(request, world)
        vae = _load_vae(request, device)
        latents = load_latents(request.load_latents).to(device)
    paths = output_paths(request, prompt="", seed=0, index=0, num_prompts=1)
    with phases.phase("decoding and saving"):
        save_video(vae, latents, paths, request=request, guard=guard)
    log.info("video in %s", paths.video)


def _announce(request: Request, job: Job, transport: Transport, device: torch.device) -> None:
    clip, mesh = request.clip, request.mesh
    log.info("%s from %s (%s)", request.task, request.checkpoint.root, request.checkpoint.layout)
    log.info(
        "%d frames of %dx%d, %d tokens, %d steps, seed %d%s",
        *(clip.frames, clip.width, clip.height, clip.num_tokens, request.steps, job.base_seed),
        f" to {job.seed(len(job.prompts) - 1)}" if len(job.prompts) > 1 else "",
    )
    log.info("mesh cfg %d x ulysses %d on %s, %s", mesh.cfg, mesh.ulysses, describe(device), request.dtype)
    log.info("exchange %s: %s", transport.name, transport.reason)


def _digest(latents: torch.Tensor) -> str:
    return hashlib.sha256(latents.float().cpu().contiguous().numpy().tobytes()).hexdigest()


def _peak_memory(device: torch.device) -> int | None:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def _rounded(seconds: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 3) for name, value in seconds.items()}
