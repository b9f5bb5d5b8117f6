"""FlashAttention 3 and 4 as their own packages: `fa3_fwd` or `flash_attn_interface`, and `flash_attn.cute`.

Both read strided rows and write a strided `out`. Lengths and strides travel as arguments of the launch: nothing is
planned and nothing is copied. FA4 compiles on the host at the first call of a kind of tensors.
"""

from importlib import import_module
from typing import Any

import torch

from usp.backends.backend import Kernel, Traits, softmax_scale

ONE_SPLIT = "num_splits=1, pack_gqa=False"
TRAITS = {
    "fa3": Traits(("fa3-fwd", "flash-attn-3"), ONE_SPLIT, writes_out=True, majors=(9,)),
    "fa4": Traits(("flash-attn-4",), ONE_SPLIT, writes_out=True, majors=(9, 10, 11), head_dims=range(8, 129, 8)),
}
# The module that registers torch.ops.NAMESPACE.fwd, and the namespace; the first one that is installed is taken.
FA3_PACKAGES = (("fa3_fwd._C", "fa3_fwd"), ("flash_attn_interface", "flash_attn_3"))


def make(name: str, device: torch.device) -> Kernel:
    return _fa3() if name == "fa3" else _fa4()


def _fa3() -> Kernel:
    forward: Any = _first_installed()

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        fixed = {"softmax_scale": softmax_scale(q), "num_splits": 1, "pack_gqa": False}
        return forward(q, k, v, out=out, **fixed)[0]

    return attend


def _first_installed() -> Any:
    missing: list[str] = []
    for module, namespace in FA3_PACKAGES:
        try:
            import_module(module)
        except ModuleNotFoundError as error:
            missing.append(str(error))
        else:
            return getattr(torch.ops, namespace).fwd.default
    raise ModuleNotFoundError("; ".join(missing))


def _fa4() -> Kernel:
    forward = import_module("flash_attn.cute.interface")._flash_attn_fwd  # the public function has no `out`

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        fixed = {"softmax_scale": softmax_scale(q), "num_splits": 1, "pack_gqa": False}
        return forward(q, k, v, out=out, **fixed)[0]

    return attend
