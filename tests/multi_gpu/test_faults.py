"""A rank fails by itself: one message, every rank out, no video under the final name, and nothing sampled is lost."""

import re
import shlex
import sys
from pathlib import Path

import pytest

from tests.multi_gpu.batch import small
from tests.multi_gpu.programs import GENERATE, Finished, Program, Programs, alone, left_over, mpirun, torchrun
from usp.launch.video import VideoInfo, probe

FAULTY = str(Path(__file__).with_name("faulty_generate.py"))
VIDEO = "video.mp4"
FLAGS = small(save_file=VIDEO)
RESCUED = "video.latents.safetensors"
HALF_BROKEN = """
import os, sys
sys.path.remove(os.path.dirname(__file__))
del sys.modules["av"]
import av
av.open = None
"""
LAUNCHERS = {"torchrun": torchrun, "mpirun": mpirun}


@pytest.fixture
def programs(tmp_path):
    with Programs(tmp_path) as programs:
        yield programs


def start(programs: Programs, launcher: list[str], fault: str) -> Program:
    return programs.start(*launcher, FAULTY, *FLAGS, FAULT=fault, REACHED="..")


def assert_failed(run: Finished, *, message: str, head: str) -> None:
    """Nonzero, and the first real fault is told once, with its rank and what that was doing."""
    assert run.code != 0
    assert len(run.lines(message)) == 1, run.said
    assert len(run.lines("failed while")) == len(run.lines(head)) == 1, run.said
    assert "lost contact" not in run.said and "ended by" not in run.said, run.said
    assert not (run.folder / VIDEO).exists()


@pytest.mark.parametrize(
    ("fault", "head"),
    [
        ("raise@save@0", "rank 0 of 4 failed while decoding and saving:"),
        ("raise@step@3", "rank 3 of 4 failed while sampling, step 2 of 4, "),
    ],
)
def test_of_four_ranks_the_one_that_fails_says_so_and_all_end(programs, fault, head):
    """D20."""
    run = start(programs, torchrun(4), fault).wait()
    assert_failed(run, message="RuntimeError: a fault of the test", head=head)
    assert left_over(run.folder) == ([RESCUED, "video.sheet.png"] if "save" in fault else [])


@pytest.mark.parametrize(("launcher", "fault"), [("torchrun", "raise@load@1"), ("mpirun", "raise@encode@0")])
def test_a_fault_before_sampling_ends_the_ranks_that_wait(programs, launcher, fault):
    """D20, D22."""
    run = start(programs, LAUNCHERS[launcher](2), fault).wait()
    assert_failed(run, message="RuntimeError: a fault of the test", head=f"rank {fault[-1]} of 2 failed while ")
    assert left_over(run.folder) == []


def test_a_rank_that_stands_still_is_named_after_the_stall_timeout(programs):
    """Not one that is slow to load, since nothing waits for it in an exchange then."""
    flags = [*FLAGS, "--cfg_size=1", "--stall_timeout=2"]
    run = programs.start(*torchrun(2), FAULTY, *flags, FAULT="wait@step@1", REACHED="..").wait()
    assert run.code != 0 and run.seconds < 30
    (told,) = run.lines("rank 0 waits for call", "rank 1 has not begun it")
    assert "StallError" in told and "step 1, layer 0" in told, run.said
    assert left_over(run.folder) == []


def test_a_users_mistake_found_late_is_its_message_alone(programs):
    run = start(programs, torchrun(2), "refuse@load@1").wait()
    assert run.code != 0
    assert len(run.lines("rank 1: error: 3 is not 4")) == len(run.lines("error: ")) == 1
    assert "failed while" not in run.said


@pytest.mark.parametrize(
    ("av", "told"),
    [
        ("raise ImportError('libavformat.so.62 cannot be opened')", "libavformat.so.62 cannot be opened"),
        (HALF_BROKEN, "cannot make a video here"),
    ],
    ids=["missing", "broken"],
)
def test_an_encoder_that_does_not_work_is_told_before_weights_load(programs, tmp_path, av, told):
    folder = tmp_path / "instead"
    folder.mkdir()
    (folder / "av.py").write_text(av)
    run = programs.start(*torchrun(2), GENERATE, *FLAGS, PYTHONPATH=str(folder)).wait()
    assert run.code != 0
    assert len(run.lines("error: PyAV ", told)) == 1 and not run.lines("failed while"), run.said
    assert not run.lines("sampling") and not run.lines("latents"), run.said
    assert left_over(run.folder) == []


def test_a_decoder_that_fails_keeps_the_latents_and_tells_how_to_go_on(programs):
    """D18."""
    run = start(programs, torchrun(2), "raise@decode@0").wait()
    assert_failed(
        run, message="RuntimeError: a fault of the test", head="rank 0 of 2 failed while decoding and saving:"
    )
    assert left_over(run.folder) == [RESCUED]
    resumed = programs.run(*resume_command(run), at=run.folder)
    assert probe(resumed.folder / VIDEO) == VideoInfo(9, 80, 48, 16)


def test_a_decoder_that_runs_out_of_memory_keeps_the_latents(programs):
    """D18."""
    run = start(programs, alone(), "oom@decode@0").wait()
    head = "rank 0 of 1 failed while decoding and saving:"
    assert_failed(run, message="OutOfMemoryError: CUDA out of memory", head=head)
    assert left_over(run.folder) == [RESCUED]
    assert RESCUED in resume_command(run)


def test_a_full_disk_is_told_once_also_when_the_latents_do_not_fit(programs):
    """D18."""
    run = start(programs, alone(), "full@every_save@0").wait()
    assert run.code != 0
    assert len(run.lines("error: cannot write video.mp4: No space left on device")) == len(run.lines("error: ")) == 1
    assert run.lines(f"The sampled latents are lost: cannot write {RESCUED}: No space left on device")
    assert left_over(run.folder) == ["video.sheet.png"]


def resume_command(run: Finished) -> list[str]:
    """As a user would paste it, but for the interpreter, which has no name on the path here."""
    (command,) = re.findall(r"To decode them later: (.*)", run.stderr)
    interpreter, *arguments = shlex.split(command)
    assert interpreter == "python"
    return [sys.executable, *arguments]


def test_pixels_that_are_no_numbers_are_an_error_and_not_black(programs):
    """D23."""
    run = start(programs, alone(), "nan@decode@0").wait()
    assert run.code != 0
    (message,) = run.lines("error: ")
    assert "frame 0 of 1 holds 11520 of 11520 values that are NaN or infinite" in message
    assert left_over(run.folder) == [RESCUED]
    assert resume_command(run)
