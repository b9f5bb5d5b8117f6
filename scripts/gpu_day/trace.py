"""What torch's profiler saw of attention calls on all ranks: hidden shares, exposed time, a picture.

Copies are told from kernels by their stream, so a GPU is needed; on CPUs nothing is recorded, and that is remarked.
"""

from collections.abc import Callable
from pathlib import Path

import torch

from scripts.gpu_day.job import Job
from usp.ranges import record_functions, step_name
from usp.recorded_call import Call
from usp.trace_calls import calls_of
from usp.trace_draw import draw_call
from usp.trace_read import read
from usp.trace_report import sums, text

RANGES = record_functions()  # what an exchange is given before its first call, to be found in a trace
RUNS, STEP = 3, 1


def trace(job: Job, run: Callable[[], object], name: str, folder: Path, *, picture: bool = False) -> None:
    """File what `run`, whose exchange has RANGES and which has run before, shows in a few turns. Collective."""
    if job.device.type != "cuda":
        job.notes.remark("traces are of copies between GPUs")
        return
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    job.meet()
    with torch.profiler.profile(activities=activities) as profiler:
        with RANGES.range(step_name(STEP)):
            for _ in range(RUNS):
                run()
        job.wait()
    profiler.export_chrome_trace(str(folder / f"trace{job.rank}.json"))
    job.meet()
    if job.rank == 0:
        try:
            _report(job, name, [folder / f"trace{rank}.json" for rank in range(job.ranks)], folder if picture else None)
        except Exception as error:  # a trace that cannot be read shall not take the times with it
            job.notes.remark(f"{name}: the trace cannot be read: {type(error).__name__}: {error}")
    job.meet()


def _report(job: Job, name: str, files: list[Path], folder: Path | None) -> None:
    calls: list[Call] = calls_of([one for file in files for one in read(file)])
    print(name, text(calls), sep="\n", flush=True)
    shares = [one.overlap.hidden_share or 0.0 for one in sums(calls)]
    exposed = [one.overlap.exposed / one.num_calls / 1e3 for one in sums(calls)]
    rates = [one.gbps for one in sums(calls)]
    job.notes.measured(f"{name}, hidden share", min(shares), "", of_ranks=shares, gigabytes_per_second=rates)
    job.notes.measured(f"{name}, exposed in the trace", max(exposed), "ms", of_ranks=exposed)
    if folder is not None:
        draw_call(calls, folder / "trace.png")
