"""Proof that the ranks of a group share memory, before anything relies on it: words read, rows and flags pushed.

What a container, a driver or a platform refuses shows here, in a fraction of a second, and not in the first step:
memory that cannot be opened, writes to a peer that nobody takes (they are posted, so no error comes back), flags that
outrun the rows before them. Used by the choice of a transport.
"""

import time
from collections.abc import Callable

import torch

from usp.ipc.arena import Arena
from usp.ipc.engine import COPY, MAIN, Block, Engine
from usp.ipc.errors import SetupError
from usp.ipc.provider import Provider
from usp.ipc.rendezvous import Rendezvous, agreed, agreed_engine

WORD = 2**40 + 7  # what rank 0 of the group writes into its memory; rank r adds r
LINE, ROWS_AT = 64, 4096  # bytes: of a flag, and where the rows begin
HEIGHT, WIDTH, PITCH = 64, 8192, 16_384  # rows that are pushed: as a head group is, with gaps where they arrive
LIMIT_S = 10.0


def prove_shared(
    rendezvous: Rendezvous, provider: Provider, make_engine: Callable[[], Engine], device: torch.device
) -> None:
    """Raise SetupError, on all ranks of the group, unless each reads from and writes to every other. Collective."""
    nbytes = ROWS_AT + rendezvous.size * HEIGHT * PITCH
    with Arena(nbytes, rendezvous=rendezvous, provider=provider, layout="probe") as arena:
        agreed(rendezvous, lambda: _write_word(arena, device))
        agreed(rendezvous, lambda: _read_words(arena, rendezvous, device))
        engine = agreed_engine(rendezvous, make_engine)
        try:
            agreed(rendezvous, lambda: _push(arena, engine, rendezvous, device))
        finally:
            engine.close()


def _write_word(arena: Arena, device: torch.device) -> None:
    arena.view(arena.rank, 0, (1,), torch.int64).fill_(WORD + arena.rank)
    _synchronize(device)


def _read_words(arena: Arena, rendezvous: Rendezvous, device: torch.device) -> None:
    wrong = [peer for peer in _peers(arena, rendezvous) if _word_of(arena, peer, device) != WORD + peer]
    if wrong:
        raise SetupError(f"it does not see what {_named(rendezvous, wrong)} wrote")


def _word_of(arena: Arena, peer: int, device: torch.device) -> int:
    """On GPUs by a copy from its address, as the exchange uses it: torch may not know the device of a peer that this
    process does not see."""
    if device.type != "cuda":
        return int(arena.view(peer, 0, (1,), torch.int64))
    from usp.ipc.driver import call, load_driver

    word = torch.zeros(1, dtype=torch.int64, device=device)
    _synchronize(device)
    call(load_driver().cuMemcpy, word.data_ptr(), arena.base[peer], word.nbytes)
    return int(word)


def _push(arena: Arena, engine: Engine, rendezvous: Rendezvous, device: torch.device) -> None:
    """Rows and then a flag to every peer, by the operations of the exchange; then look at what came from each."""
    peers = _peers(arena, rendezvous)
    sent = torch.full((HEIGHT, WIDTH), 1 + arena.rank, dtype=torch.uint8, device=device)
    _synchronize(device)
    for peer in peers:
        target = Block(arena.base[peer] + _rows_at(arena.rank), PITCH, WIDTH, HEIGHT)
        engine.copy(COPY, target, Block(sent.data_ptr(), WIDTH, WIDTH, HEIGHT))
        engine.signal(COPY, _flag(arena, peer, arena.rank), 1)
    deadline = time.monotonic() + LIMIT_S
    for peer in peers:  # the host sees a flag before a stream waits for it, which could not be ended
        engine.hold(_flag(arena, arena.rank, peer), 1, stopped=lambda: time.monotonic() > deadline)
    missing = [peer for peer in peers if engine.peek([_flag(arena, arena.rank, peer)]) != [1]]
    if missing:
        raise SetupError(f"no flag of {_named(rendezvous, missing)} came within {LIMIT_S:g} s")
    wrong: list[int] = []
    for peer in peers:
        engine.wait(MAIN, _flag(arena, arena.rank, peer), 1)
    engine.launch(MAIN, lambda: wrong.extend(peer for peer in peers if not _have_come(arena, peer)))
    engine.synchronize()
    if wrong:
        raise SetupError(f"the flag of {_named(rendezvous, wrong)} came, but not the rows that were sent before it")


def _have_come(arena: Arena, peer: int) -> bool:
    """Its rows, and nothing beside them."""
    rows = arena.view(arena.rank, _rows_at(peer), (HEIGHT, PITCH), torch.uint8)
    return bool((rows[:, :WIDTH] == 1 + peer).all()) and not bool(rows[:, WIDTH:].any())


def _flag(arena: Arena, owner: int, writer: int) -> int:
    return arena.base[owner] + LINE * (1 + writer)


def _rows_at(writer: int) -> int:
    return ROWS_AT + writer * HEIGHT * PITCH


def _peers(arena: Arena, rendezvous: Rendezvous) -> list[int]:
    return [rank for rank in range(rendezvous.size) if rank != arena.rank]


def _named(rendezvous: Rendezvous, ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(str(rendezvous.names[rank]) for rank in ranks)}"


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
