"""Copies and flags across processes: a flag that has arrived means that every byte before it has.

The litmus: in each round every rank copies a random piece into every peer's slot and raises a flag behind it. The peer
awaits the flag, compares every byte, and raises a flag back. Slots and sources alternate between two, and every byte
changes from round to round, so a copy that is late, early, short or misplaced is seen.
"""

import random
import time
from functools import partial
from typing import Any

import pytest
import torch

from tests.multi_gpu.ranks import RankEnv
from usp.ipc.arena import Arena
from usp.ipc.cuda import CudaProvider
from usp.ipc.cuda_engine import CudaEngine
from usp.ipc.engine import Block
from usp.ipc.host import HostProvider
from usp.ipc.host_engine import HostEngine
from usp.ipc.rendezvous import GroupRendezvous

NO_GPU = not torch.cuda.is_available()
MEMORY = ["host", pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(NO_GPU, reason="needs a GPU")])]
LINE = 64  # bytes of a flag
PAGE = 4096
SLOT = 64 << 10
WIDTHS = [1, 64, 1000, 1024, 4096]


def _make(memory: str, nbytes: int, **options: Any) -> tuple[Arena, HostEngine | CudaEngine]:
    provider = CudaProvider() if memory == "cuda" else HostProvider()
    engine = CudaEngine() if memory == "cuda" else HostEngine(**options)
    return Arena(nbytes, rendezvous=GroupRendezvous(), provider=provider, layout="test"), engine


def _close(arena: Arena, engine: HostEngine | CudaEngine) -> None:
    engine.synchronize()
    engine.close()
    arena.close()


class Litmus:
    """One rank's side. Flags of rank p's page: full[writer] then back[writer]; then slots [2][writer]."""

    def __init__(self, env: RankEnv, memory: str, seed: int, *, delays: bool) -> None:
        self.rank, self.world = env.rank, env.world
        self.peers = [rank for rank in range(env.world) if rank != env.rank]
        self.shapes = random.Random(seed)  # the same on every rank
        self.pauses = random.Random(seed + env.rank)
        options = {"delay": self.pause} if delays else {}
        self.arena, self.engine = _make(memory, PAGE + 2 * env.world * SLOT, **options)
        device = "cuda" if memory == "cuda" else "cpu"
        self.sources = torch.zeros((2, SLOT), dtype=torch.uint8, device=device)
        self.base = torch.arange(SLOT, dtype=torch.int32, device=device) * 7

    def pause(self, stream: str) -> None:
        time.sleep(self.pauses.choice([0, 0, 0, 1e-4, 1e-3]))

    def full(self, owner: int, writer: int) -> int:
        return self.arena.base[owner] + writer * LINE

    def back(self, owner: int, writer: int) -> int:
        return self.arena.base[owner] + (self.world + writer) * LINE

    def slot(self, number: int, writer: int) -> int:
        return PAGE + ((number % 2) * self.world + writer) * SLOT

    def pattern(self, number: int, writer: int) -> torch.Tensor:
        return (self.base + (number * 37 + writer * 91)).to(torch.uint8)

    def round(self, number: int) -> None:
        width = self.shapes.choice(WIDTHS)
        height = self.shapes.randint(1, SLOT // (2 * width) if width > 1 else 64)
        source, engine = self.sources[number % 2], self.engine
        source.copy_(self.pattern(number, self.rank))
        engine.record("main", "filled")
        engine.await_event("copy", "filled")
        for peer in self.peers:
            target = Block(self.arena.base[peer] + self.slot(number, self.rank), 2 * width, width, height)
            engine.copy("copy", target, Block(source.data_ptr(), width, width, height))
            engine.signal("copy", self.full(peer, self.rank), number)  # awaited by the peer's next loop
        for peer in self.peers:
            engine.wait("main", self.full(self.rank, peer), number)
            self.check(number, peer, width, height)
            engine.signal("main", self.back(peer, self.rank), number)  # awaited by the peer below
        for peer in self.peers:  # the sources and slots of the round before may be written again
            engine.wait("main", self.back(self.rank, peer), number - 1)

    def check(self, number: int, peer: int, width: int, height: int) -> None:
        got = self.arena.view(self.rank, self.slot(number, peer), (height, width), torch.uint8, (2 * width, 1))
        expected = self.pattern(number, peer)[: width * height].view(height, width)
        assert torch.equal(got, expected), f"round {number} from rank {peer}: {width} x {height}"


def check_litmus(env: RankEnv, memory: str, rounds: int, seed: int, delays: bool) -> None:
    litmus = Litmus(env, memory, seed, delays=delays)
    for number in range(1, rounds + 1):
        litmus.round(number)
    _close(litmus.arena, litmus.engine)


@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize(("world", "rounds", "delays"), [(2, 700, False), (3, 250, False), (4, 50, True)])
def test_a_flag_that_arrived_means_that_every_byte_before_it_has(
    ranks, memory: str, world: int, rounds: int, delays: bool
) -> None:
    ranks(world).run(check_litmus, memory, rounds, random.randrange(2**31), delays)


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("world", [2, 3])
def test_ten_thousand_rounds_arrive_whole(ranks, memory: str, world: int) -> None:
    ranks(world).run(check_litmus, memory, 10_000, random.randrange(2**31), False, limit_s=280)


def check_numbers_wrap(env: RankEnv, memory: str) -> None:
    """Calls are counted in 32 bits. Climbs to the border in steps that the cyclic compare allows, then crosses it."""
    arena, engine = _make(memory, PAGE)
    for number in [2**30, 2**31, 3 * 2**30, *range(2**32 - 5, 2**32 + 5)]:
        engine.signal("copy", arena.base[1 - env.rank], number)
        engine.wait("main", arena.base[env.rank], number)
        engine.synchronize()
    _close(arena, engine)


@pytest.mark.parametrize("memory", MEMORY)
def test_flags_go_on_counting_past_the_wrap(ranks, memory: str) -> None:
    ranks(2).run(check_numbers_wrap, memory)


def check_wait_sleeps(env: RankEnv) -> float:
    arena, engine = _make("host", PAGE)
    GroupRendezvous().barrier()
    cpu = time.process_time()
    if env.rank == 0:
        engine.launch("copy", partial(time.sleep, 1.0))
        engine.signal("copy", arena.base[1], 1)
    else:
        engine.wait("main", arena.base[1], 1)
    used = time.process_time() - cpu
    _close(arena, engine)
    return used


def test_a_wait_for_another_process_takes_no_processor_time(ranks) -> None:
    assert max(ranks(2).run(check_wait_sleeps)) < 0.1


def check_poison(env: RankEnv, memory: str, rounds: int) -> list[bool]:
    """Both ranks are parked, and the signals that both have queued set the peer's poisoned flag back."""
    released = []
    for _ in range(rounds):
        arena, engine = _make(memory, PAGE)
        own, peer = arena.base[env.rank], arena.base[1 - env.rank]
        if memory == "host":
            engine.launch("copy", partial(time.sleep, random.random() * 5e-3))
        engine.wait("copy", own + LINE, 1)  # poisoned as well
        engine.signal("copy", peer, 6)  # lower than what the peer awaits, and maybe after its first poison
        engine.wait("copy", own, 7)
        engine.wait("aux", own, 7)
        released.append(engine.release([own + LINE, own], 7 + 2**30))
        _close(arena, engine)
    return released


@pytest.mark.parametrize("memory", MEMORY)
def test_poison_is_repeated_until_nothing_is_parked(ranks, memory: str) -> None:
    assert all(all(released) for released in ranks(2).run(check_poison, memory, 30))
