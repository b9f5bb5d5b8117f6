"""Which rank this process is, and how the ranks find each other: under torchrun, under mpirun, or alone.

`detect_world` reads the environment and imports nothing heavy. `start_process_group` imports torch, and mpi4py under
mpirun. No port is ever chosen here: torchrun's rendezvous comes from its environment, under mpirun rank 0 takes a free
port and tells the others, and a single process needs none. So any number of jobs share a host.
"""

import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from usp.errors import UserError

if TYPE_CHECKING:  # torch does not mark its stores as exported, hence the ignores
    from torch.distributed import Store  # type: ignore[attr-defined]

Launcher = Literal["torchrun", "mpirun", "single"]

# For each launcher the variables of rank, world size, rank on this host, ranks on this host.
_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_OPENMPI = (
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
)
_MPICH = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
_RENDEZVOUS = ("MASTER_ADDR", "MASTER_PORT")

MEETING = timedelta(minutes=2)  # from the first rank to the last
FAILURE_CLAIM = "usp/failure/claim"  # the key of the rank that speaks when the job fails
_HERE = "usp/here/"


@dataclass(frozen=True)
class World:
    """This process among its ranks. `local_*` count the ranks of one host."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    launcher: Launcher

    def __post_init__(self) -> None:
        for name, rank, size in (("", self.rank, self.size), ("local ", self.local_rank, self.local_size)):
            if not 0 <= rank < size:
                raise UserError(
                    f"the environment says {name}rank {rank} of {size}; ranks go from 0 to the size less 1, "
                    "so start with torchrun, mpirun or --nproc, which set both"
                )

    @property
    def several_hosts(self) -> bool:
        return self.local_size < self.size


SINGLE = World(rank=0, size=1, local_rank=0, local_size=1, launcher="single")


def detect_world(environ: Mapping[str, str]) -> World:
    """The launcher's word on this process. Raises UserError where the environment is incomplete or contradicts itself.

    Where both launchers left their variables, torchrun's count if its agent started this process.
    """
    if "TORCHELASTIC_RUN_ID" in environ:
        return _from_torchrun(environ)
    for names in (_OPENMPI, _MPICH):
        if names[0] in environ:
            return _from_mpirun(environ, names)
    if "RANK" in environ or "WORLD_SIZE" in environ:
        return _from_torchrun(environ)
    return SINGLE


def open_store(world: World, *, timeout: timedelta = MEETING) -> "Store":
    """The store that all ranks of the job share, through the launcher's rendezvous."""
    return _STORES[world.launcher](world, timeout)


def start_process_group(world: World, store: "Store", *, backend: str, timeout: timedelta) -> None:
    """Join the default process group of torch.distributed; `timeout` is of its collectives.

    Every rank comes within MEETING, or is named in an error; a failure that one has claimed ends the wait at once.
    """
    import torch.distributed as dist
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    _meet(world, store)
    store.set_timeout(timeout)  # as torch does for a store of its own: NCCL's ids are awaited in it
    dist.init_process_group(
        backend, store=PrefixStore("usp", store), rank=world.rank, world_size=world.size, timeout=timeout
    )


def _meet(world: World, store: "Store") -> None:
    deadline = time.monotonic() + MEETING.total_seconds()
    store.set(f"{_HERE}{world.rank}", "1")
    missing = list(range(world.size))
    while missing := [rank for rank in missing if not store.check([f"{_HERE}{rank}"])]:
        if store.check([FAILURE_CLAIM]):
            raise RuntimeError("another rank failed before the ranks had met")
        if time.monotonic() > deadline:
            ranks = ", ".join(map(str, missing))
            raise UserError(
                f"rank {ranks} of {world.size} did not come within {MEETING.total_seconds():.0f} s; "
                "look for its message, or start all ranks at about the same time"
            )
        time.sleep(0.02)


def stop_process_group() -> None:
    """Leave the process group in good order; for success only, since it may wait for the others."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def start_ranks(nproc: int, argv: Sequence[str]) -> NoReturn:
    """Become torch's own launcher, which starts `nproc` processes of this program with `argv`. Does not return."""
    # one thread per rank is what each rank sets for itself; saying so here keeps the launcher from warning about it
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}"]
    flush_output()
    os.execv(sys.executable, [sys.executable, *launcher, *program_words(), *argv])


def flush_output() -> None:
    """Of a stream that is closed or that nobody reads, nothing is expected any more."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, AttributeError):
            stream.flush()


def program_words() -> list[str]:
    """How the running program was named, in words that Python and torch's launcher take alike."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is None:
        return [sys.argv[0]]
    return ["-m", spec.name.removesuffix(".__main__")]


def _from_torchrun(environ: Mapping[str, str]) -> World:
    missing = [name for name in (*_TORCHRUN, *_RENDEZVOUS) if name not in environ]
    if missing:
        found = ", ".join(name for name in _TORCHRUN if name in environ)
        raise UserError(
            f"the environment sets {found}, but not {', '.join(missing)}; "
            "start with torchrun, mpirun or --nproc, or unset the former"
        )
    return _world(environ, _TORCHRUN, "torchrun")


def _from_mpirun(environ: Mapping[str, str], names: Sequence[str]) -> World:
    missing = [name for name in names if name not in environ]
    if missing:
        raise UserError(f"{names[0]} is set, but {', '.join(missing)} not; start with torchrun, mpirun or --nproc")
    if find_spec("mpi4py") is None:
        raise UserError(
            "started by mpirun, which needs mpi4py to bring the ranks together; "
            "install it with `pip install 'usp-runtime[mpi]'`, or start with torchrun or --nproc"
        )
    return _world(environ, names, "mpirun")


def _world(environ: Mapping[str, str], names: Sequence[str], launcher: Launcher) -> World:
    rank, size, local_rank, local_size = (_integer(environ, name) for name in names)
    return World(rank=rank, size=size, local_rank=local_rank, local_size=local_size, launcher=launcher)


def _integer(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(environ[name])
    except ValueError:
        raise UserError(f"the environment variable {name} is {environ[name]!r}, no whole number") from None


def _torchrun_store(world: World, timeout: timedelta) -> "Store":
    from torch.distributed.rendezvous import rendezvous

    store: Store
    store, _, _ = next(rendezvous("env://", world.rank, world.size, timeout=timeout))
    return store


def _mpirun_store(world: World, timeout: timedelta) -> "Store":
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    if (comm.rank, comm.size) != (world.rank, world.size):
        raise UserError(
            f"the launcher says rank {world.rank} of {world.size}, but mpi4py says rank {comm.rank} of {comm.size}: "
            "they are of different MPI installations; use the mpirun that belongs to mpi4py"
        )
    store = _store_of_rank_zero(comm, world, timeout)
    MPI.Finalize()  # all it had to do; its shared memory would outlive a launcher that is killed
    return store


def _store_of_rank_zero(comm: Any, world: World, timeout: timedelta) -> "Store":
    """Rank 0 listens on a port that the system picks while it binds, so there is no race for it."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    host = _own_address(world)
    if world.rank == 0:
        store = TCPStore(host, 0, world.size, is_master=True, timeout=timeout, wait_for_workers=False)
        comm.bcast((host, store.port), root=0)
        return store
    host, port = comm.bcast(None, root=0)
    return TCPStore(host, port, world.size, is_master=False, timeout=timeout, wait_for_workers=False)


def _own_address(world: World) -> str:
    import socket

    return socket.getfqdn() if world.several_hosts else "127.0.0.1"


def _single_store(world: World, timeout: timedelta) -> "Store":
    from torch.distributed import HashStore  # type: ignore[attr-defined]

    store = HashStore()
    store.set_timeout(timeout)
    return store


_STORES = {"torchrun": _torchrun_store, "mpirun": _mpirun_store, "single": _single_store}
