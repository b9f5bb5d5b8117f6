"""What a run is doing, for failure messages, and how long each part took, for the report."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from usp.launch.guard import Guard


class Phases:
    """Seconds by phase, in order of first use. The guard's `phase` always names the current one."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a block under `name`; after a failure the guard still names it."""
        self.detail(name)
        start = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def rounded(self) -> dict[str, float]:
        return {name: round(seconds, 3) for name, seconds in self.seconds.items()}

    def detail(self, text: str) -> None:
        """Say more precisely what is going on inside a phase, such as the step."""
        self._guard.phase = text
