"""What every attention backend declares, and the one call that they share.

Shapes: B batch, S query tokens, L key tokens, H query heads, K key/value heads, D head dim.
"""

from collections.abc import Callable, Container
from dataclasses import dataclass

import torch

Kernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]

HALVES = (torch.bfloat16, torch.float16)
ANY_FLOAT = (*HALVES, torch.float32)
EIGHTHS = range(8, 257, 8)  # head dims of kernels that load 16 bytes at a time


@dataclass(frozen=True)
class Traits:
    """What a backend can do. Once planned, no call is to synchronise the host or copy pageable memory: measured on an
    H200 for FA3 and torch's own, by reading for FA4 and FlashInfer.

    `libraries` are the distributions that may bring it, for messages; empty for torch's own. `majors` are the compute
    capabilities that it runs on; None for any device, the CPU included. `num_splits` says how the keys of one head are
    kept from being split by the number of heads, which would change bits with the group.
    """

    libraries: tuple[str, ...]
    num_splits: str
    writes_out: bool = False  # takes `out` of any strides but a dense last axis, and touches nothing else
    takes_gqa: bool = True
    takes_prefix: bool = True  # more or fewer keys than queries
    dtypes: tuple[torch.dtype, ...] = HALVES
    majors: tuple[int, ...] | None = None
    head_dims: Container[int] = EIGHTHS
    one_stream: bool = False  # its calls share memory, so they must follow each other


class Backend:
    """A kernel under its name, ready to be called as `usp.attention.AttentionInto` says."""

    def __init__(self, name: str, traits: Traits, kernel: Kernel) -> None:
        self.name, self.traits, self.kernel = name, traits, kernel
        self.writes_out, self.one_stream = traits.writes_out, traits.one_stream

    def __call__(
        self, q_bshd: torch.Tensor, k_blhd: torch.Tensor, v_blhd: torch.Tensor, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[B, S, H, D] against [B, L, K, D] -> [B, S, H, D]. Raises ValueError for what was not declared."""
        if out is not None and not self.writes_out:
            raise ValueError(f"attention {self.name} cannot write into a given tensor")
        if q_bshd.shape[2] != k_blhd.shape[2] and not self.traits.takes_gqa:
            raise ValueError(f"attention {self.name} takes as many key/value heads as query heads")
        if q_bshd.shape[1] != k_blhd.shape[1] and not self.traits.takes_prefix:
            raise ValueError(f"attention {self.name} takes as many keys as queries")
        if not q_bshd.numel():  # of a rank without tokens; a grid of no blocks is a CUDA error
            return torch.empty_like(q_bshd) if out is None else out
        return self.kernel(q_bshd, k_blhd, v_blhd, out)


def why_unfit(traits: Traits, *, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """What the declaration alone rules out, before anything is imported."""
    major = compute_capability(device)
    if traits.majors is not None and major not in traits.majors:
        found = "is the CPU" if major is None else f"is of {major}.x"
        return f"it needs a GPU of compute capability {_listed(traits.majors, '.x')}, and this one {found}"
    if dtype not in traits.dtypes:
        return f"it takes {_listed(traits.dtypes)}, not {_short(dtype)}"
    if head_dim not in traits.head_dims:
        return f"it does not take heads of {head_dim} channels"
    return None


def compute_capability(device: torch.device) -> int | None:
    """Its major number; None for a CPU."""
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else None


def sequence_starts(batch: int, length: int, *, pinned_for: torch.device) -> torch.Tensor:
    """Where each of `batch` sequences of `length` starts, and the end of the last: [B + 1], int32, on the host."""
    return torch.arange(0, batch * length + 1, length, dtype=torch.int32, pin_memory=pinned_for.type == "cuda")


def softmax_scale(q: torch.Tensor) -> float:
    return float(q.shape[-1]) ** -0.5


def _listed(values: tuple[object, ...], unit: str = "") -> str:
    return " or ".join(f"{_short(value)}{unit}" for value in values)


def _short(value: object) -> str:
    return str(value).removeprefix("torch.")
