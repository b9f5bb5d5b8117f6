"""What each rank says about itself, in host memory that all ranks of the group read: calls begun, and the end.

A rank posts a call before it issues it; the last few stay readable, so that two ranks can be compared at the same
call although one is ahead. Posting costs a few microseconds. Used by the watchdog, with CUDA arenas as well.
"""

import struct
import zlib
from dataclasses import dataclass
from enum import IntEnum

from usp.ipc.arena import Arena
from usp.ipc.host import HostProvider
from usp.ipc.rendezvous import Rendezvous

ENTRY = struct.Struct("<qqq24sI")  # call, step, layer, plan, checksum: an entry read while it is written is ignored
REASON_NBYTES = 384
STATE = struct.Struct(f"<qq{REASON_NBYTES}s")  # state, rank at fault, reason
RING = 8  # calls that stay readable
ENTRY_STRIDE, STATE_OFFSET = 64, 64 * RING
PAGE_NBYTES = 1024


class State(IntEnum):
    RUNNING = 0
    GAVE_UP = 1


@dataclass(frozen=True)
class Entry:
    """A call that a rank has begun. `step` and `layer` are -1 where the caller has none."""

    call: int
    plan: str
    step: int = -1
    layer: int = -1

    def __str__(self) -> str:
        place = [f"{name} {value}" for name, value in (("step", self.step), ("layer", self.layer)) if value >= 0]
        return ", ".join([f"call {self.call}", *place])


@dataclass(frozen=True)
class Status:
    """A rank's page as it was read: the last calls begun, by number, and how it stands."""

    begun: dict[int, Entry]
    state: State
    at_fault: int
    reason: str

    @property
    def latest(self) -> Entry | None:
        return self.begun[max(self.begun)] if self.begun else None


class ControlPages:
    """One page per rank. Collective to make and to close; in between only memory is read and written."""

    def __init__(self, rendezvous: Rendezvous) -> None:
        self.rank = rendezvous.rank
        self._arena = Arena(PAGE_NBYTES, rendezvous=rendezvous, provider=HostProvider(), layout="control")
        # Views keep the memory mapped: posting and reading stay safe in a thread that has not yet noticed the end.
        self._pages = [self._view(rank) for rank in range(rendezvous.size)]

    def post(self, entry: Entry) -> None:
        fields = (entry.call, entry.step, entry.layer, entry.plan.encode())
        packed = ENTRY.pack(*fields, 0)
        ENTRY.pack_into(self._pages[self.rank], _offset(entry.call), *fields, zlib.crc32(packed))

    def give_up(self, reason: str, *, at_fault: int) -> None:
        """Say that this rank takes no further part."""
        STATE.pack_into(self._pages[self.rank], STATE_OFFSET, State.GAVE_UP, at_fault, reason.encode()[:REASON_NBYTES])

    def read(self, rank: int) -> Status:
        page = bytes(self._pages[rank])
        begun = {entry.call: entry for index in range(RING) if (entry := _read_entry(page, index)) is not None}
        state, at_fault, reason = STATE.unpack_from(page, STATE_OFFSET)
        return Status(begun, State(state), at_fault, _text(reason))

    def close(self) -> None:
        self._pages.clear()
        self._arena.close()

    def abandon(self) -> None:
        """Without meeting the others. What they have open they can go on reading."""
        self._arena.abandon()

    def _view(self, rank: int) -> memoryview:
        import torch

        return self._arena.view(rank, 0, (PAGE_NBYTES,), torch.uint8).numpy().data


def _offset(call: int) -> int:
    return call % RING * ENTRY_STRIDE


def _read_entry(page: bytes, index: int) -> Entry | None:
    call, step, layer, plan, checksum = ENTRY.unpack_from(page, index * ENTRY_STRIDE)
    if zlib.crc32(ENTRY.pack(call, step, layer, plan, 0)) != checksum:
        return None  # being written, or never was
    return Entry(call, _text(plan), step, layer)


def _text(field: bytes) -> str:
    return field.rstrip(b"\0").decode(errors="replace")
