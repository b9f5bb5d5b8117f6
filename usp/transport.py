"""Which transport carries the exchange: chosen once, by all ranks together, with the reason said.

NCCL needs a GPU of its own for every rank; gloo always works, through host memory. A forced transport that cannot run
raises on every rank. Used at set-up, after the ranks have met and before the mesh is made.
"""

import socket
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist

from usp.errors import UserError

TransportName = Literal["nccl", "gloo"]


@dataclass(frozen=True)
class Transport:
    """The transport in use and why; `mesh_device` is the device type that its process groups are made for."""

    name: TransportName
    reason: str

    @property
    def mesh_device(self) -> str:
        return "cuda" if self.name == "nccl" else "cpu"


def choose_transport(asked: Literal["auto", "nccl", "gloo"], *, device: torch.device) -> Transport:
    """Pick for the default group. Collective, since a transport works for all ranks or for none."""
    obstacle = _first_obstacle(device)
    if asked == "gloo":
        return Transport("gloo", "asked for")
    if asked == "nccl" and obstacle:
        raise UserError(f"--exchange nccl cannot run: {obstacle}; use --exchange gloo or auto")
    if asked == "nccl":
        return Transport("nccl", "asked for")
    return Transport("gloo", obstacle) if obstacle else Transport("nccl", "every rank has a GPU of its own")


def _first_obstacle(device: torch.device) -> str | None:
    """Why NCCL cannot serve these ranks, the same words on all of them; None if it can."""
    everyone: list[tuple[str, str]] = [("", "")] * dist.get_world_size()
    dist.all_gather_object(everyone, (_own_obstacle(device), _gpu_name(device)))
    for rank, (obstacle, gpu) in enumerate(everyone):
        if obstacle:
            return f"rank {rank} {obstacle}"
        sharing = [other for other, (_, name) in enumerate(everyone) if name == gpu]
        if len(sharing) > 1:
            return f"ranks {', '.join(map(str, sharing))} share one GPU"
    return None


def _own_obstacle(device: torch.device) -> str:
    if device.type != "cuda":
        return "runs on the CPU"
    return "" if dist.is_nccl_available() else "has a torch built without NCCL"


def _gpu_name(device: torch.device) -> str:
    """The GPU's identity, whatever each process calls it: ordinals differ under CUDA_VISIBLE_DEVICES."""
    if device.type != "cuda":
        return ""
    return f"{socket.gethostname()}/{torch.cuda.get_device_properties(device).uuid}"
