"""The exchange alone: what one attention call moves, with nothing attended. Ours, and what others would do.

    torchrun --nproc-per-node 2 scripts/gpu_day/exchange.py --notes notes.jsonl

First every contender's result is compared with plain slicing: attention is q + k + v of a head's rows, so own rows are
known without any exchange. Then they take turns with an attention that does nothing. `one group` is ours, everything
sent, then everything returned; `collectives` is three all-to-alls out and one back, over NCCL where each rank has a
GPU, as our fallback does them for shares of any size; `collectives, one permute` is the least that equal shares need.
FlashInfer's communicator runs where it is installed.
"""

import argparse
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist

from scripts.gpu_day.job import STALL_S, Job, job
from scripts.gpu_day.notes import call_name
from usp.exchange import CollectiveExchange
from usp.fill import fill_from
from usp.layout import split_counts
from usp.transport import make_exchange
from usp.ulysses import UlyssesAttention

Call = Callable[[], torch.Tensor]
CALLS = 10


class Sum:
    """Attention that is known in advance, row by row and head by head."""

    writes_out = True

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        result = q + k + v
        return result if out is None else out.copy_(result)


class Nothing:
    """Attention that takes no time; what it returns is whatever lay there."""

    writes_out = True

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        return q if out is None else out


def qkv_of(job: Job, tokens: int) -> tuple[torch.Tensor, ...]:
    """Own rows, slices of a fused projection's output."""
    own = split_counts(tokens, job.ranks)[job.rank]
    fused = torch.randn(1, own, 3 * job.sizes.num_heads, job.sizes.head_dim, device=job.device)
    return fused.to(getattr(torch, job.sizes.dtype)).chunk(3, dim=2)


def contenders(job: Job, tokens: int, stack: ExitStack, attention: object) -> dict[str, Call]:
    q, k, v = qkv_of(job, tokens)
    heads = q.shape[2]

    def ours(num_groups: int | None) -> Call:
        exchange = make_exchange(
            job.transport, tokens, mesh=job.mesh, device=job.device, num_groups=num_groups, stall_timeout=STALL_S
        )
        attn = UlyssesAttention(stack.enter_context(exchange), attention=attention)
        return lambda: attn.filled(v, fill_from(q, k), num_heads=heads)

    collective = UlyssesAttention(CollectiveExchange(tokens, axis=job.mesh.ulysses), attention=attention)
    found = {
        "exchange alone, pipelined": ours(None),
        "exchange alone, one group": ours(1),
        f"exchange alone, collectives over {job.transport.collectives}": lambda: collective.plain(q, k, v),
    }
    lean = lean_call(job, q, k, v, attention)
    if lean is not None:
        found[f"exchange alone, collectives over {job.transport.collectives}, one permute"] = lean
    theirs = flashinfer_call(job, q, k, v, stack, attention)
    if theirs is not None:
        found["exchange alone, FlashInfer's communicator"] = theirs
    if isinstance(attention, Sum):
        for name, call in found.items():
            check_sum(job, name, call, q + k + v)
    return found


def check_sum(job: Job, name: str, call: Call, wanted: torch.Tensor) -> None:
    """Twice, since a second call finds what the first one left."""
    are_equal = [torch.equal(call(), wanted) for _ in range(2)]
    job.notes.check(f"{name}: own rows of every head equal plain slicing", job.all_agree(all(are_equal)))


def have_equal_shares(job: Job, q: torch.Tensor) -> bool:
    return job.all_agree(q.shape[2] % job.ranks == 0 and q.numel() == job.slowest(q.numel()))


def lean_call(job: Job, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attention: object) -> Call | None:
    """Each tensor is permuted once before it is sent, or once after it came; where the group moves such memory."""
    group, ranks = job.mesh.ulysses.group, job.ranks
    if not have_equal_shares(job, q) or (job.device.type == "cuda" and not job.has_gpu_each):
        return None

    def scattered(x: torch.Tensor) -> torch.Tensor:
        # [1, S_r, H, D] -> [P, S_r, H_r, D], one part per peer -> [1, S, H_r, D]
        sent = x[0].unflatten(1, (ranks, -1)).transpose(0, 1).contiguous()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        return received.flatten(0, 1)[None]

    def call() -> torch.Tensor:
        out = attention(*map(scattered, (q, k, v))).contiguous()
        received = torch.empty_like(out)
        dist.all_to_all_single(received, out, group=group)
        # [1, P * S_r, H_r, D] -> [1, S_r, H, D]
        return received[0].unflatten(0, (ranks, -1)).transpose(0, 1).flatten(1, 2)[None]

    return call


def flashinfer_call(
    job: Job, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, stack: ExitStack, attention: object
) -> Call | None:
    """Equal shares only; needs contiguous operands, so the copies of slices are part of its call."""
    if not job.has_gpu_each or not have_equal_shares(job, q):
        job.notes.remark("FlashInfer's communicator needs a GPU for each rank, and equal shares of tokens and heads")
        return None
    try:
        from flashinfer.comm import UlyssesCommunicator
    except ImportError as error:
        job.notes.remark(f"FlashInfer's communicator is not installed: {error}")
        return None
    try:
        with torch.inference_mode(False):
            other = UlyssesCommunicator(job.mesh.ulysses.group, max_elems=q.numel(), dtype=q.dtype, device=job.device)
    except (RuntimeError, ValueError) as error:  # on all ranks alike, as it says
        job.notes.remark(f"FlashInfer's communicator does not start: {error}")
        return None
    stack.callback(other.close)
    job.notes.remark(f"FlashInfer's communicator runs over {other.backend}")

    def call() -> torch.Tensor:
        parts = [other.scatter_heads(x.contiguous()) for x in (q, k, v)]
        return other.gather_heads(attention(*parts).contiguous())

    return call


def sent_bytes(job: Job, tokens: int) -> int:
    """By one rank to its peers: q, k and v out, one result back."""
    own = split_counts(tokens, job.ranks)[job.rank]
    heads = job.sizes.num_heads * (job.ranks - 1) / job.ranks
    return int(4 * own * heads * job.sizes.head_dim * getattr(torch, job.sizes.dtype).itemsize)


def measure(job: Job, tokens: int) -> None:
    with ExitStack() as stack:
        contenders(job, tokens, stack, Sum())
    with ExitStack() as stack:
        times = job.time_in_turns(contenders(job, tokens, stack, Nothing()), calls=CALLS)
        medians = job.note_times(times, prefix=call_name(tokens, job.ranks, ""))
    gigabytes = sent_bytes(job, tokens) / 1e9
    for name, ms in medians.items():
        job.notes.measured(call_name(tokens, job.ranks, f"{name}, rate"), gigabytes / ms * 1e3, "GB/s sent")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    with job(parser) as here:
        for tokens in here.sizes.tokens:
            measure(here, tokens)


if __name__ == "__main__":
    main()
