"""Names, folders and whole files: what is refused before a run, and what a crash may leave behind."""

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.unit.stand_ins import request, world
from usp.errors import UserError
from usp.launch import files
from usp.launch.files import atomic_write, check_outputs, default_name, output_paths, slug
from usp.launch.guard import Guard
from usp.models.wan.clip import Clip

PROMPTS = {
    "300 ascii": "a paper boat " * 23 + "z",
    "100 chinese": "雨" * 100,
    "80 emoji": "🐈" * 80,
    "mixed": ("é" * 39 + "雨🐈") * 9,
    "slash": "a/b",
    "dots": "..",
    "hidden": ".profile",
    "newline": "a\nb\r\n",
    "nul": "a\0b",
    "empty": "",
    "lone surrogates": "a\ud800b\udfff",
    "dashes": "--- -",
    "shell": "$(rm -rf ~) `x` 'y' \"z\" *?|<>&;\\",
}


@pytest.fixture
def guard():
    return Guard(world(), parent=os.getppid())


@pytest.mark.parametrize("name", PROMPTS)
def test_a_default_name_is_safe_and_bounded(name, tmp_path, monkeypatch, guard):
    """D11: 255 bytes, not characters, with every suffix; never a separator; and the disk takes it."""
    monkeypatch.chdir(tmp_path)
    made = request("--prompt", "x", "--size", "1280*720")
    paths = output_paths(made, prompt=PROMPTS[name], seed=2**63 - 1, index=12345, num_prompts=20000)
    for path in (paths.video, paths.sheet, paths.rescue):
        assert path.parent == Path("outputs")
        assert len(os.fsencode(path.name)) < 200
        assert re.fullmatch(r"[^\W_][\w.-]*", path.name), path.name
        path.parent.mkdir(exist_ok=True)
        atomic_write(path, b"whole", guard=guard)
    assert sorted(os.listdir("outputs")) == sorted(p.name for p in (paths.video, paths.sheet, paths.rescue))


def test_a_default_name_holds_task_size_seed_prompt_and_index():
    clip = Clip(frames=9, height=48, width=80)
    name = default_name(task="t2v-A14B", clip=clip, seed=7, prompt="Two cats, boxing!", index=3)
    assert name == "t2v-A14B_80x48x9_7_Two-cats-boxing_3"
    assert name == default_name(task="t2v-A14B", clip=clip, seed=7, prompt="Two cats, boxing!", index=3)


@pytest.mark.parametrize("max_bytes", range(1, 14))
def test_a_slug_is_cut_between_characters(max_bytes):
    """D11."""
    cut = slug("é雨語 é", max_bytes=max_bytes)
    assert cut == "untitled" or ("é雨語-é".startswith(cut) and len(cut.encode()) <= max_bytes)


def test_an_empty_slug_has_a_word():
    assert {slug(text) for text in ("", "..", "🐈", "\ud800")} == {"untitled"}


def test_save_file_keeps_its_name_for_one_prompt_and_gets_an_index_for_several():
    made = request("--save_file", "d/a.b.mp4", "--save_latents", "l.safetensors")
    one = output_paths(made, prompt="p", seed=0, index=0, num_prompts=1)
    assert (str(one.video), str(one.sheet), str(one.latents)) == ("d/a.b.mp4", "d/a.b.sheet.png", "l.safetensors")
    assert str(one.rescue) == "d/a.b.latents.safetensors"
    third = output_paths(made, prompt="p", seed=0, index=2, num_prompts=3)
    assert (str(third.video), str(third.latents)) == ("d/a.b_2.mp4", "l_2.safetensors")


def test_a_png_has_no_contact_sheet():
    made = request("--save_file", "a.png", "--frame_num", "1")
    assert output_paths(made, prompt="p", seed=0, index=0, num_prompts=1).sheet is None


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--save_file a.avi", r"a\.avi: a video is an \.mp4"),
        ("--save_file a", r"\.mp4"),
        ("--save_file a.png --frame_num 5", "one frame, not 5"),
        ("--save_latents a.pt", r"\.safetensors"),
        ("--save_file folder.mp4", "is a folder"),
        ("--report folder.json", "is a folder"),
        ("--report a.txt", "the file is a .json"),
        ("--save_file file/a.mp4", "cannot write into the folder file"),
        ("--save_file /proc/a.mp4", "cannot write into the folder /proc"),
        ("--save_file /proc/new/a.mp4", "cannot write into the folder /proc/new"),
        (f"--save_file {'x' * 250}.mp4", "takes 2.. bytes, but file systems take 255"),
        (f"--save_file {'雨' * 82}.mp4", "takes 2.. bytes, but file systems take 255"),
    ],
)
def test_an_output_that_cannot_be_written_is_refused_before_the_run(flags, words, tmp_path, monkeypatch):
    """D11."""
    monkeypatch.chdir(tmp_path)
    Path("folder.mp4").mkdir()
    Path("folder.json").mkdir()
    Path("file").write_text("no folder")
    with pytest.raises(UserError, match=words):
        check_outputs(request(*flags.split()))


def test_no_output_falls_on_another_one_or_on_an_input(tmp_path, monkeypatch):
    """Of any prompt: the videos, their sheets, latents and rescued latents, the report, the prompt file."""
    monkeypatch.chdir(tmp_path)
    Path("two.json").write_text("a boat\na bird")
    for flags in (
        "--prompt_file two.json --report ./two.json",
        "--save_file q.mp4 --save_latents q.latents.safetensors --report q.json --prompt_file q.json",
        "--prompt_file two.json --save_file z.mp4 --save_latents z.mp4.safetensors --report two.json",
    ):
        Path("q.json").write_text("a boat")
        with pytest.raises(UserError, match="is named for two different files"):
            check_outputs(request(*flags.split()))
    check_outputs(request(*["--save_file", "q.mp4", "--save_latents", "./q.latents.safetensors"]))


@pytest.mark.parametrize("flags", ["", "--save_file new/deep/a.MP4", "--save_file a.png --frame_num 1 --report r.json"])
def test_an_output_that_can_be_written_leaves_no_trace_of_the_check(flags, tmp_path, monkeypatch):
    """D11: a missing folder is made."""
    monkeypatch.chdir(tmp_path)
    check_outputs(request(*flags.split()))
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    assert output_paths(request(*flags.split()), prompt="", seed=0, index=0, num_prompts=1).video.parent.is_dir()


def test_a_read_only_folder_is_refused_before_the_run(tmp_path):
    """D11. In a process without privileges, since root writes everywhere."""
    folder = tmp_path / "read_only"
    folder.mkdir(mode=0o555)
    program = textwrap.dedent("""
        import os, sys
        from pathlib import Path
        from usp.errors import UserError
        from usp.launch.files import check_folder
        if os.geteuid() == 0:
            for parent in Path(sys.argv[1]).parents[:3]:
                os.chmod(parent, 0o755)
            os.seteuid(65534)
        try:
            check_folder(Path(sys.argv[1]))
        except UserError as error:
            print(error)
    """)
    done = subprocess.run(
        [sys.executable, "-c", program, str(folder)], capture_output=True, text=True, timeout=170, check=True
    )
    assert done.stdout == f"cannot write into the folder {folder}: Permission denied; name another one\n", done.stderr


@pytest.fixture(params=["unnamed", "named"])
def file_system(request, monkeypatch):
    """With files that have no name, as local ones are, and without, as many network ones."""
    if request.param == "named":
        real = os.open

        def without_unnamed_files(path, flags, mode=0o777):
            if flags & os.O_TMPFILE == os.O_TMPFILE:
                raise OSError(95, "Operation not supported")
            return real(path, flags, mode)

        monkeypatch.setattr(os, "open", without_unnamed_files)
    return request.param


def test_a_write_replaces_the_whole_file(tmp_path, guard, file_system):
    target = tmp_path / ("x" * 251 + ".mp4")
    for data in (b"first and long", b"", b"third"):
        atomic_write(target, data, guard=guard)
        assert target.read_bytes() == data
    assert os.listdir(tmp_path) == [target.name]
    assert target.stat().st_mode & 0o777 == 0o666 & ~_umask()


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, guard, file_system, monkeypatch, call):
    """D22."""
    target = tmp_path / "a.mp4"
    target.write_bytes(b"old")

    def fails(*_arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, call, fails)
    with pytest.raises(UserError, match=r"cannot write .*a\.mp4: No space left"):
        atomic_write(target, b"new", guard=guard)
    assert os.listdir(tmp_path) == ["a.mp4"]
    assert target.read_bytes() == b"old"


def test_what_killed_processes_left_behind_is_cleared_and_the_rest_is_not(tmp_path, guard):
    """D22."""
    target = tmp_path / "a.mp4"
    prefix = files._temp_prefix(target)
    child = subprocess.Popen(["true"])
    child.wait()
    dead, alive = tmp_path / f"{prefix}{child.pid}.00.tmp", tmp_path / f"{prefix}{os.getpid()}.00.tmp"
    other = tmp_path / f"{files._temp_prefix(tmp_path / 'b.mp4')}{child.pid}.00.tmp"
    for path in (dead, alive, other):
        path.write_bytes(b"part")
    atomic_write(target, b"whole", guard=guard)
    assert set(os.listdir(tmp_path)) == {"a.mp4", alive.name, other.name}


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
