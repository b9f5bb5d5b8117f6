"""Check the kernels of a block, then time each against a copy of the same bytes and against what it replaces.

    python scripts/bench_kernels.py --json kernels.json
    python scripts/bench_kernels.py --designs --only norm_rope

Needs one GPU. All that share a line take turns in one process; times are medians, of events. FlashInfer is compared
with where it is installed. --designs also checks and times the designs that were tried (scripts/kernel_designs). GB/s
and % of copy count the rows read and written, not weights and tables.
"""

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from kernel_designs import norm_rope_designs, residual_norm_designs
from kernel_designs.compare import DesignSet
from kernel_designs.timing import Timing, time_alternating
from kernel_designs.workloads import (
    DIM,
    EPS,
    HEAD_DIM,
    Projected,
    Slots,
    Workload,
    copy_of,
    norm_rope_workload,
    norm_workload,
    place_workload,
    residual_workload,
)
from scripts.git_commit import commit_here
from usp.kernels import Kernels, kernels_for

RANKS = ((37_800, 4, 2), (18_900, 2, 4), (9_450, 1, 8))  # rows, heads a run and ranks, of 75,600 tokens
PACKAGES = ("torch", "triton", "flashinfer-python")
NORM_ROPE_POINTERS = ("q_ptr", "k_ptr", "q_weight_ptr", "k_weight_ptr", "cos_ptr", "sin_ptr", "q_to_ptr", "k_to_ptr")
RESIDUAL_NORM_POINTERS = ("x_ptr", "y_ptr", "gate_ptr", "scale_ptr", "shift_ptr", "sum_ptr", "h_ptr")
Record = dict[str, object]


def workloads(kernels: Kernels) -> Iterator[tuple[str, Callable[[], Workload]]]:
    for shape in RANKS:
        yield "norm_rope", lambda shape=shape: norm_rope_workload(kernels, *shape)
    yield "rms_norm", lambda: norm_workload(kernels, 75_600)
    for shape in RANKS:
        yield "place_heads", lambda shape=shape: place_workload(*shape)
    for num_rows in (75_600, 37_800, 9_450):
        for kind in ("gated, modulated", "added, affine", "norm alone"):
            yield "residual_norm", lambda rows=num_rows, kind=kind: residual_workload(kernels, rows, kind)


def measure(workload: Workload, repeats: int) -> list[Record]:
    """Records of ours, the copy and the others."""
    workload.check()
    variants = {"ours": workload.run, "copy": copy_of(workload.nbytes)} | workload.others
    timings = time_alternating(variants, nbytes=workload.nbytes, repeats=repeats)
    workload.check()
    ours = timings[0].median
    return [record(workload.name, timing, timings[1], timing.median / ours) for timing in timings]


def record(shape: str, timing: Timing, copy: Timing, ratio: float) -> Record:
    low, high = timing.spread
    return {
        "shape": shape,
        "name": timing.name,
        "us": timing.median,
        "us_p10": low,
        "us_p90": high,
        "gb_per_s": timing.gigabytes_per_second,
        "percent_of_copy": 100 * copy.median / timing.median,
        "ratio": ratio,
        "repeats": len(timing.samples),
    }


def norm_rope_designs_at(kernels: Kernels, num_rows: int, heads_each: int) -> DesignSet:
    given, slots = Projected.random(num_rows), Slots.empty(num_rows, heads_each)
    arguments = dict(zip(NORM_ROPE_POINTERS, (*given.arguments(), *slots.tables()), strict=True))

    def ours(_: object) -> None:
        kernels.norm_rope(*given.arguments(), eps=EPS, blocks=slots.blocks)

    package = {"package": ours}
    return DesignSet(
        f"norm_rope designs {num_rows:,}, runs of {heads_each * HEAD_DIM}",
        package | norm_rope_designs.DESIGNS | norm_rope_designs.WITHOUT,
        arguments,
        (slots.q, slots.k),
        nbytes=2 * 2 * num_rows * DIM * 2,
    )


def residual_norm_designs_at(kernels: Kernels, num_rows: int) -> DesignSet:
    x, y, total, h = (torch.randn(1, num_rows, DIM, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    shift, scale, gate = torch.randn(1, 6, DIM, device="cuda").chunk(6, dim=1)[:3]
    package = {"package": lambda _: kernels.residual_norm(x, y, gate, scale=scale, shift=shift, eps=EPS, out=total)}
    return DesignSet(
        f"residual_norm designs {num_rows:,}",
        package | residual_norm_designs.DESIGNS | residual_norm_designs.WITHOUT,
        dict(zip(RESIDUAL_NORM_POINTERS, (x, y, gate, scale, shift, total, h), strict=True)),
        (total, h),
        nbytes=4 * num_rows * DIM * 2,
    )


def measure_designs(designs: DesignSet, repeats: int) -> list[Record]:
    """Records with how many elements differ from the package's; a design that fails is reported and left out."""
    differing = designs.differing()
    runs = {name: lambda one=designs.designs[name]: one(designs.arguments) for name in differing}
    timings = time_alternating({"copy": copy_of(designs.nbytes)} | runs, nbytes=designs.nbytes, repeats=repeats)
    ours = timings[1].median
    records = [record(designs.name, timing, timings[0], timing.median / ours) for timing in timings]
    return [one | {"differing": differing.get(str(one["name"]), 0)} for one in records]


def attempt(make: Callable[[], list[Record]], failures: list[str]) -> list[Record]:
    """What does not work is reported at the end and does not stop the rest."""
    try:
        return make()
    except Exception as error:  # any: a kernel that does not compile here, memory, a missing compiler
        failures.append(f"{type(error).__name__}: {str(error)[-500:]}")
        return []
    finally:
        gc.collect()
        torch.cuda.empty_cache()


def versions() -> dict[str, str | None]:
    return {name: _version(name) for name in PACKAGES}


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def table(records: list[Record]) -> str:
    lines = [f"{'shape':54} {'':46} {'us':>8} {'p10':>8} {'p90':>8} {'GB/s':>6} {'% copy':>7} {'ratio':>6}  differing"]
    lines += [
        f"{one['shape']:54} {one['name']:46} {one['us']:8.1f} {one['us_p10']:8.1f} {one['us_p90']:8.1f} "
        f"{one['gb_per_s']:6.0f} {one['percent_of_copy']:7.1f} {one['ratio']:6.2f}  {one.get('differing', '')}"
        for one in records
    ]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    flags = _parser().parse_args(argv)
    torch.manual_seed(time.time_ns() % 2**31)
    kernels, failures, records = kernels_for(torch.device("cuda")), [], []
    for kind, make in workloads(kernels):
        if flags.only in (None, kind):
            records += attempt(lambda make=make: measure(make(), flags.repeats), failures)
    for kind, make in design_sets(kernels) if flags.designs else ():
        if flags.only in (None, kind):
            records += attempt(lambda make=make: measure_designs(make(), flags.repeats), failures)
    about = {"gpu": torch.cuda.get_device_name(), "versions": versions(), "commit": commit_here(), "command": sys.argv}
    if flags.json:
        flags.json.write_text(
            json.dumps(about | {"records": records, "failures": failures}, indent=1), encoding="utf-8"
        )
    print(json.dumps(about))
    print(table(records))
    print("\n".join(failures))
    return 1 if failures else 0


def design_sets(kernels: Kernels) -> Iterator[tuple[str, Callable[[], DesignSet]]]:
    for num_rows, heads_each, _ in RANKS:
        yield "norm_rope", lambda rows=num_rows, heads=heads_each: norm_rope_designs_at(kernels, rows, heads)
    for num_rows in (75_600, 9_450):
        yield "residual_norm", lambda rows=num_rows: residual_norm_designs_at(kernels, rows)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    kinds = ("norm_rope", "rms_norm", "place_heads", "residual_norm")
    parser.add_argument("--only", choices=kinds, help="one kernel instead of all")
    parser.add_argument("--designs", action="store_true", help="also the designs that were tried")
    parser.add_argument("--repeats", type=int, default=25, metavar="N", help="of each variant (default: 25)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="every record, GPU, versions, commit, command")
    return parser


if __name__ == "__main__":
    sys.exit(main())
