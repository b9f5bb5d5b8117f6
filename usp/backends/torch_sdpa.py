"""The attention kernels inside torch, through `scaled_dot_product_attention`.

Lengths and strides travel as arguments of the launch: nothing is planned and nothing is copied. cuDNN builds its graph
on the host at the first call of a shape.
"""

import itertools
from threading import Lock

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from usp.backends.backend import ANY_FLOAT, Kernel, Traits

AMPERE_UP = (8, 9, 10, 11, 12)
TRAITS = {
    "sdpa": Traits((), "torch picks the kernel", dtypes=ANY_FLOAT, head_dims=range(1, 1 << 16)),
    "cudnn": Traits((), "cuDNN picks", majors=AMPERE_UP),
    "efficient": Traits((), "it has no split of keys", takes_gqa=False, dtypes=ANY_FLOAT, majors=(7, *AMPERE_UP)),
    "math": Traits(
        (), "products of 512 queries and all keys, head by head", dtypes=ANY_FLOAT, head_dims=range(1, 1 << 16)
    ),
}
KERNELS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
# torch's choice of kernel belongs to the process, and head groups of a host exchange run on several threads.
CHOICE = Lock()
ROWS = 512  # of each product of `math`


def sdpa(q_bshd: torch.Tensor, k_blhd: torch.Tensor, v_blhd: torch.Tensor) -> torch.Tensor:
    """`torch.nn.functional.scaled_dot_product_attention`; torch picks the kernel."""
    q, k, v = (x.transpose(1, 2) for x in (q_bshd, k_blhd, v_blhd))
    is_grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=is_grouped).transpose(1, 2)


def make(name: str, device: torch.device) -> Kernel:
    if name == "sdpa":
        return lambda q, k, v, _out: sdpa(q, k, v)
    kernel = KERNELS[name]
    through = _in_fixed_products if name == "math" else sdpa

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, _out: torch.Tensor | None) -> torch.Tensor:
        with CHOICE, sdpa_kernel(kernel):
            return through(q, k, v)

    return attend


def _in_fixed_products(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """cuBLAS picks its algorithm for a product by its batch and its rows, and so other bits for other groups of heads
    and for other shares of the tokens. Here every product is of one head, one sample and ROWS queries."""
    result, ratio = q.new_empty(q.shape), q.shape[2] // k.shape[2]
    for b, h in itertools.product(range(q.shape[0]), range(q.shape[2])):
        keys_and_values = [x[b : b + 1, :, h // ratio : h // ratio + 1] for x in (k, v)]
        for start in range(0, q.shape[1], ROWS):
            some = q[b : b + 1, start : start + ROWS, h : h + 1]
            count = some.shape[1]
            padded = F.pad(some, (0, 0, 0, 0, 0, ROWS - count))
            result[b : b + 1, start : start + count, h : h + 1] = sdpa(padded, *keys_and_values)[:, :count]
    return result
