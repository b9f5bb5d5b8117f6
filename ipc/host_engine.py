"""The engine on host memory: the main stream is the calling thread, copy and aux are worker threads.

It runs the very schedules that CUDA runs, signals and waits included, so that every machine can exercise the protocol.
Waits sleep in the kernel. An operation costs some microseconds; used where ranks have no GPU.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
import torch

from usp.ipc.engine import AUX, COPY, MAIN, RELEASE_LIMIT_S, Block, Patience, PreparedCopy
from usp.ipc.futex import Flags
from usp.ipc.host_copy import HostCopy
from usp.ipc.host_stream import InlineStream, Operation, WorkerStream

RELEASE_PAUSE_S = 0.001


class HostEngine:
    """`delay(stream)` is called before each operation, in its thread: tests put random sleeps there.

    `num_threads` is torch's for functions launched on a worker stream; `streams` are those beside main.

    `like_cuda` is for tests. Main is a worker then, so that calls are only enqueued: whoever issues keeps all that they
    read, since no allocator follows streams here, and reads their results after `synchronize`. After a failure, and in
    `close`, what is queued still runs, and a parked wait ends by its flag alone: nothing but `release` sees to that.
    """

    device_type = "cpu"

    def __init__(
        self,
        *,
        delay: Callable[[str], None] | None = None,
        num_threads: int = 1,
        streams: Sequence[str] = (COPY, AUX),
        like_cuda: bool = False,
    ) -> None:
        self._delay, self._like_cuda = delay, like_cuda
        self._flags = Flags()
        self._progress = threading.Condition()
        self._failure: BaseException | None = None
        self._closed = False
        self._recorded: dict[str, int] = {}  # times issued, by event
        self._passed: dict[str, int] = {}  # times run
        self._parked: dict[str, int] = {}  # address that a stream sleeps on
        prepare = partial(torch.set_num_threads, num_threads)
        names = (MAIN, *streams) if like_cuda else streams
        self._workers = {name: WorkerStream(name, progress=self._progress, prepare=prepare) for name in names}
        self.streams: Mapping[str, InlineStream | WorkerStream] = {MAIN: InlineStream(), **self._workers}

    def begin(self) -> None:
        self._raise_failure()

    def prepare_copy(self, target: Block, source: Block) -> HostCopy:
        return HostCopy(target, source)

    def enqueue(self, stream: str, copy: PreparedCopy) -> None:
        assert isinstance(copy, HostCopy)
        self._issue(stream, partial(np.copyto, copy.target_rows, copy.source_rows))

    def copy(self, stream: str, target: Block, source: Block) -> None:
        self.enqueue(stream, HostCopy(target, source))

    def signal(self, stream: str, address: int, value: int) -> None:
        self._issue(stream, partial(self._flags.store, address, value))

    def wait(self, stream: str, address: int, value: int) -> None:
        self._issue(stream, partial(self._await_flag, stream, address, value))

    def record(self, stream: str, event: str) -> None:
        count = self._recorded[event] = self._recorded.get(event, 0) + 1
        self._issue(stream, partial(self._pass_event, event, count))

    def await_event(self, stream: str, event: str) -> None:
        self._issue(stream, partial(self._await_passed, event, self._recorded[event]))

    def launch(self, stream: str, function: Callable[[], object]) -> None:
        self._issue(stream, _in_current_modes(function) if stream in self._workers else function)

    def is_idle(self) -> bool:
        return all(stream.is_idle() for stream in self.streams.values())

    def synchronize(self) -> None:
        with self._progress:
            self._progress.wait_for(self.is_idle)
        self._raise_failure()

    def fail(self, error: BaseException) -> None:
        with self._progress:
            if self._failure is None:
                self._failure = error
        self._end_waits()

    def release(
        self,
        addresses: Sequence[int],
        value: int,
        *,
        limit_s: float = RELEASE_LIMIT_S,
        progress: Callable[[], object] = lambda: None,
    ) -> bool:
        patience = Patience(limit_s)
        while not self.is_idle():
            # An operation that runs is progress, however slow; only a wait that does not end is none.
            seen = progress()
            if patience.is_over(seen if self._parked else object()):
                return False
            for address in addresses:
                self._flags.store(address, value)
            time.sleep(RELEASE_PAUSE_S)
        return True

    def hold(self, address: int, value: int, *, stopped: Callable[[], bool]) -> None:
        self._flags.wait(address, value, stopped=stopped)

    def peek(self, addresses: Sequence[int]) -> list[int]:
        return [self._flags.load(address) for address in addresses]

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._end_waits()
        for worker in self._workers.values():
            worker.stop()

    def _issue(self, stream: str, operation: Operation) -> None:
        assert not self._closed
        self._raise_failure()
        run = self._run_aside if stream in self._workers else self._run
        self.streams[stream].issue(partial(run, stream, operation))

    def _run(self, stream: str, operation: Operation) -> None:
        if self._delay is not None:
            self._delay(stream)
        operation()

    def _run_aside(self, stream: str, operation: Operation) -> None:
        """In a worker: what follows a failure is skipped, so that the queue drains, unless `like_cuda`."""
        if self._is_ending():
            return
        try:
            self._run(stream, operation)
        except BaseException as error:
            self.fail(error)

    def _await_flag(self, stream: str, address: int, value: int) -> None:
        self._parked[stream] = address
        arrived = self._flags.wait(address, value, stopped=self._is_ending)
        del self._parked[stream]
        if not arrived:
            self._raise_failure()

    def _pass_event(self, event: str, count: int) -> None:
        with self._progress:
            self._passed[event] = count
            self._progress.notify_all()

    def _await_passed(self, event: str, count: int) -> None:
        with self._progress:
            self._progress.wait_for(lambda: self._passed.get(event, 0) >= count or self._is_ending())
            passed = self._passed.get(event, 0) >= count
        if not passed:
            self._raise_failure()

    def _is_ending(self) -> bool:
        return not self._like_cuda and (self._closed or self._failure is not None)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _end_waits(self) -> None:
        with self._progress:
            self._progress.notify_all()
        for address in list(self._parked.values()):
            self._flags.wake(address)


def _in_current_modes(function: Callable[[], object]) -> Callable[[], None]:
    """The function under the issuing thread's autograd modes, which are a thread's own in torch."""
    inference, grad = torch.is_inference_mode_enabled(), torch.is_grad_enabled()

    def run() -> None:
        with torch.inference_mode(inference), torch.set_grad_enabled(grad):
            function()

    return run
