"""Do the bits depend on how many GPUs make the video? Runs one request on several meshes and compares the latents.

    python -m usp.launch.verify --meshes 1x1 1x2 2x2 --ckpt_dir Wan2.2-T2V-A14B-Diffusers --sample_steps 2

Every run is a program of its own, with the ranks that its mesh asks for; the first mesh runs twice, since two runs
alone should be alike too. What is promised: equal bits on one mesh, and with guidance serial or parallel; on GPUs equal
bits on all meshes as well, if the matrix products of this GPU do not depend on the number of rows; on CPUs 5e-5. Needs
the time of that many runs, and on the mesh 1x1 a GPU that holds the model alone.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from usp.errors import UserError
from usp.layout import MeshShape
from usp.tables import table

if TYPE_CHECKING:
    import numpy as np

CPU_TOLERANCE = 5e-5  # of latents after a whole sampling
OURS = ("nproc", "cfg_size", "ulysses_size", "save_file", "save_latents", "load_latents", "report", "prompt_file")
SEED = "0"
HEADER = ("mesh", "exchange", "seconds", "latents sha256", "beside the first")


@dataclass(frozen=True)
class Run:
    """What one run ended with."""

    mesh: MeshShape
    latents: "np.ndarray[Any, Any]"
    report: dict[str, Any]

    @property
    def digest(self) -> str:
        return str(self.report["videos"][0]["latents_sha256"])

    @property
    def on_gpu(self) -> bool:
        return not str(self.report["device"]).startswith("cpu")


@dataclass(frozen=True)
class Verdict:
    """How a run compares with the first one, and whether that is what is promised."""

    text: str
    is_kept: bool


def compare(first: Run, run: Run) -> Verdict:
    if run.digest == first.digest:
        return Verdict("equal bits", True)
    off = abs(run.latents.astype("float64") - first.latents)
    count, most = int((run.latents != first.latents).sum()), float(off.max())
    text = f"{count:,} of {off.size:,} numbers differ, at most by {most:.2g}"
    if run.mesh.ulysses == first.mesh.ulysses or run.on_gpu:
        return Verdict(text, False)
    return Verdict(f"{text}, of {CPU_TOLERANCE:g} allowed on CPUs", most <= CPU_TOLERANCE)


def run_mesh(mesh: MeshShape, flags: Sequence[str], folder: Path) -> Run:
    """One run of the program. Raises UserError where it fails; its own message has been printed by then."""
    files = {"save_latents": "latents.safetensors", "report": "report.json", "save_file": "video.mp4"}
    command = [sys.executable, "-m", "usp.launch", "--nproc", str(mesh.world), "--cfg_size", str(mesh.cfg), *flags]
    command += [word for name, file in files.items() for word in (f"--{name}", str(folder / file))]
    done = subprocess.run(command, check=False)
    if done.returncode:
        raise UserError(f"the run on mesh {mesh.cfg}x{mesh.ulysses} ended with exit code {done.returncode}")
    from safetensors.numpy import load_file

    latents = load_file(folder / files["save_latents"])["latents"]
    return Run(mesh, latents, json.loads((folder / files["report"]).read_text(encoding="utf-8")))


def verify(meshes: Sequence[MeshShape], flags: Sequence[str]) -> bool:
    """Run all, print the table; whether every promise is kept."""
    runs: list[Run] = []
    for mesh in (meshes[0], *meshes):
        with TemporaryDirectory(prefix="usp-verify-") as folder:
            _say(f"run {len(runs) + 1} of {len(meshes) + 1}: mesh {mesh.cfg}x{mesh.ulysses}")
            runs.append(run_mesh(mesh, flags, Path(folder)))
    verdicts = [compare(runs[0], run) for run in runs]
    _say("", *told(runs, verdicts), "", conclusion(runs, verdicts))
    return all(verdict.is_kept for verdict in verdicts)


def _say(*lines: str) -> None:
    sys.stdout.write("\n".join([*lines, ""]))
    sys.stdout.flush()


def told(runs: Sequence[Run], verdicts: Sequence[Verdict]) -> list[str]:
    return table(HEADER, [list(_cells(*pair)) for pair in zip(runs, verdicts, strict=True)])


def _cells(run: Run, verdict: Verdict) -> Iterator[str]:
    yield f"{run.mesh.cfg}x{run.mesh.ulysses}"
    yield "none" if run.mesh.ulysses == 1 else str(run.report["exchange"]["used"])
    yield f"{sum(run.report['videos'][0]['step_seconds']):.1f}"
    yield run.digest[:16]
    yield verdict.text


def conclusion(runs: Sequence[Run], verdicts: Sequence[Verdict]) -> str:
    report = runs[0].report
    where = f"({report['device']}, {report['dtype']}, torch {report['versions']['torch']})"
    broken = [run for run, verdict in zip(runs, verdicts, strict=True) if not verdict.is_kept]
    if broken:
        meshes = ", ".join(dict.fromkeys(f"{run.mesh.cfg}x{run.mesh.ulysses}" for run in broken))
        return f"Not as promised: {meshes} differs from {runs[0].mesh.cfg}x{runs[0].mesh.ulysses} {where}."
    if len({run.digest for run in runs}) == 1:
        return f"Every mesh made the same bits {where}."
    return f"Not the same bits, but as close as is promised {where}."


def parse_mesh(text: str) -> MeshShape:
    cfg, cross, ulysses = text.partition("x")
    if not (cross and cfg.isdecimal() and ulysses.isdecimal() and int(cfg) in (1, 2) and int(ulysses) > 0):
        raise UserError(f"mesh {text!r}; give guidance x Ulysses ranks, such as 2x4")
    return MeshShape(int(cfg), int(ulysses))


def default_meshes() -> list[str]:
    """One rank, and all GPUs there are, with guidance in parallel and without; four ranks on CPUs."""
    import torch

    ranks = torch.cuda.device_count() or 4
    return list(dict.fromkeys(["1x1", f"1x{ranks}", *([f"2x{ranks // 2}"] if ranks % 2 == 0 else [])]))


def passed_on(flags: Sequence[str]) -> list[str]:
    """The flags for the program itself, with a seed. Raises UserError for those that are set here."""
    names = {flag[2:].partition("=")[0].replace("-", "_") for flag in flags if flag.startswith("--")}
    taken = sorted(names.intersection(OURS))
    if taken:
        raise UserError(f"--{taken[0]} is set by verify itself, for every run; leave it out")
    return [*flags, *([] if "base_seed" in names else ["--base_seed", SEED])]


def main(argv: Sequence[str] | None = None) -> int:
    """0: every promise is kept; 1: one is not; 2: it could not be found out."""
    parser = argparse.ArgumentParser(
        prog="python -m usp.launch.verify",
        usage="%(prog)s [--meshes CFGxULYSSES ...] [flags of generate.py]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--meshes", nargs="+", metavar="CFGxULYSSES", help="default: 1x1, and all GPUs in two ways")
    own, others = parser.parse_known_args(argv)
    try:
        flags = passed_on(others)
        return 0 if verify([parse_mesh(one) for one in own.meshes or default_meshes()], flags) else 1
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2


if __name__ == "__main__":
    sys.exit(main())
