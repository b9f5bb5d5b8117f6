"""Flags in shared host memory: 32-bit words that are stored, awaited in the kernel, and compared cyclically.

Waiters sleep on the word itself, so they cost nothing and any process that maps the word wakes them.
Used by the host engine alone; on CUDA the driver's stream memory operations take this place.
"""

import ctypes
import platform
from collections.abc import Callable

SYS_FUTEX = {"x86_64": 202, "aarch64": 98}
FUTEX_WAIT, FUTEX_WAKE, FUTEX_WAKE_OP = 0, 1, 5  # without PRIVATE: the waiter may be another process
OP_OR = 2 << 28
EVERYBODY = 2**31 - 1
RECHECK_S = 1.0  # stores are never missed; a stop that comes between the check and the sleep is, for this long


class Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Flags:
    """Stores and waits of one process. Addresses are of aligned 32-bit words."""

    def __init__(self) -> None:
        machine = platform.machine()
        if machine not in SYS_FUTEX:
            raise OSError(f"no futex number known for {machine}; host memory is exchanged on {', '.join(SYS_FUTEX)}")
        self._number = SYS_FUTEX[machine]
        self._syscall = ctypes.CDLL(None).syscall  # releases the interpreter lock while it sleeps
        pointer, number = ctypes.c_void_p, ctypes.c_long
        self._syscall.argtypes = (number, pointer, number, number, pointer, pointer, number)
        self._pause = Timespec(int(RECHECK_S), int(RECHECK_S % 1 * 1e9))
        self._fence_word = ctypes.c_uint32(0)
        self._needs_fence = machine != "x86_64"  # where neither stores nor loads pass each other

    def store(self, address: int, value: int) -> None:
        """Store after all earlier writes of this thread, and wake whoever waits."""
        self._fence()
        ctypes.c_uint32.from_address(address).value = value & 0xFFFFFFFF
        self.wake(address)

    def load(self, address: int) -> int:
        return ctypes.c_uint32.from_address(address).value

    def wake(self, address: int) -> None:
        """Let whoever waits look again, whether or not the word has changed."""
        self._syscall(self._number, address, FUTEX_WAKE, EVERYBODY, None, None, 0)

    def wait(self, address: int, value: int, *, stopped: Callable[[], bool]) -> bool:
        """Sleep until the word has reached `value`, or until `stopped()`; whether it has."""
        while not reached(current := self.load(address), value):
            if stopped():
                return False
            self._sleep(address, current)
        self._fence()
        return True

    def _sleep(self, address: int, seen: int) -> None:
        # Returns at once if the word is no longer what was seen: no wake-up can be lost.
        self._syscall(self._number, address, FUTEX_WAIT, seen, ctypes.byref(self._pause), None, 0)

    def _fence(self) -> None:
        """A full barrier, on processors that need one: the kernel's atomic update of a private word."""
        if self._needs_fence:
            word = ctypes.byref(self._fence_word)
            self._syscall(self._number, word, FUTEX_WAKE_OP, 0, None, word, OP_OR)


def reached(current: int, value: int) -> bool:
    """Whether a flag stands at `value` or later; numbers wrap, so half the range counts as later."""
    return (current - value) & 0xFFFFFFFF < 0x80000000
