"""generate.py with a fault, put in from outside: FAULT=kill@decode@1 kills rank 1 while rank 0 decodes.

Kinds are the keys of KINDS, phases those of PHASES. Where rank 0 works alone (decode, save) and another rank is at
fault, rank 0 stands still there until somebody ends it. A rank that has come to its fault, or that stands still, first
says so by a file `<phase>.<rank>` in the folder REACHED.

ARGS_OF_RANK_1, a JSON list, gives rank 1 arguments that the others do not have; so for every rank. All variables may be
missing.
"""

import errno
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from usp.errors import UserError
from usp.launch.guard import Guard
from usp.launch.main import main
from usp.launch.world import detect_world

STEP = 1  # the second one
STILL_S = 50.0  # below the limit of a test
Act = Callable[[], None]


def _raise() -> None:
    raise RuntimeError("a fault of the test")


def _refuse() -> None:
    raise UserError("3 is not 4")


def _out_of_memory() -> None:
    import torch

    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")


def _fill_disk() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


KINDS: dict[str, Act] = {
    "raise": _raise,
    "refuse": _refuse,
    "oom": _out_of_memory,
    "full": _fill_disk,
    "kill": _kill,
    "exit": lambda: os._exit(3),
    "wait": lambda: time.sleep(STILL_S),
    "nan": lambda: None,  # the decoder's output is spoilt instead
}


def act(kind: str, phase: str, rank: int) -> None:
    _reached(phase, rank).touch()
    KINDS[kind]()


def act_while_rank_0_works(kind: str, phase: str, rank: int) -> None:
    while not _reached(phase, 0).exists():
        time.sleep(0.01)
    act(kind, phase, rank)


def _reached(phase: str, rank: int) -> Path:
    return Path(os.environ["REACHED"], f"{phase}.{rank}")


# One function for each phase: it makes `act_` happen there.


def in_load(act_: Act) -> None:
    from usp.launch import session

    session.load_transformer = _before(act_, session.load_transformer)


def in_encode(act_: Act) -> None:
    from usp.launch import session

    session.encode_on_first_rank = _before(act_, session.encode_on_first_rank)


def in_step(act_: Act) -> None:
    from usp.launch import session

    plain = session.sample

    def sample(*args: Any, before_step: Callable[[int, str], None], **settings: Any) -> Any:
        def before(step: int, expert: str) -> None:
            before_step(step, expert)
            if step == STEP:
                act_()

        return plain(*args, before_step=before, **settings)

    session.sample = sample


def in_decode(act_: Act) -> None:
    from usp.launch import save

    plain = save.decode_chunks

    def decode_chunks(vae: Any, latents: Any) -> Any:
        for number, chunk in enumerate(plain(vae, latents)):
            if number == 1:
                act_()
            yield chunk

    save.decode_chunks = decode_chunks


def in_save(act_: Act, suffixes: tuple[str, ...] = (".mp4",)) -> None:
    """When the file's bytes are written, and it has no name yet."""
    from usp.launch import save

    plain, fsync = save.atomic_write, os.fsync

    def atomic_write(path: Path, data: bytes, *, guard: Guard) -> None:
        os.fsync = _before(act_, fsync) if path.suffix in suffixes else fsync
        plain(path, data, guard=guard)

    save.atomic_write = atomic_write


def in_every_save(act_: Act) -> None:
    in_save(act_, suffixes=(".mp4", ".safetensors"))


def in_wait_for_rank_0(act_: Act) -> None:
    import torch.distributed as dist

    dist.barrier = _before(act_, dist.barrier)


def spoil_pixels() -> None:
    from usp.launch import save

    plain = save.decode_chunks
    save.decode_chunks = lambda vae, latents: (chunk * float("nan") for chunk in plain(vae, latents))


PHASES: dict[str, Callable[[Act], None]] = {
    "load": in_load,
    "encode": in_encode,
    "step": in_step,
    "decode": in_decode,
    "save": in_save,
    "every_save": in_every_save,
}
OF_RANK_0 = ("decode", "save", "every_save")


def _before(act_: Act, plain: Callable[..., Any]) -> Callable[..., Any]:
    def both(*args: Any, **settings: Any) -> Any:
        act_()
        return plain(*args, **settings)

    return both


def put_in(fault: str, rank: int) -> None:
    """On this rank, what the fault asks of it."""
    kind, phase, at = fault.split("@")
    if kind == "nan":
        spoil_pixels()
    elif int(at) == rank == 0 or (int(at) == rank and phase not in OF_RANK_0):
        PHASES[phase](partial(act, kind, phase, rank))
    elif int(at) == rank:
        in_wait_for_rank_0(partial(act_while_rank_0_works, kind, phase, rank))
    elif rank == 0 and phase in OF_RANK_0:
        PHASES[phase](partial(act, "wait", phase, rank))


def put_in_behind_the_guard(fault: str) -> None:
    """The program is imported only once the guard is up: threads that come earlier would take its signals."""
    plain = Guard.__enter__

    def enter(guard: Guard) -> Guard:
        entered = plain(guard)
        put_in(fault, guard.world.rank)
        return entered

    Guard.__enter__ = enter  # type: ignore[method-assign]


if __name__ == "__main__":
    if "FAULT" in os.environ:
        put_in_behind_the_guard(os.environ["FAULT"])
    own = f"ARGS_OF_RANK_{detect_world(os.environ).rank}"
    sys.exit(main(sys.argv[1:] + json.loads(os.environ.get(own, "[]"))))
