"""From flags and a checkpoint to one complete request: every setting decided, every cheap check made. No torch.

A setting is the flag's; if the flag is silent, `usp_defaults.json`'s; else the task's. The scheduler file's flow_shift
yields to that order, and so does nothing else of the checkpoint.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar, cast

from usp.errors import UserError
from usp.launch import values
from usp.launch.flags import Flags
from usp.launch.notices import notices
from usp.launch.probe import why_no_cuda
from usp.launch.prompts import DEFAULT_PROMPT, check_seeds, read_prompts
from usp.launch.world import World
from usp.layout import MeshShape, choose_mesh
from usp.models.wan.checkpoint.folder import Checkpoint
from usp.models.wan.checkpoint.headers import read_header
from usp.models.wan.clip import VAE_STRIDE, Clip
from usp.models.wan.tasks import TASKS, Task

T = TypeVar("T")
Device = Literal["cpu", "cuda"]
Dtype = Literal["fp32", "bf16", "fp16"]
Exchange = Literal["auto", "ipc", "host", "nccl", "gloo"]

LARGE_DIM = 5120  # width of the 14B models
MAX_FPS = 1000  # of the video writer, which is too heavy to import here


@dataclass(frozen=True)
class Request:
    """What to make and how. Equal on every rank, but for `prompts`: with a prompt file only rank 0 has them.

    With one expert `guidance_low` equals `guidance_high` and `boundary_ratio` is None.
    """

    checkpoint: Checkpoint
    task: str
    prompts: tuple[str, ...] | None  # None: rank 0 read them from `prompt_file`
    prompt_file: Path | None
    negative_prompt: str
    clip: Clip
    fps: float
    steps: int
    shift: float
    guidance_high: float
    guidance_low: float
    boundary_ratio: float | None
    base_seed: int | None  # None: rank 0 draws it
    mesh: MeshShape
    device: Device
    dtype: Dtype
    stall_timeout: float  # seconds
    exchange: Exchange  # as asked; the ranks choose together once they have met
    attention: str  # as asked, likewise
    cpu_threads: int
    offload_model: bool  # keep one expert on the device
    t5_cpu: bool
    save_file: Path | None
    save_latents: Path | None
    load_latents: Path | None
    report: Path | None
    notices: tuple[str, ...]  # lines for rank 0 to say

    @property
    def guided(self) -> bool:
        """Whether any expert needs the negative branch."""
        return (self.guidance_high, self.guidance_low) != (1.0, 1.0)


def resolve(flags: Flags, *, world: World, checkpoint: Checkpoint) -> Request:
    """Decide every setting. Raises UserError for sizes, meshes, prompts and combinations that cannot work."""
    task = _task(flags, checkpoint)
    defaults = checkpoint.defaults
    high, low = _guidance(flags, checkpoint, task)
    device = _device(flags.device)
    _check_load_latents(flags, world)
    prompts = _prompts(flags, world)
    check_seeds(flags.base_seed, len(prompts or ()))
    shift = float(_first(flags.sample_shift, defaults.get("shift"), task.shift))
    return Request(
        checkpoint=checkpoint,
        task=task.name,
        prompts=prompts,
        prompt_file=flags.prompt_file,
        negative_prompt=_first(flags.negative_prompt, defaults.get("negative_prompt"), task.negative_prompt),
        clip=_clip(flags, checkpoint, task),
        fps=_fps(_first(flags.fps, defaults.get("fps"), task.fps)),
        steps=_first(flags.sample_steps, defaults.get("steps"), task.steps),
        shift=_shift(shift),
        guidance_high=high,
        guidance_low=low,
        boundary_ratio=_first_or_none(checkpoint.boundary_ratio, task.boundary_ratio),
        base_seed=flags.base_seed,
        mesh=choose_mesh(
            world=world.size,
            num_heads=checkpoint.high.config.num_heads,
            guided=(high, low) != (1.0, 1.0),
            cfg_size=flags.cfg_size,
            ulysses_size=flags.ulysses_size,
        ),
        device=device,
        dtype=cast(Dtype, flags.dtype or ("bf16" if device == "cuda" else "fp32")),
        stall_timeout=flags.stall_timeout,
        exchange=_exchange(flags.exchange, device),
        attention=flags.attention,
        cpu_threads=flags.cpu_threads,
        offload_model=checkpoint.low is not None and _first(flags.offload_model, world.size == 1),
        t5_cpu=flags.t5_cpu,
        save_file=flags.save_file,
        save_latents=flags.save_latents,
        load_latents=flags.load_latents,
        report=flags.report,
        notices=tuple(notices(flags, checkpoint, shift)),
    )


def _first(*candidates: T | None) -> T:
    """The first that is not None: 0, 0.0 and '' are values."""
    return next(value for value in candidates if value is not None)


def _first_or_none(*candidates: T | None) -> T | None:
    return next((value for value in candidates if value is not None), None)


def _fps(value: float) -> float:
    if not 1 / MAX_FPS <= value <= MAX_FPS:
        raise UserError(f"fps is {value:g}; use {1 / MAX_FPS:g} to {MAX_FPS}")
    return float(value)


def _shift(value: float) -> float:
    if value <= 0:
        raise UserError(f"shift is {value:g} in the checkpoint's usp_defaults.json; it must be above 0")
    return value


def _task(flags: Flags, checkpoint: Checkpoint) -> Task:
    named = flags.task or checkpoint.defaults.get("task")
    if named is not None and named not in TASKS:
        raise UserError(f"usp_defaults.json names the task {named!r}; use one of {', '.join(TASKS)}")
    task = TASKS[named or _fitting_task(checkpoint)]
    for_two, has_two = task.boundary_ratio is not None, checkpoint.low is not None
    if for_two != has_two:
        raise UserError(
            f"task {task.name} samples with {1 + for_two} expert(s), but {checkpoint.root} holds {1 + has_two}; "
            f"use --task {_fitting_task(checkpoint)} or another checkpoint"
        )
    return task


def _fitting_task(checkpoint: Checkpoint) -> str:
    if checkpoint.low is not None:
        return "t2v-A14B"
    return "t2v-14B" if checkpoint.high.config.dim >= LARGE_DIM else "t2v-1.3B"


def _guidance(flags: Flags, checkpoint: Checkpoint, task: Task) -> tuple[float, float]:
    """(high, low), chosen by name. One expert has one guidance."""
    defaults = checkpoint.defaults
    high = _first(flags.guidance_scale_high, defaults.get("guidance_high"), task.guidance_high)
    if checkpoint.low is not None:
        return high, _first(flags.guidance_scale_low, defaults.get("guidance_low"), task.guidance_low)
    if flags.guidance_scale_low not in (None, high):
        raise UserError(
            f"guidance of the low-noise expert is {flags.guidance_scale_low}, but {checkpoint.root} holds one expert, "
            f"whose guidance is {high}; give one value with --sample_guide_scale"
        )
    return high, high


def _clip(flags: Flags, checkpoint: Checkpoint, task: Task) -> Clip:
    config = checkpoint.high.config
    if flags.load_latents is not None:
        return _clip_of_latents(flags, flags.load_latents, channels=config.in_channels)
    width, height = flags.size or values.size(checkpoint.defaults.get("size", task.size))
    frames = _first(flags.frame_num, checkpoint.defaults.get("frames"), task.frames)
    clip = Clip(frames=frames, height=height, width=width)
    clip.check_positions(config.rope_max_seq_len)
    return clip


def _clip_of_latents(flags: Flags, file: Path, *, channels: int) -> Clip:
    """The file's own size, which --size and --frame_num may repeat but not change."""
    if not file.is_file():
        raise UserError(f"--load_latents {file}: there is no such file")
    found = read_header(file).get("latents")
    shape = found.shape if found else None
    if shape is None or len(shape) != 5 or shape[:2] != (1, channels):
        raise UserError(
            f"--load_latents {file}: expected a tensor 'latents' of [1, {channels}, F, H, W], found {shape}"
        )
    time, rows, columns = VAE_STRIDE
    clip = Clip(frames=(shape[2] - 1) * time + 1, height=shape[3] * rows, width=shape[4] * columns)
    asked = (_first(flags.frame_num, clip.frames), *_first(flags.size, (clip.width, clip.height)))
    if asked != (clip.frames, clip.width, clip.height):
        raise UserError(
            f"--load_latents {file} holds {clip.frames} frames of {clip.width}*{clip.height}, but {asked[0]} frames of "
            f"{asked[1]}*{asked[2]} were asked for; leave --frame_num and --size out"
        )
    return clip


def _check_load_latents(flags: Flags, world: World) -> None:
    if flags.load_latents is None:
        return
    if world.size != 1:
        raise UserError(f"--load_latents decodes on one process, but {world.size} were started; start one")
    for name in ("save_latents", "prompt_file", "report"):
        if getattr(flags, name) is not None:
            raise UserError(f"--load_latents only decodes, so --{name} has nothing to do; leave it out")


def _prompts(flags: Flags, world: World) -> tuple[str, ...] | None:
    if flags.prompt_file is None:
        return (_first(flags.prompt, DEFAULT_PROMPT),)
    return read_prompts(flags.prompt_file) if world.rank == 0 else None


def _device(asked: str) -> Device:
    reason = why_no_cuda(os.environ)
    if asked == "cuda" and reason is not None:
        raise UserError(f"--device cuda: {reason}; use --device cpu")
    return "cpu" if asked == "cpu" or reason is not None else "cuda"


def _exchange(asked: str, device: Device) -> Exchange:
    """What a device can never do is refused here; what the ranks can do together they find out when they meet."""
    if asked in ("ipc", "nccl") and device == "cpu":
        raise UserError(
            f"--exchange {asked} moves data between GPUs, but the device is cpu; use --exchange host or gloo"
        )
    if asked == "host" and device == "cuda":
        raise UserError("--exchange host moves host memory, but the device is cuda; use --exchange ipc, nccl or gloo")
    return cast(Exchange, asked)
