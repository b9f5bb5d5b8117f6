"""Calls that may never return, such as one into a driver that another thread holds."""

import threading
from collections.abc import Callable
from typing import TypeVar

from usp.ipc.engine import Patience

LOOK_S = 0.05

T = TypeVar("T")


def in_time(function: Callable[[], T], *, limit_s: float, progress: Callable[[], object] = lambda: None) -> T:
    """What the function returns or raises, in a thread of its own; TimeoutError after `limit_s` in which `progress()`
    stayed the same. The thread is then left behind, and does not keep the process from ending."""
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(function())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="usp in time", daemon=True)
    patience = Patience(limit_s)
    thread.start()
    while thread.is_alive():
        thread.join(LOOK_S)
        if thread.is_alive() and patience.is_over(progress()):
            raise TimeoutError(f"no answer within {limit_s:g} s")
    if errors:
        raise errors[0]
    return results[0]
