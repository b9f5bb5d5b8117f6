"""The host engine within one process: order on streams, events, copies, and how failures reach the caller."""

import ctypes
import random
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from usp.ipc.engine import Block
from usp.ipc.futex import FUTEX_WAKE_OP, OP_OR, Flags, reached
from usp.ipc.host_copy import HostCopy
from usp.ipc.host_engine import HostEngine

LIMIT_S = 30.0


@pytest.fixture
def engine() -> Iterator[HostEngine]:
    engine = HostEngine()
    yield engine
    engine.close()


@pytest.fixture
def flag() -> ctypes.c_uint32:
    return ctypes.c_uint32(0)


def _address(flag: ctypes.c_uint32) -> int:
    return ctypes.addressof(flag)


def _later(seconds: float, action) -> threading.Thread:
    thread = threading.Timer(seconds, action)
    thread.start()
    return thread


@pytest.mark.parametrize(("current", "value", "is_reached"), [(5, 5, True), (5, 6, False), (2**32 - 1, 1, False)])
def test_flags_compare_as_cyclic_numbers(current: int, value: int, is_reached: bool) -> None:
    assert reached(current, value) == is_reached
    assert reached(2, 2**32 - 3)  # after the wrap
    assert reached(7 + 2**30, 7) and not reached(7, 7 + 2**30)


def test_the_fence_of_other_processors_is_a_call_that_the_kernel_takes() -> None:
    flags = Flags()
    word = ctypes.c_uint32(6)
    code = flags._syscall(flags._number, ctypes.byref(word), FUTEX_WAKE_OP, 0, None, ctypes.byref(word), OP_OR)
    assert code >= 0 and word.value == 6


def test_copies_of_any_shape_equal_slicing(engine: HostEngine) -> None:
    for _ in range(200):
        width, height = random.choice([0, 1, 7, 64, 1000, 4096]), random.choice([1, 2, 5, 33])
        gaps = random.choice([0, 1, 64]), random.choice([0, 3, 128])
        target, source = (np.random.randint(256, size=(height, width + gap), dtype=np.uint8) for gap in gaps)
        expected = target.copy()
        expected[:, :width] = source[:, :width]
        engine.copy(
            random.choice(["main", "copy", "aux"]),
            Block(target.ctypes.data, width + gaps[0], width, height),
            Block(source.ctypes.data, width + gaps[1], width, height),
        )
        engine.synchronize()
        assert np.array_equal(target, expected), f"{width=} {height=} {gaps=}"


def test_a_prepared_copy_reads_the_source_that_it_had_when_it_was_enqueued(engine: HostEngine) -> None:
    flag, target = ctypes.c_uint32(0), np.zeros((2, 3, 8), np.uint8)
    sources = np.random.randint(1, 256, size=(2, 3, 8), dtype=np.uint8)
    first, second = (engine.prepare_copy(_rows(target[index]), _rows(sources[0])) for index in range(2))
    engine.wait("copy", _address(flag), 1)  # both copies run only after the sources were changed
    engine.enqueue("copy", first)
    second.source = sources[1].ctypes.data
    engine.enqueue("copy", second)
    first.source = sources[1].ctypes.data
    engine.signal("main", _address(flag), 1)
    engine.synchronize()
    assert np.array_equal(target, sources)


def _rows(array: np.ndarray) -> Block:
    height, width = array.shape
    return Block(array.ctypes.data, array.strides[0], width, height)


def test_blocks_of_unequal_size_are_a_bug() -> None:
    with pytest.raises(AssertionError):
        HostCopy(Block(0, 8, 8, 2), Block(0, 8, 8, 3))


def test_a_stream_keeps_its_order_under_random_delays() -> None:
    rng = random.Random(torch.seed())
    engine = HostEngine(delay=lambda stream: time.sleep(rng.random() * 1e-3))
    seen: dict[str, list[int]] = {"main": [], "copy": [], "aux": []}
    for number in range(60):
        for stream, numbers in seen.items():
            engine.launch(stream, lambda numbers=numbers, number=number: numbers.append(number))
    engine.synchronize()
    engine.close()
    assert all(numbers == list(range(60)) for numbers in seen.values())


def test_an_event_orders_streams_and_counts_its_records(engine: HostEngine, flag: ctypes.c_uint32) -> None:
    log: list[str] = []
    for number in (1, 2):
        engine.wait("copy", _address(flag), number)
        engine.launch("copy", lambda number=number: log.append(f"copy {number}"))
        engine.record("copy", "done")
        engine.await_event("aux", "done")  # the first record must not pass for the second
        engine.launch("aux", lambda number=number: log.append(f"aux {number}"))
    for number in (1, 2):
        engine.signal("main", _address(flag), number)
        time.sleep(0.05)
    engine.synchronize()
    assert log == ["copy 1", "aux 1", "copy 2", "aux 2"]


def test_the_main_stream_waits_for_an_event_of_a_worker(engine: HostEngine) -> None:
    log: list[str] = []
    engine.launch("copy", lambda: (time.sleep(0.1), log.append("copy"))[0])
    engine.record("copy", "sent")
    engine.await_event("main", "sent")
    assert log == ["copy"]


def test_an_event_that_nobody_recorded_is_a_bug(engine: HostEngine) -> None:
    with pytest.raises(KeyError, match="never"):
        engine.await_event("copy", "never")


def test_a_wait_sleeps_in_the_kernel(engine: HostEngine, flag: ctypes.c_uint32) -> None:
    flags = Flags()
    timer = _later(1.0, lambda: flags.store(_address(flag), 1))
    cpu, wall = time.process_time(), time.monotonic()
    engine.wait("copy", _address(flag), 1)
    engine.wait("main", _address(flag), 1)
    engine.synchronize()
    assert time.monotonic() - wall > 0.9
    assert time.process_time() - cpu < 0.1
    timer.join()


def test_a_signal_wakes_at_once_and_not_at_the_next_recheck(engine: HostEngine, flag: ctypes.c_uint32) -> None:
    delays = []
    for number in range(1, 6):
        sent: list[float] = []
        timer = _later(
            0.05, lambda n=number, s=sent: (s.append(time.monotonic()), engine._flags.store(_address(flag), n))
        )
        engine.wait("main", _address(flag), number)
        timer.join()
        delays.append(time.monotonic() - sent[0])
    assert sorted(delays)[2] < 0.3


def test_functions_run_under_the_modes_and_the_threads_of_the_issuer(engine: HostEngine) -> None:
    counts: list[int] = []
    with torch.inference_mode():
        output = torch.zeros(4)
        for stream in ("aux", "copy"):
            engine.launch(stream, lambda: output.add_(1))  # raises outside inference mode
            engine.launch(stream, lambda: counts.append(torch.get_num_threads()))
            engine.synchronize()
    assert output.tolist() == [2.0] * 4
    assert counts == [1, 1]


def test_an_exception_in_a_worker_reaches_every_later_operation(engine: HostEngine, flag: ctypes.c_uint32) -> None:
    log: list[str] = []
    engine.launch("aux", lambda: 1 / 0)
    engine.launch("aux", lambda: log.append("after the failure"))
    with pytest.raises(ZeroDivisionError):
        engine.synchronize()
    for issue in (
        lambda: engine.launch("copy", lambda: log.append("issued later")),
        lambda: engine.signal("main", _address(flag), 1),
        engine.synchronize,
    ):
        with pytest.raises(ZeroDivisionError):
            issue()
    assert engine.is_idle() and log == [] and flag.value == 0


def test_an_exception_in_a_worker_ends_the_waits_of_all_streams(engine: HostEngine, flag: ctypes.c_uint32) -> None:
    log: list[str] = []
    engine.wait("copy", _address(flag), 1)
    engine.launch("copy", lambda: log.append("passed a wait that was not met"))
    engine.launch("aux", lambda: (time.sleep(0.2), 1 / 0)[0])
    start = time.monotonic()
    with pytest.raises(ZeroDivisionError):
        engine.wait("main", _address(flag), 1)
    with pytest.raises(ZeroDivisionError):
        engine.synchronize()
    assert time.monotonic() - start < LIMIT_S
    assert log == []


def test_an_exception_on_the_main_stream_is_the_callers_alone(engine: HostEngine) -> None:
    with pytest.raises(ZeroDivisionError):
        engine.launch("main", lambda: 1 / 0)
    engine.launch("copy", lambda: None)
    engine.synchronize()
    assert engine.is_idle()


def test_fail_from_another_thread_ends_a_wait_of_the_main_stream(engine: HostEngine, flag: ctypes.c_uint32) -> None:
    timer = _later(0.1, lambda: engine.fail(InterruptedError("peer lost")))
    start = time.monotonic()
    with pytest.raises(InterruptedError, match="peer lost"):
        engine.wait("main", _address(flag), 1)
    assert time.monotonic() - start < LIMIT_S
    engine.fail(ValueError("a second one"))
    with pytest.raises(InterruptedError):
        engine.synchronize()
    timer.join()


def test_release_lets_parked_waits_go(engine: HostEngine) -> None:
    flags = (ctypes.c_uint32 * 3)()
    addresses = [ctypes.addressof(flags) + 4 * index for index in range(3)]
    for address in addresses:
        engine.wait("copy", address, 7)
        engine.wait("aux", address, 7)
    assert not engine.is_idle()
    assert engine.release(addresses, 7 + 2**30)
    assert engine.is_idle()


def test_release_outlasts_a_queued_signal_that_sets_a_flag_back(engine: HostEngine) -> None:
    """One shot of poison is not enough: the regression that the repetition in release() exists for."""
    first, second = ctypes.c_uint32(0), ctypes.c_uint32(0)
    engine.wait("copy", _address(first), 7)
    engine.launch("copy", lambda: time.sleep(0.05))
    engine.signal("copy", _address(second), 6)  # over the poison
    engine.wait("copy", _address(second), 7)
    assert engine.release([_address(first), _address(second)], 7 + 2**30)


def test_one_shot_of_poison_would_not_do(engine: HostEngine) -> None:
    first, second = ctypes.c_uint32(0), ctypes.c_uint32(0)
    engine.wait("copy", _address(first), 7)
    engine.launch("copy", lambda: time.sleep(0.05))
    engine.signal("copy", _address(second), 6)
    engine.wait("copy", _address(second), 7)
    for flag in (first, second):
        engine._flags.store(_address(flag), 7 + 2**30)
    time.sleep(0.5)
    assert not engine.is_idle() and second.value == 6


def test_release_tells_when_it_could_not(engine: HostEngine, flag: ctypes.c_uint32) -> None:
    other = ctypes.c_uint32(0)
    engine.wait("copy", _address(flag), 7)
    start = time.monotonic()
    assert not engine.release([_address(other)], 7 + 2**30, limit_s=0.3)
    assert 0.25 < time.monotonic() - start < LIMIT_S


def test_release_from_another_thread_frees_the_main_stream(engine: HostEngine, flag: ctypes.c_uint32) -> None:
    released: list[bool] = []
    timer = _later(0.1, lambda: released.append(engine.release([_address(flag)], 7 + 2**30)))
    engine.wait("main", _address(flag), 7)
    timer.join()
    assert released == [True]


@pytest.fixture
def like_cuda() -> Iterator[HostEngine]:
    engine = HostEngine(like_cuda=True)
    yield engine
    engine.close()


def test_like_cuda_main_is_only_enqueued_and_keeps_its_order(like_cuda: HostEngine, flag: ctypes.c_uint32) -> None:
    log: list[str] = []
    like_cuda.launch("main", lambda: log.append("before"))
    like_cuda.wait("main", _address(flag), 1)
    like_cuda.launch("main", lambda: log.append("main"))
    like_cuda.record("main", "passed")
    like_cuda.await_event("copy", "passed")
    like_cuda.launch("copy", lambda: log.append("copy"))
    time.sleep(0.1)
    assert log == ["before"] and not like_cuda.is_idle()
    like_cuda._flags.store(_address(flag), 1)
    like_cuda.synchronize()
    assert log == ["before", "main", "copy"]


def test_like_cuda_a_failure_ends_no_wait_and_drops_nothing(like_cuda: HostEngine, flag: ctypes.c_uint32) -> None:
    log: list[str] = []
    like_cuda.wait("main", _address(flag), 7)
    like_cuda.record("main", "passed")
    like_cuda.await_event("copy", "passed")
    like_cuda.launch("copy", lambda: log.append("queued before the failure"))
    like_cuda.fail(InterruptedError("peer lost"))
    with pytest.raises(InterruptedError):
        like_cuda.launch("main", lambda: log.append("issued later"))
    time.sleep(1.5)  # longer than a waiter sleeps before it looks again
    assert log == [] and not like_cuda.is_idle()
    assert like_cuda.release([_address(flag)], 7 + 2**30)
    assert log == ["queued before the failure"]
    with pytest.raises(InterruptedError):
        like_cuda.synchronize()


def test_close_ends_parked_streams_and_their_threads(flag: ctypes.c_uint32) -> None:
    before = threading.active_count()
    engine = HostEngine()
    engine.wait("copy", _address(flag), 1)
    time.sleep(0.05)
    start = time.monotonic()
    engine.close()
    engine.close()
    assert time.monotonic() - start < LIMIT_S
    assert threading.active_count() == before
