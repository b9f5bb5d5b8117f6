"""One fault, one message, every rank out: what is printed when a run fails, by whom, and how the process ends.

Before the ranks know each other (`fail_early`), rank 0 speaks at once and the others only if they are still there
seconds later: their launcher ends them as soon as the first one leaves. Once they share a store (`fail`), the first
to claim it speaks. A lost connection is another rank's fault, so whoever sees one waits for that rank to claim first.
Nothing here waits without a limit, and the process leaves without destructors, which could wait for a dead rank.
"""

import logging
import os
import sys
import time
import traceback
from contextlib import suppress
from datetime import timedelta
from typing import Any, NoReturn

from usp.errors import UserError
from usp.ipc.errors import PeerLostError
from usp.launch.claim import await_printed, claim, mark_printed
from usp.launch.guard import Guard
from usp.launch.world import World, flush_output, open_store

log = logging.getLogger(__name__)

FAILED, USER_ERROR, INTERRUPTED = 1, 2, 130  # exit codes
HOST_SECONDS = 2.0  # for rank 0 to speak and its launcher to end the rest
OTHER_HOSTS_SECONDS = 20.0  # for the ranks of other hosts to come to the store
FIRST_SECONDS = 1.0  # head start of the rank that fails by itself over those that lose contact with it

# Words of the backends' errors when the other end of a connection has gone; they all raise plain RuntimeError.
_LOST = (
    *("connection closed", "connection reset", "broken pipe", "connection refused", "connection was likely closed"),
    *("connection timed out", "no route to host", "network is unreachable", "timed out waiting"),
)
_LOST_PLACES = ("gloo", "nccl", "tcpstore", "store", "socket")


def fail_early(world: World, error: BaseException) -> int:
    """Print a fault found before the ranks share a store; the exit code.

    Ranks of other hosts, which no launcher ends, learn it from the store that they are about to meet on.
    """
    store = _store_of_other_hosts(world)
    if store is not None:
        return report_failure(store, world, error, "starting")
    time.sleep(_turn(world))
    _print(_message(error, world, "starting"))
    return _exit_code(error)


def _store_of_other_hosts(world: World) -> Any:
    if not world.several_hosts or world.launcher != "torchrun":
        return None
    try:
        return open_store(world, timeout=timedelta(seconds=OTHER_HOSTS_SECONDS))
    except Exception:  # nobody is there to be told
        return None


def fail(guard: Guard, error: BaseException) -> NoReturn:
    """Print a fault, once among all ranks, and end this process."""
    world, store = guard.world, guard.store
    if store is None:
        code = fail_early(world, error)
    else:
        code = report_failure(store, world, error, guard.phase)
    _end(world, code)


def report_failure(store: Any, world: World, error: BaseException, phase: str) -> int:
    """Print the fault if this rank is the first to claim it, else let the claiming rank finish; the exit code."""
    lost = is_lost_contact(error)
    if lost:
        time.sleep(FIRST_SECONDS)
    speaker = claim(store, world)
    if speaker is None:  # the store went with the rank that held it
        time.sleep(_turn(world) if lost else 0.0)
    if speaker in (None, world.rank):
        _print(_message(error, world, phase))
        mark_printed(store)
    else:
        log.debug("rank %d leaves: rank %d has failed and says why", world.rank, speaker)
        await_printed(store)
    return _exit_code(error)


def is_lost_contact(error: BaseException) -> bool:
    """Whether the error says that another rank went away, rather than what this rank did wrong."""
    if "torch" not in sys.modules:
        return False
    import torch.distributed as dist

    if isinstance(error, dist.DistNetworkError | dist.DistStoreError | PeerLostError):
        return True
    text = str(error).lower()
    backend = isinstance(error, dist.DistBackendError) or any(place in text for place in _LOST_PLACES)
    return isinstance(error, RuntimeError) and backend and any(words in text for words in _LOST)


def _turn(world: World) -> float:
    """Seconds before this rank may speak without having asked: rank 0 first, then one rank of each host."""
    if world.rank == 0:
        return 0.0
    return HOST_SECONDS if world.local_rank == 0 else HOST_SECONDS + 1.0


def _message(error: BaseException, world: World, phase: str) -> str:
    who = f"rank {world.rank}: " if world.rank else ""
    if isinstance(error, UserError):
        return "\n".join([f"{who}error: {error}", *getattr(error, "__notes__", ())])
    if isinstance(error, KeyboardInterrupt):
        return f"{who}interrupted while {phase}"
    head = f"rank {world.rank} of {world.size} failed while {phase}"
    if is_lost_contact(error):
        return f"{head}: lost contact with another rank ({_first_line(error)})"
    return f"{head}:\n{''.join(traceback.format_exception(error)).rstrip()}"


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]


def _exit_code(error: BaseException) -> int:
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    return USER_ERROR if isinstance(error, UserError) else FAILED


def _print(text: str) -> None:
    flush_output()
    with suppress(OSError, AttributeError):  # nobody may be reading; the process has to end all the same
        sys.stderr.write(text + "\n")
        sys.stderr.flush()


def _end(world: World, code: int) -> NoReturn:
    """Leave at once; under mpirun also end the ranks that wait for this one inside MPI."""
    flush_output()
    if world.launcher == "mpirun":
        _abort_mpi(code)
    os._exit(code)


def _abort_mpi(code: int) -> None:
    if "mpi4py.MPI" in sys.modules:
        from mpi4py import MPI

        if MPI.Is_initialized() and not MPI.Is_finalized():
            MPI.COMM_WORLD.Abort(code)
