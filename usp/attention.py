"""Attention over whole sequences: [B, S, H, D] queries against [B, L, H, D] keys and values, unmasked.

One function per backend, all with this signature. Used for self-attention after the exchange and for cross-attention.
"""

from typing import Protocol

import torch
import torch.nn.functional as F


class Attention(Protocol):
    def __call__(self, q_bshd: torch.Tensor, k_blhd: torch.Tensor, v_blhd: torch.Tensor) -> torch.Tensor:
        """Softmax attention scaled by 1/sqrt(D). Returns [B, S, H, D]."""
        ...


class AttentionInto(Protocol):
    """A backend that can also write its result to its place: it has this attribute, and takes `out`, of any strides."""

    writes_out: bool

    def __call__(
        self, q_bshd: torch.Tensor, k_blhd: torch.Tensor, v_blhd: torch.Tensor, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """As `Attention`; with `out` [B, S, H, D] the result is written there, bit for bit the same."""
        ...


def writes_out(attention: Attention) -> bool:
    return bool(getattr(attention, "writes_out", False))


def sdpa(q_bshd: torch.Tensor, k_blhd: torch.Tensor, v_blhd: torch.Tensor) -> torch.Tensor:
    """`torch.nn.functional.scaled_dot_product_attention`; torch picks the kernel."""
    q, k, v = (x.transpose(1, 2) for x in (q_bshd, k_blhd, v_blhd))
    is_grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=is_grouped).transpose(1, 2)
