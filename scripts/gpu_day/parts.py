"""The parts of the day as commands with limits, and running one so that nothing it does can take the day with it.

torchrun starts every rank in a session of its own, and a rank may outlive it; so all that a part starts inherits a mark
in its environment, and whoever bears the mark is ended with the part.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from scripts.gpu_day.notes import Note, read_notes

ROOT = Path(__file__).resolve().parents[2]
MARK, SECONDS = "USP_GPU_DAY_PART", "USP_GPU_DAY_SECONDS"
TERM_S, GONE_S = 5.0, 15.0
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
    here, choice, folder = "scripts/gpu_day", ("--attention", attention), ("--out", str(out.resolve()))

    def together(count: int, program: str, *flags: str) -> tuple[str, ...]:
        launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count))
        return (*launcher, f"{here}/{program}.py", *flags)

    pairs = [
        Part("attention, 2 ranks", 0.10, together(2, "attention", *choice, *folder)),
        Part("block, 2 ranks", 0.07, together(2, "block", *choice, *folder)),
    ]
    return [
        Part("machine", 0.06, (sys.executable, f"{here}/machine.py")),
        Part("litmus", 0.08, together(ranks, "litmus")),
        Part("exchange", 0.09, together(ranks, "exchange")),
        Part("attention", 0.15, together(ranks, "attention", *choice, *folder)),
        Part("block", 0.09, together(ranks, "block", *choice, *folder)),
        *(pairs if ranks > 2 else []),
        Part("steps", 0.33, (sys.executable, f"{here}/steps.py", *choice, "--meshes", *meshes)),
        Part("tests", 0.20, (sys.executable, f"{here}/suites.py", "--ranks", *map(str, sorted({2, ranks})))),
    ]


def run_part(part: Part, *, limit_s: float, out: Path, flags: Sequence[str]) -> Outcome:
    """Never raises for what the part does. Its output is OUT/<name>.log, its notes OUT/<name>.jsonl."""
    stem = part.name.replace(", ", "_").replace(" ", "_")
    notes_file, log = out / f"{stem}.jsonl", out / f"{stem}.log"
    notes_file.unlink(missing_ok=True)
    command = [*part.command, "--notes", str(notes_file.resolve()), *flags]
    code, seconds = run_marked(command, limit_s=limit_s, log=log)
    if code is None:
        return Outcome(part.name, "out of time", seconds, f"more than {limit_s:.0f} s", read_notes(notes_file))
    reason = "" if code == 0 else f"exit code {code}: {_last_lines(log)}"
    return Outcome(part.name, "failed" if code else "ok", seconds, reason, read_notes(notes_file))


def run_marked(command: Sequence[str], *, limit_s: float, log: Path, **environ: str) -> tuple[int | None, float]:
    """(exit code, None if it was out of time; seconds). Nothing that it started is left."""
    mark, started = uuid4().hex, time.monotonic()
    env = {"CUDA_DEVICE_MAX_CONNECTIONS": "32", "OMP_NUM_THREADS": "1", **os.environ, **environ}
    env |= {MARK: mark, SECONDS: f"{limit_s:.1f}"}
    with log.open("w") as output:
        process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=output, stderr=subprocess.STDOUT)
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end(process, mark)
    return code, round(time.monotonic() - started, 1)


def end(process: subprocess.Popen[bytes], mark: str) -> None:
    """The process and whoever bears the mark: asked first, then killed, and awaited."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(TERM_S)
    deadline = time.monotonic() + GONE_S
    while (left := marked(mark)) and time.monotonic() < deadline:
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.poll()  # reaps it
        time.sleep(0.05)


def marked(mark: str) -> list[int]:
    """Processes that inherited the mark and still run; one that has ended has no environment."""
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            if f"{MARK}={mark}".encode() in Path(f"/proc/{entry}/environ").read_bytes().split(b"\0"):
                found.append(int(entry))
    return found


def _last_lines(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return " | ".join(lines[-TAIL_LINES:])[-1500:]
