"""The device of this rank, made ready: which GPU, or how many CPU threads."""

import logging

import torch

from usp.errors import UserError
from usp.launch.request import Request
from usp.launch.world import World

log = logging.getLogger(__name__)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def prepare_device(request: Request, world: World) -> torch.device:
    """Set threads or the current GPU, which ranks share where a host has too few. Raises UserError without a GPU."""
    if request.device == "cpu":
        torch.set_num_threads(request.cpu_threads)  # explicitly: the number of threads is part of the bits
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UserError("device cuda: torch finds no GPU that it can use here; use --device cpu")
    count = torch.cuda.device_count()
    if 1 < count < world.local_size and world.local_rank == 0:
        log.warning(f"{world.local_size} ranks on this host share {count} GPUs; start as many as there are")
    device = torch.device("cuda", world.local_rank % count)
    torch.cuda.set_device(device)
    return device


def backends(device: torch.device) -> str:
    """For the default process group: gloo for host memory, and NCCL beside it where there are GPUs."""
    import torch.distributed as dist

    return "cpu:gloo,cuda:nccl" if device.type == "cuda" and dist.is_nccl_available() else "gloo"


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def release_memory(device: torch.device) -> None:
    """Give freed weights back to the device before something else of that size comes."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def describe(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu, {torch.get_num_threads()} thread(s)"
