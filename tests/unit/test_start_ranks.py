"""Real launchers, real ranks, and a stand-in for the heavy part: how ranks meet, fail and are ended."""

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
MPIRUN = [str(BIN / "mpirun"), "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", "2"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]

# What generate.py does, with a `run` that meets, and then does what the environment's PLAN says on one rank.
PROGRAM = textwrap.dedent("""
    import os, signal, sys, time, types
    from pathlib import Path
    from usp.errors import UserError
    from usp.launch.main import main

    def run(request, world, guard):
        from datetime import timedelta
        import torch, torch.distributed as dist
        from usp.launch.world import open_store, start_process_group, stop_process_group

        guard.phase = "loading"
        Path(f"rank{world.rank}.pid").write_text(str(os.getpid()))
        guard.store = open_store(world)
        start_process_group(world, guard.store, backend="gloo", timeout=timedelta(seconds=150))
        total = torch.tensor([world.rank + 1])
        dist.all_reduce(total)
        guard.phase = "sampling"
        act, _, rank = os.environ.get("PLAN", "").partition("@")
        if rank == str(world.rank):
            if act == "bug": raise ValueError("a bug")
            if act == "refuse": raise UserError("3 is not 4")
            if act == "kill": os.kill(os.getpid(), signal.SIGKILL)
            if act == "wait":
                with guard.temporary(Path("part.tmp")):
                    Path("part.tmp").write_text("half")
                    time.sleep(50)
        if act:
            dist.all_reduce(total)
        print(f"rank {world.rank} of {world.size} under {world.launcher}, sum {int(total)}\\n", end="", flush=True)
        stop_process_group()

    sys.modules["usp.launch.run"] = types.SimpleNamespace(run=run)
    sys.exit(main())
""")


@pytest.fixture
def start(tmp_path):
    """Start a command in `tmp_path`; at the end no rank that it started may be left."""
    (tmp_path / "program.py").write_text(PROGRAM)
    started = []

    def start(*command: str, plan: str = "") -> subprocess.Popen[str]:
        environ = {**os.environ, "PYTHONPATH": str(ROOT), "PLAN": plan}
        environ.pop("OMP_NUM_THREADS", None)
        folder = tmp_path / str(len(started))
        folder.mkdir()
        process = subprocess.Popen(
            command, cwd=folder, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        started.append((process, folder))
        return process

    yield start
    for process, folder in started:
        process.kill()
        process.communicate(timeout=60)
        assert _ranks_are_gone(folder, seconds=0), f"ranks of {process.args} live on"


def _ranks_are_gone(folder: Path, *, seconds: float) -> bool:
    pids = [int(file.read_text() or 0) for file in folder.glob("rank*.pid")]
    deadline = time.monotonic() + seconds
    while any(_is_alive(pid) for pid in pids):
        if time.monotonic() >= deadline:
            for pid in filter(_is_alive, pids):
                os.kill(pid, signal.SIGKILL)
            return False
        time.sleep(0.05)
    return True


def _is_alive(pid: int) -> bool:
    try:
        return b"program.py" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False


def _await(condition, seconds: float = 150.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _command(*launcher: str) -> list[str]:
    return [*launcher, "../program.py", "--prompt", "boat"]


def test_jobs_of_every_launcher_meet_side_by_side_while_the_usual_port_is_taken(start):
    """D21."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 29500))
        holder.listen()
        jobs = {
            "torchrun": start(*_command(*TORCHRUN)),
            "mpirun": start(*_command(*MPIRUN, sys.executable)),
            "--nproc": start(sys.executable, "../program.py", "--nproc", "2"),
            "single": start(*_command(sys.executable)),
        }
        said = {name: job.communicate(timeout=150) for name, job in jobs.items()}
    for name, job in jobs.items():
        launcher, size = {"--nproc": "torchrun"}.get(name, name), 1 if name == "single" else 2
        expected = [f"rank {rank} of {size} under {launcher}, sum {1 if size == 1 else 3}" for rank in range(size)]
        assert job.returncode == 0, said[name]
        assert sorted(filter(None, said[name][0].splitlines())) == expected, said[name]
    assert "OMP_NUM_THREADS" not in said["--nproc"][1]
    assert said["--nproc"][1].count("no --prompt") == 1  # by rank 0, not by the process that starts the ranks


@pytest.mark.parametrize(
    ("launcher", "plan", "message"),
    [
        (TORCHRUN, "bug@1", "ValueError: a bug"),
        (
            TORCHRUN,
            "kill@0",
            "rank 1: ended by the launcher, which was told to stop or has lost a rank, while sampling",
        ),
        ([*MPIRUN, sys.executable], "refuse@0", "error: 3 is not 4"),
        ([*MPIRUN, sys.executable], "bug@1", "ValueError: a bug"),
    ],
)
def test_a_fault_of_one_rank_is_told_once_and_ends_all(start, launcher, plan, message):
    """D06, D20, D22."""
    job = start(*_command(*launcher), plan=plan)
    said = "\n".join(job.communicate(timeout=150))
    assert job.returncode != 0
    assert said.splitlines().count(message) == 1, said
    assert said.count("failed while") == ("ValueError" in message), said
    assert said.count("ended by the launcher") == ("ended by" in message), said
    assert "lost contact" not in said and "under " not in said


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_signal_to_the_launcher_ends_every_rank_and_leaves_no_file(start, tmp_path, number):
    """D22: one rank waits in a collective, the other is writing a file."""
    job = start(*_command(*TORCHRUN), plan="wait@0")
    folder = tmp_path / "0"
    _await((folder / "part.tmp").exists)
    job.send_signal(number)
    assert _ranks_are_gone(folder, seconds=60)
    job.communicate(timeout=100)
    assert job.returncode != 0
    assert not (folder / "part.tmp").exists()
