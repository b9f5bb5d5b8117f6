"""Writes what a profiler would have recorded, in the format of either, from one description. Times in microseconds."""

import gzip
import json
import sqlite3
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HOST = 0x0123 << 48  # the part of a globalTid that stands for the machine
TABLES = (
    "StringIds (id INTEGER PRIMARY KEY, value TEXT NOT NULL)",
    "NVTX_EVENTS (start INTEGER, end INTEGER, eventType INTEGER, text TEXT, textId INTEGER, globalTid INTEGER)",
    "CUPTI_ACTIVITY_KIND_RUNTIME (start INTEGER, end INTEGER, globalTid INTEGER, correlationId INTEGER)",
    "CUPTI_ACTIVITY_KIND_KERNEL"
    " (start INTEGER, end INTEGER, streamId INTEGER, correlationId INTEGER, globalPid INTEGER)",
    "CUPTI_ACTIVITY_KIND_MEMCPY"
    " (start INTEGER, end INTEGER, streamId INTEGER, correlationId INTEGER, globalPid INTEGER, bytes INTEGER)",
    "TARGET_INFO_SESSION_START_TIME (utcEpochNs INTEGER)",
)


@dataclass(frozen=True)
class Issued:
    """Something on the device: a kernel, or a copy if it has bytes. `within` is the range in which it was issued."""

    stream: int
    start: float
    end: float
    launched: float
    within: str = ""
    nbytes: int = 0


@dataclass
class Process:
    """`ranges` are (name, start, end); each activity with `within` gets a range of its own around its launch."""

    pid: int
    issued: list[Issued] = field(default_factory=list)
    ranges: list[tuple[str, float, float]] = field(default_factory=list)

    def all_ranges(self) -> list[tuple[str, float, float]]:
        own = [(one.within, one.launched - 0.25, one.launched + 0.25) for one in self.issued if one.within]
        return self.ranges + own


def write_sqlite(path: Path, *processes: Process, origin_ns: int = 0) -> Path:
    with closing(sqlite3.connect(path)) as db, db:
        for table in TABLES:
            db.execute(f"CREATE TABLE {table}")
        if origin_ns:
            db.execute("INSERT INTO TARGET_INFO_SESSION_START_TIME VALUES (?)", (origin_ns,))
        for process in processes:
            _insert(db, process)
    return path


def _insert(db: sqlite3.Connection, process: Process) -> None:
    pid, thread = HOST | process.pid << 24, HOST | process.pid << 24 | process.pid
    for number, (name, start, end) in enumerate(process.all_ranges()):
        text, string = (name, None) if number % 2 else (None, process.pid * 1000 + number)  # both ways occur
        if string:
            db.execute("INSERT INTO StringIds VALUES (?, ?)", (string, name))
        db.execute("INSERT INTO NVTX_EVENTS VALUES (?, ?, 59, ?, ?, ?)", (_ns(start), _ns(end), text, string, thread))
    for correlation, one in enumerate(process.issued):
        call = (_ns(one.launched), _ns(one.launched) + 2, thread, correlation)
        db.execute("INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?, ?, ?, ?)", call)
        row = (_ns(one.start), _ns(one.end), one.stream, correlation, pid)
        if one.nbytes:
            db.execute("INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY VALUES (?, ?, ?, ?, ?, ?)", (*row, one.nbytes))
        else:
            db.execute("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?, ?, ?, ?, ?)", row)


def write_chrome(path: Path, process: Process, *, origin_ns: int = 0, driver_copies: bool = False) -> Path:
    """`driver_copies`: the profiler saw no call for copies, only the range that they belong to, on the device."""
    events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": process.pid, "args": {"name": "python"}}]
    host = {"ph": "X", "pid": process.pid, "tid": process.pid}
    for name, start, end in process.all_ranges():
        events.append({**host, "cat": "user_annotation", "name": name, "ts": start, "dur": end - start, "args": {}})
    for correlation, one in enumerate(process.issued, 1):
        events += _chrome_events(one, host, correlation, hidden=driver_copies and one.nbytes > 0)
    content = json.dumps({"schemaVersion": 1, "baseTimeNanoseconds": origin_ns, "traceEvents": events}).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def _chrome_events(one: Issued, host: dict[str, Any], correlation: int, *, hidden: bool) -> list[dict[str, Any]]:
    lane = {"ph": "X", "pid": 0, "tid": one.stream, "ts": one.start, "dur": one.end - one.start}
    args = {"device": 0, "stream": one.stream, "correlation": correlation}
    if one.nbytes:
        events = [{**lane, "cat": "gpu_memcpy", "name": "Memcpy DtoD", "args": {**args, "bytes": one.nbytes}}]
    else:
        events = [{**lane, "cat": "kernel", "name": "kernel", "args": args}]
    if hidden:
        return [*events, {**lane, "cat": "gpu_user_annotation", "name": one.within, "args": {}}]
    call = {"cat": "cuda_runtime", "name": "call", "ts": one.launched, "dur": 0.002, "args": args}
    return [*events, {**host, **call}]


def _ns(us: float) -> int:
    return round(us * 1e3)
