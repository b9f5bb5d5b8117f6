"""Triton kernels, one per file with its launcher; their plain-torch twins are in `reference`.

Only the file of a kernel imports Triton, and only what launches it imports that file.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Protocol

from usp.ipc.errors import SetupError

if TYPE_CHECKING:
    import torch

    from usp.destinations import FillBlocks

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


class NormRope(Protocol):
    """`usp.kernels.norm_rope.norm_rope`, or its twin. Without blocks: new tensors, or the inputs overwritten."""

    def __call__(
        self,
        q_bshd: "torch.Tensor",
        k_bshd: "torch.Tensor",
        q_weight: "torch.Tensor",
        k_weight: "torch.Tensor",
        rope_cos: "torch.Tensor",
        rope_sin: "torch.Tensor",
        *,
        eps: float,
        blocks: "FillBlocks | None" = None,
    ) -> "tuple[torch.Tensor, torch.Tensor]": ...


class RmsNorm(Protocol):
    """`usp.kernels.norm_rope.rms_norm`, or its twin."""

    def __call__(
        self, x_bshd: "torch.Tensor", weight: "torch.Tensor", *, eps: float, out: "torch.Tensor | None" = None
    ) -> "torch.Tensor": ...


class ResidualNorm(Protocol):
    """`usp.kernels.residual_norm.residual_norm`, or its twin."""

    def __call__(
        self,
        x_bsc: "torch.Tensor",
        y_bsc: "torch.Tensor | None" = None,
        gate: "torch.Tensor | None" = None,
        *,
        weight: "torch.Tensor | None" = None,
        bias: "torch.Tensor | None" = None,
        scale: "torch.Tensor | None" = None,
        shift: "torch.Tensor | None" = None,
        eps: float,
        out: "torch.Tensor | None" = None,
    ) -> "tuple[torch.Tensor, torch.Tensor]": ...


@dataclass(frozen=True)
class Kernels:
    """What a block runs besides products and attention."""

    norm_rope: NormRope
    rms_norm: RmsNorm
    residual_norm: ResidualNorm


def kernels_for(device: "torch.device") -> Kernels:
    """Triton's on a GPU, their twins elsewhere. Picked once, at start; raises SetupError on a GPU without Triton."""
    return _triton_kernels() if device.type == "cuda" else twins()


@cache
def twins() -> Kernels:
    """Plain torch: for ranks without a GPU, and for whoever needs gradients."""
    from usp.kernels import reference

    return Kernels(reference.norm_rope_reference, reference.rms_norm_reference, reference.residual_norm_reference)


@cache
def _triton_kernels() -> Kernels:
    try:
        from usp.kernels.norm_rope import norm_rope, rms_norm
        from usp.kernels.residual_norm import residual_norm
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise SetupError(
            "on a GPU the model norms and adds with Triton kernels, and Triton is not installed; "
            "pip install 'triton>=3.4'"
        ) from error
    return Kernels(norm_rope, rms_norm, residual_norm)
