"""Prompts to text states on rank 0, and from there to every rank. Only rank 0 imports what that needs."""

import torch

from usp.launch.device import DTYPES, release_memory
from usp.launch.job import Job
from usp.launch.request import Request
from usp.models.wan.config import TEXT_LEN


def encode_on_first_rank(request: Request, job: Job, *, rank: int, device: torch.device) -> torch.Tensor:
    """[N, 512, text_dim] on the CPU, the negative prompt last if guidance needs it.

    Rank 0's values; on other ranks only room for them.
    """
    texts = [*job.prompts, request.negative_prompt] if request.guided else list(job.prompts)
    if rank != 0:
        return torch.empty(len(texts), TEXT_LEN, request.checkpoint.high.config.text_dim, dtype=DTYPES[request.dtype])
    from usp.models.wan.checkpoint.loader import load_text_encoder, load_tokenizer
    from usp.models.wan.text import encode_prompts

    where = torch.device("cpu") if request.t5_cpu else device
    # UMT5 overflows in fp16
    dtype = torch.float32 if request.dtype == "fp32" else torch.bfloat16
    encoder = load_text_encoder(request.checkpoint, device=where, dtype=dtype)
    tokenizer = load_tokenizer(request.checkpoint)
    states = encode_prompts(encoder, tokenizer, texts, dtype=DTYPES[request.dtype]).cpu()
    del encoder  # before the experts come
    release_memory(device)
    return states
