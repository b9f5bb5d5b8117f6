"""`python -m usp.launch.verify` on real runs: what it prints, and its exit code."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SMALL = ["--size", "48*80", "--frame_num", "9", "--sample_steps", "2"]


def verify(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "usp.launch.verify", *flags]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=170, check=False)


def test_runs_on_one_rank_and_on_four_are_compared():
    done = verify("--meshes", "1x1", "2x2", *SMALL)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    found = [row for row in rows if row and row[0] in ("1x1", "2x2")]
    assert [row[0] for row in found] == ["1x1", "1x1", "2x2"]
    assert found[0][3] == found[1][3] and len(found[0][3]) == 16
    assert found[2][3] == found[0][3] or "allowed" in found[2]


def test_a_run_that_fails_is_no_verdict():
    done = verify("--meshes", "1x1", "--size", "50*50")
    assert done.returncode == 2 and "the run on mesh 1x1 ended with exit code" in done.stderr
    assert "equal bits" not in done.stdout
