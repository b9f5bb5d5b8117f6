"""One attention call on several ranks: how much of the exchange is exposed, by difference and by trace.

    torchrun --nproc-per-node 2 scripts/gpu_day/attention.py --notes notes.jsonl --out outputs/day

Every grouping is first compared with the sequential path, bit for bit. Then they take turns, each as a whole and with
its kernels alone: the difference is what is exposed. At the first length, the plan's own grouping is also run with q
and k filled by a copy after norm and RoPE instead of by them, and with polling kernels in place of parked waits; and
every grouping under torch's profiler, whose trace gives the hidden share.
"""

import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from scripts.gpu_day.exchange import qkv_of
from scripts.gpu_day.job import STALL_S, Job, attention_parser, job
from scripts.gpu_day.kernels_alone import KernelsAlone
from scripts.gpu_day.notes import call_name
from scripts.gpu_day.predict import plans_for
from scripts.gpu_day.trace import RANGES, trace
from usp.attention import Attention
from usp.fill import FillAll, fill_from
from usp.ipc.rendezvous import GroupRendezvous
from usp.kernels import kernels_for
from usp.pipeline import PipelinedExchange
from usp.ranges import Ranges
from usp.tables import describe_groups
from usp.transport import make_exchange
from usp.ulysses import UlyssesAttention

EPS = 1e-6


class Bench:
    """Own rows, and exchanges over them that are closed together."""

    def __init__(self, job: Job, tokens: int, attention: Attention, stack: ExitStack) -> None:
        self.job, self.tokens, self.attention, self.stack = job, tokens, attention, stack
        self.q, self.k, self.v = qkv_of(job, tokens)
        self.fill = fill_from(self.q, self.k)

    def attn(self, widths: tuple[int, ...] | None = None, *, ranges: Ranges | None = None) -> UlyssesAttention:
        here = self.job
        exchange = make_exchange(
            here.transport, self.tokens, mesh=here.mesh, device=here.device, group_widths=widths, stall_timeout=STALL_S
        )
        if ranges is not None and isinstance(exchange, PipelinedExchange):
            exchange.ranges = ranges
        return UlyssesAttention(self.stack.enter_context(exchange), attention=self.attention)

    def call(self, attn: UlyssesAttention, fill: FillAll | None = None) -> torch.Tensor:
        return attn.filled(self.v, fill or self.fill, num_heads=self.q.shape[2])

    def check(self, attn: UlyssesAttention, what: str) -> None:
        """Two calls against the sequential path."""
        wanted = attn.plain(self.q, self.k, self.v)
        are_equal = [torch.equal(self.call(attn), wanted) for _ in range(2)]
        self.job.notes.check(f"{what}: equal bits to the sequential path", self.job.all_agree(all(are_equal)))


def compare_groupings(job: Job, tokens: int, attention: Attention) -> None:
    with ExitStack() as stack:
        bench, runs = Bench(job, tokens, attention, stack), {}
        for name, widths in groupings(job, tokens).items():
            attn = bench.attn(widths)
            bench.check(attn, name)
            alone = KernelsAlone(attn.exchange, attention=attention)
            runs |= {name: partial(bench.call, attn), f"{name}, kernels alone": partial(bench.call, alone)}
        medians = job.note_times(job.time_in_turns(runs))
    for name in groupings(job, tokens):
        job.notes.measured(f"{name}, exposed", medians[name] - medians[f"{name}, kernels alone"], "ms")


def groupings(job: Job, tokens: int) -> dict[str, tuple[int, ...] | None]:
    """By the name of its prediction; None is the plan's own rule, which also knows ranks with fewer heads."""
    own, *others = plans_for(job.sizes, tokens, job.ranks)
    names = [call_name(tokens, job.ranks, f"call, groups {describe_groups(plan)}") for plan in (own, *others)]
    return dict(zip(names, [None, *(plan.group_widths[0] for plan in others)], strict=True))


def compare_fills(job: Job, tokens: int, attention: Attention) -> None:
    """norm and RoPE straight into the blocks, or in place with a copy behind them."""
    with ExitStack() as stack:
        bench = Bench(job, tokens, attention, stack)
        attn, kernels = bench.attn(), kernels_for(job.device)
        weights = [torch.ones(bench.q.shape[2] * bench.q.shape[3], dtype=bench.q.dtype, device=job.device)] * 2
        angles = torch.rand(bench.q.shape[1], bench.q.shape[3] // 2, device=job.device)
        norm_rope = partial(kernels.norm_rope, bench.q, bench.k, *weights, angles.cos(), angles.sin(), eps=EPS)

        def unfilled() -> torch.Tensor:
            return bench.call(attn, fill_from(*norm_rope()))

        def filled() -> torch.Tensor:
            return bench.call(attn, lambda blocks: norm_rope(blocks=blocks))

        runs = {"norm and RoPE into the blocks": filled, "norm and RoPE, then copied": unfilled}
        job.note_times(job.time_in_turns(runs), prefix=call_name(tokens, job.ranks, ""))


def compare_waits(job: Job, tokens: int, attention: Attention) -> None:
    if job.transport.name != "ipc" or not job.has_gpu_each:
        job.notes.remark("polling kernels are compared with where each rank has a GPU")
        return
    from scripts.gpu_day.polling import PollingEngine
    from usp.ipc.cuda import CudaProvider

    with ExitStack() as stack:
        bench = Bench(job, tokens, attention, stack)
        polling = PipelinedExchange(
            tokens,
            axis=job.mesh.ulysses,
            rendezvous=GroupRendezvous(job.mesh.ulysses.group),
            provider=CudaProvider(job.device),
            make_engine=partial(PollingEngine, job.device),
            stall_timeout=STALL_S,
        )
        attns = {"parked waits": bench.attn()}
        attns["polling kernels"] = UlyssesAttention(stack.enter_context(polling), attention=attention)
        for name, attn in attns.items():
            bench.check(attn, name)
        runs = {name: partial(bench.call, attn) for name, attn in attns.items()}
        job.note_times(job.time_in_turns(runs), prefix=call_name(tokens, job.ranks, ""))


def trace_groupings(job: Job, tokens: int, attention: Attention, folder: Path) -> None:
    """One exchange at a time: those with ranges are others than those that are timed."""
    for name, widths in groupings(job, tokens).items():
        with ExitStack() as stack:
            bench = Bench(job, tokens, attention, stack)
            attn = bench.attn(widths, ranges=RANGES)
            bench.call(attn)
            trace(job, partial(bench.call, attn), name, folder)


def main() -> None:
    with job(attention_parser(__doc__)) as here:
        chosen = here.choose_attention(getattr(torch, here.sizes.dtype))
        first, *_ = here.sizes.tokens
        for tokens in here.sizes.tokens:
            compare_groupings(here, tokens, chosen)
        compare_fills(here, first, chosen)
        compare_waits(here, first, chosen)
        trace_groupings(here, first, chosen, here.flags.out)


if __name__ == "__main__":
    main()
