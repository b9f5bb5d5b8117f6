"""Whether an exchange still works: who broke it, how the others hear of it, and how its waits are let go.

A stream that waits for a lost rank waits for ever, and no call to CUDA says so; so a watchdog looks, a failure releases
every wait of this rank by poisoning its own flags, and `check` raises wherever results leave the device. Owned by
`usp.pipeline`.
"""

import logging
import os
import threading
import time
from collections.abc import Callable

from usp.ipc.engine import RELEASE_LIMIT_S, Engine
from usp.ipc.rendezvous import Rendezvous
from usp.ipc.watchdog import Failure, Watchdog

log = logging.getLogger(__name__)

EXIT_CODE = 70  # EX_SOFTWARE
ANSWER_S = RELEASE_LIMIT_S + 1.0  # a release ends by itself, unless the driver does not answer it
NOTICE_S, PAUSE_S = 10.0, 0.001  # the watchdog looks every 0.2 s, and then releases the waits


class ExchangeBrokenError(RuntimeError):
    """An earlier call on this exchange failed; it can only be closed."""


class Liveness:
    """Of one rank's exchange. Making it is collective.

    `flags()` are the addresses of this rank's own flags and the number that is past every wait; none where no call is
    outstanding. `is_parked()` is whether a stream may be waiting for one of them.
    """

    def __init__(
        self,
        *,
        rendezvous: Rendezvous,
        engine: Engine,
        stall_timeout: float,
        completed: Callable[[], int],
        awaiting: Callable[[int], str],
        flags: Callable[[], tuple[list[int], int]],
        is_parked: Callable[[], bool],
    ) -> None:
        self.engine, self._flags, self._completed, self._is_parked = engine, flags, completed, is_parked
        self._made = threading.Event()  # a watchdog that is being made may already have something to tell
        self._name = rendezvous.names[rendezvous.rank]
        self._rounds = 0
        self.broken: BaseException | None = None
        self._failure: Failure | None = None  # of another rank, if that is what broke it
        self.watchdog = Watchdog(
            rendezvous=rendezvous,
            on_failure=self._fail,
            stall_timeout=stall_timeout,
            completed=completed,
            awaiting=awaiting,
        )
        self.rendezvous = self.watchdog.watched(self.check)
        self._made.set()

    def check(self) -> None:
        """Raise if the exchange is broken, by this rank or another."""
        if self.broken is None and self.watchdog.someone_gave_up():
            self._await_notice()
        if isinstance(self.broken, Failure.errors()):
            raise self.broken
        if self.broken is not None:
            raise ExchangeBrokenError(f"an earlier call failed: {self.broken!r}") from self.broken

    @property
    def is_over(self) -> bool:
        """Whether `check` would raise."""
        return self.broken is not None or self.watchdog.someone_gave_up()

    def give_up(self, error: BaseException) -> None:
        """This rank failed: keep the first reason, and let the others know at once."""
        if self.broken is None:
            self.broken = error
        self._tell(self.watchdog.give_up)

    def let_go(self) -> bool:
        """Give up and end every wait of this rank; whether its streams are idle then."""
        assert self.broken is not None
        self.give_up(self.broken)
        self.engine.fail(self.broken)
        return self._release()

    def close(self) -> None:
        """After the last meeting."""
        self.watchdog.close()

    @property
    def is_quiet(self) -> bool:
        """Whether nothing of a watchdog that has ended uses engine or flags any more: else they have to stay."""
        return self.watchdog.is_quiet

    def _fail(self, failure: Failure) -> None:
        """In the watchdog's thread: another rank failed. Tell the others before anything is released, since what this
        rank's streams then still do reads and writes garbage."""
        self._made.wait()
        error = failure.error()
        if self.broken is None:
            self.broken, self._failure = error, failure
        self._tell(self.watchdog.announce)
        self.engine.fail(error)
        if self._is_parked() and not self._release_in_time():
            log.error("rank %d: %s; and its streams do not end, so the process does", self._name, failure.text)
            os._exit(EXIT_CODE)

    def _tell(self, say: Callable[..., None]) -> None:
        if self._failure is None:
            say(f"{type(self.broken).__name__}: {self.broken}")
        else:
            say(self._failure.cause, at_fault=self._failure.rank)

    def _release(self) -> bool:
        addresses, past = self._flags()
        return not addresses or self.engine.release(addresses, past, progress=self._progress)

    def _progress(self) -> int:
        """Asked in each round of a release."""
        self._rounds += 1
        return self._completed()

    def _sign_of_life(self) -> tuple[int, int]:
        """The driver answers a release, or calls end."""
        return self._rounds, self._completed()

    def _release_in_time(self) -> bool:
        """A thread that issues work may be inside the driver, waiting for a stream that waits for the lost rank: while
        it loads a kernel, say. Then no other thread's call into the driver returns, and the process has to end.

        How long a driver that answers may take to end the waits is for the release to say.
        """
        try:
            return self.watchdog.in_time.call(self._release, limit_s=ANSWER_S, progress=self._sign_of_life)
        except TimeoutError:
            return False
        except Exception:
            log.exception("rank %d: its waits cannot be released", self._name)
            return False

    def _await_notice(self) -> None:
        deadline = time.monotonic() + NOTICE_S
        while self.broken is None and time.monotonic() < deadline:
            time.sleep(PAUSE_S)
