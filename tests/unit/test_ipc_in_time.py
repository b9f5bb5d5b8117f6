"""Calls with a limit on silence: results, errors, and who is still out."""

import threading
import time
from itertools import count

import pytest

from usp.ipc.in_time import InTime


def test_a_call_gives_its_result_or_its_error() -> None:
    in_time = InTime()
    assert in_time.call(lambda: 7, limit_s=5.0) == 7
    with pytest.raises(ZeroDivisionError):
        in_time.call(lambda: 1 // 0, limit_s=5.0)
    assert in_time.are_back()


def test_a_call_that_does_not_return_is_left_and_known_to_be_out() -> None:
    in_time, end = InTime(), threading.Event()
    start = time.monotonic()
    with pytest.raises(TimeoutError, match=r"no answer within 0\.2 s"):
        in_time.call(lambda: end.wait(30), limit_s=0.2)
    assert 0.2 <= time.monotonic() - start < 5.0
    assert not in_time.are_back() and not in_time.are_back(0.1)
    assert in_time.call(lambda: 1, limit_s=5.0) == 1  # others are not kept
    assert not in_time.are_back()
    end.set()
    assert in_time.are_back(5.0)


def test_progress_is_waited_for_however_long_it_takes() -> None:
    steps = count()
    assert InTime().call(lambda: time.sleep(0.6) or "done", limit_s=0.2, progress=lambda: next(steps)) == "done"
