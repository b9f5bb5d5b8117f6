"""Nsight Systems' sqlite export: kernels, copies and fills of the device, tied to ranges through the calls' numbers.

All processes of a session are in one file. Tables without content are not in it. Times are in nanoseconds.
"""

import sqlite3
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from usp.errors import UserError
from usp.ranges import parse
from usp.recording import Activity, HostRange, Launch, Recording

KERNELS, COPIES, FILLS = (f"CUPTI_ACTIVITY_KIND_{kind}" for kind in ("KERNEL", "MEMCPY", "MEMSET"))
API = "CUPTI_ACTIVITY_KIND_RUNTIME"  # driver calls are in it, too
RANGES, STRINGS, SESSION = "NVTX_EVENTS", "StringIds", "TARGET_INFO_SESSION_START_TIME"
PUSH_POP = 59  # eventType
THREAD_BITS = 24  # the low bits of a globalTid; the others are the process
PID_MASK = 0xFFFFFF  # above it are numbers of the machine

Launches = dict[tuple[int, int], Launch]  # by process and correlation


def read_sqlite(path: Path) -> list[Recording]:
    with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as db:
        tables = {name for (name,) in db.execute("SELECT name FROM sqlite_master")}
        for needed, what in ((KERNELS, "kernels"), (RANGES, "ranges"), (API, "calls of the CUDA API")):
            if needed not in tables:
                raise UserError(f"{path}: no table {needed}, so no {what}; profile with nsys --trace=cuda,nvtx")
        ranges, activities = _ranges(db), _activities(db, tables)
        started = db.execute(f"SELECT utcEpochNs FROM {SESSION}").fetchone() if SESSION in tables else None
    origin_ns = started[0] if started else 0
    return [
        Recording(f"{path}, process {pid & PID_MASK}", origin_ns, tuple(activities[pid]), tuple(own))
        for pid, own in sorted(ranges.items())
    ]


def _ranges(db: sqlite3.Connection) -> dict[int, list[HostRange]]:
    """By process."""
    found: defaultdict[int, list[HostRange]] = defaultdict(list)
    text = "text"
    if "textId" in {column[1] for column in db.execute(f"PRAGMA table_info({RANGES})")}:
        text = f"COALESCE(text, (SELECT value FROM {STRINGS} WHERE id = textId))"
    query = f'SELECT start, "end", globalTid, {text} FROM {RANGES} WHERE eventType = {PUSH_POP} AND "end" IS NOT NULL'
    for start, end, thread, name in db.execute(query):
        mark = parse(name or "")
        if mark is not None:
            found[thread >> THREAD_BITS].append(HostRange(mark, start / 1e3, end / 1e3, thread))
    return found


def _activities(db: sqlite3.Connection, tables: set[str]) -> dict[int, list[Activity]]:
    """By process."""
    found: defaultdict[int, list[Activity]] = defaultdict(list)
    launches = _launches(db)
    for table, size in ((KERNELS, "0"), (COPIES, "bytes"), (FILLS, "0")):
        for pid, activity in _rows(db, table, size, launches) if table in tables else ():
            found[pid].append(activity)
    return found


def _rows(db: sqlite3.Connection, table: str, size: str, launches: Launches) -> Iterator[tuple[int, Activity]]:
    query = f'SELECT start, "end", streamId, globalPid, correlationId, {size} FROM {table}'
    for start, end, stream, process, correlation, nbytes in db.execute(query):
        pid = process >> THREAD_BITS
        yield pid, Activity(stream, start / 1e3, end / 1e3, nbytes, launches.get((pid, correlation)))


def _launches(db: sqlite3.Connection) -> Launches:
    query = f"SELECT start, globalTid, correlationId FROM {API} WHERE globalTid IS NOT NULL"
    return {
        (thread >> THREAD_BITS, correlation): Launch(start / 1e3, thread)
        for start, thread, correlation in db.execute(query)
    }
