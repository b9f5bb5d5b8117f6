"""How the device computes while training: bf16 products on a GPU, fp32 elsewhere."""

import time
from collections.abc import Callable

import torch

TRIALS = 3


def pick_device(name: str) -> torch.device:
    """`auto` takes the GPU if there is one."""
    wanted = ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name
    if wanted == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = True
        torch.backends.cudnn.allow_tf32 = True
        torch.backends.cudnn.benchmark = True
        torch.backends.cuda.enable_cudnn_sdp(False)  # its gradients under a mask are wrong on Hopper in some releases
    return torch.device(wanted)


def lower_precision(device: torch.device, *, enabled: bool = True) -> torch.autocast:
    """bf16 on a GPU, unless it is not wanted; nothing changes elsewhere."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=enabled and device.type == "cuda")


def is_bf16_faster(step: Callable[[bool], None], device: torch.device) -> bool:
    """Whether `step(True)` takes less time than `step(False)`: not every cuDNN has fast 3-D convolutions in bf16."""
    if device.type != "cuda":
        return False
    return _shortest(lambda: step(True)) < _shortest(lambda: step(False))


def _shortest(step: Callable[[], None]) -> float:
    """Seconds of the quickest of a few runs after the first."""
    seconds = []
    for _ in range(1 + TRIALS):
        torch.cuda.synchronize()
        started = time.perf_counter()
        step()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return min(seconds[1:])
