"""The Chrome trace of torch's profiler: one process, its activities tied to `record_function` ranges.

Kernels are tied through the call that launched them. Copies issued through the driver have no such entry; the profiler
then shows on the device's own stream which range they belong to.
"""

from bisect import bisect_right
from collections import defaultdict
from typing import Any

from usp.ranges import Mark, parse
from usp.recording import OPERATIONS, Activity, HostRange, Launch, Recording

ACTIVITIES = ("kernel", "gpu_memcpy", "gpu_memset")
CALLS = ("cuda_runtime", "cuda_driver")
HOST_RANGE, DEVICE_RANGE = "user_annotation", "gpu_user_annotation"
TOLERANCE_US = 0.01  # spans are rounded to nanoseconds

Event = dict[str, Any]
Lane = tuple[int, int]  # device, stream
DeviceRanges = dict[Lane, list[tuple[float, float, Mark]]]


def read_chrome(content: Any, *, source: str) -> Recording:
    """From parsed JSON: {"traceEvents": [...]}, or the list alone."""
    events = content["traceEvents"] if isinstance(content, dict) else content
    by_kind: defaultdict[str, list[Event]] = defaultdict(list)
    for event in events:
        if event.get("ph") == "X":
            by_kind[event.get("cat", "")].append(event)
    launches = {
        event["args"]["correlation"]: Launch(float(event["ts"]), _thread(event))
        for event in (one for kind in CALLS for one in by_kind[kind])
        if "correlation" in event.get("args", {})
    }
    device = _device_ranges(by_kind[DEVICE_RANGE])
    activities = tuple(_activity(one, launches, device) for kind in ACTIVITIES for one in by_kind[kind])
    origin = int(content.get("baseTimeNanoseconds", 0)) if isinstance(content, dict) else 0
    return Recording(source, origin, activities, _host_ranges(by_kind[HOST_RANGE]))


def _host_ranges(events: list[Event]) -> tuple[HostRange, ...]:
    marked = ((parse(event["name"]), event) for event in events)
    return tuple(HostRange(mark, *_span(event), _thread(event)) for mark, event in marked if mark is not None)


def _device_ranges(events: list[Event]) -> DeviceRanges:
    found: DeviceRanges = defaultdict(list)
    for event in sorted(events, key=lambda one: float(one["ts"])):
        mark = parse(event["name"])
        if mark is not None and mark.kind in OPERATIONS:
            found[event["pid"], event["tid"]].append((*_span(event), mark))
    return found


def _activity(event: Event, launches: dict[int, Launch], device: DeviceRanges) -> Activity:
    args = event["args"]
    start, end = _span(event)
    launch = launches.get(args.get("correlation"))
    mark = None if launch else _around(device.get((event["pid"], event["tid"]), []), start, end)
    return Activity(int(args["stream"]), start, end, int(args.get("bytes", 0)), launch, mark)


def _around(ranges: list[tuple[float, float, Mark]], start: float, end: float) -> Mark | None:
    place = bisect_right(ranges, start + TOLERANCE_US, key=lambda one: one[0]) - 1
    if place < 0 or ranges[place][1] < end - TOLERANCE_US:
        return None
    return ranges[place][2]


def _span(event: Event) -> tuple[float, float]:
    start = float(event["ts"])
    return start, start + float(event["dur"])


def _thread(event: Event) -> int:
    return int(event["tid"])
