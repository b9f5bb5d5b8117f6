"""Programs under real launchers: each in a folder of its own, awaited with a limit, and proved to leave nothing behind.

Every process of a program, whatever session or parent it ends up with, inherits a mark in its environment; so whoever
is left can be found in /proc. Temporary files go to a folder that must be empty at the end.
"""

import errno
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Self
from uuid import uuid4

ROOT = Path(__file__).parents[2]
GENERATE = str(ROOT / "generate.py")
LIMIT_S = 170.0  # for a whole run of several ranks
GONE_S = 20.0  # for the ranks of a run that was ended
MARK = "USP_TEST_MARK"
SHM = Path("/dev/shm")
# What torch leaves however a job ends (empty log and cache folders), and mpirun if it is killed.
NOT_OURS = ("torchelastic_", "torchinductor_", "ompi.")
NOTHING: Mapping[str, str] = MappingProxyType({})


def torchrun(nproc: int, *options: str) -> list[str]:
    """torch's launcher on this host, up to the program's name."""
    return [sys.executable, "-m", "torch.distributed.run", *(options or ("--standalone",)), f"--nproc-per-node={nproc}"]


def torchrun_agent(nodes: int, nproc: int, *, port: int, job: str) -> list[str]:
    """One of several agents, as on several hosts."""
    endpoint = ("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", f"--rdzv-id={job}")
    return torchrun(nproc, f"--nnodes={nodes}", *endpoint, "--local-addr=127.0.0.1")


def mpirun(nproc: int) -> list[str]:
    """mpirun of the same environment as Python, up to the program's name."""
    launcher = str(Path(sys.executable).with_name("mpirun"))
    return [launcher, "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", str(nproc), sys.executable]


def alone() -> list[str]:
    return [sys.executable]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def held_port(port: int) -> Iterator[None]:
    """Somebody listens there: this process, unless another one does already."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            holder.bind(("127.0.0.1", port))
            holder.listen()
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
        yield


def await_(condition: Callable[[], object], *, limit_s: float) -> bool:
    """Whether the condition came true in time."""
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.05)
    return True


@dataclass(frozen=True)
class Finished:
    """How a program ended. `said` is what it wrote to both streams."""

    code: int
    stdout: str
    stderr: str
    seconds: float
    folder: Path

    @property
    def said(self) -> str:
        return self.stdout + self.stderr

    def lines(self, *words: str) -> list[str]:
        """The lines that hold all of the words."""
        return [line for line in self.said.splitlines() if all(word in line for word in words)]


class Program:
    """A running command. Its current folder is `folder`, and temporary files go below `base`."""

    def __init__(
        self, command: list[str], *, base: Path, folder: Path, files: Mapping[str, str], environ: dict[str, str]
    ) -> None:
        self.folder, self._temp, self.mark = folder, base / "tmp", uuid4().hex
        self.folder.mkdir(parents=True, exist_ok=True)
        base.mkdir(exist_ok=True)
        self._temp.mkdir()
        for name, text in files.items():
            (self.folder / name).write_text(text)
        self._said = [base / "stdout", base / "stderr"]
        self._started = time.monotonic()
        inherited = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        with self._said[0].open("wb") as out, self._said[1].open("wb") as err:
            self.process = subprocess.Popen(
                command,
                cwd=self.folder,
                env={**inherited, "PYTHONPATH": str(ROOT), "TMPDIR": str(self._temp), MARK: self.mark, **environ},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
            )

    def wait(self, limit_s: float = LIMIT_S) -> Finished:
        """The end of the launcher, and of everybody it started; fails the test if one of them outlives the limit."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(max(0.1, self._started + limit_s - time.monotonic()))
        seconds = time.monotonic() - self._started
        late = self.process.poll() is None
        assert self.gone(seconds=0.0 if late else GONE_S), f"ranks live on after {seconds:.0f} s:\n{self.text()}"
        stdout, stderr = (file.read_text(errors="replace") for file in self._said)
        return Finished(self.process.wait(), stdout, stderr, seconds, self.folder)

    def gone(self, *, seconds: float) -> bool:
        """Whether every process of the program ends within `seconds`; whoever does not is killed."""
        if await_(lambda: self.process.poll() is not None and not self.pids(), limit_s=seconds):
            return True
        for pid in self.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(10)
        return False

    def pids(self) -> list[int]:
        """Every living process of the program."""
        mark = f"{MARK}={self.mark}".encode()
        return [pid for pid in _all_pids() if mark in _read(Path(f"/proc/{pid}/environ")).split(b"\0")]

    def litter(self) -> list[str]:
        """Temporary files outside the current folder that are still there."""
        return [name for name in left_over(self._temp) if not name.startswith(NOT_OURS)]

    def text(self) -> str:
        """What it has written so far."""
        return "\n".join(file.read_text(errors="replace") for file in self._said)


class Programs:
    """All programs of one test. Leaving the block proves that no process, shared memory or temporary file is left."""

    def __init__(self, base: Path) -> None:
        self._base = base
        self._started: list[Program] = []

    def __enter__(self) -> Self:
        self._shm_before = _shm_files()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        alive = [program for program in self._started if not program.gone(seconds=0.0)]
        leaked = orphans(_shm_files() - self._shm_before)
        litter = [name for program in self._started for name in program.litter()]
        if error is None:
            assert not alive, f"still running at the end of the test: {[program.process.args for program in alive]}"
            assert not leaked, f"left in {SHM}: {leaked}"
            assert not litter, f"temporary files left: {litter}"

    def start(
        self, *command: str, files: Mapping[str, str] = NOTHING, at: Path | None = None, **environ: str
    ) -> Program:
        """Start a command with these variables in the folder `at`, or a new one, where `files` are put first."""
        base = self._base / str(len(self._started))
        program = Program([*command], base=base, folder=at or base / "cwd", files=files, environ=environ)
        self._started.append(program)
        return program

    def run(self, *command: str, files: Mapping[str, str] = NOTHING, at: Path | None = None) -> Finished:
        """Start a command and wait for its end; it must succeed."""
        finished = self.start(*command, files=files, at=at).wait()
        assert finished.code == 0, finished.said
        return finished


def orphans(files: set[Path]) -> list[Path]:
    """Those that no living process has mapped or open: a job of somebody else may have its own there."""
    used = b"".join(_read(Path(f"/proc/{pid}/maps")) for pid in _all_pids())
    return [file for file in files if file.exists() and os.fsencode(file) not in used]


def left_over(folder: Path) -> list[str]:
    """Every file and folder below, by its path from there."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def _all_pids() -> list[int]:
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError:  # the process has gone
        return b""


def _shm_files() -> set[Path]:
    return set(SHM.iterdir()) if SHM.is_dir() else set()
