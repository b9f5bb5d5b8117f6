"""How ranks meet: alone, over mpi4py's interface, and over process groups that could not carry a handle."""

import socket
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist

from usp.ipc.arena import Arena
from usp.ipc.errors import SetupError
from usp.ipc.host import HostProvider
from usp.ipc.rendezvous import GroupRendezvous, LoneRendezvous, MpiRendezvous, agreed


def test_one_rank_meets_nobody_and_has_an_arena() -> None:
    with Arena(64, rendezvous=LoneRendezvous(), provider=HostProvider(), layout="alone") as arena:
        arena.view(0, 0, (8,), torch.int64).fill_(7)
        assert arena.view(0, 56, (1,), torch.int64).item() == 7
        assert arena.nbytes == (64,)


class Comm:
    """Ranks of an mpi4py communicator, as threads."""

    def __init__(self, rank: int, meeting: threading.Barrier, board: list[Any]) -> None:
        self.rank, self.meeting, self.board = rank, meeting, board

    def Get_rank(self) -> int:  # noqa: N802
        return self.rank

    def Get_size(self) -> int:  # noqa: N802
        return len(self.board)

    def allgather(self, value: Any) -> list[Any]:
        self.board[self.rank] = value
        self.meeting.wait(10)
        values = list(self.board)
        self.meeting.wait(10)
        return values

    def Barrier(self) -> None:  # noqa: N802
        self.meeting.wait(10)


def test_ranks_agree_over_mpi() -> None:
    size = 3
    meeting, board, told = threading.Barrier(size), [None] * size, [""] * size

    def run(rank: int) -> None:
        meet = MpiRendezvous(Comm(rank, meeting, board))
        assert agreed(meet, lambda: meet.rank * 2) == rank * 2
        try:
            agreed(meet, lambda: int("x" if rank == 2 else "1"))
        except SetupError as error:
            told[rank] = str(error)
        meet.barrier()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert told == ["rank 2: ValueError: invalid literal for int() with base 10: 'x'"] * size


@pytest.fixture
def lone_group():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_the_default_group_and_a_named_one_are_the_same(lone_group) -> None:
    for group in (None, lone_group):
        meet = GroupRendezvous(group)
        assert (meet.rank, meet.size, meet.gather("x")) == (0, 1, ["x"])


def test_a_group_that_moves_device_memory_alone_is_refused() -> None:
    class NcclGroup:
        _device_types = (torch.device("cuda"),)

    with pytest.raises(SetupError, match=r"moves cuda memory alone.*cpu:gloo,cuda:nccl"):
        GroupRendezvous(NcclGroup())  # type: ignore[arg-type]
