"""The Ulysses exchange as plain collectives: my tokens, all heads <-> all tokens, my heads.

Three all-to-alls out and one back per attention call, nothing overlapped: the reference that every faster exchange must
equal bit for bit, and the transport for groups that span hosts. Used through `usp.ulysses`.

Shapes: B batch, S tokens of the clip, S_r tokens of rank r, H heads, H_r heads of rank r, D head dim, P ranks.
"""

from types import TracebackType
from typing import Self

import torch

from usp.collectives import all_gather, all_to_all
from usp.layout import split_counts
from usp.mesh import Axis


class CollectiveExchange:
    """Swaps tokens for heads over one mesh axis. Tokens and heads may split unevenly; a rank may hold no token."""

    def __init__(self, num_tokens: int, *, axis: Axis) -> None:
        self.axis = axis
        self.token_counts = split_counts(num_tokens, axis.size)

    def scatter_heads(self, x_bshd: torch.Tensor, *, unit: int = 1) -> torch.Tensor:
        """[B, S_r, H, D] -> [B, S, H_r, D]. Any dtype and strides; heads stay together in runs of `unit`.

        Collective over the axis.
        """
        batch, num_own, num_heads, head_dim = x_bshd.shape
        self._check_tokens(num_own)
        head_counts = self._head_counts(num_heads, unit)
        num_local_heads = head_counts[self.axis.index]
        shapes = [(batch, count, num_local_heads, head_dim) for count in self.token_counts]
        received = all_to_all(x_bshd.split(head_counts, dim=2), shapes=shapes, axis=self.axis)
        return _join(received, dim=1)

    def gather_heads(self, x_bshd: torch.Tensor, *, num_heads: int, unit: int = 1) -> torch.Tensor:
        """[B, S, H_r, D] -> [B, S_r, H, D], the inverse of `scatter_heads`. Collective over the axis."""
        batch, num_tokens, num_local_heads, head_dim = x_bshd.shape
        head_counts = self._head_counts(num_heads, unit)
        if num_tokens != sum(self.token_counts) or num_local_heads != head_counts[self.axis.index]:
            raise ValueError(
                f"got {num_tokens} tokens and {num_local_heads} heads; rank {self.axis.index} of {self.axis.size} "
                f"holds {sum(self.token_counts)} tokens and {head_counts[self.axis.index]} of {num_heads} heads here"
            )
        num_own = self.token_counts[self.axis.index]
        shapes = [(batch, num_own, count, head_dim) for count in head_counts]
        received = all_to_all(x_bshd.split(self.token_counts, dim=1), shapes=shapes, axis=self.axis)
        return _join(received, dim=2)

    def gather_tokens(self, x_bsc: torch.Tensor) -> torch.Tensor:
        """[B, S_r, C] -> [B, S, C] on every rank. Collective over the axis."""
        batch, num_own, channels = x_bsc.shape
        self._check_tokens(num_own)
        shapes = [(batch, count, channels) for count in self.token_counts]
        return _join(all_gather(x_bsc, shapes=shapes, axis=self.axis), dim=1)

    def close(self) -> None:
        """Nothing is held; for exchanges that do, this is collective. May be called twice."""

    def check(self) -> None:
        """Raise if results cannot be trusted: a collective that failed has raised already."""

    def at(self, *, step: int | None = None, layer: int | None = None) -> None:
        """Say where the model is, for messages about failures. Layers then count by themselves, call by call."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _head_counts(self, num_heads: int, unit: int) -> tuple[int, ...]:
        return tuple(unit * count for count in split_counts(num_heads // unit, self.axis.size))

    def _check_tokens(self, num_own: int) -> None:
        expected = self.token_counts[self.axis.index]
        if num_own != expected:
            raise ValueError(f"got {num_own} tokens; rank {self.axis.index} of {self.axis.size} holds {expected}")


def check_rows(name: str, rows: torch.Tensor, *, like: torch.Tensor, shape: tuple[int, ...]) -> None:
    """Raise ValueError unless rows have this shape, and the dtype and device of `like`."""
    if rows.shape != shape or rows.dtype != like.dtype or rows.device != like.device:
        raise ValueError(
            f"{name} is {rows.dtype} {tuple(rows.shape)} on {rows.device}; "
            f"wanted {like.dtype} {tuple(shape)} on {like.device}"
        )


def dense_heads(x_bshd: torch.Tensor) -> torch.Tensor:
    """The tensor itself if each row's heads lie one after another, else a contiguous copy.

    Rows may be far apart, as in a slice of a fused product, but not one upon the other, as in an expanded tensor;
    anything else would be misread by a 2-D copy, and sends attention down another path with other bits.
    """
    _, num_rows, num_heads, head_dim = x_bshd.shape
    is_dense = x_bshd.stride(3) == 1 and (num_heads == 1 or x_bshd.stride(2) == head_dim)
    is_apart = num_rows <= 1 or x_bshd.stride(1) >= num_heads * head_dim
    return x_bshd if is_dense and is_apart else x_bshd.contiguous()


def _join(parts: list[torch.Tensor], *, dim: int) -> torch.Tensor:
    if len(parts) > 1:
        return torch.cat(parts, dim=dim)
    return dense_heads(parts[0]) if parts[0].ndim == 4 else parts[0].contiguous()  # one rank alone copies nothing
