"""A driver that stands still while it loads a kernel, as CUDA's does: until every stream is idle, for every thread.

A rank whose peer dies meanwhile could not be told by anybody. So no stream is left waiting in the first step; and where
one waits all the same, the process ends.
"""

import random
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial

import pytest
import torch

from tests.multi_gpu import test_pipeline
from tests.multi_gpu.ranks import RankEnv, Ranks, new_mesh
from tests.multi_gpu.test_pipeline import SHAPES, Shape, check_calls, inputs, on_host_engine, pipelined
from tests.multi_gpu.test_pipeline_ends import told
from tests.multi_gpu.test_pipeline_faults import CULPRIT, SHAPE, Fault, Outcome, fresh_ranks, run_into_fault, settle
from usp import liveness
from usp.destinations import FillBlocks
from usp.execute import Executor
from usp.fill import fill_from
from usp.ipc.host_engine import HostEngine
from usp.layout import MeshShape
from usp.liveness import EXIT_CODE
from usp.pipeline import PipelinedExchange
from usp.schedule import Kind

__all__ = ["fresh_ranks"]

pytestmark = on_host_engine
KERNELS = 20  # more launches than two calls have: those that load something


class LoadingEngine(HostEngine):
    """Each of the first launches finds a kernel that is not loaded yet."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self._driver, self._to_load = threading.RLock(), KERNELS

    def launch(self, stream: str, function: Callable[[], object]) -> None:
        if self._to_load:
            self._to_load -= 1
            with self._driver:
                while not super().is_idle():
                    time.sleep(1e-3)
        super().launch(stream, function)

    def is_idle(self) -> bool:
        with self._driver:
            return super().is_idle()

    def peek(self, addresses: Sequence[int]) -> list[int]:
        with self._driver:
            return super().peek(addresses)


class DeafEngine(HostEngine):
    """Does not tell in time what it waits for."""

    def peek(self, addresses: Sequence[int]) -> list[int]:
        if threading.current_thread().name == "usp in time":
            time.sleep(1.8)
        return super().peek(addresses)


def on(engine: type[HostEngine], env: RankEnv, body: Callable[..., object], *args: object, gate: bool = True) -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(test_pipeline, "HostEngine", engine)
        if not gate:
            patch.setattr(PipelinedExchange, "_gate", park)
        return body(env, *args)


def park(exchange: PipelinedExchange, executor: Executor) -> None:
    exchange._latest_parking = exchange._numbers.begun


def on_loading(env: RankEnv, body: Callable[..., object], *args: object, gate: bool = True) -> object:
    return on(LoadingEngine, env, body, *args, gate=gate)


def on_deaf(env: RankEnv, body: Callable[..., object], *args: object) -> object:
    return on(DeafEngine, env, body, *args)


@pytest.mark.parametrize(
    ("shape", "gate"), [(SHAPES[1], True), (SHAPES[2], True), (SHAPES[1], False)], ids=["two streams", "GQA", "parked"]
)
def test_no_rank_keeps_a_healthy_peer_from_loading(ranks, shape: Shape, gate: bool) -> None:
    ranks(3).run(partial(on_loading, gate=gate), check_calls, shape, 5, 1, True)


def make_mixed(env: RankEnv, shape: Shape, seed: int) -> None:
    """Each rank takes some calls for first ones, as after executors were dropped; which ones, no other rank knows."""
    pick, gate = random.Random(seed * 10 + env.rank), PipelinedExchange._gate

    def gate_or_not(exchange: PipelinedExchange, executor: Executor) -> Callable[[int, int], None] | None:
        if pick.random() < 0.5:
            executor.first_step = None
        return gate(exchange, executor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PipelinedExchange, "_gate", gate_or_not)
        check_calls(env, shape, 12, seed, True)


@pytest.mark.parametrize("shape", [SHAPES[1], Shape(2, 5, 5, groups=2, attend_streams=2)], ids=["all", "no tokens"])
def test_ranks_need_not_agree_on_which_call_is_the_first(ranks, shape: Shape) -> None:
    ranks(3).run(on_loading, make_mixed, shape, random.randrange(2**31))


@pytest.mark.parametrize(
    "fault",
    [
        Fault(Kind.FILL, "kill", 1, like_cuda=True),
        Fault(Kind.FILL, "kill", 2, like_cuda=True, in_first_step=True),
        pytest.param(Fault(Kind.ATTEND, "kill", 1, like_cuda=True), marks=pytest.mark.long),
        pytest.param(Fault(Kind.RETURN, "kill", 2, like_cuda=True, in_first_step=True), marks=pytest.mark.long),
    ],
    ids=str,
)
def test_a_rank_that_dies_while_others_load_kernels_is_told_of(fresh_ranks, fault: Fault) -> None:
    assert_told(fresh_ranks.run_to_the_end(on_loading, run_into_fault, fault), limit_s=10.0)


def test_a_rank_that_cannot_say_what_it_awaits_still_ends_well(fresh_ranks) -> None:
    """Whoever still asks is waited for, and then nothing is left."""
    fault = Fault(Kind.FILL, "kill", 1, like_cuda=True)
    assert_told(fresh_ranks.run_to_the_end(on_deaf, run_into_fault, fault), limit_s=10.0)


def assert_told(answers: list[tuple[bool, Outcome]], limit_s: float) -> None:
    assert all(answers[rank][0] for rank in (0, 2)), answers
    survivors = [answers[rank][1] for rank in (0, 2)]
    assert all(one.said.startswith(f"PeerLostError: rank {CULPRIT} ") and one.seconds < limit_s for one in survivors)
    assert all(one.refuses and one.left == [] for one in survivors), survivors


def test_a_process_whose_driver_does_not_answer_ends(capfd) -> None:
    with closing(Ranks(3)) as heard:  # started here, where what they say is caught
        heard.run(nothing)
        start = time.monotonic()
        fault = Fault(Kind.FILL, "kill", 1, like_cuda=True)
        answers = heard.run_to_the_end(partial(on_loading, gate=False), run_into_fault, fault)
        seconds = time.monotonic() - start
    codes = [EXIT_CODE, -signal.SIGKILL, EXIT_CODE]
    assert answers == [(False, f"no answer; alive: False, exit code: {int(code)}") for code in codes]
    assert seconds < 25.0  # to make the exchange, ASK_S and ANSWER_S
    said = [line for line in capfd.readouterr().err.splitlines() if "do not end, so the process does" in line]
    assert len(said) == 2 and all(f"rank {CULPRIT} (process" in line for line in said), said


def nothing(env: RankEnv) -> None:
    pass


def attend_and_raise(env: RankEnv, slow_s: float) -> str:
    """Rank 1 gives up while the others are at work for longer than a driver may be silent."""
    axis = new_mesh(MeshShape(1, env.world)).ulysses
    attn = pipelined(env, axis, SHAPE, stall_timeout=60.0)
    generator = torch.Generator().manual_seed(0)
    first, (q, k, v) = (inputs(env, SHAPE, generator)[0] for _ in range(2))
    attn(*first)
    settle(attn.exchange)

    def fill_all(blocks: FillBlocks) -> None:
        if env.rank == CULPRIT:
            raise ValueError("planted")
        time.sleep(slow_s)
        fill_from(q, k)(blocks)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(liveness, "ANSWER_S", 1.0)
        said, _ = told(lambda: (attn.filled(v, fill_all, num_heads=q.shape[2]), attn.exchange.check()))
        attn.exchange.close()
    return said


def test_work_that_takes_longer_than_a_driver_may_be_silent_kills_nobody(ranks) -> None:
    said = ranks(3).run(attend_and_raise, 4.0)
    assert all(said[rank].startswith(f"PeerLostError: rank {CULPRIT} gave up: ValueError: planted") for rank in (0, 2))


def fail_to_release(env: RankEnv, fault: Fault) -> Outcome:
    def release(*_: object, **__: object) -> bool:
        raise RuntimeError("the driver is gone")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HostEngine, "release", release)
        return run_into_fault(env, fault)


def test_a_release_that_fails_ends_the_process(capfd) -> None:
    with closing(Ranks(3)) as heard:
        answers = heard.run_to_the_end(fail_to_release, Fault(Kind.SIGNAL, "kill", 3, like_cuda=True))
    assert all(answers[rank] == (False, f"no answer; alive: False, exit code: {EXIT_CODE}") for rank in (0, 2)), answers
    assert "the driver is gone" in capfd.readouterr().err
