"""FlashInfer's ragged prefill: a batch is so many sequences of equal length, one after another.

Lengths are planned once per shape, from pinned memory (cutlass plans on the device, and waits for it); a later call of
the shape launches and nothing else. All shapes share one workspace, taken when the backend is made; each plan adds 8 MB
on the device and as much pinned memory.

Shapes: B batch, S query tokens, L key tokens, H query heads, K key/value heads, D head dim.
"""

from typing import Any

import torch

from usp.backends.backend import Kernel, Traits, compute_capability, sequence_starts, softmax_scale

WORKSPACE_BYTES = 128 * 2**20  # what the library recommends
LIBRARY = ("flashinfer-python",)
HEAD_DIMS = (64, 128, 256)
HOPPER = 9
INT32_MAX = 2**31 - 1
TRAITS = {
    "flashinfer-fa2": Traits(
        LIBRARY, "disable_split_kv=True", majors=(8, 9, 10, 11, 12), head_dims=HEAD_DIMS, one_stream=True
    ),
    "flashinfer-fa3": Traits(
        LIBRARY,
        "its schedule never splits keys",
        writes_out=True,
        majors=(HOPPER,),
        head_dims=HEAD_DIMS,
        one_stream=True,
    ),
    "flashinfer-cutlass": Traits(
        LIBRARY, "its schedule never splits keys", majors=(10, 11), head_dims=(128,), one_stream=True
    ),
    "flashinfer-cudnn": Traits(LIBRARY, "cuDNN picks", majors=(8, 9, 10, 11, 12), head_dims=(128,), one_stream=True),
}


def resolved(name: str, device: torch.device) -> str:
    """The kernel behind the plain name `flashinfer`: the one that the library's own choice takes."""
    if name != "flashinfer":
        return name
    return "flashinfer-fa3" if compute_capability(device) == HOPPER else "flashinfer-fa2"


def make(name: str, device: torch.device) -> Kernel:
    return RaggedPrefill(name.removeprefix("flashinfer-"), device)


class RaggedPrefill:
    """One planned wrapper for each shape. Calls that share the workspace are ordered by one stream."""

    def __init__(self, kernel: str, device: torch.device) -> None:
        from flashinfer import BatchPrefillWithRaggedKVCacheWrapper

        self.kernel, self.device = kernel, device
        self.make_wrapper = BatchPrefillWithRaggedKVCacheWrapper
        self.workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self.planned: dict[tuple[object, ...], Any] = {}

    def __call__(
        self, q_bshd: torch.Tensor, k_blhd: torch.Tensor, v_blhd: torch.Tensor, out: torch.Tensor | None
    ) -> torch.Tensor:
        key = (q_bshd.shape, k_blhd.shape, q_bshd.dtype)
        if key not in self.planned:
            self.planned[key] = self._plan(q_bshd, k_blhd)
        # [B, S, H, D] -> [B * S, H, D]
        rows = [x.flatten(0, 1) for x in (q_bshd, k_blhd, v_blhd)]
        if self.kernel == "cudnn":  # its graph is declared for dense rows, whatever it is given
            rows = [x.contiguous() for x in rows]
        if out is None:
            return self.planned[key].run(*rows, enable_pdl=False).view(q_bshd.shape)
        self.planned[key].run(*rows, out=out.view(rows[0].shape), enable_pdl=False)
        return out

    def _plan(self, q: torch.Tensor, k: torch.Tensor) -> Any:
        wrapper = self.make_wrapper(self.workspace, "NHD", backend=self.kernel)
        (batch, num_queries, num_heads, head_dim), (num_keys, num_kv_heads) = q.shape, k.shape[1:3]
        # cuDNN's offsets count elements, the others' rows
        widths = (num_heads * head_dim, num_kv_heads * head_dim) if self.kernel == "cudnn" else (1, 1)
        lengths = num_queries * widths[0], num_keys * widths[1]
        if batch * max(lengths) > INT32_MAX:
            raise ValueError(
                f"attention flashinfer-{self.kernel} counts {batch * max(lengths):,} elements in 32 bits; use another"
            )
        starts_q, starts_k = (sequence_starts(batch, length, pinned_for=self.device) for length in lengths)
        settings = {"sm_scale": softmax_scale(q), "q_data_type": q.dtype, "kv_data_type": q.dtype}
        if self.kernel == "fa2":
            settings["disable_split_kv"] = True
        if self.kernel == "cutlass":  # plans on the device
            starts_q, starts_k = (starts.to(self.device, non_blocking=True) for starts in (starts_q, starts_k))
        if self.kernel == "cudnn":
            settings |= self._lengths(batch, num_queries, num_keys)
        wrapper.plan(starts_q, starts_k, num_heads, num_kv_heads, head_dim, causal=False, **settings)
        return wrapper

    def _lengths(self, batch: int, num_queries: int, num_keys: int) -> dict[str, Any]:
        queries, keys = (
            torch.full((batch, 1, 1, 1), count, dtype=torch.int32, device=self.device)
            for count in (num_queries, num_keys)
        )
        longest = {"max_token_per_sequence": num_queries, "max_sequence_kv": num_keys}
        return {"seq_lens_q": queries, "seq_lens": keys, **longest}
