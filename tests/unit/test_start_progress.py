"""The progress line: seconds per step and the time left, on a terminal and in a log, on rank 0 alone."""

import io
import re

import pytest

from usp.launch import progress as progress_module
from usp.launch.progress import Progress, open_progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(progress_module, "time", made)
    return made


def _run(stream, clock, steps, seconds):
    with Progress(steps, label="sampling", stream=stream) as progress:
        for _ in range(steps):
            clock.now += seconds
            progress.advance()
    return stream.getvalue()


@pytest.mark.parametrize("steps", [1, 2, 40])
def test_every_log_line_holds_seconds_per_step_and_the_time_left(steps, clock):
    lines = _run(io.StringIO(), clock, steps, 12.5).splitlines()
    assert len(lines) == steps
    for done, line in enumerate(lines, start=1):
        assert re.search(rf"sampling: {done}/{steps}, .* left, +12\.50s/step", line), line
    assert "00:00 left" in lines[-1]
    if steps == 40:
        assert "08:07 left" in lines[0]


def test_fast_steps_are_still_seconds_per_step_and_do_not_flood_a_log(clock):
    lines = _run(io.StringIO(), clock, 50, 0.1).splitlines()
    assert len(lines) <= 7
    assert all("0.10s/step" in line for line in lines)
    assert "1/50" in lines[0] and "50/50" in lines[-1]


def test_a_terminal_shows_one_line_redrawn(clock):
    text = _run(Terminal(), clock, 3, 2.0)
    assert text.count("\r") == 3 and text.count("\n") == 1 and text.endswith("\n")
    assert "2.00s/step" in text


def test_other_ranks_show_nothing(capsys):
    for rank in (0, 1):
        with open_progress(1, rank=rank, label="sampling") as progress:
            progress.advance()
        assert ("s/step" in capsys.readouterr().err) == (rank == 0)
