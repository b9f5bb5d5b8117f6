"""The arena over real processes: who sees whose bytes, how set-up fails, and what is left afterwards (D22, D24)."""

import gc
import os
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.multi_gpu.ranks import RankEnv
from usp.ipc.arena import Arena
from usp.ipc.cuda import CudaProvider
from usp.ipc.errors import SetupError
from usp.ipc.handle import Handle
from usp.ipc.host import HostProvider
from usp.ipc.provider import Provider, Segment
from usp.ipc.rendezvous import GroupRendezvous, agreed

NO_GPU = not torch.cuda.is_available()
MEMORY = ["host", pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(NO_GPU, reason="needs a GPU")])]


def _arena(nbytes: int, memory: str | Provider = "host", **options: Any) -> Arena:
    options = {"layout": "test", **options}
    if isinstance(memory, str):
        memory = CudaProvider() if memory == "cuda" else HostProvider()
    return Arena(nbytes, rendezvous=GroupRendezvous(), provider=memory, **options)


def _meet() -> None:
    """All ranks are here, and what they asked their GPUs to do is done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    GroupRendezvous().barrier()


def _pattern(writer: int, owner: int, count: int, seed: int) -> torch.Tensor:
    return (torch.arange(count) * 31 + writer * 1009 + owner * 10007 + seed).to(torch.int32)


def check_everybody_writes_everywhere(env: RankEnv, memory: str, seed: int) -> None:
    """Rank w writes its column of rank o's memory; every rank then reads all of everybody's."""
    counts = [257 + 64 * owner for owner in range(env.world)]
    with _arena(counts[env.rank] * env.world * 4, memory) as arena:
        assert arena.nbytes == tuple(count * env.world * 4 for count in counts)
        for owner, count in enumerate(counts):
            assert not arena.view(owner, 0, (count, env.world), torch.int32).any(), "memory is zeroed"
        _meet()
        for owner, count in enumerate(counts):
            column = arena.view(owner, env.rank * 4, (count,), torch.int32, strides=(env.world,))
            column.copy_(_pattern(env.rank, owner, count, seed))
        _meet()
        for owner, count in enumerate(counts):
            seen = arena.view(owner, 0, (count, env.world), torch.int32)
            for writer in range(env.world):
                assert torch.equal(seen[:, writer].cpu(), _pattern(writer, owner, count, seed)), f"{writer=} {owner=}"
        _meet()
        del seen, column


@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("world", [2, 3, 4])
def test_every_rank_reads_what_every_rank_wrote(ranks, memory: str, world: int) -> None:
    ranks(world).run(check_everybody_writes_everywhere, memory, int(torch.randint(1000, (1,))))


def check_own_and_peer_views_are_one_memory(env: RankEnv, memory: str) -> bool:
    with _arena(64, memory) as arena:
        own = arena.view(env.rank, 8, (3,), torch.bfloat16)
        own.fill_(env.rank + 1.5)
        _meet()
        seen = [float(arena.view(rank, 8, (3,), torch.bfloat16)[2]) for rank in range(env.world)]
        _meet()
        return own.data_ptr() == arena.base[env.rank] + 8 and seen == [rank + 1.5 for rank in range(env.world)]


@pytest.mark.parametrize("memory", MEMORY)
def test_a_view_is_the_memory_itself(ranks, memory: str) -> None:
    assert ranks(2).run(check_own_and_peer_views_are_one_memory, memory) == [True, True]


def check_views_stay_inside(env: RankEnv) -> list[str]:
    messages = []
    with _arena(64 * (env.rank + 1)) as arena:
        for rank, offset, shape, strides in [(0, 0, (17,), None), (0, 2, (1,), None), (1, -4, (1,), None)]:
            with pytest.raises(ValueError, match="does not fit") as error:
                arena.view(rank, offset, shape, torch.float32, strides)
            messages.append(str(error.value))
        with pytest.raises(ValueError, match="to 132"):
            arena.view(1, 0, (2, 2), torch.float32, (31, 1))
        assert arena.view(1, 0, (2, 2), torch.float32, (30, 1)).shape == (2, 2)
        assert arena.view(0, 64, (0, 9), torch.float32).numel() == 0
    return messages


def test_a_view_outside_its_memory_is_refused_with_the_numbers(ranks) -> None:
    message = ranks(2).run(check_views_stay_inside)[0][0]
    assert message.startswith("torch.float32 (17,) from byte 0 to 68 does not fit the 64 bytes of rank 0")


class Refusing(HostProvider):
    """Fails one step on one rank, as a GPU that cannot be reached does."""

    def __init__(self, step: str) -> None:
        self.step = step

    def allocate(self, nbytes: int) -> Segment:
        if self.step == "allocate":
            raise MemoryError(f"no {nbytes} bytes left")
        return super().allocate(nbytes)

    def open(self, handle: Handle) -> Segment:
        if self.step == "open":
            raise OSError("peer access is not supported")
        return super().open(handle)


def check_refusal(env: RankEnv, step: str, where: int) -> str:
    before = _descriptors()
    provider = Refusing(step if env.rank == where else "none")
    with pytest.raises(SetupError) as error:
        _arena(4096, provider)
    assert _descriptors() == before
    with _arena(4096) as arena:  # and the group is as good as before
        assert len(arena.base) == env.world
    return str(error.value)


@pytest.mark.parametrize(
    ("step", "reason"),
    [("allocate", "MemoryError: no 4096 bytes left"), ("open", "OSError: peer access is not supported")],
)
def test_a_step_that_fails_on_one_rank_raises_the_same_words_on_all(ranks, step: str, reason: str) -> None:
    """D24: what one rank cannot do, all decide together."""
    where = int(torch.randint(3, (1,)))
    assert ranks(3).run(check_refusal, step, where) == [f"rank {where}: {reason}"] * 3


def check_agreed(env: RankEnv) -> tuple[int, str]:
    def step() -> int:
        if env.rank in (1, 2):
            raise OSError(f"broken on {env.rank}")
        return env.rank

    with pytest.raises(SetupError) as error:
        agreed(GroupRendezvous(), step)
    return agreed(GroupRendezvous(), lambda: env.rank), str(error.value)


def test_agreed_names_the_first_rank_that_failed_and_how_many_more(ranks) -> None:
    answers = ranks(3).run(check_agreed)
    assert answers == [(rank, "rank 1 (and 1 more): OSError: broken on 1") for rank in range(3)]


def check_too_large(env: RankEnv) -> str:
    before = _descriptors()
    with pytest.raises(SetupError) as error:
        _arena(1 << 60 if env.rank == 1 else 4096)
    assert _descriptors() == before
    return str(error.value)


def test_memory_that_cannot_be_had_is_an_error_at_set_up_with_its_size(ranks) -> None:
    first, second = ranks(2).run(check_too_large)
    assert first == second and first.startswith(f"rank 1: {1 << 60} bytes of host memory for the exchange, but ")


class Elsewhere(HostProvider):
    """Stands for other memory than the ranks agreed on."""

    name = "cuda"


def check_disagreement(env: RankEnv, field: str) -> str:
    odd = env.rank == 1
    provider = Elsewhere() if odd and field == "provider" else HostProvider()
    options = {"layout": {"layout": f"plan {odd}"}, "epoch": {"epoch": int(odd)}}.get(field, {})
    with pytest.raises(SetupError) as error:
        _arena(64, provider, **options)
    return str(error.value)


@pytest.mark.parametrize("field", ["provider", "layout", "epoch"])
def test_ranks_that_mean_different_arenas_are_refused_on_every_rank(ranks, field: str) -> None:
    first, second = ranks(2).run(check_disagreement, field)
    assert first == second
    assert "ranks 0" in first and "ranks 1" in first and "2 different" in first


def check_stale_descriptor(env: RankEnv) -> str:
    provider = HostProvider()
    segment = provider.allocate(4096)
    pid, fd, inode = provider.export(segment)
    handle = Handle("host", 4096, 0, "", "", "", "", (pid, fd, inode))
    provider.shut(provider.open(handle))
    with pytest.raises(SetupError, match="not the arena of 4096 bytes") as error:
        provider.open(replace(handle, payload=(pid, fd, inode + 1)))
    provider.free(segment)
    return str(error.value)


def test_a_descriptor_that_now_means_another_file_is_refused(ranks) -> None:
    ranks(2).run(check_stale_descriptor)


def check_cycles(env: RankEnv, count: int) -> tuple[list[int], list[int]]:
    descriptors, memory = [], []
    for cycle in range(count + 5):
        arena = _arena(1 << 20)
        arena.view((env.rank + 1) % env.world, 0, (1 << 20,), torch.uint8).fill_(cycle)
        arena.close()
        arena.close()
        if cycle in (4, count + 4):
            gc.collect()
            descriptors.append(_descriptors())
            memory.append(_mapped_bytes())
    return descriptors, memory


def test_fifty_arenas_leave_no_descriptor_no_mapping_and_no_file(ranks) -> None:
    """D22: nothing with a name is ever made."""
    files = set(os.listdir("/dev/shm"))
    for descriptors, memory in ranks(2).run(check_cycles, 50):
        assert descriptors[0] == descriptors[1]
        assert memory[0] == memory[1] == 0
    assert {name for name in set(os.listdir("/dev/shm")) - files if "usp" in name} == set()


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def _mapped_bytes() -> int:
    """Of arenas alone."""
    lines = [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:usp" in line]
    spans = [line.split()[0].split("-") for line in lines]
    return sum(int(end, 16) - int(start, 16) for start, end in spans)


def check_cuda_cycles(env: RankEnv, count: int) -> int:
    free = []
    for cycle in range(count + 5):
        with _arena(32 << 20, "cuda") as arena:
            arena.view((env.rank + 1) % env.world, 0, (32 << 20,), torch.uint8).fill_(cycle)
            _meet()
        _meet()
        if cycle in (4, count + 4):
            free.append(torch.cuda.mem_get_info()[0])
            _meet()
    return free[0] - free[1]


@pytest.mark.gpu
@pytest.mark.skipif(NO_GPU, reason="needs a GPU")
def test_fifty_cuda_arenas_leave_the_gpu_as_it_was(ranks) -> None:
    assert max(ranks(2).run(check_cuda_cycles, 50)) < 32 << 20


def check_abandon(env: RankEnv) -> int:
    arena = _arena(4096)
    if env.rank == 0:
        arena.abandon()  # waits for nobody
        arena.close()
    _meet()
    if env.rank == 1:  # still whole for those who have it
        arena.view(0, 0, (4096,), torch.uint8).fill_(1)
        arena.abandon()
    return _mapped_bytes()


def test_an_abandoned_arena_waits_for_nobody_and_leaves_nothing(ranks) -> None:
    assert ranks(2).run(check_abandon) == [0, 0]


def check_forgotten(env: RankEnv) -> list[str]:
    arena = _arena(64)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        del arena
        gc.collect()
    return [str(warning.message) for warning in caught if warning.category is ResourceWarning]


def test_an_arena_that_was_never_closed_warns(ranks) -> None:
    messages = ranks(2).run(check_forgotten)
    assert messages == [[f"an arena of rank {rank} was never closed"] for rank in range(2)]


def check_error_inside(env: RankEnv) -> int:
    """The rank that fails leaves at once; the other one is not there to meet it."""
    try:
        with _arena(64):
            raise KeyError(env.rank)
    except KeyError as error:
        return int(error.args[0])


def test_an_error_inside_the_arena_leaves_it_without_meeting_the_others(ranks) -> None:
    assert ranks(2).run(check_error_inside) == [0, 1]
