"""One allocation per rank that every rank of the group can address, from set-up to its collective end.

Set-up costs a few gathers over host memory, and every step of it succeeds on all ranks or raises on all of them.
Used by the executors, which lay flags, slots and results out in it, and by the watchdog's control pages.
"""

import warnings
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

from usp.ipc.errors import SetupError
from usp.ipc.handle import Handle, boot_id, check_same_host, check_same_memory, pid_namespace
from usp.ipc.provider import Provider, Segment
from usp.ipc.rendezvous import Rendezvous, agreed

if TYPE_CHECKING:
    import torch


class Arena:
    """Zeroed memory of every rank, by rank. Collective to make and to close.

    `nbytes` is this rank's own size; sizes may differ. `base[r]` is the address of rank r's memory in this process.
    No tensor over an arena may outlive it: CUDA memory is gone at `close`, whoever still points at it.
    """

    def __init__(self, nbytes: int, *, rendezvous: Rendezvous, provider: Provider, layout: str, epoch: int = 0) -> None:
        assert nbytes >= 0
        self.rank = rendezvous.rank
        self._rendezvous, self._provider = rendezvous, provider
        self._segments: dict[int, Segment] = {}
        self._bytes: dict[int, torch.Tensor] = {}
        self._closed = False
        try:
            handles = self._publish(nbytes, layout, epoch)
            agreed(rendezvous, lambda: self._open(handles))
        except SetupError:  # raised on every rank, so all of them meet in close
            self.close()
            raise
        except BaseException:
            self.abandon()
            raise
        provider.seal(self._segments[self.rank])
        self.nbytes = tuple(handle.nbytes for handle in handles)
        self.base = tuple(self._segments[rank].address for rank in range(rendezvous.size))

    def view(
        self, rank: int, offset: int, shape: Sequence[int], dtype: "torch.dtype", strides: Sequence[int] | None = None
    ) -> "torch.Tensor":
        """A tensor over rank's memory from byte `offset`; `strides` count elements, contiguous if left out."""
        assert not self._closed
        strides = _contiguous(shape) if strides is None else strides
        last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        end = offset + (0 if 0 in shape else (last + 1) * dtype.itemsize)
        if offset < 0 or offset % dtype.itemsize or end > self.nbytes[rank]:
            raise ValueError(
                f"{dtype} {tuple(shape)} from byte {offset} to {end} does not fit the {self.nbytes[rank]} bytes "
                f"of rank {rank}, or is not aligned to {dtype.itemsize}"
            )
        import torch

        with torch.inference_mode(False):  # a view is written under whatever mode the caller is in
            return self._whole(rank)[offset:].view(dtype).as_strided(tuple(shape), tuple(strides))

    def close(self) -> None:
        """Let go of the peers' memory, meet, free the own. Collective; the streams must be idle. May be called twice.

        The order matters: freeing what a peer has still open is undefined for CUDA.
        """
        if self._closed:
            return
        self._closed = True
        self._shut_imports()
        try:
            self._rendezvous.barrier()
        except BaseException:
            if self._may_free_alone():
                self._free_own()
            raise
        self._free_own()

    def abandon(self, *, idle: bool = False) -> None:
        """End a broken arena without waiting for anybody. Afterwards `close` does nothing.

        Host memory goes back at once. CUDA memory is touched only if the own streams are `idle`, since driver calls
        would wait for them, and what peers may have open is left to the end of the process.
        """
        if self._closed:
            return
        self._closed = True
        if idle or self._provider.frees_while_open:
            self._shut_imports()
        if self._may_free_alone() and (idle or self._provider.frees_while_open):
            self._free_own()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:  # the other ranks may never come
            self.abandon()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            warnings.warn(f"an arena of rank {self.rank} was never closed", ResourceWarning, stacklevel=2)

    def _publish(self, nbytes: int, layout: str, epoch: int) -> list[Handle]:
        """Allocate, and tell everybody. All ranks see the same handles, so the checks raise on all or on none."""
        own = agreed(self._rendezvous, lambda: self._allocate(nbytes, layout, epoch))
        handles: list[Handle] = self._rendezvous.gather(own)
        check_same_host(handles, self._rendezvous.names)
        check_same_memory(handles, self._rendezvous.names)
        return handles

    def _allocate(self, nbytes: int, layout: str, epoch: int) -> Handle:
        provider = self._provider
        segment = self._segments[self.rank] = provider.allocate(nbytes)
        payload = provider.export(segment)
        return Handle(provider.name, nbytes, epoch, layout, boot_id(), pid_namespace(), provider.device, payload)

    def _open(self, handles: Sequence[Handle]) -> None:
        for rank, handle in enumerate(handles):
            if rank != self.rank:
                self._segments[rank] = self._provider.open(handle)

    def _whole(self, rank: int) -> "torch.Tensor":
        if rank not in self._bytes:
            self._bytes[rank] = self._provider.as_bytes(self._segments[rank])
        return self._bytes[rank]

    def _may_free_alone(self) -> bool:
        return self._provider.frees_while_open or self._rendezvous.size == 1

    def _shut_imports(self) -> None:
        self._bytes.clear()
        for rank in [rank for rank in self._segments if rank != self.rank]:
            self._provider.shut(self._segments.pop(rank))

    def _free_own(self) -> None:
        if self.rank in self._segments:
            self._provider.free(self._segments.pop(self.rank))


def _contiguous(shape: Sequence[int]) -> list[int]:
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * max(1, shape[dim + 1])
    return strides
