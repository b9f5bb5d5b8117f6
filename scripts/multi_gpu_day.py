"""All that several GPUs of one host are to show, in one command and nine minutes: transport, overlap, scaling.

    python scripts/multi_gpu_day.py --out outputs/day
    python scripts/multi_gpu_day.py --small --minutes 4 --parts exchange attention block    # anywhere, tiny

What the simulator expects is written first. Then the parts run, each a process of its own with a limit of its own: what
the machine is, whether a flag means that the copy before it is there, the exchange alone, attention calls and a block
with and without their copies, steps of the real-size model on several meshes, and the tests. Each checks before it
times; one that fails or hangs ends alone, and what it had found is kept. After every part OUT/day.json and OUT/day.md
are written anew. NCCL's and torch's variables are left as they are.
"""

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.git_commit import commit_here
from scripts.gpu_day.parts import Part, all_parts, run_marked, run_part
from scripts.gpu_day.predict import predictions
from scripts.gpu_day.sizes import sizes_of
from scripts.gpu_day.table import markdown, misses

ROOT = Path(__file__).resolve().parent.parent
MESHES = {2: ["1x1", "1x2", "2x1"], 4: ["1x1", "2x2", "1x4"], 8: ["1x1", "2x4", "1x8"]}
SHORTEST_S, WARM_UP_S = 5.0, 60.0


def count_gpus() -> int:
    """Without starting CUDA in this process."""
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in done.stdout.splitlines())


def meshes_for(ranks: int, gpus: int, *, small: bool = False) -> list[str]:
    """Weights of the real size take a GPU for each rank."""
    return MESHES.get(ranks, ["1x1", f"1x{ranks}"]) if small or gpus >= ranks else ["1x1"] * (gpus > 0)


def run_day(parts: Sequence[Part], report: dict[str, Any], flags: argparse.Namespace, ends: float) -> None:
    """Run the parts; what one leaves of its time is there for the others."""
    extra = ["--small"] if flags.small else []
    for place, part in enumerate(parts):
        share = part.share / sum(one.share for one in parts[place:])
        limit = max(SHORTEST_S, share * (ends - time.monotonic()))
        print(f"{part.name}: at most {limit:.0f} s", flush=True)
        outcome = run_part(part, limit_s=limit, out=flags.out, flags=extra)
        print(f"{part.name}: {outcome.status}, {outcome.seconds:.0f} s {outcome.reason[:200]}", flush=True)
        report["parts"].append(asdict(outcome))
        write(report, flags.out)


def write(report: dict[str, Any], out: Path) -> None:
    (out / "day.json").write_text(json.dumps(report, indent=1), encoding="utf-8")
    (out / "day.md").write_text(markdown(report), encoding="utf-8")


def warm_up(out: Path) -> None:
    """A bare machine reads libraries from its disk and starts its GPUs: no part's time."""
    program = "import torch, triton; [torch.empty(1, device=one) for one in range(torch.cuda.device_count())]"
    code, seconds = run_marked([sys.executable, "-c", program], limit_s=WARM_UP_S, log=out / "warm_up.log")
    print(f"warm-up: {seconds:.0f} s, exit code {code}", flush=True)


def capture_with_nsys(flags: argparse.Namespace, ranks: int, limit_s: float) -> str:
    """A capture of one step with the packaged model, where nsys is there; what became of it."""
    if shutil.which("nsys") is None:
        return "nsys is not on the PATH: no capture"
    if limit_s < SHORTEST_S:
        return "no time was left for nsys"
    command = ["scripts/profile_overlap.sh", "-n", str(ranks), "-s", "2", "-o", str(flags.out.resolve() / "nsys")]
    log = flags.out / "nsys.log"
    code, seconds = run_marked([*command, "--", "--cfg_size", "1"], limit_s=limit_s, log=log, PYTHON=sys.executable)
    return f"nsys ended with {code} after {seconds:.0f} s; {log}"


def main(argv: Sequence[str] | None = None) -> int:
    flags = _parser().parse_args(argv)
    gpus = count_gpus()
    ranks = flags.ranks or max(2, gpus)
    flags.out.mkdir(parents=True, exist_ok=True)
    meshes = flags.meshes or meshes_for(ranks, ranks if flags.predict else gpus, small=flags.small)
    pairs = [(int(cfg), int(ulysses)) for cfg, _, ulysses in (mesh.partition("x") for mesh in meshes)]
    report: dict[str, Any] = {
        "commit": commit_here(),
        "date": date.today().isoformat(),
        "command": " ".join(["scripts/multi_gpu_day.py", *(sys.argv[1:] if argv is None else argv)]),
        "gpus": gpus,
        "ranks": ranks,
        "predictions": predictions(sizes_of(small=flags.small), ranks_of_calls={2, ranks}, meshes=pairs),
        "parts": [],
    }
    write(report, flags.out)
    if flags.predict:
        print((flags.out / "day.md").read_text(encoding="utf-8"))
        return 0
    parts = [one for one in all_parts(ranks, meshes, flags.attention, flags.out) if one.name in flags.parts]
    if not meshes:
        parts = [one for one in parts if one.name != "steps"]
    if gpus:
        warm_up(flags.out)
    ends = time.monotonic() + 60 * flags.minutes
    run_day(parts, report, flags, ends)
    if gpus:
        report["nsys"] = capture_with_nsys(flags, ranks, ends - time.monotonic())
    report["misses"] = misses(report)
    write(report, flags.out)
    print((flags.out / "day.md").read_text(encoding="utf-8"))
    return 0 if all(part["status"] == "ok" for part in report["parts"]) else 1


def _parser() -> argparse.ArgumentParser:
    names = [part.name for part in all_parts(4, [], "auto", Path())]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--out", type=Path, default=Path("outputs/day"))
    parser.add_argument(
        "--ranks", type=int, help="one per GPU where there are as many (default: as many as GPUs, or 2)"
    )
    parser.add_argument("--minutes", type=float, default=8.5, help="of all parts together (default: %(default)s)")
    parser.add_argument("--parts", nargs="+", choices=names, default=names)
    parser.add_argument("--meshes", nargs="+", metavar="CFGxULYSSES", help="of the steps (default: by ranks)")
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--predict", action="store_true", help="only write what is expected")
    parser.add_argument("--small", action="store_true", help="tiny sizes: does it run?")
    return parser


if __name__ == "__main__":
    sys.exit(main())
