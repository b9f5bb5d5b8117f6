"""The watchdog over real processes: who notices what, how soon, and what it says (D22).

Ranks that die are started for the one test and meet over pipes, since they would take a shared group with them.
"""

import multiprocessing as mp
import os
import queue
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest

from tests.multi_gpu.ranks import RankEnv
from usp.ipc.arena import Arena
from usp.ipc.control import Entry
from usp.ipc.errors import PeerLostError
from usp.ipc.host import HostProvider
from usp.ipc.host_engine import HostEngine
from usp.ipc.rendezvous import GroupRendezvous, Rendezvous
from usp.ipc.watchdog import Failure, FailureKind, Watchdog

LIMIT_S = 90.0
NOTICE_S = 2.0


class Watched:
    """A rank with its watchdog, whose failures arrive in a queue."""

    def __init__(self, meet: Rendezvous, **options: Any) -> None:
        self.rank, self.meet = meet.rank, meet
        self.failures: queue.Queue[tuple[Failure, float]] = queue.Queue()
        self.on_failure = lambda failure: self.failures.put((failure, time.time()))
        self.watchdog = Watchdog(rendezvous=meet, on_failure=lambda failure: self.on_failure(failure), **options)

    def noticed(self) -> tuple[FailureKind, int, str, float]:
        """The failure, and when it was noticed."""
        failure, when = self.failures.get(timeout=60)
        time.sleep(0.5)
        assert self.failures.empty(), "told once"
        return failure.kind, failure.rank, failure.text, when


class PipeRendezvous:
    """Ranks that meet over pipes to rank 0."""

    def __init__(self, rank: int, size: int, pipes: list[Connection]) -> None:
        self.rank, self.size, self.pipes = rank, size, pipes
        self.names = range(size)

    def gather(self, value: object) -> list[Any]:
        if self.rank:
            self.pipes[0].send(value)
            return self.pipes[0].recv()
        values = [value, *(pipe.recv() for pipe in self.pipes)]
        for pipe in self.pipes:
            pipe.send(values)
        return values

    def barrier(self) -> None:
        self.gather(None)


def _serve(meet: PipeRendezvous, out: Connection, body: Callable[[Watched], Any]) -> None:
    out.send(body(Watched(meet)))


class Mortals:
    """Processes of which some end before they answer."""

    def __init__(self, size: int, body: Callable[[Watched], Any]) -> None:
        context = mp.get_context("spawn")
        links = [context.Pipe() for _ in range(1, size)]
        self.outs: list[Connection] = []
        self.processes = []
        for rank in range(size):
            pipes = [ours for ours, _ in links] if rank == 0 else [links[rank - 1][1]]
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(PipeRendezvous(rank, size, pipes), theirs, body))
            process.start()
            theirs.close()
            self.outs.append(ours)
            self.processes.append(process)

    def answer(self, rank: int) -> Any:
        assert self.outs[rank].poll(LIMIT_S)
        return self.outs[rank].recv()

    def close(self) -> None:
        for process in self.processes:
            process.join(5)
            process.kill()
            process.join(5)


@pytest.fixture
def start() -> Iterator[Callable[[int, Callable[[Watched], Any]], Mortals]]:
    started: list[Mortals] = []

    def make(size: int, body: Callable[[Watched], Any]) -> Mortals:
        started.append(Mortals(size, body))
        return started[-1]

    yield make
    for mortals in started:
        mortals.close()


def killed(own: Watched) -> Any:
    own.watchdog.begin(17, plan="a", step=3, layer=5)
    dying = own.meet.gather(time.time())[1]
    if own.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    kind, at_fault, text, when = own.noticed()
    own.watchdog.give_up(text, at_fault=at_fault)
    return kind, at_fault, text, when - dying


def test_a_killed_peer_is_noticed_by_all_others_within_two_seconds(start) -> None:
    group = start(3, killed)
    for rank in (0, 2):
        kind, at_fault, text, delay = group.answer(rank)
        assert kind is FailureKind.LOST and at_fault == 1 and delay < NOTICE_S
        assert text == (
            f"rank 1 (process {group.processes[1].pid}) ended; it had begun call 17, step 3, layer 5; "
            f"rank {rank} is at call 17, step 3, layer 5"
        )


def killed_while_awaited(own: Watched) -> Any:
    """Parked on the main stream, on a worker, and again on main behind the worker."""
    arena = Arena(4096, rendezvous=own.meet, provider=HostProvider(), layout="awaited")
    engine = HostEngine()
    own.on_failure = lambda failure: engine.fail(failure.error())
    own.watchdog.begin(1, plan="a")
    own.meet.barrier()
    if own.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    engine.wait("copy", arena.base[0], 1)
    with pytest.raises(PeerLostError) as error:
        engine.wait("main", arena.base[0], 1)
    waited = time.monotonic() - start
    with pytest.raises(PeerLostError):
        engine.synchronize()
    assert engine.is_idle()
    engine.close()
    arena.abandon()
    own.watchdog.give_up(str(error.value))
    own.watchdog.give_up("twice")
    return str(error.value), waited


def test_streams_parked_on_a_killed_peer_raise_what_the_watchdog_says(start) -> None:
    text, waited = start(2, killed_while_awaited).answer(0)
    assert text.startswith("rank 1 (process ") and waited < NOTICE_S


def exits_without_a_word(own: Watched) -> Any:
    if own.rank == 1:
        os._exit(0)
    kind, at_fault, text, _ = own.noticed()
    own.watchdog.give_up(text)
    return kind, at_fault, "begun no call" in text


def test_a_peer_that_exits_with_success_but_without_closing_is_lost(start) -> None:
    assert start(2, exits_without_a_word).answer(0) == (FailureKind.LOST, 1, True)


def closes_and_exits(own: Watched) -> int:
    own.watchdog.close()
    if own.rank == 0:
        time.sleep(0.5)
    return own.failures.qsize()


def test_a_peer_that_closed_may_end_first(start) -> None:
    assert start(2, closes_and_exits).answer(0) == 0


def check_closing(env: RankEnv) -> int:
    own = Watched(GroupRendezvous(), stall_timeout=0.5)
    descriptors = len(os.listdir("/proc/self/fd"))
    for call in range(1, 30):
        own.watchdog.begin(call, plan="a")
        own.watchdog.end(call)
    time.sleep(0.3 * env.rank)
    own.watchdog.close()
    own.watchdog.close()
    assert len(os.listdir("/proc/self/fd")) < descriptors
    return own.failures.qsize()


def test_ranks_that_close_report_nothing(ranks) -> None:
    assert ranks(3).run(check_closing) == [0, 0, 0]


def check_names(env: RankEnv) -> str:
    """Ranks 5 and 9 of a job; what rank 9 waits for cannot be read."""

    def awaiting(rank: int) -> str:
        return "it awaits the mail" if env.rank == 0 else str({}["no such key"])

    meet = GroupRendezvous()
    meet.names = (5, 9)
    own = Watched(meet, awaiting=awaiting, stall_timeout=0.2)
    own.watchdog.begin(3 - env.rank, plan="a")
    own.meet.barrier()
    text = own.noticed()[2]
    own.watchdog.close()
    return text


def test_messages_use_the_ranks_of_the_job_and_say_what_is_awaited(ranks) -> None:
    first, second = ranks(2).run(check_names)
    assert first.startswith("rank 5 waits for call 1 since 0 s at call 3;") and first.endswith("; it awaits the mail")
    assert second.startswith("rank 9 waits for call 1 since 0 s at call 2;") and "cannot be read: 'no such" in second


def check_giving_up(env: RankEnv) -> Any:
    own = Watched(GroupRendezvous())
    own.watchdog.begin(4, plan="a", layer=7)
    if own.rank == 2:
        own.watchdog.give_up("ZeroDivisionError in call 4, layer 7")
        own.watchdog.begin(5)  # a thread that does not know yet does no harm
        own.watchdog.end(5)
        own.meet.barrier()  # and lives on
        return None
    kind, at_fault, text, _ = own.noticed()
    own.meet.barrier()
    own.watchdog.give_up(text, at_fault=at_fault)
    return kind, at_fault, text


def test_a_peer_that_gives_up_is_reported_with_its_reason_although_it_lives(ranks) -> None:
    for rank, answer in enumerate(ranks(3).run(check_giving_up)[:2]):
        assert answer == (
            FailureKind.LOST,
            2,
            f"rank 2 gave up: ZeroDivisionError in call 4, layer 7; rank {rank} is at call 4, layer 7",
        )


def check_straying(env: RankEnv) -> Any:
    """One call behind the latest by the time anyone looks, so the older entries must still be there."""
    own = Watched(GroupRendezvous())
    for call in range(1, 4):
        own.watchdog.begin(call, plan="beef" if own.rank == 1 and call == 2 else "cafe", step=0, layer=call)
    kind, at_fault, text, _ = own.noticed()
    own.meet.barrier()
    own.watchdog.close()
    return kind, at_fault, text


def test_ranks_on_different_plans_are_told_apart_at_the_call_where_they_parted(ranks) -> None:
    first, second = ranks(2).run(check_straying)
    assert first == (
        FailureKind.MISMATCH,
        1,
        "rank 0 is at call 2, step 0, layer 2 of plan cafe, but rank 1 at call 2, step 0, layer 2 of plan beef; "
        "every rank must make the same calls",
    )
    assert second[:2] == (FailureKind.MISMATCH, 0)


def check_stalling(env: RankEnv) -> Any:
    own = Watched(GroupRendezvous(), stall_timeout=1.0)
    own.watchdog.begin(1, step=2)
    own.watchdog.end(1)
    time.sleep(1.2)  # idle for longer than the limit is no stall
    assert own.failures.empty()
    own.meet.barrier()
    if own.rank == 0:
        own.meet.barrier()  # alive, and never comes to call 2
        own.watchdog.close()
        return own.failures.qsize()
    began = time.time()
    own.watchdog.begin(2, step=3, layer=9)
    kind, at_fault, text, when = own.noticed()
    own.meet.barrier()
    own.watchdog.close()
    return kind, at_fault, text, when - began


def test_a_call_that_stands_still_is_reported_with_the_rank_that_is_late(ranks) -> None:
    calm, (kind, at_fault, text, delay) = ranks(2).run(check_stalling)
    assert calm == 0
    assert (kind, at_fault) == (FailureKind.STALL, 0) and 1.0 <= delay < 1.0 + NOTICE_S
    assert text == (
        "rank 1 waits for call 2 since 1 s at call 2, step 3, layer 9; rank 0 has not begun it (last: call 1, step 2)"
    )


def check_slowness(env: RankEnv) -> int:
    """Six calls are issued at once; each takes half the limit, all of them three times the limit."""
    own = Watched(GroupRendezvous(), stall_timeout=0.8)
    for call in range(1, 7):
        own.watchdog.begin(call)
    for call in range(1, 7):
        time.sleep(0.4)
        own.watchdog.end(call)
    own.watchdog.close()
    return own.failures.qsize()


def test_slow_calls_that_progress_are_no_stall(ranks) -> None:
    assert ranks(2).run(check_slowness) == [0, 0]


def check_asynchronous_end(env: RankEnv, done: int) -> int:
    own = Watched(GroupRendezvous(), stall_timeout=0.5, completed=lambda: done)
    own.watchdog.begin(5)
    time.sleep(1.2)
    own.watchdog.close()
    return own.failures.qsize()


@pytest.mark.parametrize(("done", "failures"), [(5, 0), (4, 1)])
def test_calls_that_end_asynchronously_are_asked_for(ranks, done: int, failures: int) -> None:
    assert ranks(2).run(check_asynchronous_end, done) == [failures, failures]


def test_an_entry_names_only_what_it_knows() -> None:
    assert str(Entry(4, "a")) == "call 4"
    assert str(Entry(4, "a", layer=0)) == "call 4, layer 0"
