"""How far a loop is: on rank 0, one line on stderr with seconds per step and the time left.

On a terminal the line is redrawn in place; in a log each report is a line of its own, at most one a second.
"""

import sys
import time
from contextlib import suppress
from types import TracebackType
from typing import Self, TextIO

LOG_SECONDS = 1.0  # between two lines in a log
FORMAT = "{desc}: {n_fmt}/{total_fmt}, {elapsed} gone, {remaining} left, {rate_inv_fmt}"


class NoProgress:
    """The other ranks' counter: same methods, says nothing."""

    def advance(self) -> None:
        pass

    def close(self) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Progress(NoProgress):
    """Counts `total` steps. `advance` after each of them; the first and the last are always shown."""

    def __init__(self, total: int, *, label: str, stream: TextIO | None = None) -> None:
        self._total, self._label = total, label
        self._stream = stream or sys.stderr
        self._in_place = self._stream.isatty()
        self._done = 0
        self._started = self._shown = time.monotonic()
        self._is_line_open = False

    def advance(self) -> None:
        self._done += 1
        now = time.monotonic()
        is_end = self._done in (1, self._total)
        if self._in_place or is_end or now - self._shown >= LOG_SECONDS:
            self._shown = now
            self._show(now - self._started)

    def close(self) -> None:
        """End the line on a terminal. May be called twice."""
        if self._is_line_open:
            self._write("\n")
            self._is_line_open = False

    def _show(self, elapsed: float) -> None:
        from tqdm import tqdm

        text = tqdm.format_meter(self._done, self._total, elapsed, unit="step", prefix=self._label, bar_format=FORMAT)
        self._write(f"\r{text}\x1b[K" if self._in_place else f"{text}\n")
        self._is_line_open = self._in_place

    def _write(self, text: str) -> None:
        with suppress(OSError):  # nobody reads any more; the video is still wanted
            self._stream.write(text)
            self._stream.flush()


def open_progress(total: int, *, rank: int, label: str) -> NoProgress:
    """The counter of a loop of `total` steps: rank 0's is shown."""
    return Progress(total, label=label) if rank == 0 else NoProgress()
