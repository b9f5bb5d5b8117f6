"""The parts of the day as commands with limits, and running one so that nothing it does can take the day with it.

torchrun starts every rank in a session of its own, so whatever a part has started is found by descent and ended with
it.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts.gpu_day.notes import Note, read_notes

ROOT = Path(__file__).resolve().parents[2]
TERM_S = 5.0
TAIL_LINES = 12


@dataclass(frozen=True)
class Part:
    """`share` is the part's limit as a share of the day's minutes."""

    name: str
    share: float
    command: tuple[str, ...]


@dataclass(frozen=True)
class Outcome:
    name: str
    status: str  # ok, failed or out of time
    seconds: float
    reason: str
    notes: list[Note]


def all_parts(ranks: int, meshes: Sequence[str], attention: str, out: Path) -> list[Part]:
    """In the order in which they run: what all else rests on first, what takes longest last."""
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))
    here = "scripts/gpu_day"
    choice, folder = ("--attention", attention), str(out.resolve())
    numbers = tuple(str(one) for one in sorted({2, 3, ranks}))  # the fault tests have three ranks
    return [
        Part("machine", 0.05, (sys.executable, f"{here}/machine.py")),
        Part("litmus", 0.08, (*launcher, f"{here}/litmus.py")),
        Part("exchange", 0.09, (*launcher, f"{here}/exchange.py")),
        Part("attention", 0.15, (*launcher, f"{here}/attention.py", *choice, "--out", folder)),
        Part("block", 0.09, (*launcher, f"{here}/block.py", *choice, "--out", folder)),
        Part("steps", 0.33, (sys.executable, f"{here}/steps.py", *choice, "--meshes", *meshes)),
        Part("tests", 0.21, (sys.executable, f"{here}/suites.py", "--ranks", *numbers)),
    ]


def run_part(part: Part, *, limit_s: float, out: Path, flags: Sequence[str]) -> Outcome:
    """Never raises for what the part does. Its output is OUT/<name>.log, its notes OUT/<name>.jsonl."""
    notes_file, log = out / f"{part.name}.jsonl", out / f"{part.name}.log"
    notes_file.unlink(missing_ok=True)
    env = {"CUDA_DEVICE_MAX_CONNECTIONS": "32", "OMP_NUM_THREADS": "1", **os.environ}
    started = time.monotonic()
    with log.open("w") as output:
        command = [*part.command, "--notes", str(notes_file.resolve()), *flags]
        process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=output, stderr=subprocess.STDOUT)
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end(process)
    seconds = round(time.monotonic() - started, 1)
    if code is None:
        return Outcome(part.name, "out of time", seconds, f"more than {limit_s:.0f} s", read_notes(notes_file))
    reason = "" if code == 0 else f"exit code {code}: {_last_lines(log)}"
    return Outcome(part.name, "failed" if code else "ok", seconds, reason, read_notes(notes_file))


def end(process: subprocess.Popen[bytes]) -> None:
    """The process and all that it started, asked first, then killed."""
    family = [process.pid, *descendants(process.pid)]
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(TERM_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    for pid in family[1:]:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def descendants(pid: int) -> Iterator[int]:
    """Of a process that is alive."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except (FileNotFoundError, ProcessLookupError):
        return
    for child in map(int, children):
        yield child
        yield from descendants(child)


def _last_lines(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return " | ".join(lines[-TAIL_LINES:])[-1500:]
