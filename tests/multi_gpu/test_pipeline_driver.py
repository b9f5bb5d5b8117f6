"""A driver that stands still while it loads a kernel, as CUDA's does: until every stream is idle, for every thread.

A rank whose peer dies meanwhile could not be told by anybody. So first calls never leave a stream waiting; and where
one waits all the same, the process ends.
"""

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

import pytest

from tests.multi_gpu import test_pipeline
from tests.multi_gpu.ranks import RankEnv
from tests.multi_gpu.test_pipeline import SHAPES, Shape, check_calls, on_host_engine
from tests.multi_gpu.test_pipeline_faults import CULPRIT, Fault, Outcome, fresh_ranks, run_into_fault
from usp.ipc.host_engine import HostEngine
from usp.liveness import EXIT_CODE
from usp.pipeline import PipelinedExchange
from usp.schedule import Kind

__all__ = ["fresh_ranks"]

pytestmark = on_host_engine
KERNELS = 6  # launches of a call and more: those that load something


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


def loading(env: RankEnv, body: Callable[..., object], *args: object, first_calls_wait: bool = True) -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(test_pipeline, "HostEngine", LoadingEngine)
        if not first_calls_wait:
            patch.setattr(PipelinedExchange, "_await_flag", lambda *_: None)
        return body(env, *args)


@pytest.mark.parametrize("shape", [SHAPES[1], SHAPES[2]], ids=str)
@pytest.mark.parametrize("first_calls_wait", [True, False])
def test_no_rank_keeps_a_healthy_peer_from_loading(ranks, shape: Shape, first_calls_wait: bool) -> None:
    body = partial(loading, first_calls_wait=first_calls_wait)
    ranks(3).run(body, check_calls, shape, 5, 1, True)


@pytest.mark.parametrize(
    "where",
    [Kind.FILL, Kind.ATTEND, *(pytest.param(kind, marks=pytest.mark.long) for kind in (Kind.SIGNAL, Kind.RETURN))],
)
def test_a_rank_that_dies_while_others_load_kernels_is_told_of(fresh_ranks, where: Kind) -> None:
    answers = fresh_ranks.run_to_the_end(loading, run_into_fault, Fault(where, "kill", 1, like_cuda=True), limit_s=40.0)
    assert all(answers[rank][0] for rank in (0, 2)), answers
    survivors: list[Outcome] = [answers[rank][1] for rank in (0, 2)]
    assert all(one.said.startswith(f"PeerLostError: rank {CULPRIT} ") and one.seconds < 5.0 for one in survivors)
    assert all(one.refuses and one.left == [] for one in survivors), survivors


def test_a_process_whose_driver_does_not_answer_ends(fresh_ranks) -> None:
    body = partial(loading, first_calls_wait=False)
    start = time.monotonic()
    answers = fresh_ranks.run_to_the_end(
        body, run_into_fault, Fault(Kind.FILL, "kill", 1, like_cuda=True), limit_s=40.0
    )
    for rank in (0, 2):
        assert answers[rank] == (False, f"no answer; alive: False, exit code: {EXIT_CODE}"), answers
    assert time.monotonic() - start < 30.0  # most of it to start the ranks
