"""What can go wrong between the processes of one host. Imports nothing heavy."""

from usp.errors import UserError


class SetupError(UserError):
    """A step that all ranks take together failed on one of them; every rank raises it with the same words."""


class CudaError(RuntimeError):
    """A driver call failed; the message names the call and the code."""


class PeerLostError(RuntimeError):
    """A rank ended while others still counted on it."""


class StallError(RuntimeError):
    """A call that was issued made no progress for longer than the limit."""


class PlanMismatchError(RuntimeError):
    """Two ranks entered the same call with different plans."""
