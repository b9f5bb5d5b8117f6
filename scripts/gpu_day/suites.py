"""The tests of tests/multi_gpu over this machine's GPUs: which passed, with one number of ranks at a time.

    python scripts/gpu_day/suites.py --notes notes.jsonl --ranks 2

Where each rank has a GPU of its own the exchange runs over ipc, and what it is compared with over nccl. What matters
most runs first; when the part's time is nearly over, a run is interrupted and what it had done is counted.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.gpu_day.notes import Notes
from scripts.gpu_day.parts import SECONDS

ROOT = Path(__file__).resolve().parents[2]
FAULT_RANKS = 3  # which the fault tests have; they share GPUs where there are two
KEPT_S, LEAVING_S = 6.0, 10.0  # to write notes, and for pytest to write its report
LEFT_OUT = "left out: tests that start whole programs, and test_fused_bits; the steps have one hash on all meshes"


def suites(ranks: list[int], *, small: bool) -> list[tuple[str, int, list[str]]]:
    """(name, number of ranks, files), in order."""
    folder = "tests/multi_gpu"
    found = [] if small else [("faults", FAULT_RANKS, [f"{folder}/test_pipeline_faults.py"])]
    for count in ranks:
        found.append(("exchange", count, [f"{folder}/test_exchange.py"]))
        if not small:
            found.append(("pipeline", count, [f"{folder}/test_pipeline.py", f"{folder}/test_pipeline_gpu.py"]))
    return found


def run_suite(files: list[str], ranks: int, *, ends: float, small: bool) -> list[ET.Element]:
    """The cases that were run until `ends`."""
    with TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout", "100"]
        command += ["-m", "not gpu and not long" if small else "not long", f"--junit-xml={report}", *files]
        env = {**os.environ, "USP_TEST_RANKS": str(ranks)}
        process = subprocess.Popen(command, cwd=ROOT, env=env)
        try:
            process.wait(max(0.0, ends - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(LEAVING_S)
            except subprocess.TimeoutExpired:
                process.kill()
        return list(ET.parse(report).iter("testcase")) if report.exists() else []


def note_suite(notes: Notes, name: str, cases: list[ET.Element]) -> bool:
    """Whether some passed and none failed; failures are named one by one."""
    failed = [case.get("name") for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = sum(case.find("skipped") is not None for case in cases)
    passed = len(cases) - len(failed) - skipped
    detail = {"passed": passed, "skipped": skipped, "names": failed, "seconds": _seconds(cases)}
    notes.measured(f"tests, {name}: passed", passed, "tests", **detail)
    notes.measured(f"tests, {name}: failed", len(failed), "tests")
    return passed > 0 and not failed


def _seconds(cases: list[ET.Element]) -> float:
    return round(sum(float(case.get("time", 0)) for case in cases), 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--notes", type=Path, required=True)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--small", action="store_true", help="one suite, without a GPU's tests")
    flags = parser.parse_args()
    ends = time.monotonic() + float(os.environ.get(SECONDS, "3600")) - KEPT_S - LEAVING_S
    notes, results = Notes(flags.notes), {}
    notes.remark(LEFT_OUT)
    for name, ranks, files in suites(flags.ranks, small=flags.small):
        if time.monotonic() > ends:
            notes.remark(f"no time was left for {name} at {ranks} ranks")
            continue
        cases = run_suite(files, ranks, ends=ends, small=flags.small)
        results[f"{name}, {ranks} ranks"] = note_suite(notes, f"{name}, {ranks} ranks", cases)
    notes.check("what was run of the tests passed", bool(results) and all(results.values()), suites=results)


if __name__ == "__main__":
    main()
