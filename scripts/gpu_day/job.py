"""One rank of a part: how ranks meet, which GPU is whose, and how long a thing takes that all of them do together.

Runs under torchrun; on GPUs, on one GPU that the ranks share, or on CPUs, where the exchange is `host`.
"""

import argparse
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from scripts.gpu_day.notes import Notes
from scripts.gpu_day.sizes import Sizes, sizes_of
from usp.attention import Attention, choose_attention, of_all_ranks
from usp.layout import MeshShape
from usp.mesh import Mesh
from usp.transport import Transport, choose_transport, mesh_of, proven

STALL_S = 60.0
HEAD_START_CYCLES = 20_000_000  # about 10 ms


@dataclass(frozen=True)
class Job:
    rank: int
    ranks: int
    device: torch.device
    mesh: Mesh
    transport: Transport
    notes: Notes
    sizes: Sizes
    flags: argparse.Namespace

    @property
    def has_gpu_each(self) -> bool:
        return self.transport.collectives == "nccl"

    def choose_attention(self, dtype: torch.dtype) -> Attention:
        """What --attention asks for, tried on all ranks; also makes the folder of --out."""
        self.flags.out.mkdir(parents=True, exist_ok=True)
        asked, size = self.flags.attention, self.sizes.head_dim
        chosen = choose_attention(asked, device=self.device, dtype=dtype, head_dim=size, gather=of_all_ranks)
        self.notes.remark(f"attention {chosen.backend.name}: {chosen.reason}")
        return chosen.backend

    def meet(self) -> None:
        """All ranks, with nothing left on their devices."""
        self.wait()
        dist.all_gather_object([None] * self.ranks, None)

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def slowest(self, value: float) -> float:
        """The largest of all ranks' values."""
        values: list[float] = [0.0] * self.ranks
        dist.all_gather_object(values, value)
        return max(values)

    def all_agree(self, is_met: bool) -> bool:
        return self.slowest(0.0 if is_met else 1.0) == 0.0

    def time_in_turns(
        self, runs: Mapping[str, Callable[[], object]], *, calls: int | None = None
    ) -> dict[str, list[float]]:
        """Milliseconds a call of each contender, one value a round: `calls` back to back on all ranks at once, of which
        the slowest rank counts."""
        found: dict[str, list[float]] = {name: [] for name in runs}
        time_calls = self._time_on_gpu if self.device.type == "cuda" else self._time_on_cpu
        for run in runs.values():
            run()
        for _ in range(self.sizes.rounds):
            for name, run in runs.items():
                self.meet()
                found[name].append(self.slowest(time_calls(run, calls or self.sizes.calls)))
        return found

    def _time_on_gpu(self, run: Callable[[], object], count: int) -> float:
        """By events. The host runs ahead while the device sleeps, and a call before the first one that is timed lets
        the ranks wait for each other."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in "se")
        torch.cuda._sleep(HEAD_START_CYCLES)
        run()
        start.record()
        for _ in range(count):
            run()
        end.record()
        self.wait()
        return start.elapsed_time(end) / count

    def _time_on_cpu(self, run: Callable[[], object], count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            run()
        return (time.perf_counter() - start) * 1e3 / count

    def note_times(self, found: Mapping[str, list[float]], *, prefix: str = "", **detail: object) -> dict[str, float]:
        """File medians and their spread; returns the medians."""
        medians = {name: median(samples) for name, samples in found.items()}
        for name, samples in found.items():
            spread = {"least": min(samples), "most": max(samples), "rounds": len(samples)}
            self.notes.measured(f"{prefix}{name}", medians[name], "ms", **spread, **detail)
        return medians


def attention_parser(doc: str | None) -> argparse.ArgumentParser:
    """For parts that attend, and that leave pictures and traces."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--out", type=Path, default=Path("outputs/day"))
    return parser


@contextmanager
def job(parser: argparse.ArgumentParser) -> Iterator[Job]:
    """This rank of the part, by `parser`'s flags and those that all parts have. Everything on one Ulysses axis."""
    parser.add_argument("--notes", type=Path, required=True, help="JSON lines are added here")
    parser.add_argument("--small", action="store_true", help="tiny sizes: does it run?")
    flags = parser.parse_args()
    device = _own_device()
    has_gpu_each = device.type == "cuda" and int(os.environ["LOCAL_WORLD_SIZE"]) <= torch.cuda.device_count()
    dist.init_process_group("cpu:gloo,cuda:nccl" if has_gpu_each else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    shape = MeshShape(1, ranks)
    transport = choose_transport("auto", shape=shape, device=device)
    mesh = mesh_of(transport, shape)
    transport = proven(transport, "auto", mesh=mesh, device=device)
    notes = Notes(flags.notes if rank == 0 else None)
    notes.remark(f"exchange {transport.name}: {transport.reason}", ranks=ranks, device=str(device))
    notes.check("the exchange shares memory", transport.name in ("ipc", "host"), transport=transport.reason)
    torch.manual_seed(rank)
    try:
        with torch.inference_mode():
            yield Job(rank, ranks, device, mesh, transport, notes, sizes_of(small=flags.small), flags)
    except BaseException:
        # Not destroyed: that is collective over NCCL, and the others wait elsewhere. torchrun ends them now.
        traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
    dist.destroy_process_group()


def _own_device() -> torch.device:
    if not torch.cuda.is_available():
        torch.set_num_threads(1)
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device
