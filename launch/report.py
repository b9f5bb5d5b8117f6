"""What a run was and how it went, as JSON: enough to repeat it and to compare it."""

import json
import platform
from importlib.metadata import version

import torch

import usp
from usp.launch.device import describe
from usp.launch.job import Job
from usp.launch.request import Request
from usp.launch.world import World
from usp.transport import Transport

LIBRARIES = ("diffusers", "transformers", "safetensors", "numpy", "av")


def run_facts(
    request: Request, job: Job, world: World, *, transport: Transport, device: torch.device
) -> dict[str, object]:
    """Everything about a run that is known before it samples."""
    clip, checkpoint = request.clip, request.checkpoint
    return {
        "task": request.task,
        "checkpoint": str(checkpoint.root),
        "layout": checkpoint.layout,
        "fingerprint": checkpoint.fingerprint,
        "clip": {"frames": clip.frames, "width": clip.width, "height": clip.height, "fps": request.fps},
        "tokens": clip.num_tokens,
        "steps": request.steps,
        "shift": request.shift,
        "boundary_ratio": request.boundary_ratio,
        "guidance": {"high": request.guidance_high, "low": request.guidance_low},
        "negative_prompt": request.negative_prompt,
        "base_seed": job.base_seed,
        "world": {"size": world.size, "launcher": world.launcher},
        "mesh": {"cfg": request.mesh.cfg, "ulysses": request.mesh.ulysses},
        "exchange": {"asked": request.exchange, "used": transport.name, "reason": transport.reason},
        "collectives": transport.collectives,
        "offload_model": request.offload_model,
        "t5_cpu": request.t5_cpu,
        "device": describe(device),
        "dtype": request.dtype,
        "versions": _versions(),
    }


def encode_report(facts: dict[str, object]) -> bytes:
    """The report as the bytes of a JSON file."""
    return (json.dumps(facts, indent=2, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")


def _versions() -> dict[str, str | None]:
    ours = {"usp-runtime": usp.__version__, "python": platform.python_version(), "torch": torch.__version__}
    return {**ours, "cuda": torch.version.cuda, **{name: version(name) for name in LIBRARIES}}
