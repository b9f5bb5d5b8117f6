"""What one rank tells the others about its memory: a small picklable description, checked before anyone opens it."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from usp.ipc.errors import SetupError


@dataclass(frozen=True)
class Handle:
    provider: str
    nbytes: int
    epoch: int  # counts arenas of one group: a handle of an earlier one is stale
    layout: str  # hash of what lies where
    host: str  # boot id of the kernel
    pid_namespace: str
    device: str  # UUID of the GPU that holds the memory; "" for host memory. Ordinals differ between processes
    payload: Any  # what the provider needs to open it


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def pid_namespace() -> str:
    return os.readlink("/proc/self/ns/pid")


def check_same_host(handles: Sequence[Handle], names: Sequence[int]) -> None:
    """Raise SetupError unless all ranks run under one kernel and see each other's process ids."""
    _check_one(handles, names, lambda handle: handle.host, "hosts", "use nccl or gloo between hosts")
    _check_one(
        handles, names, lambda handle: handle.pid_namespace, "pid namespaces", "start the ranks in one container"
    )


def check_same_memory(handles: Sequence[Handle], names: Sequence[int]) -> None:
    """Raise SetupError unless all ranks mean the same arena."""
    _check_one(handles, names, lambda handle: handle.provider, "kinds of memory", "choose one exchange for all ranks")
    _check_one(handles, names, lambda handle: handle.layout, "layouts", "give every rank the same plan")
    _check_one(
        handles, names, lambda handle: handle.epoch, "epochs", "open and close arenas in the same order on every rank"
    )


def _check_one(
    handles: Sequence[Handle], names: Sequence[int], field: Callable[[Handle], object], what: str, advice: str
) -> None:
    ranks_of: dict[object, list[int]] = {}
    for rank, handle in zip(names, handles, strict=True):
        ranks_of.setdefault(field(handle), []).append(rank)
    if len(ranks_of) > 1:
        told = "; ".join(f"{value}: ranks {', '.join(map(str, ranks))}" for value, ranks in ranks_of.items())
        raise SetupError(f"the {len(handles)} ranks are on {len(ranks_of)} different {what} ({told}); {advice}")
