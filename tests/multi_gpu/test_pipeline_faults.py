"""One rank of a pipelined exchange dies, raises or stands still: the others say so in time, and nothing is left.

The fault is planted in the executor's own list, before the operation named, in the third call.
"""

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.multi_gpu.ranks import RankEnv, Ranks
from tests.multi_gpu.test_pipeline import Shape, inputs, pipelined
from usp.layout import MeshShape
from usp.mesh import make_mesh
from usp.pipeline import ExchangeBrokenError
from usp.schedule import Kind

SHAPE = Shape(45, 6, 6, groups=2)
CULPRIT, STEP = 1, 7
STALL_TIMEOUT_S, STANDSTILL_S = 2.0, 6.0
LIMITS_S = {"kill": 10.0, "exit": 10.0, "raise": 10.0, "stall": 10.0}


def fault(kind: str) -> None:
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "exit":
        os._exit(3)
    if kind == "stall":
        time.sleep(STANDSTILL_S)
    if kind == "raise":
        raise ValueError("planted")


def run_into_fault(env: RankEnv, where: Kind, kind: str) -> tuple[str, float, bool]:
    """What this rank raised, after how many seconds of its third call, and whether the exchange refuses more."""
    axis = make_mesh(MeshShape(1, env.world), device_type="cpu").ulysses
    attn = pipelined(env, axis, SHAPE, stall_timeout=STALL_TIMEOUT_S)
    exchange = attn.exchange
    generator = torch.Generator().manual_seed(0)
    exchange.at(step=STEP, layer=0)
    for _ in range(2):
        attn(*inputs(env, SHAPE, generator)[0])
    if env.rank == CULPRIT:
        (executor,) = exchange._executors.values()
        index = next(i for i, op in enumerate(executor.ops) if op.kind is where)
        step = executor.steps[index]
        executor.steps[index] = lambda call: (fault(kind), step(call))
    said, start = "nothing", time.monotonic()
    try:
        attn(*inputs(env, SHAPE, generator)[0])
        if env.device == "cuda":
            torch.cuda.synchronize()  # a call only enqueues; its waits end when the watchdog releases them
        exchange.check()
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    seconds = time.monotonic() - start
    refuses = False
    try:
        exchange.check()
    except (ExchangeBrokenError, RuntimeError):
        refuses = True
    exchange.close()
    exchange.close()
    return said, seconds, refuses


@pytest.fixture
def fresh_ranks() -> Iterator[Ranks]:
    before, used = set(os.listdir("/dev/shm")), gpu_memory()
    group = Ranks(3)
    yield group
    pids = [process.pid for process in group.processes]
    group.close()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert set(os.listdir("/dev/shm")) <= before
    deadline = time.monotonic() + 10.0  # the driver frees what a killed process had after it has gone
    while gpu_memory() > used and time.monotonic() < deadline:
        time.sleep(0.1)
    assert gpu_memory() <= used


def gpu_memory() -> int:
    """Bytes in use on the GPU by whomever; 0 without one."""
    if not torch.cuda.is_available():
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free


WHERE = (Kind.FILL, Kind.SIGNAL, Kind.ATTEND, Kind.RETURN)
IN_CI = [
    (Kind.FILL, "kill"),
    (Kind.SIGNAL, "exit"),
    (Kind.ATTEND, "raise"),
    (Kind.RETURN, "kill"),
    (Kind.ATTEND, "stall"),
]
LONG = [(where, kind) for where in WHERE for kind in LIMITS_S if (where, kind) not in IN_CI]


@pytest.mark.parametrize(("where", "kind"), [*IN_CI, *(pytest.param(*case, marks=pytest.mark.long) for case in LONG)])
def test_survivors_say_which_rank_step_and_layer_and_refuse_more(fresh_ranks, where: Kind, kind: str) -> None:
    answers = fresh_ranks.run_to_the_end(run_into_fault, where, kind, limit_s=40.0)
    said = [answers[rank][1][0] for rank in (0, 2) if answers[rank][0]]
    assert len(said) == 2, answers
    for ok, seconds, refuses in ((answers[rank][0], *answers[rank][1][1:]) for rank in (0, 2)):
        assert ok and refuses and seconds < LIMITS_S[kind]
    assert all("call 3, step 7, layer 2" in text for text in said), said
    if kind == "stall":  # whoever notices first says so; the other one hears that it gave up
        assert all(text.startswith(("StallError", "PeerLostError")) for text in said), said
        assert any("waits for call 3 since 2 s" in text and "; it awaits " in text for text in said), said
    else:
        assert all(text.startswith(f"PeerLostError: rank {CULPRIT} ") for text in said), said
        awaited = "q, k and v of group 0" if where is Kind.FILL else r"(q, k and v|the results) of group [01]"
        assert all(re.search(f"; it awaits {awaited} from rank {CULPRIT}$", text) for text in said), said
    if kind in ("raise", "stall"):
        assert answers[CULPRIT][0] and answers[CULPRIT][1][2]
    if kind == "raise":
        assert all("gave up: ValueError: planted" in text for text in said), said


def run_apart(env: RankEnv) -> str:
    """Rank 1 comes to a known plan while the others come to a new one."""
    axis = make_mesh(MeshShape(1, env.world), device_type="cpu").ulysses
    attn = pipelined(env, axis, SHAPE)
    generator = torch.Generator().manual_seed(0)
    said = "nothing"
    try:
        attn(*inputs(env, SHAPE, generator)[0])
        attn(*inputs(env, SHAPE if env.rank == CULPRIT else Shape(45, 3, 3), generator)[0])
        if env.device == "cuda":
            torch.cuda.synchronize()
        attn.exchange.check()
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    attn.exchange.close()
    return said


def test_a_rank_at_another_plan_is_told_from_the_control_pages(fresh_ranks) -> None:
    answers = fresh_ranks.run_to_the_end(run_apart, limit_s=30.0)
    assert all(ok for ok, _ in answers), answers
    said = [text for _, text in answers]
    assert any(text.startswith("PlanMismatchError") and "of plan" in text and "call 2" in text for text in said), said
    assert "nothing" not in said
