"""Meetings of ranks that watch each other: whoever waits for a rank that is lost is told, and does not wait on.

A process group's gather waits for a dead or stopped rank as long as the group's time limit; this one asks between
looks. Used by whatever ranks must do together after set-up: growth, change of plan, and the end.
"""

import pickle
import time
from collections.abc import Callable, Sequence
from typing import Any

from usp.ipc.control import LETTER_NBYTES, ControlPages

LOOK_S = 0.0005
MAX_TEXT = LETTER_NBYTES // 8  # characters of a reason, four bytes each at most, with room for the rest


class WatchedRendezvous:
    """A `Rendezvous` over control pages. `check` raises when there is no sense in waiting."""

    def __init__(self, pages: ControlPages, *, names: Sequence[int], check: Callable[[], None]) -> None:
        self.rank, self.size, self.names = pages.rank, len(names), names
        self._pages, self._check = pages, check
        self.meetings = 0  # that this rank has come to; the pages are blank at 0

    def gather(self, value: object) -> list[Any]:
        self._check()
        self.meetings += 1
        self._pages.send(self.meetings, pickle.dumps(value[:MAX_TEXT] if isinstance(value, str) else value))
        return [pickle.loads(self._letter(rank)) for rank in range(self.size)]

    def barrier(self) -> None:
        self.gather(None)

    def has_come(self, rank: int) -> bool:
        """Whether a rank is at the meeting where this one is."""
        return self.meetings == 0 or self._pages.letter(rank, self.meetings) is not None

    def is_awaited(self) -> bool:
        """Whether another rank is at the meeting after this one's last."""
        others = (rank for rank in range(self.size) if rank != self.rank)
        return any(self._pages.letter(rank, self.meetings + 1) is not None for rank in others)

    def _letter(self, rank: int) -> bytes:
        while (letter := self._pages.letter(rank, self.meetings)) is None:
            self._check()
            time.sleep(LOOK_S)
        return letter
