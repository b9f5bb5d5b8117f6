"""What `python -m usp.launch.verify` says of runs that are alike, that differ, and that cannot be compared."""

import numpy as np
import pytest

from usp.errors import UserError
from usp.launch.verify import CPU_TOLERANCE, Run, compare, conclusion, default_meshes, main, parse_mesh, passed_on, told
from usp.layout import MeshShape

FIRST, SAME, PARALLEL, SHARED = MeshShape(1, 1), MeshShape(1, 1), MeshShape(2, 1), MeshShape(1, 2)


def run(mesh: MeshShape, *, off: float = 0.0, device: str = "cpu, 1 thread(s)") -> Run:
    latents = np.linspace(-1, 1, 12, dtype=np.float32).reshape(1, 3, 1, 2, 2)
    latents[0, 0, 0, 0, 0] += off
    video = {"latents_sha256": str(off), "step_seconds": [0.5, 0.25]}
    facts = {"device": device, "dtype": "fp32", "versions": {"torch": "2.13"}, "exchange": {"used": "host"}}
    return Run(mesh, latents, {**facts, "videos": [video]})


def test_equal_hashes_are_equal_bits():
    assert compare(run(FIRST), run(SHARED)).text == "equal bits"
    assert compare(run(FIRST), run(SHARED)).is_kept


@pytest.mark.parametrize(
    ("mesh", "off", "device", "is_kept"),
    [
        (SHARED, 2e-5, "cpu, 1 thread(s)", True),
        (SHARED, 2 * CPU_TOLERANCE, "cpu, 1 thread(s)", False),
        (SHARED, 1e-6, "NVIDIA H200", False),
        (SAME, 1e-6, "cpu, 1 thread(s)", False),
        (PARALLEL, 1e-6, "cpu, 1 thread(s)", False),
        (PARALLEL, 1e-6, "NVIDIA H200", False),
        (SHARED, float("nan"), "cpu, 1 thread(s)", False),
    ],
)
def test_a_difference_is_kept_to_what_is_promised(mesh: MeshShape, off: float, device: str, is_kept: bool):
    first = run(FIRST, device=device)
    verdict = compare(first, run(mesh, off=off, device=device))
    assert verdict.is_kept == is_kept
    assert verdict.text.startswith("1 of 12 numbers differ, at most by ")


def test_the_table_and_the_conclusion_name_what_differs():
    runs = [run(FIRST), run(SAME), run(SHARED, off=0.5)]
    verdicts = [compare(runs[0], one) for one in runs]
    lines = told(runs, verdicts)
    assert [line.split()[0] for line in lines] == ["mesh", "1x1", "1x1", "1x2"]
    assert lines[1].split()[1:3] == ["none", "0.8"] and lines[3].split()[1] == "host"
    assert conclusion(runs, verdicts) == "Not as promised: 1x2 differs from 1x1 (cpu, 1 thread(s), fp32, torch 2.13)."
    assert conclusion(runs[:2], verdicts[:2]).startswith("Every mesh made the same bits")
    close = [runs[0], run(SHARED, off=1e-6)]
    assert conclusion(close, [compare(runs[0], one) for one in close]).startswith("Not the same bits, but as close")


@pytest.mark.parametrize("text", ["2", "x2", "1x0", "3x1", "1x-2", "1x2x3", "axb", ""])
def test_a_mesh_is_two_numbers(text: str):
    with pytest.raises(UserError, match="such as 2x4"):
        parse_mesh(text)
    assert parse_mesh("2x4") == MeshShape(2, 4)


@pytest.mark.parametrize("flag", ["--save_file=x.mp4", "--nproc", "--cfg-size=2", "--report", "--prompt_file"])
def test_flags_that_are_set_for_every_run_are_refused(flag: str, capsys):
    assert main(["--meshes", "1x1", flag, "3"]) == 2
    assert "leave it out" in capsys.readouterr().err


def test_a_seed_is_given_where_none_is():
    assert passed_on(["--prompt", "a"]) == ["--prompt", "a", "--base_seed", "0"]
    assert passed_on(["--base-seed=3"]) == ["--base-seed=3"]


def test_silent_meshes_start_with_one_rank():
    assert default_meshes()[0] == "1x1" and len(set(default_meshes())) == len(default_meshes())
