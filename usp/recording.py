"""What one process left in a profiler's file, whichever profiler it was: activities of the device, and our ranges.

Times are microseconds since the file's origin. Read by usp/trace_read.py, evaluated by usp/trace_calls.py.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from usp.overlap import Span
from usp.ranges import MARKED, Mark

OPERATIONS = tuple(kind.value for kind in MARKED)


@dataclass(frozen=True)
class Launch:
    """The host's call that issued an activity."""

    time: float
    thread: int


@dataclass(frozen=True)
class Activity:
    """A kernel, copy or fill on a stream of the device. `mark` only where the file ties it to a range directly."""

    stream: int
    start: float
    end: float
    nbytes: int = 0
    launch: Launch | None = None
    mark: Mark | None = None

    @property
    def span(self) -> Span:
        return self.start, self.end


@dataclass(frozen=True)
class HostRange:
    """One of our ranges, as the host went through it."""

    mark: Mark
    start: float
    end: float
    thread: int


@dataclass(frozen=True)
class Recording:
    """One process. `origin_ns` is when its clock was 0, since the epoch; 0 if the file does not tell."""

    source: str
    origin_ns: int
    activities: tuple[Activity, ...]
    ranges: tuple[HostRange, ...]

    def of(self, *kinds: str) -> list[HostRange]:
        return sorted((one for one in self.ranges if one.mark.kind in kinds), key=lambda one: one.start)

    def mark(self, activity: Activity) -> Mark | None:
        """Which operation of the exchange an activity belongs to."""
        if activity.launch is None:
            return activity.mark
        found = self._operations.around(activity.launch)
        return found.mark if found else activity.mark

    @cached_property
    def _operations(self) -> "RangeIndex":
        return RangeIndex(self.of(*OPERATIONS))


class RangeIndex:
    """Finds the range around a launch, among ranges that do not overlap within a thread."""

    def __init__(self, ranges: Iterable[HostRange]) -> None:
        self._by_thread: defaultdict[int, list[HostRange]] = defaultdict(list)
        for one in sorted(ranges, key=lambda one: one.start):
            self._by_thread[one.thread].append(one)
        self._starts = {thread: [one.start for one in own] for thread, own in self._by_thread.items()}

    def around(self, launch: Launch) -> HostRange | None:
        place = bisect_right(self._starts.get(launch.thread, []), launch.time) - 1
        found = self._by_thread[launch.thread][place] if place >= 0 else None
        return found if found and launch.time <= found.end else None
