"""Finds the attention calls in recordings: what each launched, where it begins and ends, which copies reach it.

A copy is what ran on a copy stream, whatever its kind; everything else on the device is work. A call's window opens
when what was launched before it is done, and closes when what was launched after it begins. The device waits where no
work runs though the next was launched; a wait with no copy from this rank, or from a recorded peer to it, is a stall.
"""

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from usp.errors import UserError
from usp.overlap import Span, Spans, union
from usp.recorded_call import Call, Key, Marked, with_inner
from usp.recording import Activity, HostRange, Launch, RangeIndex, Recording

COPYING = ("send", "return")


def calls_of(recordings: Sequence[Recording], *, copy_streams: Sequence[int] = ()) -> list[Call]:
    """Of all ranks, in order of rank and time, on one clock. Raises UserError."""
    origin = _common_origin(recordings)
    calls = [call for one in recordings for call in _Process(one, copy_streams, one.origin_ns, origin).calls()]
    found: dict[tuple[int, Key], Call] = {}
    for call in calls:
        if found.setdefault((call.rank, call.key), call) is not call:
            raise UserError(f"rank {call.rank} is in several recordings; give one per rank")
    return [_with_arrivals(call, found) for call in sorted(calls, key=lambda call: (call.rank, call.window))]


def _with_arrivals(call: Call, found: dict[tuple[int, Key], Call]) -> Call:
    peers = [found[rank, call.key] for rank in call.ranks if rank != call.rank and (rank, call.key) in found]
    for peer in peers:
        if peer.ranks != call.ranks:
            raise UserError(
                f"rank {call.rank} exchanges with {call.ranks} and rank {peer.rank} with {peer.ranks}; "
                "give the recordings of one job"
            )
    return replace(call, arrivals=tuple(copy for peer in peers for copy in peer.arrivals_at(call.rank)))


def _common_origin(recordings: Sequence[Recording]) -> int:
    """The earliest one; 0 unless every file has one."""
    origins = [one.origin_ns for one in recordings]
    return min(origins) if all(origins) else 0


class _Process:
    """One recording, its times moved to the common clock."""

    def __init__(self, recording: Recording, copy_streams: Sequence[int], own_origin: int, origin: int) -> None:
        self.recording, self.shift = recording, (own_origin - origin) / 1e3 if origin else 0.0
        self.layers = recording.of("layer")
        self.rank, self.ranks = self._who()
        self.marks = {id(one): recording.mark(one) for one in recording.activities}
        self.copy_streams = frozenset(copy_streams) or self._copy_streams()
        self.work = [one for one in recording.activities if one.stream not in self.copy_streams]
        self.launched = sorted(((one.launch.time, one) for one in self.work if one.launch), key=lambda pair: pair[0])
        self.launch_times = [time for time, _ in self.launched]
        self.latest_ends = list(accumulate((one.end for _, one in self.launched), max))
        self.busy = union(one.span for one in self.work)
        self.waits = self._waits()

    def calls(self) -> list[Call]:
        spans = [self._opening(layer) for layer in self.layers]
        members = self._members(spans)
        steps, counts = RangeIndex(self.recording.of("step")), Counter[tuple[int, int]]()
        calls = []
        for place, layer in enumerate(self.layers):
            step = steps.around(Launch(layer.start, layer.thread))
            name = (step.mark.number if step else -1, layer.mark.number)
            counts[name] += 1
            calls.append(self._call((*name, counts[name]), layer, spans[place], members[place]))
        return calls

    def _call(self, key: Key, layer: HostRange, opening: float, members: list[Activity]) -> Call:
        window = min([opening, *(one.start for one in members)]), self._closing(layer, members, opening)
        copies, others = ([one for one in members if self._works(one) is works] for works in (False, True))
        attends = tuple(self._marked(one) for one in others if self._does(one, ("attend",)))
        work, waits = (self._all_moved(self._near(spans, window)) for spans in (self.busy, self.waits))
        own = with_inner([self._marked(one) for one in copies])
        return Call(self.rank, self.ranks, key, self._moved(window), work, waits, attends, own)

    def _marked(self, activity: Activity) -> Marked:
        return Marked(self._moved(activity.span), activity.nbytes, self.marks[id(activity)])

    def _who(self) -> tuple[int, tuple[int, ...]]:
        found = {(one.mark.rank, one.mark.ranks) for one in self.layers}
        if len(found) != 1:
            ranks = ", ".join(str(rank) for rank, _ in sorted(found))
            raise UserError(
                f"{self.recording.source} holds ranks {ranks} in one process; give one Chrome trace per rank"
            )
        (who,) = found
        if who[0] not in who[1]:
            raise UserError(f"{self.recording.source}: a 'usp layer' range does not name its rank; record it anew")
        return who

    def _copy_streams(self) -> frozenset[int]:
        found = frozenset(one.stream for one in self.recording.activities if self._does(one, COPYING))
        if not found and self.recording.of(*COPYING):
            streams = sorted({one.stream for one in self.recording.activities})
            raise UserError(
                f"{self.recording.source}: nothing on the device is tied to its send and return ranges; "
                f"name the copy stream with --copy-stream, one of {', '.join(map(str, streams))}"
            )
        return found

    def _does(self, activity: Activity, kinds: tuple[str, ...]) -> bool:
        mark = self.marks[id(activity)]
        return mark is not None and mark.kind in kinds

    def _works(self, activity: Activity) -> bool:
        return activity.stream not in self.copy_streams

    def _opening(self, layer: HostRange) -> float:
        """When what was launched earlier is done, or the host comes to the call if that is later."""
        earlier = bisect_left(self.launch_times, layer.start)
        return max(layer.start, self.latest_ends[earlier - 1]) if earlier else layer.start

    def _closing(self, layer: HostRange, members: list[Activity], opening: float) -> float:
        """When what was launched next begins; at the end of a file, when the last of the call is done."""
        later = bisect_left(self.launch_times, layer.end)
        if later < len(self.launched):
            return max(self.launched[later][1].start, opening)
        return max((one.end for one in members), default=opening)

    def _members(self, openings: list[float]) -> list[list[Activity]]:
        """The activities of each call: by launch, and where that is unknown, by when the calls open."""
        index = RangeIndex(self.layers)
        place = {id(layer): number for number, layer in enumerate(self.layers)}
        members: list[list[Activity]] = [[] for _ in self.layers]
        for one in self.recording.activities:
            if one.launch is not None:
                layer = index.around(one.launch)
                number = place[id(layer)] if layer else -1
            else:
                number = bisect_right(openings, one.start) - 1
            if number >= 0:
                members[number].append(one)
        return members

    def _waits(self) -> Spans:
        """When no work ran though the next one was launched, so that the device waited, not the host."""
        launches: defaultdict[float, float] = defaultdict(lambda: float("-inf"))
        for time, one in self.launched:
            launches[one.start] = max(launches[one.start], time)
        gaps = ((end, start) for (_, end), (start, _) in pairwise(self.busy))
        return union((max(end, launches[start]), start) for end, start in gaps)

    def _near(self, spans: Spans, window: Span) -> Spans:
        first = max(0, bisect_left(spans, window[0], key=lambda span: span[1]))
        last = bisect_left(spans, window[1], key=lambda span: span[0])
        return spans[first:last]

    def _all_moved(self, spans: Spans) -> Spans:
        return tuple(self._moved(span) for span in spans)

    def _moved(self, span: Span) -> Span:
        return span[0] + self.shift, span[1] + self.shift
