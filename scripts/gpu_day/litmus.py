"""Does a flag that follows a copy mean that the copy is there? Every byte of every round is looked at, under load.

    torchrun --nproc-per-node 2 scripts/gpu_day/litmus.py --notes notes.jsonl

Each rank fills a buffer with a pattern of the round, copies it into the next rank's memory, and raises a flag there,
all on its copy stream; the next rank waits for the flag on its main stream, compares, and answers with a flag of its
own, which lets the next copy go. Beside it another stream keeps the link and the memory busy. The copies have 4 bytes
to 16 MiB. Then the flag is raised before the copy, which must be noticed: a comparison that cannot fail shows nothing.
And one round in ten is repeated with flags that are themselves copied, from a word of the rank's own: what the exchange
would do if the usual way did not hold on some link.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from scripts.gpu_day.job import Job, job
from usp.ipc.arena import Arena
from usp.ipc.engine import AUX, COPY, MAIN, Block
from usp.ipc.rendezvous import GroupRendezvous
from usp.transport import _cuda, _host

LINE = 64  # bytes of a flag
ARRIVED, ANSWERED, OWN_ARRIVED, OWN_ANSWERED, SLOT = (line * LINE for line in range(5))
LOAD_BYTES = 32 << 20
STEP = 40503  # what the pattern moves on by, round by round
AHEAD = 256  # rounds that the host may be ahead of the device
PLANTED_ROUNDS = 200
COPIED_SHARE = 10  # one round in so many is repeated with flags that are copied


class Litmus:
    """Memory, streams and the two ends of one rank: it writes to the next rank and is written to by the one before."""

    def __init__(self, job: Job, arena: Arena, engine: Any, num_words: int, *, are_flags_copied: bool) -> None:
        self.engine, self.are_flags_copied = engine, are_flags_copied
        self.rank, self.to, self.source_rank = job.rank, (job.rank + 1) % job.ranks, (job.rank - 1) % job.ranks
        self.base = arena.base
        self.pattern = torch.arange(num_words, dtype=torch.int32, device=job.device)
        self.sent = torch.empty_like(self.pattern)
        self.slot = arena.view(job.rank, SLOT, (num_words,), torch.int32)
        self.num_wrong = torch.zeros((), dtype=torch.int64, device=job.device)
        width = 4 * num_words
        target = Block(arena.base[self.to] + SLOT, width, width, 1)
        self.copy = engine.prepare_copy(target, Block(self.sent.data_ptr(), width, width, 1))
        self.load = self._load(job, arena)

    def round(self, number: int, *, planted: bool = False) -> None:
        self.engine.wait(COPY, self.base[self.rank] + ANSWERED, number - 1)
        self.engine.launch(COPY, lambda: torch.add(self.pattern, number * STEP, out=self.sent))
        steps = [
            lambda: self.engine.enqueue(COPY, self.copy),
            lambda: self._tell(COPY, self.base[self.to] + ARRIVED, number, own=OWN_ARRIVED),
        ]
        for step in reversed(steps) if planted else steps:
            step()
        self.load()
        self.engine.wait(MAIN, self.base[self.rank] + ARRIVED, number)
        self.engine.launch(MAIN, lambda: self._compare(number))
        self._tell(MAIN, self.base[self.source_rank] + ANSWERED, number, own=OWN_ANSWERED)

    def _tell(self, stream: str, flag: int, number: int, *, own: int) -> None:
        """Raise a peer's flag, by a stream write or by a copy of an own word."""
        if not self.are_flags_copied:
            self.engine.signal(stream, flag, number)
            return
        word = self.base[self.rank] + own
        self.engine.signal(stream, word, number)
        self.engine.copy(stream, Block(flag, 4, 4, 1), Block(word, 4, 4, 1))

    def _compare(self, number: int) -> None:
        self.num_wrong += (self.slot != self.pattern + number * STEP).sum()

    def _load(self, job: Job, arena: Arena) -> Callable[[], None]:
        """On a GPU, a large copy to the same peer in every other round, on a stream of its own."""
        if job.device.type != "cuda":
            return lambda: None
        offset = arena.nbytes[self.to] - LOAD_BYTES
        source = torch.empty(LOAD_BYTES, dtype=torch.uint8, device=job.device)
        target = Block(arena.base[self.to] + offset, LOAD_BYTES, LOAD_BYTES, 1)
        copy = self.engine.prepare_copy(target, Block(source.data_ptr(), LOAD_BYTES, LOAD_BYTES, 1))
        turns = iter(range(1 << 60))

        def load(keeps: torch.Tensor = source) -> None:
            if next(turns) % 2 == 0:
                self.engine.enqueue(AUX, copy)

        return load


def rounds_of(job: Job) -> dict[int, int]:
    """Rounds by the number of words, in all as many as the sizes ask for: fewer of the large ones."""
    sizes, total = job.sizes.litmus_words, job.sizes.litmus_rounds
    weights = [1 / (1 + words / 2**16) for words in sizes]
    rounds = {words: int(total * weight / sum(weights)) for words, weight in zip(sizes, weights, strict=True)}
    rounds[sizes[0]] += total - sum(rounds.values())
    return rounds


def play(job: Job, num_words: int, num_rounds: int, *, planted: bool = False, are_flags_copied: bool = False) -> int:
    """How many words were wrong on all ranks."""
    provider, make_engine = _cuda(job.device) if job.device.type == "cuda" else _host()
    meet, engine = GroupRendezvous(job.mesh.ulysses.group), make_engine()
    nbytes = SLOT + 4 * num_words + (LOAD_BYTES if job.device.type == "cuda" else 0) + LINE
    with Arena(nbytes, rendezvous=meet, provider=provider, layout="litmus") as arena:
        litmus = Litmus(job, arena, engine, num_words, are_flags_copied=are_flags_copied)
        engine.synchronize()
        job.meet()
        for number in range(1, num_rounds + 1):
            litmus.round(number, planted=planted)
            if number % AHEAD == 0:
                engine.synchronize()
        engine.synchronize()
        wrong = int(litmus.num_wrong)
        del litmus
        meet.barrier()
    engine.close()
    return sum(meet.gather(wrong))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    with job(parser) as here:
        found = {}
        for words, rounds in rounds_of(here).items():
            found[words] = rounds, play(here, words, rounds)
        for words, rounds in rounds_of(here).items():
            wrong = play(here, words, rounds // COPIED_SHARE, are_flags_copied=True)
            here.notes.remark(f"flags that are copied, after {4 * words:,} bytes: {wrong} wrong words", wrong=wrong)
        for words, (rounds, wrong) in found.items():
            what = f"a flag after a copy of {4 * words:,} bytes"
            here.notes.check(what, wrong == 0, rounds=rounds, wrong_words=wrong)
        words = here.sizes.litmus_words[-1]
        wrong = play(here, words, min(PLANTED_ROUNDS, here.sizes.litmus_rounds), planted=True)
        what = f"a flag before a copy of {4 * words:,} bytes is noticed"
        if here.device.type == "cuda":
            here.notes.check(what, wrong > 0, wrong_words=wrong)
        else:
            here.notes.remark(f"{what}: {wrong} wrong words", wrong_words=wrong)


if __name__ == "__main__":
    main()
