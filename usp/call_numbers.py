"""How far the calls of an exchange are: begun, enqueued, done; and the numbers that its flags carry.

Calls count up for ever. Flags hold 32 bits and are compared as signed differences, so their numbers go round; they
begin anew with every arena. A stream writes the count of calls that are done into a word on the host.
"""

import torch

CYCLE = 2**32
POISON = 2**30  # ahead of the last call: past every wait, and still ahead cyclically


class CallNumbers:
    """One thread counts; `completed`, `oldest` and `past_every_wait` may be asked from any."""

    def __init__(self, *, pinned: bool) -> None:
        self.begun, self.enqueued = 0, 0
        self.flag = 0  # what the latest call writes into flags
        self._completed = 0
        self._done = torch.zeros(1, dtype=torch.int32, pin_memory=pinned)

    @property
    def done_address(self) -> int:
        """Of the word into which a stream writes `begun`, behind each call."""
        return self._done.data_ptr()

    def begin(self) -> int:
        self.begun += 1
        return self.begun

    def enqueue(self) -> int:
        """The number for the flags of the call that was begun last."""
        self.flag, self.enqueued = (self.flag + 1) % CYCLE, self.begun
        return self.flag

    def restart(self) -> None:
        """For an arena whose flags are zero."""
        self.flag = 0

    def completed(self) -> int:
        """Calls that are done. The word is at most half of its range behind."""
        behind = (self.begun - int(self._done)) % CYCLE
        self._completed = max(self._completed, self.begun - behind)
        return self._completed

    @property
    def are_outstanding(self) -> bool:
        return self.enqueued > self.completed()

    def oldest(self) -> int:
        """The flag number of the first call that was enqueued and is not done."""
        return (self.flag - (self.enqueued - self.completed()) + 1) % CYCLE

    def past_every_wait(self) -> int:
        return (self.flag + POISON) % CYCLE
