"""Self-attention over tokens that are sharded across ranks: exchange in, attend, exchange back.

The model calls it in place of plain attention and sees only its own tokens. With a pipelined exchange one head group
travels while the group before is attended; with a collective one, and in `plain`, one step follows the other. The bits
are the same.

Shapes: B batch, S tokens of the clip, S_r tokens of rank r, H query heads, K key/value heads, D head dim.
"""

import torch

from usp.attention import Attention
from usp.destinations import FillBlock, FillBlocks
from usp.exchange import CollectiveExchange, check_rows
from usp.execute import KeyValue
from usp.fill import FillAll, fill_from
from usp.pipeline import PipelinedExchange


class UlyssesAttention:
    """`attn(q, k, v)`: own tokens of every head in, own tokens of every head out, each attended to every token.

    `prefix_kv` and `suffix_kv` are keys and values [B, L, K_r, D] before and after the tokens: this rank's own
    key/value heads only, normed and rotated already, held by every rank for its heads and never sent.
    """

    def __init__(self, exchange: CollectiveExchange, *, attention: Attention) -> None:
        self.exchange = exchange
        self.attention = attention
        self.is_pipelined = isinstance(exchange, PipelinedExchange)  # then `filled` spares a pass over q and k

    def __call__(
        self,
        q_bshd: torch.Tensor,
        k_bskd: torch.Tensor,
        v_bskd: torch.Tensor,
        prefix_kv: KeyValue | None = None,
        suffix_kv: KeyValue | None = None,
    ) -> torch.Tensor:
        """[B, S_r, H, D], [B, S_r, K, D] twice -> [B, S_r, H, D] of the caller's own. Collective over the axis.

        Raises ValueError on several ranks where a gradient is asked for: the exchange passes none back.
        """
        self._refuse_gradients(q_bshd, k_bskd, v_bskd)
        if not isinstance(self.exchange, PipelinedExchange):
            return self.plain(q_bshd, k_bskd, v_bskd, prefix_kv, suffix_kv)
        check_rows("k", k_bskd, like=v_bskd, shape=v_bskd.shape)
        check_rows("q", q_bshd, like=v_bskd, shape=(*v_bskd.shape[:2], q_bshd.shape[2], v_bskd.shape[3]))
        fill, num_heads = fill_from(q_bshd, k_bskd), q_bshd.shape[2]
        return self.filled(v_bskd, fill, num_heads=num_heads, prefix_kv=prefix_kv, suffix_kv=suffix_kv).clone()

    def filled(
        self,
        v_bskd: torch.Tensor,
        fill_all: FillAll,
        *,
        num_heads: int,
        prefix_kv: KeyValue | None = None,
        suffix_kv: KeyValue | None = None,
    ) -> torch.Tensor:
        """As a call, but `fill_all(blocks)` writes q and k where the exchange wants them, in one go.

        The result is a view that is valid until the next call on the exchange. Collective over the axis.
        """
        if isinstance(self.exchange, PipelinedExchange):
            ends = {"prefix_kv": prefix_kv, "suffix_kv": suffix_kv}
            return self.exchange.attend(self.attention, v_bskd, fill_all, num_heads=num_heads, **ends)
        batch, num_own, num_kv_heads, head_dim = v_bskd.shape
        q, k = v_bskd.new_empty(batch, num_own, num_heads, head_dim), v_bskd.new_empty(v_bskd.shape)
        fill_all(FillBlocks([FillBlock(0, num_heads, q, k, 0, num_kv_heads)]))
        return self.plain(q, k, v_bskd, prefix_kv, suffix_kv)

    def plain(
        self,
        q_bshd: torch.Tensor,
        k_bskd: torch.Tensor,
        v_bskd: torch.Tensor,
        prefix_kv: KeyValue | None = None,
        suffix_kv: KeyValue | None = None,
    ) -> torch.Tensor:
        """The sequential path, with the same attention over the same numbers: the reference for the pipelined one."""
        self._refuse_gradients(q_bshd, k_bskd, v_bskd)
        num_heads, unit = q_bshd.shape[2], q_bshd.shape[2] // k_bskd.shape[2]
        # [B, S_r, H, D] -> [B, S, H_r, D] -> attention -> [B, S_r, H, D]
        q = self.exchange.scatter_heads(q_bshd, unit=unit)
        k, v = (self.exchange.scatter_heads(x) for x in (k_bskd, v_bskd))
        if prefix_kv or suffix_kv:
            k, v = (torch.cat(_between(prefix_kv, x, suffix_kv, part), dim=1) for part, x in enumerate((k, v)))
        out = self.attention(q, k, v) if q.shape[2] else q
        return self.exchange.gather_heads(out, num_heads=num_heads, unit=unit)

    def _refuse_gradients(self, *inputs: torch.Tensor) -> None:
        if self.exchange.axis.size > 1 and torch.is_grad_enabled() and any(one.requires_grad for one in inputs):
            raise ValueError("q, k or v requires a gradient, and the exchange passes none back; use torch.no_grad()")


def _between(prefix: KeyValue | None, x: torch.Tensor, suffix: KeyValue | None, part: int) -> list[torch.Tensor]:
    return [*([prefix[part]] if prefix else []), x, *([suffix[part]] if suffix else [])]
