"""Reads a profile, whichever tool wrote it: Nsight Systems' sqlite export, or the Chrome trace of torch's profiler."""

import gzip
import json
import sqlite3
import zlib
from pathlib import Path

from usp.errors import UserError
from usp.recording import Recording
from usp.trace_chrome import read_chrome
from usp.trace_sqlite import read_sqlite

SQLITE_MAGIC, GZIP_MAGIC = b"SQLite format 3\0", b"\x1f\x8b"
FAULTS = (OSError, EOFError, zlib.error, sqlite3.Error, ValueError, KeyError, TypeError, AttributeError, OverflowError)


def read(path: Path) -> list[Recording]:
    """The processes in a file that have ranges of ours. Raises UserError."""
    try:
        recordings = _read(path)
    except UserError:
        raise
    except FAULTS as error:
        what = f"{type(error).__name__} {error}" if isinstance(error, KeyError | TypeError) else str(error)
        raise UserError(
            f"{path}: {what}; give a sqlite export of nsys, or a Chrome trace of torch's profiler, .json or .json.gz"
        ) from error
    marked = [one for one in recordings if one.of("layer")]
    if not marked:
        raise UserError(
            f"{path}: no range is called 'usp layer ...'; record with USP_NVTX=1 under nsys, or give the exchange "
            "usp.ranges.record_functions() under torch's profiler"
        )
    return marked


def _read(path: Path) -> list[Recording]:
    with path.open("rb") as file:
        head = file.read(len(SQLITE_MAGIC))
    if head == SQLITE_MAGIC:
        return read_sqlite(path)
    content = path.read_bytes()
    if head.startswith(GZIP_MAGIC):
        content = gzip.decompress(content)
    return [read_chrome(json.loads(content), source=str(path))]
