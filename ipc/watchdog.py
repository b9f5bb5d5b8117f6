"""A thread per process that notices what no stream would ever tell: a peer that died, gave up, strayed or stands still.

Deaths come from the kernel at once; everything else is read from the control pages a few times a second. It detects
and reports, once; what follows (releasing waits, raising) is the business of whoever made it.
"""

import logging
import os
import select
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from usp.ipc.control import ControlPages, Entry, State, Status
from usp.ipc.errors import PeerLostError, PlanMismatchError, SetupError, StallError
from usp.ipc.in_time import InTime
from usp.ipc.rendezvous import Rendezvous, agreed
from usp.ipc.watched import WatchedRendezvous

log = logging.getLogger(__name__)

LOOK_S = 0.2
MEET_S = 0.001
JOIN_S = 5.0
ASK_S = 1.5
STALL_TIMEOUT_S = 300.0  # long: a rank that compiles, swaps or decodes is slow and healthy


class FailureKind(Enum):
    LOST = PeerLostError
    STALL = StallError
    MISMATCH = PlanMismatchError


@dataclass(frozen=True)
class Failure:
    """What was noticed, and which rank is at fault."""

    kind: FailureKind
    rank: int
    cause: str
    here: str = ""  # where the rank that noticed was

    @property
    def text(self) -> str:
        return f"{self.cause}; {self.here}" if self.here else self.cause

    @staticmethod
    def errors() -> tuple[type[RuntimeError], ...]:
        """What `error` may be."""
        return tuple(kind.value for kind in FailureKind)

    def error(self) -> RuntimeError:
        error: RuntimeError = self.kind.value(self.text)
        return error


class Watchdog:
    """Watches from the moment it is made, which is collective and meets over `rendezvous`; ending it waits for nobody.

    `on_failure` is called once, in the watchdog's thread. `completed()` is the last call known to be done, for callers
    whose calls end asynchronously; others say so with `end`. `awaiting(rank)` says what this rank waits for, of several
    things the one from that rank; empty if for nothing.
    """

    def __init__(
        self,
        *,
        rendezvous: Rendezvous,
        on_failure: Callable[[Failure], None],
        stall_timeout: float = STALL_TIMEOUT_S,
        completed: Callable[[], int] | None = None,
        awaiting: Callable[[int], str] = lambda rank: "",
    ) -> None:
        self.rank = rendezvous.rank
        self._names = rendezvous.names
        self._awaiting = awaiting
        self._on_failure, self._stall_timeout, self._completed = on_failure, stall_timeout, completed
        self._current: Entry | None = None
        self._done = 0
        self._progress_at = time.monotonic()
        self._closed = False
        self.in_time = InTime()
        self._pages = ControlPages(rendezvous)
        self._meeting: WatchedRendezvous | None = None
        self._pids = rendezvous.gather(os.getpid())
        self._peer_of_fd: dict[int, int] = {}
        try:
            agreed(rendezvous, self._watch_peers)
        except SetupError:
            self._close_fds()
            self._pages.abandon()
            raise
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._watch, name="usp watchdog", daemon=True)
        self._thread.start()

    def begin(self, call: int, *, plan: str = "", step: int = -1, layer: int = -1) -> None:
        """A call is about to be issued; calls count upwards from 1."""
        if self._current is None or self._done >= self._current.call:
            self._progress_at = time.monotonic()  # nothing was outstanding, so the clock starts here
        self._current = Entry(call, plan, step, layer)
        self._pages.post(self._current)

    def end(self, call: int) -> None:
        """All calls up to this one are done."""
        if call > self._done:
            self._done = call
            self._progress_at = time.monotonic()

    def watched(self, check: Callable[[], None]) -> WatchedRendezvous:
        """A rendezvous that this watchdog's failures end, by way of `check`; the one that messages speak of."""
        self._meeting = WatchedRendezvous(self._pages, names=self._names, check=check)
        return self._meeting

    def meet(self, call: int, *, check: Callable[[], None]) -> None:
        """Return once every rank has begun the call, which this one has. `check` raises when there is no sense in
        waiting; raises PlanMismatchError if another rank began it with something else in mind."""
        while True:
            check()
            pages = {rank: self._pages.read(rank) for rank in self._peer_of_fd.values()}
            strayed = self._strayed(pages)
            if strayed is not None:
                raise strayed.error()
            if all(max(status.begun, default=0) >= call for status in pages.values()):
                return
            time.sleep(MEET_S)

    def someone_gave_up(self) -> bool:
        """Whether another rank said so, noticed by this watchdog or not yet. Costs a microsecond per rank."""
        return not self._closed and any(self._pages.has_given_up(rank) for rank in self._peer_of_fd.values())

    def announce(self, reason: str, *, at_fault: int | None = None) -> None:
        """Tell the others that this rank takes no further part; they report it at once. From any thread."""
        if not self._closed:
            self._pages.give_up(reason, at_fault=self.rank if at_fault is None else at_fault)

    def give_up(self, reason: str, *, at_fault: int | None = None) -> None:
        """`announce`, and end. Not in the watchdog's thread."""
        if not self._closed:
            self.announce(reason, at_fault=at_fault)
            self._stop()

    def close(self) -> None:
        """End in good order, after every rank has come to a last meeting. May be called twice."""
        if not self._closed:
            self._pages.leave()
            self._stop()

    @property
    def is_quiet(self) -> bool:
        """Whether no thread of it runs, nor one that it has left behind."""
        return not self._thread.is_alive() and self.in_time.are_back()

    def _watch_peers(self) -> None:
        for rank, pid in enumerate(self._pids):
            if rank != self.rank:
                self._peer_of_fd[os.pidfd_open(pid)] = rank

    def _stop(self) -> None:
        self._closed = True
        os.eventfd_write(self._wake, 1)
        self._thread.join(JOIN_S)
        self.in_time.are_back(ASK_S)
        if not self._thread.is_alive():  # else it still polls them
            self._close_fds()
            os.close(self._wake)
        self._pages.abandon()

    def _close_fds(self) -> None:
        for fd in self._peer_of_fd:
            os.close(fd)

    def _watch(self) -> None:
        poller = select.poll()
        for fd in (*self._peer_of_fd, self._wake):
            poller.register(fd, select.POLLIN)
        while not self._closed:
            poller.poll(LOOK_S * 1000)
            failure = None if self._closed else self._look(poller)
            if failure is not None:
                self._report(failure)
                return

    def _report(self, failure: Failure) -> None:
        try:
            self._on_failure(failure)
        except Exception:
            log.exception("rank %d: %s; and handling that failed", self._names[self.rank], failure.text)

    def _look(self, poller: Any) -> Failure | None:
        # Pages before deaths: whoever gave up because of a death is not blamed for it. And the pages of the dead once
        # more: one may have given its reason in between.
        pages = {rank: self._pages.read(rank) for rank in self._peer_of_fd.values()}
        dead = [self._peer_of_fd[fd] for fd, _ in poller.poll(0) if fd in self._peer_of_fd]
        pages.update({rank: self._pages.read(rank) for rank in dead})
        return self._lost(dead, pages) or self._gave_up(pages) or self._strayed(pages) or self._stalled(pages)

    def _lost(self, dead: list[int], pages: dict[int, Status]) -> Failure | None:
        for rank in dead:
            if pages[rank].state is State.RUNNING:
                latest = pages[rank].latest
                did = f"it had begun {latest}" if latest else "it had begun no call"
                cause = f"rank {self._names[rank]} (process {self._pids[rank]}) ended; {did}"
                return Failure(FailureKind.LOST, rank, cause, self._here(rank))
        return None

    def _gave_up(self, pages: dict[int, Status]) -> Failure | None:
        """The rank at fault before those that gave up because of it, who pass its words on."""
        gave_up = [(rank, status) for rank, status in pages.items() if status.state is State.GAVE_UP]
        for rank, status in sorted(gave_up, key=lambda one: one[0] != one[1].at_fault):
            cause = f"rank {self._names[rank]} gave up: {status.reason}" if status.at_fault == rank else status.reason
            return Failure(FailureKind.LOST, status.at_fault, cause, self._here(status.at_fault))
        return None

    def _strayed(self, pages: dict[int, Status]) -> Failure | None:
        own = self._pages.read(self.rank).begun
        for rank, status in pages.items():
            for call in sorted(own.keys() & status.begun.keys()):
                if own[call].plan != status.begun[call].plan:
                    return self._mismatch(own[call], rank, status.begun[call])
            # A change of plan waits for every rank: of the calls that another one is ahead, only its latest, where it
            # may be waiting, can be of another plan. What the two began at one call may be overwritten by then.
            mine = max(own, default=0)
            for call in sorted(call for call in status.begun if call > mine > 0)[:-1]:
                if status.begun[call].plan != own[mine].plan:
                    return self._mismatch(own[mine], rank, status.begun[call])
        return None

    def _mismatch(self, mine: Entry, rank: int, theirs: Entry) -> Failure:
        here = f"rank {self._names[self.rank]} is at {_told(mine)}"
        there = f"rank {self._names[rank]} at {_told(theirs)}"
        return Failure(FailureKind.MISMATCH, rank, f"{here}, but {there}; every rank must make the same calls")

    def _stalled(self, pages: dict[int, Status]) -> Failure | None:
        if self._completed is not None:
            self.end(self._completed())
        current, waited = self._current, time.monotonic() - self._progress_at
        if current is None or self._done >= current.call or waited < self._stall_timeout:
            return None
        waiting_for = self._done + 1
        late = [rank for rank, status in pages.items() if max(status.begun, default=0) < waiting_for]
        told = [f"rank {self._names[rank]} has not begun it (last: {pages[rank].latest or 'none'})" for rank in late]
        absent = [] if late else self._absent()
        told += [f"rank {self._names[rank]} has begun it, but does not come to the meeting" for rank in absent]
        at_fault = (late + absent + [self.rank])[0]
        why = "; ".join([*(told or ["every rank has begun it"]), *self._awaited(at_fault)])
        cause = f"rank {self._names[self.rank]} waits for call {waiting_for} since {waited:.0f} s at {current}; {why}"
        return Failure(FailureKind.STALL, at_fault, cause)

    def _absent(self) -> list[int]:
        """Who keeps others waiting where they meet, this rank perhaps."""
        if self._meeting is None:
            return []
        if self._meeting.is_awaited():
            return [self.rank]
        return [rank for rank in self._peer_of_fd.values() if not self._meeting.has_come(rank)]

    def _here(self, at_fault: int) -> str:
        place = [f"rank {self._names[self.rank]} is at {self._current}"] if self._current else []
        return "; ".join([*place, *self._awaited(at_fault)])

    def _awaited(self, rank: int) -> list[str]:
        """Nothing, or what this rank waits for; what cannot be said must not hide what can."""
        try:
            awaited = self.in_time.call(lambda: self._awaiting(rank), limit_s=ASK_S)
        except Exception as error:
            awaited = f"what it waits for cannot be read: {error}"
        return [awaited] if awaited else []


def _told(entry: Entry) -> str:
    return f"{entry} of plan {entry.plan}" if entry.plan else str(entry)
