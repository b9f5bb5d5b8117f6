"""Which transport carries the exchange: chosen once, by all ranks together, with the reason said.

    ipc    copy engines between CUDA buffers that the processes of one host share
    host   the same protocol on shared host memory, for ranks on CPUs
    nccl   plain collectives between GPUs, each rank with one of its own
    gloo   plain collectives through host memory; always works

A forced transport that cannot run raises on every rank. Used at set-up, after the ranks have met.
"""

import socket
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist

from usp.errors import UserError
from usp.exchange import CollectiveExchange
from usp.fill import make_placer
from usp.ipc.engine import Engine
from usp.ipc.errors import SetupError
from usp.ipc.handle import boot_id, pid_namespace
from usp.ipc.provider import Provider
from usp.ipc.rendezvous import GroupRendezvous, agreed
from usp.ipc.watchdog import STALL_TIMEOUT_S
from usp.layout import MeshShape
from usp.mesh import Mesh, make_mesh
from usp.pipeline import PipelinedExchange
from usp.proof import prove_shared

TransportName = Literal["ipc", "host", "nccl", "gloo"]
Asked = Literal["auto", "ipc", "host", "nccl", "gloo"]

WHY: dict[TransportName, str] = {
    "ipc": "the GPUs of a group are of one host",
    "host": "the ranks of a group share host memory",
    "nccl": "every rank has a GPU of its own",
    "gloo": "it always works",
}


@dataclass(frozen=True)
class Transport:
    """What carries the exchange inside attention, and why. `collectives` carries everything else between ranks."""

    name: TransportName
    reason: str
    collectives: Literal["nccl", "gloo"]


@dataclass(frozen=True)
class _Rank:
    """What one rank tells the others before they choose."""

    device_type: str
    gpu: str  # identity, whatever each process calls it: ordinals differ under CUDA_VISIBLE_DEVICES
    host: str
    has_nccl: bool


def choose_transport(asked: Asked, *, shape: MeshShape, device: torch.device) -> Transport:
    """Pick for the default group. Collective, since a transport works for all ranks or for none."""
    ranks: list[_Rank] = [_describe(device)] * dist.get_world_size()
    dist.all_gather_object(ranks, _describe(device))
    obstacles = {
        "ipc": _why_another_device(ranks, "cuda") or _spans_hosts(ranks, shape),
        "host": _why_another_device(ranks, "cpu") or _spans_hosts(ranks, shape),
        "nccl": _why_no_nccl(ranks),
        "gloo": None,
    }
    collectives: Literal["nccl", "gloo"] = "gloo" if obstacles["nccl"] or asked == "gloo" else "nccl"
    if asked != "auto":
        if obstacles[asked]:
            raise UserError(f"--exchange {asked} cannot run: {obstacles[asked]}; use --exchange auto")
        return Transport(asked, "asked for", collectives)
    return _automatic(obstacles, device, collectives)


def proven(transport: Transport, asked: Asked, *, mesh: Mesh, device: torch.device) -> Transport:
    """The transport, once memory was really shared with it; else, under `auto`, the collectives, with the reason.

    What ranks can do in principle, a container or a driver may still refuse. Collective, and decided by all ranks
    alike; a forced transport that fails on any raises UserError on all.
    """
    reasons: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(reasons, _try_to_share(transport, mesh, device))
    reason = next((one for one in reasons if one), None)
    if reason is None:
        return transport
    if asked != "auto":
        raise UserError(f"--exchange {asked} cannot run: {reason}; use --exchange auto")
    name = transport.collectives
    return Transport(name, f"no {transport.name}, since {reason}; {WHY[name]}", name)


def _try_to_share(transport: Transport, mesh: Mesh, device: torch.device) -> str | None:
    """Why the ranks of this Ulysses group cannot share memory; None if each has read from and written to the others."""
    if transport.name in ("nccl", "gloo") or mesh.ulysses.size == 1:
        return None
    rendezvous = GroupRendezvous(mesh.ulysses.group)
    no_kernel = _why_no_kernel(device) if transport.name == "ipc" else None
    try:
        provider, make_engine = agreed(rendezvous, lambda: _cuda(device) if transport.name == "ipc" else _host())
        prove_shared(rendezvous, provider, make_engine, device)
    except SetupError as error:
        return str(error)
    return no_kernel


def _why_no_kernel(device: torch.device) -> str | None:
    """Whether the kernel that places own rows compiles and runs here: found out now, not in the first call."""
    x = torch.arange(16, device=device).view(1, 2, 1, 8)
    placed = torch.zeros_like(x)
    try:
        make_placer([(0, placed)], num_heads=1, by_kernel=True)(x)
    except SetupError as error:
        return str(error)
    except Exception as error:  # whatever a compiler that is missing or broken raises
        return f"its Triton kernel fails: {type(error).__name__}: {error}"
    return None if torch.equal(placed, x) else "its Triton kernel computes nonsense"


def make_exchange(
    transport: Transport,
    num_tokens: int,
    *,
    mesh: Mesh,
    device: torch.device,
    num_groups: int | None = None,
    group_widths: tuple[int, ...] | None = None,
    stall_timeout: float = STALL_TIMEOUT_S,
) -> CollectiveExchange:
    """The exchange of this rank's Ulysses group, for a `with` block; one rank alone needs none. Collective."""
    if transport.name in ("nccl", "gloo") or mesh.ulysses.size == 1:
        return CollectiveExchange(num_tokens, axis=mesh.ulysses)
    rendezvous = GroupRendezvous(mesh.ulysses.group)
    provider, make_engine = agreed(rendezvous, lambda: _cuda(device) if transport.name == "ipc" else _host())
    return PipelinedExchange(
        num_tokens,
        axis=mesh.ulysses,
        rendezvous=rendezvous,
        provider=provider,
        make_engine=make_engine,
        num_groups=num_groups,
        group_widths=group_widths,
        stall_timeout=stall_timeout,
    )


def mesh_of(transport: Transport, shape: MeshShape) -> Mesh:
    """The mesh whose groups carry the transport's collectives. Collective."""
    return make_mesh(shape, device_type="cuda" if transport.collectives == "nccl" else "cpu")


def _automatic(
    obstacles: dict[str, str | None], device: torch.device, collectives: Literal["nccl", "gloo"]
) -> Transport:
    """The first that can run, with why those before it cannot."""
    order: tuple[TransportName, ...] = ("ipc", "nccl", "gloo") if device.type == "cuda" else ("host", "gloo")
    reasons: list[str] = []
    for name in order:
        obstacle = obstacles[name]
        if obstacle is None:
            return Transport(name, "; ".join([*reasons, WHY[name]]), collectives)
        reasons.append(f"no {name}, since {obstacle}")
    raise AssertionError("gloo always works")


def _describe(device: torch.device) -> _Rank:
    gpu = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
    has_nccl = device.type == "cuda" and dist.is_nccl_available()
    return _Rank(device.type, f"{socket.gethostname()}/{gpu}", f"{boot_id()}/{pid_namespace()}", has_nccl)


def _why_another_device(ranks: list[_Rank], wanted: str) -> str | None:
    others = (
        f"rank {index} runs on {rank.device_type}" for index, rank in enumerate(ranks) if rank.device_type != wanted
    )
    return next(others, None)


def _spans_hosts(ranks: list[_Rank], shape: MeshShape) -> str | None:
    """Whether some Ulysses group has ranks that cannot map each other's memory."""
    for first in range(0, shape.world, shape.ulysses):
        hosts = {rank.host for rank in ranks[first : first + shape.ulysses]}
        if len(hosts) > 1:
            return f"ranks {first} to {first + shape.ulysses - 1} are on {len(hosts)} hosts or in separate containers"
    return None


def _why_no_nccl(ranks: list[_Rank]) -> str | None:
    for index, rank in enumerate(ranks):
        if rank.device_type != "cuda" or not rank.has_nccl:
            return (
                f"rank {index} {'has a torch built without NCCL' if rank.device_type == 'cuda' else 'runs on the CPU'}"
            )
        sharing = [other for other, one in enumerate(ranks) if one.gpu == rank.gpu]
        if len(sharing) > 1:
            return f"ranks {', '.join(map(str, sharing))} share one GPU"
    return None


def _host() -> tuple[Provider, Callable[[], Engine]]:
    from usp.ipc.host import HostProvider
    from usp.ipc.host_engine import HostEngine

    return HostProvider(), HostEngine


def _cuda(device: torch.device) -> tuple[Provider, Callable[[], Engine]]:
    from usp.ipc.cuda import CudaProvider
    from usp.ipc.cuda_engine import CudaEngine

    return CudaProvider(device), partial(CudaEngine, device)
