"""CUDA memory that processes share: the driver's own allocations, exported and opened as legacy IPC handles.

Never torch's caching allocator, whose expandable segments cannot be exported. Opening enables peer access where the
memory is on another GPU; ranks may also share one GPU. Used by the arena of the pipelined exchange on GPUs.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from usp.ipc.driver import call, load_driver
from usp.ipc.errors import CudaError, SetupError
from usp.ipc.handle import Handle
from usp.ipc.provider import Segment

if TYPE_CHECKING:
    import torch

# Smaller allocations share such a block, and IPC exports whole blocks.
GRANULARITY = 2 << 20
HANDLE_NBYTES = 64  # CU_IPC_HANDLE_SIZE; read through the struct's address, since not every cuda-python has its field


class CudaProvider:
    """Memory of one GPU, in torch's context for it. `device` as this process counts GPUs; None is the current one.

    Tensors over a segment do not keep it alive: CUDA frees it whoever points at it.
    """

    name = "cuda"
    frees_while_open = False  # undefined by CUDA: importers close first

    def __init__(self, device: "torch.device | str | int | None" = None) -> None:
        import torch

        self._driver = load_driver()
        torch.cuda.init()
        index = torch.cuda.current_device() if device is None else torch.device("cuda", _index(device)).index
        self.torch_device = torch.device("cuda", index)
        torch.empty(1, device=self.torch_device)  # makes torch's context, which the driver calls below then use
        self.device = f"GPU-{torch.cuda.get_device_properties(index).uuid}"

    def allocate(self, nbytes: int) -> Segment:
        size = -(-max(nbytes, 1) // GRANULARITY) * GRANULARITY
        with self._context():
            segment = Segment(self._take(size), nbytes)
            try:
                call(self._driver.cuMemsetD8, segment.address, 0, size)
                call(self._driver.cuCtxSynchronize)  # a peer may read as soon as it has the handle
            except BaseException:
                self.free(segment)
                raise
        return segment

    def _take(self, size: int) -> int:
        """The address of so many bytes; torch is asked for what it keeps for later if there are too few."""
        import torch

        for is_last in (False, True):
            try:
                return int(call(self._driver.cuMemAlloc, size))
            except CudaError as error:
                if is_last:
                    raise SetupError(f"{size} bytes of GPU memory for the exchange cannot be had: {error}") from error
            torch.cuda.synchronize(self.torch_device)
            torch.cuda.empty_cache()
        raise AssertionError("it returns or raises")

    def export(self, segment: Segment) -> bytes:
        with self._context():
            exported = call(self._driver.cuIpcGetMemHandle, segment.address)
        return ctypes.string_at(int(exported.getPtr()), HANDLE_NBYTES)

    def seal(self, segment: Segment) -> None:
        return None  # handles name the memory itself; nothing is held for those who have yet to open it

    def open(self, handle: Handle) -> Segment:
        assert len(handle.payload) == HANDLE_NBYTES
        opened = self._driver.CUipcMemHandle()
        ctypes.memmove(int(opened.getPtr()), handle.payload, HANDLE_NBYTES)
        flags = int(self._driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS)
        with self._context():
            return Segment(int(call(self._driver.cuIpcOpenMemHandle, opened, flags)), handle.nbytes)

    def shut(self, segment: Segment) -> None:
        with self._context():
            call(self._driver.cuIpcCloseMemHandle, segment.address)

    def free(self, segment: Segment) -> None:
        with self._context():
            call(self._driver.cuMemFree, segment.address)

    def as_bytes(self, segment: Segment) -> "torch.Tensor":
        import torch

        if segment.nbytes == 0:
            return torch.empty(0, dtype=torch.uint8, device=self.torch_device)
        with self._context():
            # No device is named: torch reads it from the pointer, and naming another one would make a copy.
            tensor = torch.as_tensor(_ArrayInterface(segment))
        assert tensor.data_ptr() == segment.address
        return tensor

    @contextmanager
    def _context(self) -> Iterator[None]:
        import torch

        with torch.cuda.device(self.torch_device):
            yield


class _ArrayInterface:
    """What torch asks for to view foreign CUDA memory."""

    def __init__(self, segment: Segment) -> None:
        self.__cuda_array_interface__ = {
            "shape": (segment.nbytes,),
            "typestr": "|u1",
            "data": (segment.address, False),
            "strides": None,
            "version": 3,
        }


def _index(device: "torch.device | str | int") -> int:
    import torch

    index = device if isinstance(device, int) else torch.device(device).index
    return torch.cuda.current_device() if index is None else index
