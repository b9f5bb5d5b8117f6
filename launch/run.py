"""The heavy part of a run, on every rank: meet, agree, make the videos, report."""

import logging
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version

import torch
import torch.distributed as dist

from usp.attention import Chosen, choose_attention, of_all_ranks
from usp.collectives import connect
from usp.errors import UserError
from usp.kernels import kernels_for
from usp.kernels.check import why_no_kernels
from usp.launch.device import DTYPES, backends, describe, prepare_device
from usp.launch.files import atomic_write, output_paths
from usp.launch.guard import Guard
from usp.launch.job import Job, agree_on_job
from usp.launch.phases import Phases
from usp.launch.report import encode_report, run_facts
from usp.launch.request import Request
from usp.launch.session import Ranks, Session
from usp.launch.world import World, open_store, start_process_group, stop_process_group
from usp.transport import Transport, choose_transport, make_exchange, mesh_of, proven

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
        guard.store = open_store(world)
        start_process_group(world, guard.store, backend=backends(device), timeout=PATIENCE)
        job = agree_on_job(request)
        transport = choose_transport(request.exchange, shape=request.mesh, device=device)
        mesh = mesh_of(transport, request.mesh)
        transport = proven(transport, request.exchange, mesh=mesh, device=device)
    with phases.phase("trying the attention kernels"):
        attention = _choose_attention(request, device)
    if world.rank == 0:
        with phases.phase("trying the video encoder"):
            _try_encoder(request)
    _announce(request, job, transport, attention, device)
    exchange = make_exchange(
        transport, request.clip.num_tokens, mesh=mesh, device=device, stall_timeout=request.stall_timeout
    )
    with exchange:
        if device.type == "cuda":
            with phases.phase("connecting the GPUs"):
                connect((mesh.cfg, mesh.ulysses), device)
        ranks = Ranks(world.rank, mesh, exchange, attention.backend, device)
        videos = Session(request, job, ranks, phases=phases, guard=guard).make_videos()
        if request.report is not None and world.rank == 0:
            facts = run_facts(request, job, world, transport=transport, device=device)
            facts["attention"] = {
                "asked": request.attention,
                "used": attention.backend.name,
                "reason": attention.reason,
            }
            facts |= {"seconds": phases.rounded(), "videos": videos, "peak_memory_bytes": _peak_memory(device)}
            atomic_write(request.report, encode_report(facts), guard=guard)
        with phases.phase("waiting for rank 0 to save"):
            dist.barrier()
    stop_process_group()


def _decode_only(request: Request, world: World, phases: Phases, guard: Guard) -> None:
    """Make the video of a saved latents file: what is left to do after a run that failed in decoding."""
    from usp.launch.save import load_latents, save_results
    from usp.models.wan.checkpoint.loader import load_vae

    assert request.load_latents is not None
    with phases.phase("loading the decoder"):
        device = prepare_device(request, world)
        vae = load_vae(request.checkpoint, device=device, dtype=torch.float32)
        latents = load_latents(request.load_latents).to(device)
    paths = output_paths(request, prompt="", seed=0, index=0, num_prompts=1)
    with phases.phase("decoding and saving"):
        save_results(vae, latents, paths, request=request, guard=guard)
    log.info("video in %s", paths.video)


def _choose_attention(request: Request, device: torch.device) -> Chosen:
    """Before any weight loads. Collective."""
    config, dtype = request.checkpoint.high.config, DTYPES[request.dtype]
    kernels_for(device)  # a GPU without Triton is told now, not in the first step
    refuse(why_no_kernels(device, num_heads=config.num_heads, head_dim=config.head_dim, dtype=dtype), device)
    return choose_attention(
        request.attention, device=device, dtype=dtype, head_dim=config.head_dim, gather=of_all_ranks
    )


def refuse(obstacle: str | None, device: torch.device) -> None:
    """Raise UserError on all ranks if one has an obstacle. Collective."""
    obstacles: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(obstacles, obstacle)
    for rank, one in enumerate(obstacles):
        if one is not None:
            raise UserError(f"rank {rank}: {one}; {describe(device)}, torch {torch.__version__}, {_triton()}")


def _triton() -> str:
    try:
        return f"Triton {version('triton')}"
    except PackageNotFoundError:
        return "no Triton"


def _try_encoder(request: Request) -> None:
    """Hours may lie between here and the first video."""
    clip = request.clip
    try:
        from usp.launch.video import try_encoder
    except ImportError as error:
        raise UserError(f"PyAV or Pillow is missing or broken ({error}); the rank that saves needs both") from error
    try_encoder(height=clip.height, width=clip.width, fps=request.fps)


def _announce(request: Request, job: Job, transport: Transport, attention: Chosen, device: torch.device) -> None:
    clip, mesh = request.clip, request.mesh
    log.info("%s from %s (%s)", request.task, request.checkpoint.root, request.checkpoint.layout)
    log.info(
        "%d frames of %dx%d, %d tokens, %d steps, seed %d%s",
        *(clip.frames, clip.width, clip.height, clip.num_tokens, request.steps, job.base_seed),
        f" to {job.seed(len(job.prompts) - 1)}" if len(job.prompts) > 1 else "",
    )
    log.info("mesh cfg %d x ulysses %d on %s, %s", mesh.cfg, mesh.ulysses, describe(device), request.dtype)
    log.info("exchange %s: %s", transport.name, transport.reason)
    log.info("attention %s: %s", attention.backend.name, attention.reason)


def _peak_memory(device: torch.device) -> int | None:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
