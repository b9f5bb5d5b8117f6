"""The FlashAttention 2 inside torch, given as sequences of known lengths: so it never splits keys.

Through `scaled_dot_product_attention` the same kernel splits the keys of short clips by the number of heads, and a head
group alone has other bits than inside the full call. Lengths are put on the device once per shape, from pinned memory;
a later call of the shape launches and nothing else.

Shapes: B batch, S query tokens, L key tokens, H query heads, D head dim.
"""

import torch

from usp.backends.backend import Kernel, Traits, sequence_starts, softmax_scale

TRAITS = {"flash": Traits((), "ragged lengths, which it does not split", majors=(8, 9, 10, 11, 12))}


def make(name: str, device: torch.device) -> Kernel:
    return RaggedFlash(device)


class RaggedFlash:
    """A batch is so many sequences of equal length, one after another."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.starts: dict[tuple[int, int], torch.Tensor] = {}

    def __call__(
        self, q_bshd: torch.Tensor, k_blhd: torch.Tensor, v_blhd: torch.Tensor, _out: torch.Tensor | None
    ) -> torch.Tensor:
        lengths = q_bshd.shape[1], k_blhd.shape[1]
        starts = (self._starts(q_bshd.shape[0], length) for length in lengths)
        # [B, S, H, D] -> [B * S, H, D]
        rows = (x.flatten(0, 1) for x in (q_bshd, k_blhd, v_blhd))
        fixed = {"dropout_p": 0.0, "is_causal": False, "return_debug_mask": False, "scale": softmax_scale(q_bshd)}
        found = torch.ops.aten._flash_attention_forward(*rows, *starts, *lengths, **fixed)[0]
        return found.view(q_bshd.shape)

    def _starts(self, batch: int, length: int) -> torch.Tensor:
        key = batch, length
        if key not in self.starts:
            self.starts[key] = sequence_starts(batch, length, pinned_for=self.device).to(self.device, non_blocking=True)
        return self.starts[key]
