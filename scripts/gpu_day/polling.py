"""An engine whose waits are kernels that look at the flag until it has come: what stream memory operations replace.

Such a kernel keeps an SM while it looks, and it must give up some day, since nothing can end it from outside. Only to
be compared with (scripts/gpu_day/attention.py).
"""

import torch
import triton
import triton.language as tl

from usp.ipc.cuda_engine import CudaEngine

MOST_LOOKS = 200_000_000  # minutes


@triton.jit(do_not_specialize=["address", "value"])  # or it would compile anew when the call number divides by 16
def _poll(address, value, MOST: tl.constexpr):  # noqa: N803
    """Reads the 32-bit flag at `address` until it has reached `value`; what the peer wrote before it is seen then."""
    flag_ptr = address.to(tl.pointer_type(tl.int32))
    seen = tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys")
    looks = 0
    while ((seen - value) < 0) & (looks < MOST):
        seen = tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys")
        looks += 1


class PollingEngine(CudaEngine):
    def wait(self, stream: str, address: int, value: int) -> None:
        self._stream(stream)
        with torch.cuda.stream(self.streams[stream]):
            _poll[(1,)](address, value, MOST=MOST_LOOKS, num_warps=1)
