"""Triton kernels, one per file with its launcher; their plain-torch twins are in `reference`.

Only the file of a kernel imports Triton, and only what launches it imports that file.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from usp.ipc.errors import SetupError

if TYPE_CHECKING:
    import torch

PlaceHeads = Callable[["torch.Tensor", "torch.Tensor"], None]


def load_place_heads() -> PlaceHeads:
    """`usp.kernels.place.place_heads`, or a sentence about what it lacks."""
    try:
        from usp.kernels.place import place_heads
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise SetupError(
            "the exchange over ipc places rows with a Triton kernel, and Triton is not installed; "
            "pip install 'triton>=3.4', or choose another exchange"
        ) from error
    return place_heads
