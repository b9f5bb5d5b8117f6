"""A rank or the launcher is ended from outside, in every phase: nobody lives on, no half file stays, a rerun works."""

import signal
from itertools import product

import pytest

from tests.multi_gpu.programs import GENERATE, GONE_S, Finished, Program, Programs, await_, left_over, torchrun
from tests.multi_gpu.test_faults import FAULTY, FLAGS, LAUNCHERS, VIDEO
from usp.launch.video import VideoInfo, probe

PHASES = ("load", "step", "decode", "save")
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGKILL)
REACH_S = 40.0  # for ranks to start and come to the phase


@pytest.fixture
def programs(tmp_path):
    with Programs(tmp_path) as programs:
        yield programs


def start(programs: Programs, launcher: str, fault: str, *, ranks: int = 2) -> Program:
    return programs.start(*LAUNCHERS[launcher](ranks), FAULTY, *FLAGS, FAULT=fault, REACHED="..")


def assert_ended(program: Program, phase: str) -> Finished:
    """Everybody is gone in time, the launcher says so by its code, and no file is half-written."""
    assert program.gone(seconds=GONE_S)
    run = program.wait()
    assert run.code != 0
    assert left_over(run.folder) == (["video.sheet.png"] if phase == "save" else [])
    return run


def assert_rerun_works(programs: Programs, run: Finished) -> None:
    """At once, in the same folder."""
    again = programs.run(*torchrun(2), GENERATE, *FLAGS, at=run.folder)
    assert probe(again.folder / VIDEO) == VideoInfo(9, 80, 48, 16)
    assert left_over(again.folder) == [VIDEO, "video.sheet.png"]


def signalled(programs: Programs, launcher: str, phase: str, number: signal.Signals, *, ranks: int = 2) -> Finished:
    """Rank 0 stands still in the phase, the others in the collective that comes next; then the launcher is told."""
    program = start(programs, launcher, f"wait@{phase}@0", ranks=ranks)
    assert await_((program.folder.parent / f"{phase}.0").exists, limit_s=REACH_S), program.text()
    program.process.send_signal(number)
    return assert_ended(program, phase)


def killed(programs: Programs, launcher: str, phase: str, rank: int, *, ranks: int = 2) -> Finished:
    program = start(programs, launcher, f"kill@{phase}@{rank}", ranks=ranks)
    assert await_((program.folder.parent / f"{phase}.{rank}").exists, limit_s=REACH_S), program.text()
    return assert_ended(program, phase)


@pytest.mark.parametrize(
    ("launcher", "phase", "number"),
    [
        ("torchrun", "load", signal.SIGTERM),
        ("mpirun", "step", signal.SIGKILL),
        ("torchrun", "decode", signal.SIGINT),
        ("torchrun", "save", signal.SIGKILL),
    ],
)
def test_a_signal_to_the_launcher_ends_every_rank(programs, launcher, phase, number):
    """D22."""
    run = signalled(programs, launcher, phase, number)
    assert "failed while" not in run.said


@pytest.mark.parametrize(("phase", "rank"), [*zip(PHASES, (0, 1, 1, 0), strict=True)])
def test_a_rank_that_is_killed_takes_the_job_with_it(programs, phase, rank):
    """D22."""
    run = killed(programs, "torchrun", phase, rank)
    if phase == "save":
        assert_rerun_works(programs, run)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("launcher", "phase", "number"), [*product(LAUNCHERS, PHASES, SIGNALS)])
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_signal_in_every_phase_ends_every_rank(programs, launcher, phase, number, ranks):
    """D22: the full product."""
    assert_rerun_works(programs, signalled(programs, launcher, phase, number, ranks=ranks))


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("launcher", "phase", "rank"), [*product(LAUNCHERS, PHASES, (0, 1, 3))])
def test_a_kill_of_any_rank_in_any_phase_takes_the_job_with_it(programs, launcher, phase, rank):
    """D22: the full product."""
    assert_rerun_works(programs, killed(programs, launcher, phase, rank, ranks=4))


@pytest.mark.long
@pytest.mark.parametrize(("phase", "rank"), [*product(PHASES, (0, 1))])
def test_a_rank_that_leaves_without_a_word_takes_the_job_with_it(programs, phase, rank):
    """D22."""
    program = start(programs, "torchrun", f"exit@{phase}@{rank}")
    assert_ended(program, phase)
