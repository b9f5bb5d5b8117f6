"""Self-attention over tokens that are sharded across ranks: exchange in, attend, exchange back.

The model calls it in place of plain attention and sees only its own tokens.
"""

import torch

from usp.attention import Attention
from usp.exchange import CollectiveExchange


class UlyssesAttention:
    """`attn(q, k, v)`: [B, S_r, H, D] each -> [B, S_r, H, D], where every token attended to every token."""

    def __init__(self, exchange: CollectiveExchange, *, attention: Attention) -> None:
        self.exchange = exchange
        self.attention = attention

    def __call__(self, q_bshd: torch.Tensor, k_bshd: torch.Tensor, v_bshd: torch.Tensor) -> torch.Tensor:
        # [B, S_r, H, D] -> [B, S, H_r, D] -> attention -> [B, S_r, H, D]
        q, k, v = (self.exchange.scatter_heads(x) for x in (q_bshd, k_bshd, v_bshd))
        return self.exchange.gather_heads(self.attention(q, k, v), num_heads=q_bshd.shape[2])
