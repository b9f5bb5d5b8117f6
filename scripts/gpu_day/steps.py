"""Two denoising steps of real-size T2V-A14B, random weights, on several meshes: scaling, and one hash of the latents.

    python scripts/gpu_day/steps.py --notes notes.jsonl --meshes 1x1 1x2 2x1

Each mesh is a run of scripts/real_size_steps.py with as many ranks. The first step loads kernels and is not counted.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.gpu_day.notes import CheckError, Notes
from scripts.gpu_day.predict import step_name

ROOT = Path(__file__).resolve().parents[2]
TINY = ["--heads", "4", "--ffn", "256"]
STEPS, NOT_FINITE = 2, "not finite"


def run_mesh(cfg: int, ulysses: int, flags: argparse.Namespace) -> dict[str, Any]:
    """The last line that the run prints. Raises CheckError where there is none."""
    program = ["scripts/real_size_steps.py", "--cfg_size", str(cfg), "--attention", flags.attention]
    program += ["--size", flags.size, "--frame_num", str(flags.frame_num), "--layers", str(flags.layers)]
    program += ["--steps", str(STEPS), "--warmup", "0", *(TINY if flags.small else [])]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(cfg * ulysses)]
    done = subprocess.run(
        [sys.executable, *launcher, *program], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        raise CheckError(f"mesh {cfg}x{ulysses} ended with {done.returncode}")
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def note_mesh(notes: Notes, cfg: int, ulysses: int, found: dict[str, Any], base: float | None) -> float:
    """File a mesh's seconds, and its efficiency beside `base`, one GPU's seconds; returns the seconds."""
    seconds = median(one for _, one in found["s/step"][1:])
    name = step_name(found["tokens"], cfg, ulysses)
    kept = {key: found[key] for key in ("mesh", "exchange", "attention", "peak_GB", "latents_sha256", "s/step")}
    notes.measured(name, seconds, "s", **kept)
    if base is not None:
        notes.measured(f"{name}, efficiency", base / (cfg * ulysses * seconds), "")
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--notes", type=Path, required=True)
    parser.add_argument("--small", action="store_true", help="two layers and few tokens")
    parser.add_argument("--meshes", nargs="+", default=["1x1", "1x2", "2x1"], help="cfg x ulysses; 1x1 first")
    parser.add_argument("--size", default="1280*720")
    parser.add_argument("--frame_num", type=int, default=81)
    parser.add_argument("--layers", type=int, default=40)
    parser.add_argument("--attention", default="auto")
    flags = parser.parse_args()
    if flags.small:
        flags.size, flags.frame_num, flags.layers = "80*48", 9, 2
    notes, hashes, found = Notes(flags.notes), {}, {"gpu": ""}
    base: float | None = None
    for mesh in flags.meshes:
        cfg, ulysses = map(int, mesh.split("x"))
        try:
            found = run_mesh(cfg, ulysses, flags)
        except CheckError as error:
            notes.remark(str(error))
            continue
        seconds = note_mesh(notes, cfg, ulysses, found, base)
        base = seconds if mesh == "1x1" else base
        hashes[mesh] = found["latents_sha256"] if found["finite"] else NOT_FINITE
    ran = len(hashes) == len(flags.meshes) and NOT_FINITE not in hashes.values()
    notes.check("every mesh ran, to latents that are finite", ran, hashes=hashes)
    if found["gpu"] is None:
        notes.remark(f"on CPUs a product's bits depend on its rows: {len(set(hashes.values()))} hashes", hashes=hashes)
    else:
        notes.check("one hash of the latents on all meshes", len(set(hashes.values())) == 1, hashes=hashes)


if __name__ == "__main__":
    main()
