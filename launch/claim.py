"""Which rank speaks when a job fails: the first to claim it in the store that the ranks share.

Every question to the store has a limit, since the store may be gone, or busy on behalf of a thread that waits for ever.
"""

import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

from usp.launch.world import FAILURE_CLAIM, World

STORE_SECONDS = 3.0  # for one question to the store
PRINTED_SECONDS = 5.0  # for the speaking rank to have printed
_PRINTED = "usp/failure/printed"


def claim(store: Any, world: World, *, seconds: float = STORE_SECONDS) -> int | None:
    """The rank that speaks, which is this one unless another has claimed before; None if the store does not answer."""
    winner = _bounded(lambda: store.compare_set(FAILURE_CLAIM, "", str(world.rank)), seconds)
    return None if winner is None else int(winner)


def mark_printed(store: Any) -> None:
    """The speaking rank has spoken."""
    _bounded(lambda: store.set(_PRINTED, "1"), STORE_SECONDS)


def await_printed(store: Any) -> None:
    """For the silent ranks: a launcher ends everybody once the first rank leaves, so the speaker goes first."""
    deadline = time.monotonic() + PRINTED_SECONDS
    while time.monotonic() < deadline and _bounded(lambda: store.check([_PRINTED]), STORE_SECONDS) is False:
        time.sleep(0.05)


def _bounded(question: Callable[[], Any], seconds: float) -> Any:
    """The store's answer, or None where it fails or does not come in time."""
    answers: SimpleQueue[Any] = SimpleQueue()

    def ask() -> None:
        try:
            answers.put(question())
        except RuntimeError:  # of torch, also for a connection that is gone
            answers.put(None)

    Thread(target=ask, daemon=True).start()
    try:
        return answers.get(timeout=seconds)
    except Empty:
        return None
