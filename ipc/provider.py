"""Where an arena's memory comes from: the interface that host memory and CUDA memory share."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from usp.ipc.handle import Handle

if TYPE_CHECKING:
    import torch


@dataclass
class Segment:
    """Memory as this process addresses it: its own, or a peer's that it has opened."""

    address: int
    nbytes: int
    mapping: Any = None  # keeps host memory mapped
    fd: int = -1  # what peers open, until all of them have


class Provider(Protocol):
    """Allocates, exports and opens memory. Knows no ranks: when others may act is the arena's business."""

    name: str
    frees_while_open: bool  # whether an owner may free what peers have open

    @property
    def device(self) -> str:
        """UUID of the GPU that holds the memory; "" for host memory."""

    def allocate(self, nbytes: int) -> Segment:
        """Zeroed memory that can be exported."""

    def export(self, segment: Segment) -> Any:
        """What another process needs to open it: the payload of a handle."""

    def seal(self, segment: Segment) -> None:
        """Every peer has opened it."""

    def open(self, handle: Handle) -> Segment:
        """A peer's memory, addressable here."""

    def shut(self, segment: Segment) -> None:
        """Let go of a peer's memory."""

    def free(self, segment: Segment) -> None:
        """Give own memory back."""

    def as_bytes(self, segment: Segment) -> "torch.Tensor":
        """The segment as a uint8 tensor, without a copy."""
