"""Host memory that processes share: an unnamed memory file, opened by peers through the owner's descriptor.

It has no name in any folder, so nothing is left when a process is killed. Pages are reserved at set-up: running out of
memory is an error there, not a fault during an exchange. Used where there is no GPU, and for control pages everywhere.
"""

import ctypes
import mmap
import os
from pathlib import Path
from typing import TYPE_CHECKING

from usp.ipc.errors import SetupError
from usp.ipc.handle import Handle
from usp.ipc.provider import Segment

if TYPE_CHECKING:
    import torch

Payload = tuple[int, int, int]  # process id, its descriptor, inode of the file behind it


class HostProvider:
    name = "host"
    device = ""
    frees_while_open = True  # the kernel keeps the pages until the last mapping goes

    def allocate(self, nbytes: int) -> Segment:
        _check_available(nbytes)
        fd = os.memfd_create("usp", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(fd, 0, _mapped(nbytes))
            return _map(fd, nbytes, keep=True)
        except OSError as error:
            os.close(fd)
            raise SetupError(f"{nbytes} bytes of host memory cannot be shared: {error}; free memory first") from error

    def export(self, segment: Segment) -> Payload:
        return os.getpid(), segment.fd, os.fstat(segment.fd).st_ino

    def seal(self, segment: Segment) -> None:
        if segment.fd >= 0:
            os.close(segment.fd)
            segment.fd = -1

    def open(self, handle: Handle) -> Segment:
        pid, number, inode = handle.payload
        fd = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
        try:
            status = os.fstat(fd)
            if (status.st_ino, status.st_size) != (inode, _mapped(handle.nbytes)):
                raise SetupError(
                    f"descriptor {number} of process {pid} is a file of {status.st_size} bytes, not the arena of "
                    f"{handle.nbytes} bytes that was announced; open arenas while their owners still hold them"
                )
            return _map(fd, handle.nbytes)
        finally:
            os.close(fd)

    def shut(self, segment: Segment) -> None:
        # Unmapped with its last reference: a tensor that wrongly outlives the arena reads old bytes, not freed memory.
        segment.mapping = None

    def free(self, segment: Segment) -> None:
        self.seal(segment)
        segment.mapping = None

    def as_bytes(self, segment: Segment) -> "torch.Tensor":
        import torch

        return torch.frombuffer(segment.mapping, dtype=torch.uint8)


def _map(fd: int, nbytes: int, *, keep: bool = False) -> Segment:
    mapping = mmap.mmap(fd, _mapped(nbytes))
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    return Segment(address, nbytes, mapping, fd if keep else -1)


def _check_available(nbytes: int) -> None:
    """The kernel would rather end other processes than refuse pages, so what it has is asked first."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024
    if nbytes > available:
        raise SetupError(
            f"{nbytes} bytes of host memory for the exchange, but {available} are available; free some, "
            "use fewer ranks on this host, or choose the gloo exchange"
        )


def _mapped(nbytes: int) -> int:
    return max(nbytes, 1)  # nothing cannot be mapped
