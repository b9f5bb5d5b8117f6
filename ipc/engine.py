"""What executes a rank's operations: streams that copy, signal, wait and launch, on CUDA or on host memory.

An operation is enqueued on a named stream and runs after everything enqueued there before it. The executors walk one
schedule against this interface; which engine stands behind it they do not see.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

MAIN, COPY, AUX = "main", "copy", "aux"
STREAMS = (MAIN, COPY, AUX)
RELEASE_LIMIT_S = 5.0
PEEK_WORDS = 1024


@dataclass(frozen=True)
class Block:
    """A 2-D piece of memory: `height` rows of `width` bytes, `pitch` bytes apart."""

    address: int
    pitch: int
    width: int
    height: int

    @property
    def nbytes(self) -> int:
        return self.width * self.height

    @property
    def contiguous(self) -> bool:
        return self.pitch == self.width or self.height == 1


class Patience:
    """A limit on time without progress, whatever progress is: any value that changes."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s, self._seen, self._since = limit_s, object(), time.monotonic()

    def is_over(self, progress: object) -> bool:
        now = time.monotonic()
        if progress != self._seen:
            self._seen, self._since = progress, now
        return now - self._since > self._limit_s


class PreparedCopy(Protocol):
    """A copy whose shape is fixed; its source may move between calls."""

    source: int  # address


class Engine(Protocol):
    """The streams of one rank. One thread issues; `fail`, `release` and `is_idle` may be called from any.

    After `fail`, or an exception in an operation of another stream than main, every call that issues raises that
    exception.
    """

    device_type: str  # of torch, "cuda" or "cpu"

    @property
    def streams(self) -> Mapping[str, Any]: ...

    def begin(self) -> None:
        """Before the operations of a call: `main` is the caller's stream, behind everything on the one before."""

    def prepare_copy(self, target: Block, source: Block) -> PreparedCopy:
        """Blocks of equal width and height, which do not overlap."""

    def enqueue(self, stream: str, copy: PreparedCopy) -> None: ...

    def copy(self, stream: str, target: Block, source: Block) -> None:
        """`prepare_copy` and `enqueue` in one."""

    def signal(self, stream: str, address: int, value: int) -> None:
        """Store a 32-bit value after everything before it on the stream, seen by all processes and devices."""

    def wait(self, stream: str, address: int, value: int) -> None:
        """Hold the stream until the 32-bit word has reached `value`: (int32)(*address - value) >= 0."""

    def record(self, stream: str, event: str) -> None: ...

    def await_event(self, stream: str, event: str) -> None:
        """Hold the stream until the latest `record` of the event, which must have been issued, has passed."""

    def launch(self, stream: str, function: Callable[[], object]) -> None:
        """Run a function whose work belongs on the stream."""

    def is_idle(self) -> bool:
        """Whether everything issued so far has run."""

    def synchronize(self) -> None:
        """Block the calling thread until idle; raises what went wrong."""

    def fail(self, error: BaseException) -> None:
        """Refuse further operations with this error. The first one stays."""

    def release(
        self,
        addresses: Sequence[int],
        value: int,
        *,
        limit_s: float = RELEASE_LIMIT_S,
        progress: Callable[[], object] = lambda: None,
    ) -> bool:
        """Let parked waits go by rewriting `value` into own flags until idle; False after `limit_s` without progress.

        Rewriting, not writing: a peer's signal that was queued before it failed may set a flag back. What then runs
        reads garbage, so it is for the failure path only; much may be queued, so time counts only while `progress()`,
        such as the calls that are done, stays the same; it is asked in every round. May be called from a thread that
        issues nothing.
        """

    def hold(self, address: int, value: int, *, stopped: Callable[[], bool]) -> None:
        """Hold the calling thread, and no stream, until the 32-bit word has reached `value` or `stopped()`."""

    def peek(self, addresses: Sequence[int]) -> list[int]:
        """The 32-bit words there, without waiting for any stream; at most PEEK_WORDS. Empty if they cannot be read in
        a moment. From any thread."""

    def close(self) -> None:
        """Give the streams back. What is still queued is dropped, so synchronise first. May be called twice."""
