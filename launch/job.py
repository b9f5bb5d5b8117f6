"""What all ranks must hold alike before anything heavy happens: one agreement, and what rank 0 alone knows."""

import hashlib
from dataclasses import dataclass
from importlib.metadata import version

import torch
import torch.distributed as dist

import usp
from usp.collectives import agree
from usp.launch.prompts import draw_base_seed
from usp.launch.request import Request

SAME_SETTINGS = (
    *("task", "steps", "shift", "guidance_high", "guidance_low", "boundary_ratio", "base_seed"),
    *("device", "dtype", "exchange", "attention", "cpu_threads", "offload_model"),
)


@dataclass(frozen=True)
class Job:
    """Prompts and seeds of a request, the same on every rank. Prompt i is sampled with `base_seed + i`."""

    prompts: tuple[str, ...]
    base_seed: int

    def seed(self, index: int) -> int:
        return self.base_seed + index


def agree_on_job(request: Request) -> Job:
    """Stop every rank unless all were asked for the same; then take prompts and seed from rank 0. Collective."""
    agree(_facts(request), what="ranks were given different requests")
    told: list[tuple[tuple[str, ...] | None, int]] = [(request.prompts, _own_seed(request))]
    dist.broadcast_object_list(told, src=0)
    prompts, base_seed = told[0]
    assert prompts is not None, "rank 0 reads the prompt file"
    return Job(prompts, base_seed)


def _own_seed(request: Request) -> int:
    return draw_base_seed() if request.base_seed is None else request.base_seed


def _facts(request: Request) -> dict[str, object]:
    clip, mesh = request.clip, request.mesh
    facts: dict[str, object] = {
        "checkpoint": request.checkpoint.fingerprint[:16],
        "size": f"{clip.width}*{clip.height}",
        "frame_num": clip.frames,
        "mesh": f"cfg {mesh.cfg} x ulysses {mesh.ulysses}",
        "negative_prompt": _digest(request.negative_prompt),
        "usp": usp.__version__,
        "torch": torch.__version__,
        "diffusers": version("diffusers"),  # its scheduler runs on every rank
    }
    facts["prompt"] = _digest(request.prompts) if request.prompt_file is None else "in a file"  # rank 0 alone reads it
    return facts | {name: getattr(request, name) for name in SAME_SETTINGS}


def _digest(text: object) -> str:
    return hashlib.sha256(repr(text).encode("utf-8", "backslashreplace")).hexdigest()[:16]
