"""Many small requests to the whole program in one set of ranks, each looked up afterwards by its name."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.multi_gpu.programs import NOTHING, Finished, Programs
from tests.tiny import tiny_checkpoint

DRIVER = str(Path(__file__).with_name("generate_many.py"))
SMALL = {"size": "80*48", "frame_num": 9, "sample_steps": 4, "base_seed": 0, "prompt": "a red ball"}


@dataclass(frozen=True)
class Made:
    """What one request left: its report, and the files that the report names."""

    report: Mapping[str, Any]
    folder: Path

    @property
    def hashes(self) -> list[str]:
        return [video["latents_sha256"] for video in self.report["videos"]]

    @property
    def videos(self) -> list[Path]:
        return [self.folder / video["file"] for video in self.report["videos"]]

    @property
    def video(self) -> Path:
        (video,) = self.videos
        return video

    @property
    def hash(self) -> str:
        (only,) = self.hashes
        return only


def small(checkpoint: Path | None = None, **flags: object) -> list[str]:
    """A command line for a tiny checkpoint; a flag that is None is left out."""
    wanted = {**SMALL, "ckpt_dir": checkpoint or tiny_checkpoint(), **flags}
    return [f"--{name}={value}" for name, value in wanted.items() if value is not None]


def make_all(
    programs: Programs, launcher: list[str], requests: Mapping[str, list[str]], *, files: Mapping[str, str] = NOTHING
) -> tuple[dict[str, Made], Finished]:
    """Run every request, in order, where `files` are. Those that sample leave a report under their name."""
    program = [*launcher, DRIVER, "../runs.json"]
    runs = [argv if _only_decodes(argv) else [*argv, f"--report={name}.json"] for name, argv in requests.items()]
    finished = programs.run(*program, files={"../runs.json": json.dumps(runs), **files})
    folder = finished.folder
    reported = [name for name, argv in requests.items() if not _only_decodes(argv)]
    reports = {name: json.loads((folder / f"{name}.json").read_text()) for name in reported}
    return {name: Made(report, folder) for name, report in reports.items()}, finished


def modules_of(finished: Finished, rank: int) -> set[str]:
    """Everything that a rank of a batch has imported."""
    return set(json.loads((finished.folder / f"modules.{rank}.json").read_text()))


def _only_decodes(argv: list[str]) -> bool:
    return any(argument.startswith("--load_latents") for argument in argv)
