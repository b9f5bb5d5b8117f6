"""A rank that is told to stop, or loses its launcher, is gone in seconds, whatever its main thread is inside."""

import os
import select
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

# The main thread sits in a C call that no Python signal handler interrupts, as a collective does.
PROGRAM = textwrap.dedent("""
    import ctypes, os, sys, time
    from pathlib import Path
    from usp.launch.guard import Guard
    from usp.launch.world import World

    rank, launcher, folder = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    libc = ctypes.CDLL(None)

    def sleep_in_c():
        deadline = time.monotonic() + 40
        while time.monotonic() < deadline:
            libc.sleep(40)

    with Guard(World(rank, 4, rank, 4, launcher), parent=os.getppid()) as guard:
        guard.phase = "sampling"
        temp = folder / "part.tmp"
        with guard.temporary(temp):
            with guard.held():
                temp.write_bytes(b"half")
            print("ready", os.getpid(), flush=True)
            sleep_in_c()
""")

SAVE = textwrap.dedent("""
    import ctypes, os, sys, time
    from pathlib import Path
    from usp.launch import files
    from usp.launch.guard import Guard
    from usp.launch.world import SINGLE

    def stuck(descriptor):
        print("ready", os.getpid(), flush=True)
        time.sleep(40)

    files.os.fsync = stuck
    with Guard(SINGLE, parent=os.getppid()) as guard:
        files.atomic_write(Path(sys.argv[1]) / "a.mp4", b"x" * 100_000, guard=guard)
""")

PARENT = "import subprocess, sys; subprocess.run([sys.executable, '-c', *sys.argv[1:]])"


def _start(program: str, *arguments: object, **options: object) -> tuple[subprocess.Popen, int]:
    """The process and the id of the one that printed `ready`, which is its child if `program` is PARENT."""
    command = [sys.executable, "-c", program, *map(str, arguments)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)
    readable, _, _ = select.select([process.stdout], [], [], 60)
    assert readable, process.kill()
    word, pid = process.stdout.readline().split()
    assert word == "ready"
    return process, int(pid)


def _is_gone_within(pid: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        state = _state(pid)
        if state in ("Z", None):
            return True
        time.sleep(0.02)
    os.kill(pid, signal.SIGKILL)
    return False


def _state(pid: int) -> str | None:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return None


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_a_process_that_is_stuck_in_c(number, tmp_path):
    """D22."""
    process, pid = _start(PROGRAM, 0, "single", tmp_path)
    assert (tmp_path / "part.tmp").exists()
    process.send_signal(number)
    assert _is_gone_within(pid, 20)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert said == f"interrupted by {number.name}, while sampling\n"
    assert os.listdir(tmp_path) == []


def test_other_ranks_say_nothing(tmp_path):
    process, pid = _start(PROGRAM, 1, "torchrun", tmp_path)
    process.send_signal(signal.SIGINT)
    assert _is_gone_within(pid, 20)
    assert process.communicate(timeout=60)[1] == ""
    assert process.returncode == 130


@pytest.mark.parametrize("rank", [0, 3])
def test_a_rank_ends_when_its_launcher_was_killed(rank, tmp_path):
    """D22: no worker lives on."""
    parent, pid = _start(PARENT, PROGRAM, rank, "torchrun", tmp_path)
    parent.kill()
    assert _is_gone_within(pid, 20)
    assert parent.communicate(timeout=60)[1] == ("the launcher is gone, while sampling\n" if rank == 0 else "")
    assert os.listdir(tmp_path) == []


def test_a_single_process_outlives_the_shell_that_started_it(tmp_path):
    parent, pid = _start(PARENT, PROGRAM, 0, "single", tmp_path)
    parent.kill()
    parent.wait(timeout=60)
    time.sleep(1.0)
    assert _state(pid) not in ("Z", None)
    os.kill(pid, signal.SIGTERM)
    assert _is_gone_within(pid, 20)
    parent.communicate(timeout=60)


def test_an_ignored_signal_stays_ignored(tmp_path):
    process, pid = _start(
        PROGRAM, 0, "single", tmp_path, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)
    )
    process.send_signal(signal.SIGHUP)
    time.sleep(0.6)
    assert _state(pid) not in ("Z", None)
    process.send_signal(signal.SIGTERM)
    assert _is_gone_within(pid, 20)
    process.communicate(timeout=60)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_write_that_is_cut_short_leaves_nothing(number, tmp_path):
    """D22: not even for SIGKILL, since the data sits in a file without a name until it is whole."""
    process, pid = _start(SAVE, tmp_path)
    process.send_signal(number)
    assert _is_gone_within(pid, 20)
    process.communicate(timeout=60)
    assert os.listdir(tmp_path) == []


def test_after_the_guard_signals_are_pythons_again():
    program = textwrap.dedent("""
        import os, signal
        from usp.launch.guard import Guard
        from usp.launch.world import SINGLE
        with Guard(SINGLE, parent=os.getppid()) as guard:
            pass
        guard.close()
        try:
            os.kill(os.getpid(), signal.SIGINT)
            import time; time.sleep(2)
        except KeyboardInterrupt:
            print("KeyboardInterrupt")
    """)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=170, check=True)
    assert done.stdout == "KeyboardInterrupt\n", done.stderr
