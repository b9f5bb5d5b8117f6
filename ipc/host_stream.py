"""A stream on the host: a thread that runs operations in the order of their issue, or the issuing thread itself."""

import threading
from collections.abc import Callable
from queue import SimpleQueue

Operation = Callable[[], object]
JOIN_S = 5.0


class InlineStream:
    """Operations run at once, in the thread that issues them; their exceptions are the caller's."""

    def __init__(self) -> None:
        self._busy = False

    def issue(self, operation: Operation) -> None:
        self._busy = True
        try:
            operation()
        finally:
            self._busy = False

    def is_idle(self) -> bool:
        return not self._busy


class WorkerStream:
    """Operations run in a thread of their own. They must not raise.

    `progress` is notified after each of them. `prepare` runs first in the thread.
    """

    def __init__(self, name: str, *, progress: threading.Condition, prepare: Operation) -> None:
        self._progress, self._prepare = progress, prepare
        self._issued = self._finished = 0  # each written by one thread only
        self._queue: SimpleQueue[Operation | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"usp {name} stream", daemon=True)
        self._thread.start()

    def issue(self, operation: Operation) -> None:
        self._issued += 1
        self._queue.put(operation)

    def is_idle(self) -> bool:
        return self._issued == self._finished

    def stop(self) -> None:
        """Let the thread end after what is queued, and wait for it."""
        self._queue.put(None)
        self._thread.join(JOIN_S)

    def _run(self) -> None:
        self._prepare()
        while (operation := self._queue.get()) is not None:
            operation()
            del operation  # it may hold a call's tensors
            with self._progress:
                self._finished += 1
                self._progress.notify_all()
