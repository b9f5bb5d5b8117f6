"""Copies on a CUDA stream, described once: issuing one is a single driver call with nothing to build.

Addresses are unified, so source and target may be on this GPU, on a peer, or in pinned host memory.
"""

from typing import Any

from usp.ipc.driver import call
from usp.ipc.engine import Block


class FlatCopy:
    """Between blocks without gaps."""

    def __init__(self, driver: Any, target: Block, source: Block) -> None:
        self._function = driver.cuMemcpyAsync
        self._target, self._nbytes = target.address, target.nbytes
        self.source = source.address

    def issue(self, stream: Any) -> None:
        call(self._function, self._target, self.source, self._nbytes, stream)


class PitchedCopy:
    """Between blocks of which at least one has gaps between its rows."""

    def __init__(self, driver: Any, target: Block, source: Block) -> None:
        self._function = driver.cuMemcpy2DAsync
        unified = driver.CUmemorytype.CU_MEMORYTYPE_UNIFIED
        what = self._what = driver.CUDA_MEMCPY2D()
        what.srcMemoryType, what.srcDevice, what.srcPitch = unified, source.address, source.pitch
        what.dstMemoryType, what.dstDevice, what.dstPitch = unified, target.address, target.pitch
        what.WidthInBytes, what.Height = target.width, target.height
        self._source = source.address

    @property
    def source(self) -> int:
        return self._source

    @source.setter
    def source(self, address: int) -> None:
        if address != self._source:
            self._source = self._what.srcDevice = address

    def issue(self, stream: Any) -> None:
        call(self._function, self._what, stream)


class NoCopy:
    """Of a block without bytes, which the driver would refuse."""

    def __init__(self, source: Block) -> None:
        self.source = source.address

    def issue(self, stream: Any) -> None:
        return None


CudaCopy = FlatCopy | PitchedCopy | NoCopy


def make_copy(driver: Any, target: Block, source: Block) -> CudaCopy:
    assert (target.width, target.height) == (source.width, source.height)
    if target.nbytes == 0:
        return NoCopy(source)
    if target.contiguous and source.contiguous:
        return FlatCopy(driver, target, source)
    return PitchedCopy(driver, target, source)
