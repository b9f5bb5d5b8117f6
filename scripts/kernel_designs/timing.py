"""Times of variants that take turns on one stream, by events: no variant has the clocks or the caches to itself."""

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

HEAD_START_CYCLES = 20_000_000  # the host enqueues while the GPU sleeps, so that launches never wait for it


@dataclass(frozen=True)
class Timing:
    """Microseconds of every repeat, and the bytes that one repeat has to move."""

    name: str
    nbytes: int
    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def spread(self) -> tuple[float, float]:
        """Tenth and ninetieth percentile."""
        tenths = statistics.quantiles(self.samples, n=10)
        return tenths[0], tenths[-1]

    @property
    def gigabytes_per_second(self) -> float:
        return self.nbytes / self.median / 1e3


def time_alternating(
    variants: Mapping[str, Callable[[], object]], *, nbytes: int, repeats: int = 25, warmup: int = 3
) -> list[Timing]:
    """Each variant `repeats` times, in turns, every turn beginning with another one, so that none always follows the
    same. The bytes read and written are those of every variant."""
    for _ in range(warmup):
        for run in variants.values():
            run()
    torch.cuda.synchronize()
    torch.cuda._sleep(HEAD_START_CYCLES)
    events = {name: [] for name in variants}
    names = list(variants)
    for turn in range(repeats):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            variants[name]()
            end.record()
            events[name].append((begin, end))
    torch.cuda.synchronize()
    return [
        Timing(name, nbytes, tuple(begin.elapsed_time(end) * 1e3 for begin, end in pairs))
        for name, pairs in events.items()
    ]
