"""The end of a rank that is told to stop, or whose launcher died: bounded in time, and nothing left behind.

The main thread spends its life inside collectives and kernels, where Python never runs a signal handler. So SIGINT and
SIGTERM are blocked in every thread, and one thread of each rank takes them off the queue. It removes the temporary
files that are being written and leaves with os._exit, whatever the main thread is doing.

The blocked signals are inherited by programs that this process starts. It starts none, but for the compilers that
torch may run for a moment, and those end by themselves.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock, Thread
from types import TracebackType
from typing import Any, Self

from usp.launch.claim import claim
from usp.launch.world import World

STOP_SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
POLL_SECONDS = 0.25  # between two looks at the launcher
LOCK_SECONDS = 1.0  # for what the main thread does under `held`, a few system calls


class Guard:
    """Watches signals and the launcher from `with` on, which must come before any other thread is started.

    `phase` and `store` are what a failure report needs: what the rank is doing, and the store it shares with the
    others once there is one. `parent` is the launcher's process id, taken at the start of the program.
    """

    def __init__(self, world: World, *, parent: int) -> None:
        self.world = world
        self.phase = "starting"
        self.store: Any = None
        self._parent = parent
        self._temporary: set[Path] = set()
        self._lock = Lock()  # taken for good by the thread that ends the process
        self._closed = False
        # what nohup and the like made this process ignore stays ignored
        self._signals = [s for s in STOP_SIGNALS if signal.getsignal(s) is not signal.SIG_IGN]

    def __enter__(self) -> Self:
        self._old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, self._signals)
        Thread(target=self._watch, name="guard", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give the signals back to Python. May be called twice."""
        with self._lock:
            if not self._closed:
                self._closed = True
                signal.pthread_sigmask(signal.SIG_SETMASK, self._old_mask)

    @contextmanager
    def held(self) -> Iterator[None]:
        """The process is not ended inside the block, which must be short; if it is ending, the block never begins."""
        with self._lock:
            yield

    @contextmanager
    def temporary(self, path: Path) -> Iterator[None]:
        """`path` is gone when the block ends, also when the process is ended inside it. Create it under `held`."""
        with self._lock:
            self._temporary.add(path)
        try:
            yield
        finally:
            with self._lock:
                path.unlink(missing_ok=True)
                self._temporary.discard(path)

    def _watch(self) -> None:
        while not self._closed:
            received = signal.sigtimedwait(self._signals, POLL_SECONDS)
            if received is not None:
                self._leave(received.si_signo)
            elif self.world.launcher != "single" and os.getppid() != self._parent:
                self._leave(None)

    def _leave(self, signal_number: int | None) -> None:
        """End the process for a signal, or for the loss of the launcher (None)."""
        self._lock.acquire(timeout=LOCK_SECONDS)
        if self._closed and signal_number is not None:  # it came while the guard was being closed
            return os.kill(os.getpid(), signal_number)
        for path in self._temporary:
            _try_to_remove(path)
        if reason := self._reason(signal_number):
            _write(f"{reason}, while {self.phase}")
        os._exit(128 + (signal_number or signal.SIGTERM))

    def _reason(self, signal_number: int | None) -> str | None:
        """What this rank is to say about its end; None where another rank says it."""
        is_launched, rank = self.world.launcher != "single", self.world.rank
        if is_launched and signal_number == signal.SIGTERM:
            # The others are ended so when one rank fails. That rank has claimed to say why, unless it was killed.
            speaks = self.store is not None and claim(self.store, self.world, seconds=LOCK_SECONDS) == rank
            return f"rank {rank}: ended by the launcher, which was told to stop or has lost a rank" if speaks else None
        if rank != 0:
            return None
        return "the launcher is gone" if signal_number is None else f"interrupted by {_name(signal_number)}"


def _name(signal_number: int) -> str:
    return signal.Signals(signal_number).name


def _try_to_remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        _write(f"{path} could not be removed: {error.strerror}")


def _write(line: str) -> None:
    """Past Python's streams, whose locks the main thread may hold. Nobody may be reading: the launcher may be gone."""
    with suppress(OSError):
        os.write(2, f"{line}\n".encode(errors="backslashreplace"))
