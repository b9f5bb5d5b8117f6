"""Collectives that move uneven tensors of any dtype over NCCL or gloo, as raw bytes.

Everything goes through the single-tensor all-to-all, the one form that both backends have with uneven splits; bytes,
because gloo refuses some dtypes. Device memory over gloo is staged through the host.
Used by the collective exchange, by guidance and by set-up; never inside the pipelined exchange.
"""

import math
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from usp.errors import RankMismatchError, UserError
from usp.ipc.in_time import InTime
from usp.mesh import Axis

Shape = tuple[int, ...]

CONNECT_S = 120.0


def all_to_all(parts: Sequence[torch.Tensor], *, shapes: Sequence[Shape], axis: Axis) -> list[torch.Tensor]:
    """Send `parts[p]` to rank p of the axis and return what each rank p sent, of `shapes[p]`.

    All tensors share one dtype and device; any strides. Collective over the axis.
    """
    assert len(parts) == len(shapes) == axis.size
    if axis.size == 1:
        return [parts[0].reshape(shapes[0])]
    dtype, device = parts[0].dtype, parts[0].device
    staging = device if device.type == axis.device_type else torch.device("cpu")
    sent = torch.cat([_as_bytes(part) for part in parts]).to(staging)
    in_sizes = [part.numel() * dtype.itemsize for part in parts]
    out_sizes = [math.prod(shape) * dtype.itemsize for shape in shapes]
    received = torch.empty(sum(out_sizes), dtype=torch.uint8, device=staging)
    dist.all_to_all_single(received, sent, out_sizes, in_sizes, group=axis.group)
    pieces = received.to(device).split(out_sizes)
    return [piece.view(dtype).view(shape) for piece, shape in zip(pieces, shapes, strict=True)]


def all_gather(own: torch.Tensor, *, shapes: Sequence[Shape], axis: Axis) -> list[torch.Tensor]:
    """Return every rank's tensor, of `shapes[p]` from rank p of the axis. Collective over the axis."""
    return all_to_all([own] * axis.size, shapes=shapes, axis=axis)


def broadcast(own: torch.Tensor, *, source: int, axis: Axis) -> torch.Tensor:
    """Return the tensor of rank `source` of the axis; `own` of the others gives shape, dtype and device only."""
    nothing = own.flatten()[:0]
    parts = [own if axis.index == source else nothing] * axis.size
    shapes = [tuple(own.shape) if rank == source else (0,) for rank in range(axis.size)]
    return all_to_all(parts, shapes=shapes, axis=axis)[source]


def broadcast_host(tensor: torch.Tensor) -> torch.Tensor:
    """Fill a CPU tensor of any dtype with rank 0's values, over the default group, in place; returns it."""
    assert tensor.device.type == "cpu" and tensor.is_contiguous()
    dist.broadcast(tensor.view(-1).view(torch.uint8), src=0)
    return tensor


def connect(axes: Sequence[Axis], device: torch.device, *, limit_s: float = CONNECT_S) -> None:
    """Let NCCL connect the ranks of each axis that it serves, now: while the GPU has room, and all ranks are here.

    It would do so at the first collective, in the first step, where want of memory or of a working link would cost all
    that was loaded. Collective; raises UserError where it takes longer than `limit_s`, since NCCL may wait for ever.
    """
    served = [axis for axis in axes if axis.size > 1 and axis.device_type == device.type]

    def gather() -> None:
        if device.type == "cuda":
            torch.cuda.set_device(device)  # a thread has its own
        for axis in served:
            own = torch.full((1,), axis.index, dtype=torch.uint8, device=device)
            found = [int(one) for one in all_gather(own, shapes=[(1,)] * axis.size, axis=axis)]
            if found != list(range(axis.size)):
                raise UserError(f"{axis.name}: ranks gather {found}; the links between these devices do not work")

    try:
        if served:
            InTime().call(gather, limit_s=limit_s)
    except TimeoutError:
        raise UserError(
            f"NCCL did not connect within {limit_s:.0f} s; NCCL_DEBUG=INFO says why; NCCL_P2P_DISABLE=1 or "
            "--exchange gloo may help"
        ) from None


def meet() -> None:
    """Return once every rank of the default group has come; over host memory, so no device stands waiting."""
    dist.all_gather_object([None] * dist.get_world_size(), None)


def agree(facts: Mapping[str, object], *, what: str) -> None:
    """Raise RankMismatchError on every rank of the default group unless all hold the same facts. One object gather."""
    everyone: list[Mapping[str, object]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyone, dict(facts))
    names = sorted({name for one in everyone for name in one})
    differing = [name for name in names if len({repr(one.get(name)) for one in everyone}) > 1]
    if differing:
        raise RankMismatchError(f"{what}: " + "; ".join(_tell(name, everyone) for name in differing))


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _tell(name: str, everyone: Sequence[Mapping[str, object]]) -> str:
    ranks_of: dict[str, list[int]] = {}
    for rank, facts in enumerate(everyone):
        ranks_of.setdefault(str(facts.get(name)), []).append(rank)
    told = [
        f"{value} on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}" for value, ranks in ranks_of.items()
    ]
    return f"{name} is " + " but ".join(told)
