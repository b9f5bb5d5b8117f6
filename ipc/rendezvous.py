"""How the ranks of a group meet: values gathered over host memory, and steps whose outcome all ranks share.

A gather costs about a millisecond and serves set-up, growth and close; nothing here is called inside an exchange.
Used by the arena, the watchdog and whoever must decide something together on all ranks.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from usp.ipc.errors import SetupError

if TYPE_CHECKING:
    import torch.distributed as dist

T = TypeVar("T")


class Closable(Protocol):
    def close(self) -> None: ...


E = TypeVar("E", bound=Closable)


class Rendezvous(Protocol):
    """A fixed group of ranks. Both methods are collective: every rank calls them in the same order.

    `names` are what messages call the ranks: their numbers in the job.
    """

    rank: int
    size: int
    names: Sequence[int]

    def gather(self, value: object) -> list[Any]:
        """Every rank's picklable value, in rank order."""

    def barrier(self) -> None:
        """Return once every rank has entered."""


class GroupRendezvous:
    """Over the CPU side of a torch process group; None is the default group. Refuses one without a CPU backend."""

    def __init__(self, group: "dist.ProcessGroup | None" = None) -> None:
        import torch
        import torch.distributed as dist

        self.group = dist.distributed_c10d._get_default_group() if group is None else group
        if torch.device("cpu") not in self.group._device_types:
            devices = ", ".join(str(device) for device in self.group._device_types)
            raise SetupError(
                f"the process group moves {devices} memory alone; handles travel over host memory, "
                "so start it with a CPU backend as well, such as cpu:gloo,cuda:nccl"
            )
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.names: Sequence[int] = dist.get_process_group_ranks(self.group)

    def gather(self, value: object) -> list[Any]:
        import torch.distributed as dist

        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def barrier(self) -> None:
        self.gather(None)  # torch's own barrier would go to the GPU where the group has one


class MpiRendezvous:
    """Over an mpi4py communicator."""

    def __init__(self, comm: Any) -> None:
        self.comm = comm
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        self.names: Sequence[int] = range(self.size)  # a communicator does not tell what the job calls them

    def gather(self, value: object) -> list[Any]:
        values: list[Any] = self.comm.allgather(value)
        return values

    def barrier(self) -> None:
        self.comm.Barrier()


class LoneRendezvous:
    """One rank, which meets nobody."""

    rank, size = 0, 1
    names: Sequence[int] = (0,)

    def gather(self, value: object) -> list[Any]:
        return [value]

    def barrier(self) -> None:
        return None


def agreed(rendezvous: Rendezvous, step: Callable[[], T]) -> T:
    """The result of `step`, once it succeeded on every rank.

    If it failed on any, every rank raises one SetupError that names the first of them and its reason. What the step
    made where it succeeded is the caller's to undo. Collective.
    """
    error: Exception | None = None
    try:
        result = step()
    except Exception as caught:
        error = caught
    reasons = rendezvous.gather(None if error is None else _reason(error))
    failed = [rank for rank, reason in enumerate(reasons) if reason is not None]
    if failed:
        others = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
        raise SetupError(f"rank {rendezvous.names[failed[0]]}{others}: {reasons[failed[0]]}") from error
    return result


def agreed_engine(rendezvous: Rendezvous, make: Callable[[], E]) -> E:
    """As `agreed`, for something that is closed where it was made while others failed."""
    made: list[E] = []
    try:
        agreed(rendezvous, lambda: made.append(make()))
    except BaseException:
        for engine in made:
            engine.close()
        raise
    return made[0]


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, SetupError) else f"{type(error).__name__}: {error}"
