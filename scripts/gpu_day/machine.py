"""What the machine is: GPUs and links, and what its copy engines move between two GPUs, one way and both ways.

    python scripts/gpu_day/machine.py --notes notes.jsonl

One process on all GPUs. The copies are those of the exchange (usp/ipc/cuda_copy.py): flat, and 2-D with rows as wide as
a few heads of one token.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from scripts.gpu_day.notes import Notes
from usp.ipc.engine import COPY, Block

FLAT_BYTES = 256 << 20
ROW_BYTES = (256, 512, 1024, 10_240)
PAGE = 4096
REPEATS, IN_A_ROW = 10, 4
HEAD_START_CYCLES = 2_000_000  # about 1 ms
Copy = Callable[[], None]


class Gpu:
    """A GPU with a copy stream and two buffers."""

    def __init__(self, index: int) -> None:
        from usp.ipc.cuda_engine import CudaEngine

        self.device = torch.device("cuda", index)
        with torch.cuda.device(self.device):
            self.engine = CudaEngine(self.device)
            self.source, self.target = (
                torch.zeros(2 * FLAT_BYTES, dtype=torch.uint8, device=self.device) for _ in "st"
            )


def about(notes: Notes) -> int:
    """Tell what is there; returns the number of GPUs."""
    smi = _said("nvidia-smi", "--query-gpu=index,name,memory.total,driver_version,pcie.link.gen.max", "--format=csv")
    links = _said("nvidia-smi", "topo", "-m")
    count = torch.cuda.device_count()
    versions = {"torch": torch.__version__, "cuda": torch.version.cuda, "nccl": _nccl_version()}
    names = [torch.cuda.get_device_name(index) for index in range(count)]
    chosen = {name: value for name, value in os.environ.items() if name.startswith(("NCCL_", "TORCH_SYMM", "NVSHMEM_"))}
    notes.remark(f"{count} GPUs: {', '.join(sorted(set(names))) or 'none'}", names=names, versions=versions)
    notes.remark("environment, left as it was", **chosen)
    notes.remark("nvidia-smi", lines=smi)
    notes.remark("links", lines=links)
    pairs = [(one, other) for one in range(count) for other in range(count) if one != other]
    for one, other in pairs:
        notes.check(f"GPU {one} may reach GPU {other}", torch.cuda.can_device_access_peer(one, other))
    return count


def _said(*command: str) -> list[str]:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return [f"{command[0]}: {error}"]
    return (done.stdout or done.stderr).splitlines()


def _nccl_version() -> str:
    return ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else "none"


def flat(one: Gpu, other: Gpu, *, lane: int = 0, nbytes: int = FLAT_BYTES) -> Copy:
    """A copy from one GPU to another without gaps, on the first one's copy stream. Lanes do not overlap."""
    return _copy(one, other, width=nbytes, height=1, pitch=nbytes, start=lane * nbytes)


def rows(one: Gpu, other: Gpu, width: int) -> Copy:
    """Rows that lie dense here and three times as far apart there, as a head group in a fused product."""
    return _copy(one, other, width=width, height=FLAT_BYTES // (3 * width), pitch=3 * width, start=0)


def _copy(one: Gpu, other: Gpu, *, width: int, height: int, pitch: int, start: int) -> Copy:
    target = Block(other.target.data_ptr() + start, pitch, width, height)
    prepared = one.engine.prepare_copy(target, Block(one.source.data_ptr() + start, width, width, height))

    def issue() -> None:
        with torch.cuda.device(one.device):
            one.engine.enqueue(COPY, prepared)

    return issue


def seconds(copies: list[tuple[Gpu, Copy]]) -> float:
    """Median time of copies issued together, until the last is done. A sleep before them lets the host run ahead."""
    found = []
    for _ in range(REPEATS):
        _synchronize()
        for gpu in {id(gpu): gpu for gpu, _ in copies}.values():
            _sleep(gpu)
        starts = [_mark(gpu) for gpu, _ in copies]
        for _, copy in copies:
            copy()
        ends = [_mark(gpu) for gpu, _ in copies]
        _synchronize()
        found.append(max(start.elapsed_time(end) for start, end in zip(starts, ends, strict=True)) / 1e3)
    return median(found)


def _sleep(gpu: Gpu) -> None:
    with torch.cuda.device(gpu.device), torch.cuda.stream(gpu.engine.streams[COPY]):
        torch.cuda._sleep(HEAD_START_CYCLES)


def _mark(gpu: Gpu) -> Any:
    with torch.cuda.device(gpu.device):
        event = torch.cuda.Event(enable_timing=True)
        event.record(gpu.engine.streams[COPY])
    return event


def _synchronize() -> None:
    for index in range(torch.cuda.device_count()):
        torch.cuda.synchronize(index)


def check_copies(notes: Notes, gpus: list[Gpu]) -> None:
    """What arrives is what was sent, flat and in rows; this also opens the way between the GPUs."""
    for one in gpus:
        for other in (gpu for gpu in gpus if gpu is not one):
            other.target.copy_(one.source)  # torch enables access to a peer's memory
            one.source.random_(0, 255)
            other.target.fill_(255)
            _synchronize()
            for copy in (flat(one, other), rows(one, other, 512)):
                copy()
                _synchronize()
            count = FLAT_BYTES // (3 * 512)
            sent = one.source[: 512 * count].view(count, 512)
            found = other.target[: 3 * 512 * count].view(count, 3, 512)
            is_right = torch.equal(found[:, 0].cpu(), sent.cpu())
            untouched = torch.equal(found[-1, 1:].cpu().flatten(), one.source[3 * 512 * (count - 1) :][512:1536].cpu())
            notes.check(f"copies from {one.device} to {other.device}", is_right and untouched)


def measure(notes: Notes, gpus: list[Gpu]) -> None:
    one, other, peers = gpus[0], gpus[1], gpus[1:]
    share = FLAT_BYTES // len(peers) // PAGE * PAGE

    def rate(name: str, nbytes: int, copies: list[tuple[Gpu, Copy]]) -> None:
        """Of what each GPU sends, a few times over, so that a start in turns does not count."""
        notes.measured(f"copy engine, {name}", IN_A_ROW * nbytes / 1e9 / seconds(IN_A_ROW * copies), "GB/s")

    rate("one way", FLAT_BYTES, [(one, flat(one, other))])
    rate("both ways, each", FLAT_BYTES, [(one, flat(one, other)), (other, flat(other, one, lane=1))])
    for width in ROW_BYTES:
        rate(f"rows of {width:,} bytes", FLAT_BYTES // (3 * width) * width, [(one, rows(one, other, width))])
    to_all = [(one, flat(one, peer, nbytes=share)) for peer in peers]
    rate(f"{len(peers)} peers one after another", share * len(peers), to_all)
    pairs = [(gpu, peer, lane) for lane, gpu in enumerate(gpus) for peer in gpus if peer is not gpu]
    everyone = [(gpu, flat(gpu, peer, lane=lane, nbytes=share)) for gpu, peer, lane in pairs]
    rate("all to all at once, each", share * len(peers), everyone)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--notes", type=Path, required=True)
    parser.add_argument("--small", action="store_true", help="taken, but what is there is what is looked at")
    flags = parser.parse_args()
    notes = Notes(flags.notes)
    if about(notes) < 2:
        notes.remark("fewer than two GPUs: nothing to copy between")
        return
    gpus = [Gpu(index) for index in range(torch.cuda.device_count())]
    check_copies(notes, gpus)
    measure(notes, gpus)


if __name__ == "__main__":
    main()
