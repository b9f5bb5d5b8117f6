"""The engine on CUDA: copies on copy engines, flags through stream memory operations, work launched through torch.

Waiting streams hold no SM, and issuing allocates nothing. All streams but main are created non-blocking, since others
would serialise with torch's legacy default stream. Used where ranks have GPUs; several may share one.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from usp.ipc.cuda_copy import CudaCopy, make_copy
from usp.ipc.driver import call, cuda_error, load_driver
from usp.ipc.engine import AUX, COPY, MAIN, PEEK_WORDS, RELEASE_LIMIT_S, Block, Patience, PreparedCopy
from usp.ipc.errors import SetupError
from usp.ipc.futex import reached

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
ENOUGH_CONNECTIONS = 32
DEFAULT_CONNECTIONS = 8
MAX_EVENTS = 64
RELEASE_PAUSE_S = 0.001
PEEK_LIMIT_S = 0.5
HOLD_PAUSE_S, LONGEST_HOLD_PAUSE_S = 0.0001, 0.005


class CudaEngine:
    """`device` as this process counts GPUs; None is the current one. `main` is the stream that is current now, the
    others are `streams`."""

    device_type = "cuda"

    def __init__(self, device: "torch.device | int | None" = None, *, streams: Sequence[str] = (COPY, AUX)) -> None:
        import torch

        check_connections(os.environ)
        driver = self._driver = load_driver()
        torch.cuda.init()
        self._device = torch.device("cuda", torch.cuda.current_device() if device is None else _index(device))
        self._failure: BaseException | None = None
        self._closed = False
        self._peeking = threading.Lock()
        with torch.cuda.device(self._device):
            torch.empty(1, device=self._device)  # makes torch's context current, which the driver calls below then use
            self._context = call(driver.cuCtxGetCurrent)
            self._own = {name: self._make_stream() for name in streams}
            # Made before the first wait: making a stream may wait for the device, and then could not end the waits.
            self._release_stream = self._make_stream()
            self._peeked = torch.zeros(PEEK_WORDS, dtype=torch.int32).pin_memory()
            self._free_events = [self._make_event() for _ in range(MAX_EVENTS)]
        self._events: dict[str, Any] = {}
        self._handles: dict[str, Any] = dict(self._own)
        self._torch_streams: dict[str, torch.cuda.Stream] = {
            name: torch.cuda.ExternalStream(int(handle), device=self._device) for name, handle in self._own.items()
        }
        self.use_main(torch.cuda.current_stream(self._device))

    @property
    def streams(self) -> Mapping[str, "torch.cuda.Stream"]:
        return self._torch_streams

    def use_main(self, stream: "torch.cuda.Stream") -> None:
        """Let `main` mean this stream from now on."""
        self._torch_streams[MAIN] = stream
        self._handles[MAIN] = self._driver.CUstream(stream.cuda_stream)

    def begin(self) -> None:
        import torch

        stream, before = torch.cuda.current_stream(self._device), self._torch_streams[MAIN]
        self._refuse_capture(stream)  # first: what a capturing stream is made to wait for breaks the capture
        if stream.cuda_stream != before.cuda_stream:
            stream.wait_stream(before)
            self.use_main(stream)

    def bind_thread(self) -> None:
        """Make the calling thread one that may use this engine."""
        call(self._driver.cuCtxSetCurrent, self._context)

    def prepare_copy(self, target: Block, source: Block) -> CudaCopy:
        return make_copy(self._driver, target, source)

    def enqueue(self, stream: str, copy: PreparedCopy) -> None:
        cast(CudaCopy, copy).issue(self._stream(stream))

    def copy(self, stream: str, target: Block, source: Block) -> None:
        self.enqueue(stream, self.prepare_copy(target, source))

    def signal(self, stream: str, address: int, value: int) -> None:
        self._store(self._stream(stream), address, value)

    def wait(self, stream: str, address: int, value: int) -> None:
        geq = 0  # CU_STREAM_WAIT_VALUE_GEQ, which compares cyclically
        call(self._driver.cuStreamWaitValue32, self._stream(stream), address, value & 0xFFFFFFFF, geq)

    def record(self, stream: str, event: str) -> None:
        call(self._driver.cuEventRecord, self._event(event), self._stream(stream))

    def await_event(self, stream: str, event: str) -> None:
        call(self._driver.cuStreamWaitEvent, self._stream(stream), self._events[event], 0)

    def launch(self, stream: str, function: Callable[[], object]) -> None:
        import torch

        self._stream(stream)
        with torch.cuda.stream(self._torch_streams[stream]):
            function()

    def is_idle(self) -> bool:
        return all(self._has_run(handle) for handle in self._handles.values())

    def synchronize(self) -> None:
        for handle in self._handles.values():
            call(self._driver.cuStreamSynchronize, handle)
        self._raise_failure()

    def fail(self, error: BaseException) -> None:
        if self._failure is None:
            self._failure = error

    def release(
        self,
        addresses: Sequence[int],
        value: int,
        *,
        limit_s: float = RELEASE_LIMIT_S,
        progress: Callable[[], object] = lambda: None,
    ) -> bool:
        self.bind_thread()
        patience = Patience(limit_s)
        while not self.is_idle():
            if patience.is_over(progress()):
                return False
            if self._has_run(self._release_stream):  # never more than one round queued
                for address in addresses:
                    self._store(self._release_stream, address, value)
            time.sleep(RELEASE_PAUSE_S)
        return True

    def hold(self, address: int, value: int, *, stopped: Callable[[], bool]) -> None:
        pause = HOLD_PAUSE_S
        while not any(reached(found, value) for found in self.peek([address])) and not stopped():
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_HOLD_PAUSE_S)

    def peek(self, addresses: Sequence[int]) -> list[int]:
        assert len(addresses) <= PEEK_WORDS
        if not self._peeking.acquire(timeout=PEEK_LIMIT_S):
            return []
        try:
            return self._peek(addresses)
        finally:
            self._peeking.release()

    def _peek(self, addresses: Sequence[int]) -> list[int]:
        self.bind_thread()
        start = self._peeked.data_ptr()
        for place, address in enumerate(addresses):
            call(self._driver.cuMemcpyAsync, start + 4 * place, address, 4, self._release_stream)
        deadline = time.monotonic() + PEEK_LIMIT_S
        while not self._has_run(self._release_stream):
            if time.monotonic() > deadline:
                return []
            time.sleep(RELEASE_PAUSE_S)
        return [value & 0xFFFFFFFF for value in self._peeked[: len(addresses)].tolist()]

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self.bind_thread()
        for event in (*self._free_events, *self._events.values()):
            call(self._driver.cuEventDestroy, event)
        for handle in (*self._own.values(), self._release_stream):
            call(self._driver.cuStreamDestroy, handle)

    def _store(self, handle: Any, address: int, value: int) -> None:
        # Flags 0 keep the fence: all earlier work of the stream is seen before the value.
        call(self._driver.cuStreamWriteValue32, handle, address, value & 0xFFFFFFFF, 0)

    def _stream(self, name: str) -> Any:
        assert not self._closed
        if self._failure is not None:
            raise self._failure
        return self._handles[name]

    def _refuse_capture(self, stream: "torch.cuda.Stream") -> None:
        if int(call(self._driver.cuStreamIsCapturing, self._driver.CUstream(stream.cuda_stream))) != 0:
            raise RuntimeError(
                "the exchange cannot be captured in a CUDA graph: call numbers differ from call to call; "
                "capture what lies between exchanges, or run without graphs"
            )

    def _event(self, name: str) -> Any:
        if name not in self._events:
            if not self._free_events:
                raise RuntimeError(f"event {name!r} is one more than the {MAX_EVENTS} that an engine keeps")
            self._events[name] = self._free_events.pop()
        return self._events[name]

    def _has_run(self, handle: Any) -> bool:
        (code,) = self._driver.cuStreamQuery(handle)
        if code == self._driver.CUresult.CUDA_ERROR_NOT_READY:
            return False
        if int(code) != 0:
            raise cuda_error("cuStreamQuery", code)
        return True

    def _make_stream(self) -> Any:
        return call(self._driver.cuStreamCreate, int(self._driver.CUstream_flags.CU_STREAM_NON_BLOCKING))

    def _make_event(self) -> Any:
        return call(self._driver.cuEventCreate, int(self._driver.CUevent_flags.CU_EVENT_DISABLE_TIMING))

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure


def check_connections(environ: Mapping[str, str]) -> None:
    """Whether waiting streams can stop others: CUDA reads the number of hardware queues once, when it starts.

    At the default of 8, seven waiting streams were measured to stop an unrelated one; with 1 the first wait would.
    """
    text = environ.get(CONNECTIONS, str(DEFAULT_CONNECTIONS))
    count = int(text) if text.isdecimal() else DEFAULT_CONNECTIONS
    if count <= 1:
        raise SetupError(
            f"{CONNECTIONS} is {text}: all streams share one queue, so a waiting stream would stop the copies that it "
            f"waits for; set it to {ENOUGH_CONNECTIONS} before CUDA starts, or choose the nccl exchange"
        )
    if count < ENOUGH_CONNECTIONS:
        log.warning(
            f"{CONNECTIONS} is {text if CONNECTIONS in environ else f'not set, so {count}'}: waiting streams may stop "
            f"others; set it to {ENOUGH_CONNECTIONS} before CUDA starts"
        )


def _index(device: "torch.device | int") -> int:
    return device if isinstance(device, int) else device.index
