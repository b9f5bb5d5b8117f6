"""The recipe for Nsight Systems: what it calls, with a stand-in for nsys, and what it says where it cannot run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.profiles import Issued, Process, write_sqlite

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "profile_overlap.sh"
NSYS = """#!/bin/sh
echo "$USP_NVTX $USP_PROFILE_STEPS $*" >> {log}
[ "$1" != export ] || cp {profile} "$(echo "$4" | sed s/--output=//)"
"""


def run(*arguments: str, path: str, **environ: str) -> subprocess.CompletedProcess:
    command = ["/bin/bash", str(SCRIPT), *arguments]
    env = {**os.environ, "PATH": path, "PYTHON": sys.executable, **environ}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=150, check=False)


def test_all_ranks_are_profiled_at_the_chosen_steps_and_reported(tmp_path):
    issued = [Issued(7, 0, 10, 1), Issued(7, 20, 30, 6, "usp attend g0"), Issued(7, 30, 40, 12)]
    ranges = [("usp layer 0 rank 0 of 0", 5, 10), ("usp step 2", 4, 50)]
    profile, log = write_sqlite(tmp_path / "profile", Process(1, issued, ranges)), tmp_path / "log"
    nsys = tmp_path / "bin" / "nsys"
    nsys.parent.mkdir()
    nsys.write_text(NSYS.format(log=log, profile=profile))
    nsys.chmod(0o755)
    out = tmp_path / "results" / "run"
    path = f"{nsys.parent}:{os.environ['PATH']}"
    done = run("-n", "4", "-s", "2-5", "-o", str(out), "--", "--size", "64*64", path=path)
    assert done.returncode == 0, done.stderr
    profiled, exported = log.read_text().splitlines()
    assert profiled.startswith("1 2-5 profile ") and f"--output={out} " in profiled
    for flag in ("--trace=cuda,nvtx", "--capture-range=cudaProfilerApi", "--capture-range-end=stop"):
        assert flag in profiled
    assert "--nproc-per-node 4 " in profiled and profiled.endswith("generate.py --size 64*64")
    assert f"export --type=sqlite --force-overwrite=true --output={out}.sqlite {out}.nsys-rep" in exported
    assert out.with_suffix(".json").is_file() and out.with_suffix(".png").is_file()
    assert "attention calls per rank and step" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "nsys is not on the PATH"),
        (("-n", "0"), "give a number of processes"),
        (("-s", "4,5"), "give a step or two"),
        (("-n",), "-n needs a value"),
        (("--size", "64*64"), "behind --"),
    ],
)
def test_what_cannot_run_gets_one_sentence(tmp_path, arguments, said):
    done = run(*arguments, path="/nowhere")
    assert done.returncode == 2 and done.stdout == ""
    assert said in done.stderr and done.stderr.count("\n") == 1


def test_help_needs_nothing():
    done = run("--help", path=os.defpath)
    assert done.returncode == 0 and "--capture" not in done.stdout and "-s STEPS" in done.stdout
