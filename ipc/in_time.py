"""Calls that may never return, such as one into a driver that another thread holds."""

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from usp.ipc.engine import Patience

LOOK_S = 0.05

T = TypeVar("T")


class InTime:
    """Makes such calls, each in a thread of its own, and knows which of them are still out."""

    def __init__(self) -> None:
        self._out: list[threading.Thread] = []  # all of them; there are a few in the life of a process

    def call(self, function: Callable[[], T], *, limit_s: float, progress: Callable[[], object] = lambda: None) -> T:
        """What the function returns or raises; TimeoutError after `limit_s` in which `progress()` stayed the same.

        The thread is then left behind. It does not keep the process from ending.
        """
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
        self._out.append(thread)
        while thread.is_alive():
            thread.join(LOOK_S)
            if thread.is_alive() and patience.is_over(progress()):
                raise TimeoutError(f"no answer within {limit_s:g} s")
        if errors:
            raise errors[0]
        return results[0]

    def are_back(self, limit_s: float = 0.0) -> bool:
        """Whether no call is out any more: what it uses may go."""
        deadline = time.monotonic() + limit_s
        for thread in self._out:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._out)
