"""One rank of a pipelined exchange dies, raises or stands still: the others say so in time, and nothing is left.

The fault is planted in the executor's own list, before the operation named. What is left is looked at by the survivors
themselves, before they end, and they end by themselves.
"""

import gc
import mmap
import os
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.multi_gpu.ranks import RankEnv, Ranks, new_mesh
from tests.multi_gpu.test_pipeline import Shape, each_head, inputs, on_host_engine, pipelined
from usp.execute import Executor
from usp.ipc.control import PAGE_NBYTES
from usp.ipc.host_engine import HostEngine
from usp.ipc.rendezvous import GroupRendezvous
from usp.layout import MeshShape
from usp.mesh import Axis
from usp.pipeline import PipelinedExchange
from usp.schedule import Kind

SHAPE = Shape(45, 6, 6, groups=2)
CULPRIT, STEP = 1, 7
ARRIVAL_S, STANDSTILL_S = 0.1, 6.0
STALL_TIMEOUT_S, PATIENT_S = 2.0, 60.0  # for a stall; for all else, since a first call on a GPU may take seconds
LIMITS_S = {"kill": 10.0, "exit": 10.0, "raise": 10.0, "stall": 10.0}
EXIT_CODES = {"kill": -signal.SIGKILL, "exit": 3, "raise": 0, "stall": 0}


@dataclass(frozen=True)
class Fault:
    where: Kind
    kind: str
    call: int = 3
    like_cuda: bool = False
    in_first_step: bool = False

    @property
    def step(self) -> int:
        return STEP - self.in_first_step

    def __str__(self) -> str:
        marks = ("like_cuda", "in_first_step")
        return "-".join([self.kind, self.where.value, str(self.call), *(mark for mark in marks if getattr(self, mark))])

    def happen(self) -> None:
        if self.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.kind == "exit":
            os._exit(EXIT_CODES["exit"])
        if self.kind == "stall":
            time.sleep(STANDSTILL_S)
        if self.kind == "raise":
            raise ValueError("planted")

    def plant(self, exchange: PipelinedExchange) -> None:
        """Into the next call. It happens when all others have begun that call, and had time to come to their waits."""
        make = exchange._executor

        def make_faulty(*args):
            executor = make(*args)
            index = next(i for i, op in enumerate(executor.ops) if op.kind is self.where)
            step = executor.steps[index]
            executor.steps[index] = lambda call: (wait_for_others(), self.happen(), step(call))
            return executor

        def wait_for_others() -> None:
            exchange.liveness.watchdog.meet(self.call, check=lambda: None)
            time.sleep(ARRIVAL_S)

        exchange._executor = make_faulty


@dataclass(frozen=True)
class Outcome:
    said: str
    seconds: float  # from the start of the call with the fault
    refuses: bool  # whether the exchange refuses more
    num_arenas: int  # mapped after close, while somebody still has the exchange
    left: list[str]  # held after close that was not before, when nobody has


def run_into_fault(env: RankEnv, fault: Fault) -> Outcome:
    axis = new_mesh(MeshShape(1, env.world)).ulysses
    before = held_before(env, axis)
    what_happened = call_into_fault(env, axis, fault)
    return Outcome(*what_happened, left(env, before))


def call_into_fault(env: RankEnv, axis: Axis, fault: Fault) -> tuple[str, float, bool, int]:
    timeout = STALL_TIMEOUT_S if fault.kind == "stall" else PATIENT_S
    attn = pipelined(env, axis, SHAPE, like_cuda=fault.like_cuda, stall_timeout=timeout)
    exchange, generator = attn.exchange, torch.Generator().manual_seed(0)
    exchange.at(step=STEP - 1, layer=0)
    given = [inputs(env, SHAPE, generator)[0] for _ in range(fault.call)]
    for qkv in given[:-1]:
        attn(*qkv)
    settle(exchange)
    exchange.at(step=fault.step)  # streams wait in later steps only; in the first it is the host
    if env.rank == CULPRIT:
        fault.plant(exchange)
    said, start = "nothing", time.monotonic()
    try:
        attn(*given[-1])
        exchange.engine.synchronize()  # a call may only enqueue; its waits end when the watchdog releases them
        exchange.check()
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        error.__traceback__ = None  # its frames hold views of the arena
    seconds = time.monotonic() - start
    refuses = False
    try:
        exchange.check()
    except RuntimeError as error:
        error.__traceback__ = None
        refuses = True
    exchange.close()
    exchange.close()
    return said, seconds, refuses, num_arenas()


def settle(exchange: PipelinedExchange) -> None:
    """Every rank's streams are idle: no rank is caught in an earlier call than the one with the fault."""
    exchange.engine.synchronize()
    GroupRendezvous(exchange.axis.group).barrier()


def held_before(env: RankEnv, axis: Axis) -> Counter[str]:
    """After a meeting and an attention, since what libraries take at their first use is not the exchange's."""
    GroupRendezvous(axis.group).barrier()
    each_head(*inputs(env, SHAPE, torch.Generator().manual_seed(0))[0])
    return held(env)


def held(env: RankEnv) -> Counter[str]:
    """What an exchange takes of this process: threads by name, open files by what they are, mappings of shared memory,
    bytes of torch's own GPU memory. The driver opens files as it likes, so on a GPU those of our kinds alone count.
    """
    gc.collect()
    things = Counter(f"thread {thread.name}" for thread in threading.enumerate())
    files = [re.sub(r"\d+", "N", target) for target in open_files()]
    things.update(f"file {name}" for name in files if env.device == "cpu" or "pidfd" in name or "memfd:usp" in name)
    things["mappings"] = len(mappings())
    if env.device == "cuda":
        torch.cuda.synchronize()
        things["bytes of GPU tensors"] = torch.cuda.memory_allocated()
    return things


def num_arenas() -> int:
    """Of host memory. Control pages, which stay readable, do not count."""
    gc.collect()
    page_nbytes = -(-PAGE_NBYTES // mmap.PAGESIZE) * mmap.PAGESIZE
    return sum(nbytes != page_nbytes for nbytes in mappings())


def mappings() -> list[int]:
    """Bytes of each mapping of memory that processes share."""
    lines = [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:usp" in line]
    ends = [[int(end, 16) for end in line.split()[0].split("-")] for line in lines]
    return [stop - start for start, stop in ends]


def open_files() -> Iterator[str]:
    for fd in os.listdir("/proc/self/fd"):
        try:
            yield os.readlink(f"/proc/self/fd/{fd}")
        except FileNotFoundError:  # the listing's own
            continue


def left(env: RankEnv, before: Counter[str]) -> list[str]:
    return [f"{count} {name}" for name, count in sorted((held(env) - before).items())]


@pytest.fixture
def fresh_ranks() -> Iterator[Ranks]:
    group = Ranks(3)
    yield group
    group.close()


IN_CI = [
    Fault(Kind.SIGNAL, "exit", call=1),
    Fault(Kind.RETURN, "kill", like_cuda=True),
    Fault(Kind.ATTEND, "raise"),
    Fault(Kind.FILL, "raise", call=2, like_cuda=True),
    Fault(Kind.ATTEND, "stall", like_cuda=True),
    Fault(Kind.ATTEND, "kill", call=2, like_cuda=True, in_first_step=True),
]
LONG = [
    fault
    for where in (Kind.FILL, Kind.SIGNAL, Kind.ATTEND, Kind.RETURN)
    for kind in LIMITS_S
    for call in (1, 2, 3)
    for like_cuda in (False, True)
    for in_first_step in ((False, True) if call == 2 else (False,))
    if (fault := Fault(where, kind, call, like_cuda, in_first_step)) not in IN_CI
]


@pytest.mark.parametrize("fault", [*IN_CI, *(pytest.param(one, marks=pytest.mark.long) for one in LONG)], ids=str)
def test_survivors_say_which_rank_step_and_layer_refuse_more_and_hold_nothing(fresh_ranks, fault: Fault) -> None:
    if fault.like_cuda and torch.cuda.is_available():
        pytest.skip("this is CUDA")
    answers = fresh_ranks.run_to_the_end(run_into_fault, fault, limit_s=120.0)
    assert all(answers[rank][0] for rank in (0, 2)), answers
    survivors: list[Outcome] = [answers[rank][1] for rank in (0, 2)]
    assert all(one.refuses and one.seconds < LIMITS_S[fault.kind] for one in survivors), survivors
    said = [one.said for one in survivors]
    assert all(f"call {fault.call}, step {fault.step}, layer {fault.call - 1}" in text for text in said), said
    if fault.kind == "stall":  # whoever notices first says so; the other one hears that it gave up
        assert all(text.startswith(("StallError", "PeerLostError")) for text in said), said
        waits = f"waits for call {fault.call} since 2 s"
        assert any(waits in text and "; it awaits " in text for text in said), said
    else:
        assert all(text.startswith(f"PeerLostError: rank {CULPRIT} ") for text in said), said
        awaited = "q, k and v of group 0" if fault.where is Kind.FILL else r"(q, k and v|the results) of group [01]"
        assert all(re.search(f"; it awaits {awaited} from rank {CULPRIT}$", text) for text in said), said
    if fault.kind in ("raise", "stall"):
        assert answers[CULPRIT][0] and answers[CULPRIT][1].refuses, answers
        survivors.append(answers[CULPRIT][1])
    if fault.kind == "raise":
        assert all("gave up: ValueError: planted" in text for text in said), said
    assert [(one.num_arenas, one.left) for one in survivors] == [(0, [])] * len(survivors)
    assert fresh_ranks.end() == [0, EXIT_CODES[fault.kind], 0]


def issue_slowly(env: RankEnv, fault: Fault) -> Outcome:
    """As while kernels compile: the survivors have sent each other nothing when the culprit dies."""
    run = Executor.run
    with pytest.MonkeyPatch.context() as patch:
        if env.rank != CULPRIT:
            patch.setattr(Executor, "run", lambda self, call: (time.sleep(1.0), run(self, call))[1])
        return run_into_fault(env, fault)


def test_what_is_awaited_is_told_of_the_lost_rank_although_others_are_late_too(fresh_ranks) -> None:
    answers = fresh_ranks.run_to_the_end(issue_slowly, Fault(Kind.FILL, "kill", 1, like_cuda=True), limit_s=120.0)
    for rank in (0, 2):
        assert answers[rank][0], answers
        assert answers[rank][1].said.endswith(f"; it awaits q, k and v of group 0 from rank {CULPRIT}"), answers


def use_and_keep(env: RankEnv) -> tuple[list[str], int, int, list[str]]:
    """What is held while an exchange is open, arenas then and after close, and what is left when nobody has it."""
    axis = new_mesh(MeshShape(1, env.world)).ulysses
    before = held_before(env, axis)
    attn = pipelined(env, axis, SHAPE)
    with attn.exchange:
        attn(*inputs(env, SHAPE, torch.Generator().manual_seed(0))[0])
        while_open, arenas_open = left(env, before), num_arenas()
    arenas_closed = num_arenas()
    del attn
    return while_open, arenas_open, arenas_closed, left(env, before)


def test_what_a_closed_exchange_holds_would_be_seen(ranks) -> None:
    for while_open, arenas_open, arenas_closed, after in ranks(3).run(use_and_keep):
        assert all(any(what in one for one in while_open) for what in ("thread usp watchdog", "pidfd", "mappings"))
        assert (arenas_open > 0 or torch.cuda.is_available()) and arenas_closed == 0
        assert after == []


def never(engine: HostEngine, addresses: list[int], value: int, **_: object) -> bool:
    """A release that does nothing and says that all is well."""
    return True


def once(engine: HostEngine, addresses: list[int], value: int, **_: object) -> bool:
    """A release that writes each flag a single time, and says that all is well."""
    for address in addresses:
        engine._flags.store(address, value)
    return True


def lose_a_rank(env: RankEnv, release: Callable[..., bool] | None) -> bool:
    """Rank 1 dies in call 3, when rank 0 has queued call 4 as well and rank 2 has not. Whether this rank's streams come
    to rest within three seconds.

    Rank 2's last signal of call 3 comes after rank 0 was poisoned, and before rank 0 is at its wait for call 4.
    """
    axis = new_mesh(MeshShape(1, env.world)).ulysses
    slow, pauses = threading.Event(), {(0, "main"): 0.04, (2, "copy"): 0.02}
    attn = pipelined(
        env,
        axis,
        SHAPE,
        delay=lambda stream: time.sleep(pauses.get((env.rank, stream), 0.0) if slow.is_set() else 0.0),
        like_cuda=True,
    )
    engine, generator = attn.exchange.engine, torch.Generator().manual_seed(0)
    given = [inputs(env, SHAPE, generator)[0] for _ in range(4)]
    for qkv in given[:2]:
        attn(*qkv)
    if release is not None:
        engine.release = partial(release, engine)
    settle(attn.exchange)
    if env.rank == CULPRIT:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    for qkv in given[2:] if env.rank == 0 else given[2:3]:
        attn(*qkv)
    assert not engine.is_idle()
    slow.set()
    await_failure(attn.exchange)
    return comes_to_rest(engine, 3.0)


def await_failure(exchange: PipelinedExchange) -> None:
    deadline = time.monotonic() + 10.0
    while exchange.liveness.broken is None and time.monotonic() < deadline:
        time.sleep(0.001)
    assert exchange.liveness.broken is not None


def comes_to_rest(engine: HostEngine, limit_s: float) -> bool:
    deadline = time.monotonic() + limit_s
    while not engine.is_idle() and time.monotonic() < deadline:
        time.sleep(0.001)
    return engine.is_idle()


@on_host_engine
@pytest.mark.parametrize(("release", "comes_free"), [(None, True), (never, False), (once, False)])
def test_nothing_but_repeated_poison_frees_a_rank_whose_peer_died(fresh_ranks, release, comes_free: bool) -> None:
    answers = fresh_ranks.run_to_the_end(lose_a_rank, release)
    assert answers[0] == (True, comes_free), answers
    if comes_free:
        assert answers[2] == (True, True), answers


def run_apart(env: RankEnv) -> str:
    """Rank 1 comes to a known plan while the others come to a new one."""
    axis = new_mesh(MeshShape(1, env.world)).ulysses
    attn = pipelined(env, axis, SHAPE)
    generator = torch.Generator().manual_seed(0)
    said = "nothing"
    try:
        attn(*inputs(env, SHAPE, generator)[0])
        attn(*inputs(env, SHAPE if env.rank == CULPRIT else Shape(45, 3, 3), generator)[0])
        attn.exchange.engine.synchronize()
        attn.exchange.check()
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    attn.exchange.close()
    return said


def test_a_rank_at_another_plan_is_told_from_the_control_pages(fresh_ranks) -> None:
    answers = fresh_ranks.run_to_the_end(run_apart, limit_s=120.0)
    assert all(ok for ok, _ in answers), answers
    said = [text for _, text in answers]
    assert any(text.startswith("PlanMismatchError") and "of plan" in text and "call 2" in text for text in said), said
    assert "nothing" not in said
    assert fresh_ranks.end() == [0, 0, 0]
