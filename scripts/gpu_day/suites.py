"""The tests of tests/multi_gpu at some numbers of ranks, on this machine's GPUs: which passed.

    python scripts/gpu_day/suites.py --notes notes.jsonl --ranks 2

Where each rank has a GPU of its own the exchange runs over ipc, and what it is compared with over nccl.
"""

import argparse
import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.gpu_day.notes import Notes

ROOT = Path(__file__).resolve().parents[2]
SUITES = {
    "exchange": ["tests/multi_gpu/test_exchange.py"],
    "pipeline": ["tests/multi_gpu/test_pipeline.py", "tests/multi_gpu/test_pipeline_gpu.py"],
    "faults": ["tests/multi_gpu/test_pipeline_faults.py"],
    "bits of a model": ["tests/multi_gpu/test_fused_bits.py", "tests/multi_gpu/test_generate_gpu.py"],
}
SMALL_SUITES = {"exchange": ["tests/multi_gpu/test_exchange.py"]}


def run_suite(name: str, files: list[str], ranks: list[int], notes: Notes, *, small: bool) -> bool:
    """Whether all of it passed; failures are named one by one."""
    with TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout", "200"]
        command += ["-m", "not gpu and not long" if small else "not long", f"--junit-xml={report}"]
        env = {**os.environ, "USP_TEST_RANKS": ",".join(map(str, ranks))}
        done = subprocess.run([*command, *files], cwd=ROOT, env=env, check=False)
        cases = list(ET.parse(report).iter("testcase")) if report.exists() else []
    failed = [case.get("name") for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = sum(case.find("skipped") is not None for case in cases)
    passed = len(cases) - len(failed) - skipped
    detail = {"passed": passed, "skipped": skipped, "failed": failed, "seconds": _seconds(cases), "ranks": ranks}
    notes.measured(f"tests, {name}: failed", len(failed), "tests", **detail)
    return passed > 0 and not failed and done.returncode == 0


def _seconds(cases: list[ET.Element]) -> float:
    return round(sum(float(case.get("time", 0)) for case in cases), 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--notes", type=Path, required=True)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--small", action="store_true", help="one suite, without a GPU's tests")
    flags = parser.parse_args()
    notes = Notes(flags.notes)
    suites = SMALL_SUITES if flags.small else SUITES
    results = {name: run_suite(name, files, flags.ranks, notes, small=flags.small) for name, files in suites.items()}
    notes.check("every suite passed", all(results.values()), suites=results)


if __name__ == "__main__":
    main()
