"""Attention over whole sequences: [B, S, H, D] queries against [B, L, H, D] keys and values, unmasked.

One callable per backend, all with this signature, and one place where one of them is picked, before any weight loads.
Used for self-attention after the exchange and for cross-attention.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist

from usp.backends.backend import Backend
from usp.backends.check import TRAITS, try_backend
from usp.backends.names import AUTO, NAMES
from usp.backends.ragged import resolved
from usp.backends.torch_sdpa import sdpa
from usp.errors import UserError

__all__ = ["Attention", "AttentionInto", "Chosen", "alone", "choose_attention", "of_all_ranks", "sdpa", "writes_out"]


class Attention(Protocol):
    def __call__(self, q_bshd: torch.Tensor, k_blhd: torch.Tensor, v_blhd: torch.Tensor) -> torch.Tensor:
        """Softmax attention scaled by 1/sqrt(D). Returns [B, S, H, D]."""
        ...


class AttentionInto(Protocol):
    """A backend that can also write its result to its place: it has this attribute, and takes `out`, of any strides."""

    writes_out: bool

    def __call__(
        self, q_bshd: torch.Tensor, k_blhd: torch.Tensor, v_blhd: torch.Tensor, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """As `Attention`; with `out` [B, S, H, D] the result is written there, bit for bit the same."""
        ...


def writes_out(attention: Attention) -> bool:
    return bool(getattr(attention, "writes_out", False))


class Chosen(NamedTuple):
    """What all ranks attend with, and why."""

    backend: Backend
    reason: str


@dataclass(frozen=True)
class Answer:
    """What one rank found out about a backend."""

    obstacle: str | None  # None: it ran and agrees with math
    libraries: str  # with versions


Gather = Callable[[Answer], Sequence[Answer]]


def alone(own: Answer) -> list[Answer]:
    return [own]


def of_all_ranks(own: Answer) -> list[Answer]:
    """Every rank's answer, by rank of the default group. Collective."""
    answers = [own] * dist.get_world_size()
    dist.all_gather_object(answers, own)
    return answers


def choose_attention(
    asked: str, *, device: torch.device, dtype: torch.dtype, head_dim: int, gather: Gather = alone
) -> Chosen:
    """The backend asked for, or under `auto` the first that runs on every rank, tried on a tiny input.

    With `gather=of_all_ranks` this is collective and decided by all ranks alike, so that all have the same bits.
    Raises UserError, on all of them, for a name that does not exist and for a backend that cannot run.
    """
    if asked not in ("auto", *NAMES):
        raise UserError(f"there is no attention {asked!r}; use auto or one of {', '.join(NAMES)}")
    obstacles: dict[str, str] = {}
    for name in AUTO[device.type] if asked == "auto" else (asked,):
        backend, own = try_backend(name, device=device, dtype=dtype, head_dim=head_dim)
        libraries = _libraries(resolved(name, device), device)
        obstacle = _common_obstacle(gather(Answer(own, libraries)))
        if obstacle is None:
            assert backend is not None, "no rank has an obstacle"
            return Chosen(backend, "; ".join([*_told(obstacles), f"{libraries}, agrees with math"]))
        obstacles[name] = obstacle
    if asked == "auto":
        raise UserError(f"no attention runs on {_device_name(device)}: {'; '.join(_told(obstacles))}")
    raise UserError(
        f"--attention {asked} cannot run on {_device_name(device)} with {libraries}: {obstacle}; use --attention auto"
    )


def _told(obstacles: dict[str, str]) -> list[str]:
    return [f"no {name}, since {obstacle}" for name, obstacle in obstacles.items()]


def _common_obstacle(answers: Sequence[Answer]) -> str | None:
    for rank, answer in enumerate(answers):
        if answer.obstacle is not None:
            return f"on rank {rank}, {answer.obstacle}" if len(answers) > 1 else answer.obstacle
        if answer.libraries != answers[0].libraries:
            return f"rank 0 has {answers[0].libraries}, but rank {rank} {answer.libraries}: their bits may differ"
    return None


def _libraries(name: str, device: torch.device) -> str:
    """The versions that bits depend on: of the package that brings the backend, of torch, and of cuDNN."""
    found = [_version(library) for library in TRAITS[name].libraries]
    packages = [one for one in found if one is not None] or [f"no {' or '.join(TRAITS[name].libraries)}"] * bool(found)
    cudnn = [f"cuDNN {torch.backends.cudnn.version()}"] * (device.type == "cuda" and "cudnn" in name)
    return ", ".join([*packages, *cudnn, f"torch {torch.__version__}"])


def _version(library: str) -> str | None:
    try:
        return f"{library} {version(library)}"
    except PackageNotFoundError:
        return None


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"
