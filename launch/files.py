"""Where results go: names that any file system takes, folders proved writable before a run, whole files or none.

`check_outputs` runs before anything heavy loads, so that a video is never made that cannot be saved. `atomic_write`
gives a file its final name only when every byte of it is on disk.
"""

import hashlib
import os
import secrets
import socket
import unicodedata
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from usp.errors import UserError
from usp.launch.guard import Guard
from usp.models.wan.clip import Clip

if TYPE_CHECKING:
    from usp.launch.request import Request

OUTPUT_FOLDER = Path("outputs")
MAX_NAME_BYTES = 255  # of a file name on Linux's file systems
MAX_SLUG_BYTES = 80
VIDEO_SUFFIXES = (".mp4", ".png")
SHEET_SUFFIX, LATENTS_SUFFIX = ".sheet.png", ".latents.safetensors"


@dataclass(frozen=True)
class OutputPaths:
    """The files of one prompt. `rescue` is where latents are kept if decoding or saving fails."""

    video: Path  # .mp4, or .png for one frame
    sheet: Path | None  # contact sheet of an .mp4
    latents: Path | None
    rescue: Path


def output_paths(request: "Request", *, prompt: str, seed: int, index: int, num_prompts: int) -> OutputPaths:
    """Names of the files of prompt `index`; the same for the same arguments."""
    several = num_prompts > 1
    video = _video_path(request, prompt=prompt, seed=seed, index=index, several=several)
    latents = request.save_latents
    return OutputPaths(
        video=video,
        sheet=None if video.suffix.lower() == ".png" else video.with_name(video.stem + SHEET_SUFFIX),
        latents=_indexed(latents, index) if latents and several else latents,
        rescue=video.with_name(video.stem + LATENTS_SUFFIX),
    )


def default_name(*, task: str, clip: Clip, seed: int, prompt: str, index: int) -> str:
    """`<task>_<WxHxF>_<seed>_<slug>_<index>`, without a suffix and far below the limit of a file name."""
    size = f"{clip.width}x{clip.height}x{clip.frames}"
    return f"{task}_{size}_{seed}_{slug(prompt)}_{index}"


def slug(prompt: str, max_bytes: int = MAX_SLUG_BYTES) -> str:
    """Letters and digits of the prompt, of any script, the rest one dash each run; at most `max_bytes` in UTF-8."""
    text = unicodedata.normalize("NFC", prompt)
    words = "".join(c if c.isalnum() else " " for c in text).split()
    cut = "-".join(words).encode()[:max_bytes].decode(errors="ignore")
    return cut.strip("-") or "untitled"


def check_outputs(request: "Request") -> None:
    """Raise UserError unless every file that the run will write can be written. Creates missing folders."""
    num_prompts = len(request.prompts or ("",))
    _check_suffixes(request)
    for folder in {path.parent for path in _first_and_last(request, num_prompts)}:
        check_folder(folder)
    for path in _first_and_last(request, num_prompts):
        _check_target(path)
    _check_distinct(request, num_prompts)


def check_folder(folder: Path) -> None:
    """Raise UserError unless a file can be created in `folder`, which is itself created if missing."""
    probe = folder / f".{secrets.token_hex(8)}.probe"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        os.close(os.open(probe, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except OSError as error:
        raise UserError(f"cannot write into the folder {folder}: {error.strerror}; name another one") from error
    finally:
        with suppress(OSError):
            probe.unlink()


def atomic_write(path: Path, data: bytes, *, guard: Guard) -> None:
    """Write a whole file under its final name, or nothing: `path` never holds a part, whatever ends the process.

    A file without a name receives the data, since the system drops it even if this process is killed. Some network
    file systems have none; there a named temporary file does it, which the next write to `path` clears away if need be.
    """
    try:
        _write_whole(path, data, guard)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error


def _write_whole(path: Path, data: bytes, guard: Guard) -> None:
    _remove_stale(path)
    temp = path.with_name(f"{_temp_prefix(path)}{os.getpid()}.{secrets.token_hex(4)}.tmp")
    with guard.temporary(temp):
        descriptor, is_named = _open_temporary(temp, guard)
        with open(descriptor, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(descriptor)
            with guard.held():
                if not is_named:
                    _give_name(descriptor, temp)
                os.replace(temp, path)
    _sync_folder(path.parent)


def _video_path(request: "Request", *, prompt: str, seed: int, index: int, several: bool) -> Path:
    if request.save_file is not None:
        return _indexed(request.save_file, index) if several else request.save_file
    if request.load_latents is not None:
        return OUTPUT_FOLDER / f"{slug(request.load_latents.stem)}.mp4"
    name = default_name(task=request.task, clip=request.clip, seed=seed, prompt=prompt, index=index)
    return OUTPUT_FOLDER / f"{name}.mp4"


def _indexed(path: Path, index: int) -> Path:
    """a.mp4 -> a_3.mp4"""
    return path.with_name(f"{path.stem}_{index}{path.suffix}")


def _first_and_last(request: "Request", num_prompts: int) -> list[Path]:
    """What the run will write: the report, and the files of the first and the last prompt, whose index is longest."""
    paths = [request.report] if request.report else []
    for index in {0, num_prompts - 1}:
        files = output_paths(request, prompt="", seed=0, index=index, num_prompts=num_prompts)
        paths += [path for path in (files.video, files.sheet, files.latents, files.rescue) if path]
    return paths


def _check_suffixes(request: "Request") -> None:
    video, latents, frames = request.save_file, request.save_latents, request.clip.frames
    if video is not None and video.suffix.lower() not in VIDEO_SUFFIXES:
        raise UserError(f"--save_file {video}: a video is an .mp4, or a .png for one frame")
    if video is not None and video.suffix.lower() == ".png" and frames > 1:
        raise UserError(f"--save_file {video}: a .png holds one frame, not {frames}; use .mp4, or --frame_num 1")
    if latents is not None and latents.suffix != ".safetensors":
        raise UserError(f"--save_latents {latents}: the file is a .safetensors")
    if request.report is not None and request.report.suffix.lower() != ".json":
        raise UserError(f"--report {request.report}: the file is a .json")


def _check_target(path: Path) -> None:
    nbytes = len(os.fsencode(path.name))
    if nbytes > MAX_NAME_BYTES:
        raise UserError(
            f"the file name {path.name} takes {nbytes} bytes, but file systems take {MAX_NAME_BYTES}; "
            f"shorten the name by {nbytes - MAX_NAME_BYTES} bytes"
        )
    if path.is_dir():
        raise UserError(f"{path} is a folder; name a file in it")


def _check_distinct(request: "Request", num_prompts: int) -> None:
    """No output may fall on another one or on an input, for any prompt. Latents that are loaded need no rescue."""
    named = [path for path in (request.report, request.prompt_file, request.load_latents) if path]
    for index in range(num_prompts):
        files = output_paths(request, prompt="", seed=0, index=index, num_prompts=num_prompts)
        named += [path for path in (files.video, files.sheet, files.latents) if path]
        named += [files.rescue] if request.load_latents is None and files.rescue != files.latents else []
    resolved = [path.resolve() for path in named]
    for path, count in Counter(resolved).items():
        if count > 1:
            raise UserError(f"{path} is named for two different files; give each its own name")


def _temp_prefix(path: Path) -> str:
    """Of short, fixed length however long the name is; holds the host, since a process id means nothing elsewhere."""
    tags = (hashlib.sha256(os.fsencode(text)).hexdigest()[:12] for text in (path.name, socket.gethostname()))
    return f".{'.'.join(tags)}."


def _remove_stale(path: Path) -> None:
    """Remove what killed processes of this host left behind for the same target."""
    for stale in path.parent.glob(f"{_temp_prefix(path)}*.tmp"):
        if not Path("/proc", stale.name.split(".")[3]).exists():
            stale.unlink(missing_ok=True)


def _open_temporary(temp: Path, guard: Guard) -> tuple[int, bool]:
    """A descriptor to write to, and whether the file already has the name `temp`."""
    try:
        return os.open(temp.parent, os.O_TMPFILE | os.O_WRONLY, 0o666), False
    except OSError:  # this file system has no files without a name
        with guard.held():
            return os.open(temp, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666), True


def _give_name(descriptor: int, path: Path) -> None:
    # any dir_fd makes Python call linkat, which alone can follow the link to a file without a name
    proc = os.open("/proc/self/fd", os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.link(str(descriptor), path, src_dir_fd=proc, follow_symlinks=True)
    finally:
        os.close(proc)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
