"""What several ranks say to a request that cannot work: one message with its numbers, soon, and nothing is written."""

import json
from pathlib import Path

import pytest

from tests.multi_gpu.batch import small
from tests.multi_gpu.programs import GENERATE, Finished, Programs, alone, left_over, mpirun, torchrun
from tests.tiny import tiny_checkpoint, tiny_copy

FAULTY = str(Path(__file__).with_name("faulty_generate.py"))
SOON_S = 10.0

# (heads, cfg_size, ulysses_size) on 4 ranks, and what the message names.
ILLEGAL_MESHES = [
    *[(heads, 4, 1, ("cfg_size is 4", "use 1", "or 2")) for heads in (4, 5, 6)],
    *[(heads, 2, 4, ("cfg_size 2 x ulysses_size 4 = 8 ranks", "4 were started")) for heads in (4, 5, 6)],
    *[(heads, 1, 3, ("cfg_size 1 x ulysses_size 3 = 3 ranks", "4 were started")) for heads in (4, 5, 6)],
    (3, 1, 4, ("3 heads do not fit 4 ulysses ranks", "at most 3")),
]
ILLEGAL_FRAMES = {-1: "1", 0: "1", 2: "1 or 5", 4: "1 or 5", 48: "45 or 49", 80: "77 or 81"}
ILLEGAL_SIDES = {8: "16", 24: "16 or 32", 40: "32 or 48", 50: "48 or 64", 0: "16", -16: "16"}
OTHER = object()  # stands for a checkpoint in other files
LAUNCHERS = {"torchrun": torchrun, "mpirun": mpirun}


@pytest.fixture
def programs(tmp_path):
    with Programs(tmp_path) as programs:
        yield programs


def assert_refused(run: Finished, *words: str) -> None:
    """One message, from one rank, with these words; the launcher may add its own summary."""
    assert run.code != 0
    (message,) = run.lines("error: ")
    assert all(word in message for word in words), message
    assert "failed while" not in run.said and "ended by" not in run.said, run.said
    assert [path for path in run.folder.rglob("*") if not path.is_dir()] == []


@pytest.mark.parametrize(("heads", "cfg", "ulysses", "words"), ILLEGAL_MESHES)
def test_an_illegal_mesh_is_refused_before_ranks_are_started(programs, heads, cfg, ulysses, words):
    """D06."""
    flags = small(tiny_checkpoint(heads=heads), cfg_size=cfg, ulysses_size=ulysses, nproc=4)
    run = programs.start(*alone(), GENERATE, *flags).wait(SOON_S)
    assert_refused(run, *words)
    assert "torch" not in run.said


@pytest.mark.parametrize(("launcher", "mesh"), [("torchrun", ILLEGAL_MESHES[4]), ("mpirun", ILLEGAL_MESHES[-1])])
def test_ranks_refuse_an_illegal_mesh_together(programs, launcher, mesh):
    """D06."""
    heads, cfg, ulysses, words = mesh
    flags = small(tiny_checkpoint(heads=heads), cfg_size=cfg, ulysses_size=ulysses)
    run = programs.start(*LAUNCHERS[launcher](4), GENERATE, *flags).wait()
    assert_refused(run, *words)
    assert run.seconds < SOON_S


@pytest.mark.parametrize(("frames", "nearest"), ILLEGAL_FRAMES.items())
def test_an_illegal_frame_count_is_refused_before_ranks_are_started(programs, frames, nearest):
    """D09."""
    run = programs.start(*alone(), GENERATE, *small(frame_num=frames, nproc=2)).wait(SOON_S)
    assert_refused(run, str(frames), nearest)


@pytest.mark.parametrize("flag", ["{}*48", "80*{}"])
@pytest.mark.parametrize(("side", "nearest"), ILLEGAL_SIDES.items())
def test_an_illegal_side_is_refused_before_ranks_are_started(programs, flag, side, nearest):
    """D09."""
    run = programs.start(*alone(), GENERATE, *small(size=flag.format(side), nproc=2)).wait(SOON_S)
    assert_refused(run, str(side), nearest)


@pytest.mark.parametrize(
    ("launcher", "flag", "value", "nearest"),
    [("torchrun", "frame_num", 80, "77 or 81"), ("mpirun", "size", "80*50", "48 or 64")],
)
def test_ranks_refuse_an_illegal_clip_together(programs, launcher, flag, value, nearest):
    """D09."""
    run = programs.start(*LAUNCHERS[launcher](2), GENERATE, *small(**{flag: value})).wait()
    assert_refused(run, nearest)
    assert run.seconds < SOON_S


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sample_steps": 3}, ("steps is 4 on rank 0 but 3 on rank 1",)),
        ({"prompt": "a blue ball"}, ("prompt is ", "on rank 0 but ", "on rank 1")),
        ({"checkpoint": OTHER, "base_seed": 7}, ("checkpoint is ", "base_seed is 0 on rank 0 but 7 on rank 1")),
    ],
)
def test_ranks_that_were_asked_for_different_things_stop_and_say_which(programs, changes, words):
    changes = {name: tiny_checkpoint(shards=2) if value is OTHER else value for name, value in changes.items()}
    own = {"ARGS_OF_RANK_0": json.dumps(small()), "ARGS_OF_RANK_1": json.dumps(small(**changes))}
    assert_refused(programs.start(*torchrun(2), FAULTY, **own).wait(), *words)


def test_ranks_of_which_one_reads_a_prompt_file_stop_and_say_so(programs):
    own = {"ARGS_OF_RANK_0": '["--prompt_file=../prompts.txt"]', "ARGS_OF_RANK_1": '["--prompt=one"]'}
    program = [*torchrun(2), FAULTY, *small(prompt=None)]
    run = programs.start(*program, files={"../prompts.txt": "one\n"}, **own).wait()
    assert_refused(run, "prompt is in a file on rank 0 but ", "on rank 1")


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_no_rank_waits_when_rank_zero_cannot_write(programs, launcher):
    """D11: only rank 0 writes, so only it can know."""
    run = programs.start(*LAUNCHERS[launcher](2), GENERATE, *small(save_file="/proc/new/video.mp4")).wait()
    assert_refused(run, "cannot write into the folder /proc/new", "name another one")
    assert run.seconds < 2 * SOON_S


def test_a_missing_output_folder_is_made(programs):
    """D11."""
    run = programs.run(*alone(), GENERATE, *small(save_file="a/b/video.mp4", sample_steps=1))
    assert left_over(run.folder) == ["a", "a/b", "a/b/video.mp4", "a/b/video.sheet.png"]


@pytest.mark.parametrize("damage", ["no checkpoint", "missing shard", "truncated shard"])
def test_ranks_refuse_a_damaged_checkpoint_together(programs, tmp_path, damage):
    """D15."""
    checkpoint = tiny_copy(tmp_path)
    shard = sorted((checkpoint / "transformer_2").glob("*.safetensors"))[1]
    if damage == "missing shard":
        shard.unlink()
    elif damage == "truncated shard":
        shard.write_bytes(shard.read_bytes()[:-4])
    else:
        checkpoint = tmp_path / "nowhere"
    run = programs.start(*torchrun(2), GENERATE, *small(checkpoint)).wait()
    assert_refused(run, "nowhere" if damage == "no checkpoint" else shard.name)
    assert run.seconds < SOON_S


def test_there_is_no_lora_option(programs):
    """D17: not supported, so the option does not exist."""
    for name in ("lora", "lora_path", "lora_scale", "lora-dir"):
        assert_refused(programs.start(*alone(), GENERATE, f"--{name}=x").wait(SOON_S), "unknown flag", "lora")
    assert "lora" not in programs.run(*alone(), GENERATE, "--help").said.lower()
