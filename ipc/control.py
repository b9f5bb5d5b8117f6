"""What each rank says about itself, in host memory that all ranks of the group read: calls begun, letters, the end.

A rank posts a call before it issues it; the last few stay readable, so that two ranks can be compared at the same
call although one is ahead. Letters carry what ranks tell each other where they meet. Posting costs a few microseconds.
Used by the watchdog, with CUDA arenas as well.
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
STATE = struct.Struct(f"<qq{REASON_NBYTES}sI")  # state, rank at fault, reason, checksum
RING = 8  # calls that stay readable
ENTRY_STRIDE, STATE_OFFSET = 64, 64 * RING
LETTER = struct.Struct("<qII")  # number of the meeting, bytes, checksum
LETTER_OFFSET, LETTER_NBYTES = 1024, 8192  # two: nobody is more than one meeting ahead of anybody
PAGE_NBYTES = LETTER_OFFSET + 2 * (LETTER.size + LETTER_NBYTES)


class State(IntEnum):
    RUNNING = 0
    GAVE_UP = 1
    CLOSED = 2


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
    """One page per rank. Collective to make; after that only memory is read and written, and nobody waits to end."""

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
        self._post_state(State.GAVE_UP, at_fault, reason.encode(errors="backslashreplace")[:REASON_NBYTES])

    def leave(self) -> None:
        """Say that this rank ended in good order."""
        self._post_state(State.CLOSED, self.rank, b"")

    def has_given_up(self, rank: int) -> bool:
        """A look at one word, for those who ask often."""
        return bool(self._pages[rank][STATE_OFFSET] == State.GAVE_UP)

    def send(self, meeting: int, letter: bytes) -> None:
        """For all ranks to read, once each is at this meeting; the last letter but one is overwritten."""
        if len(letter) > LETTER_NBYTES:
            raise ValueError(f"a letter of {len(letter)} bytes; a page takes {LETTER_NBYTES}")
        page, start = self._pages[self.rank], _letter_offset(meeting)
        page[start + LETTER.size : start + LETTER.size + len(letter)] = letter
        LETTER.pack_into(page, start, meeting, len(letter), _letter_checksum(meeting, letter))

    def letter(self, rank: int, meeting: int) -> bytes | None:
        """What a rank sent to this meeting; None while it has not come."""
        page, start = self._pages[rank], _letter_offset(meeting)
        number, nbytes, checksum = LETTER.unpack_from(page, start)
        content = bytes(page[start + LETTER.size : start + LETTER.size + min(nbytes, LETTER_NBYTES)])
        return content if number == meeting and _letter_checksum(number, content) == checksum else None

    def read(self, rank: int) -> Status:
        page = bytes(self._pages[rank])
        begun = {entry.call: entry for index in range(RING) if (entry := _read_entry(page, index)) is not None}
        *words, checksum = STATE.unpack_from(page, STATE_OFFSET)
        state, at_fault, reason = words if zlib.crc32(STATE.pack(*words, 0)) == checksum else (State.RUNNING, -1, b"")
        return Status(begun, State(state), at_fault, _text(reason))

    def abandon(self) -> None:
        """Without meeting the others. What they have open they can go on reading."""
        self._arena.abandon()

    def _post_state(self, state: State, at_fault: int, reason: bytes) -> None:
        packed = STATE.pack(state, at_fault, reason, 0)
        STATE.pack_into(self._pages[self.rank], STATE_OFFSET, state, at_fault, reason, zlib.crc32(packed))

    def _view(self, rank: int) -> memoryview:
        import torch

        return self._arena.view(rank, 0, (PAGE_NBYTES,), torch.uint8).numpy().data


def _offset(call: int) -> int:
    return call % RING * ENTRY_STRIDE


def _letter_offset(meeting: int) -> int:
    return LETTER_OFFSET + meeting % 2 * (LETTER.size + LETTER_NBYTES)


def _letter_checksum(meeting: int, letter: bytes) -> int:
    """Of the head as well: one that is being written has a number before a length, and the sum of nothing is 0."""
    return zlib.crc32(letter, zlib.crc32(LETTER.pack(meeting, len(letter), 0)))


def _read_entry(page: bytes, index: int) -> Entry | None:
    call, step, layer, plan, checksum = ENTRY.unpack_from(page, index * ENTRY_STRIDE)
    if zlib.crc32(ENTRY.pack(call, step, layer, plan, 0)) != checksum:
        return None  # being written, or never was
    return Entry(call, _text(plan), step, layer)


def _text(field: bytes) -> str:
    return field.rstrip(b"\0").decode(errors="replace")
