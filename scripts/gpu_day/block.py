"""One block of Wan A14B on several ranks, and the same block without a copy: the exposed share of its time.

    torchrun --nproc-per-node 2 scripts/gpu_day/block.py --notes notes.jsonl --out outputs/day

Random weights. First the block's rows are compared with those over the collective exchange, bit for bit. Then the block
takes turns with itself where attention's call runs its kernels alone: no copy, no flag, no wait. Last it runs under
torch's profiler: OUT/trace.png is its attention call at the first length.
"""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from real_size_steps import random_expert
from scripts.gpu_day.job import STALL_S, Job, attention_parser, job
from scripts.gpu_day.kernels_alone import KernelsAlone
from scripts.gpu_day.notes import call_name
from scripts.gpu_day.trace import RANGES, trace
from usp.attention import Attention
from usp.exchange import CollectiveExchange
from usp.kernels import kernels_for
from usp.layout import split_counts
from usp.models.wan.config import TEXT_LEN, TransformerConfig
from usp.models.wan.rope import RopeTable
from usp.models.wan.transformer import Addend, TextKV, WanBlock
from usp.pipeline import PipelinedExchange
from usp.transport import make_exchange
from usp.ulysses import UlyssesAttention

DTYPE = torch.bfloat16


class Bench:
    """A block, and what it is given: own rows of every rank."""

    def __init__(self, job: Job, tokens: int, attention: Attention) -> None:
        sizes, own = job.sizes, split_counts(tokens, job.ranks)[job.rank]
        wide = {"num_heads": sizes.num_heads, "head_dim": sizes.head_dim} if job.flags.small else {}
        config = TransformerConfig(num_layers=1, **wide, **({"ffn_dim": 64} if wide else {}))
        (self.block,) = random_expert(config, seed=1, device=job.device).blocks  # the same on every rank
        self.kernels, self.attention = kernels_for(job.device), attention
        self.x = torch.randn(1, own, config.dim, device=job.device).to(DTYPE)
        self.modulation = torch.randn(1, 6, config.dim, device=job.device) * 0.3
        angles = torch.rand(own, config.head_dim // 2, device=job.device) * 6.3
        self.rope = RopeTable(angles.cos(), angles.sin())
        context = torch.randn(1, TEXT_LEN, config.dim, device=job.device).to(DTYPE)
        self.text = TextKV(*self._block.attn2.project_text(context))
        self.addend = Addend(torch.zeros_like(self.x), torch.ones(1, 1, config.dim, device=job.device))

    @property
    def _block(self) -> WanBlock:
        assert isinstance(self.block, WanBlock)
        return self.block

    def run(self, self_attention: UlyssesAttention, *, again: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """The block's rows, and the last addend, which is left to the next block. `again` goes on with what the last
        run left, for which nothing is copied."""
        x, last = self._block(
            self.x if again else self.x.clone(),  # which it writes over
            self.addend,
            modulation=self.modulation,
            text_kv=self.text,
            rope=self.rope,
            self_attention=self_attention,
            cross_attention=self.attention,
            kernels=self.kernels,
        )
        return x, last.y


def measure(job: Job, tokens: int, attention: Attention) -> None:
    bench = Bench(job, tokens, attention)
    exchange = make_exchange(job.transport, tokens, mesh=job.mesh, device=job.device, stall_timeout=STALL_S)
    with exchange:
        whole = UlyssesAttention(exchange, attention=attention)
        collective = UlyssesAttention(CollectiveExchange(tokens, axis=job.mesh.ulysses), attention=attention)
        wanted = bench.run(collective)
        are_equal = [all(map(torch.equal, bench.run(whole), wanted)) for _ in range(2)]
        name = call_name(tokens, job.ranks, "block")
        job.notes.check(f"{name}: equal bits to the sequential path", job.all_agree(all(are_equal)))
        del wanted
        alone = KernelsAlone(exchange, attention=attention)
        runs: dict[str, Callable[[], object]] = {
            name: partial(bench.run, whole, again=True),
            f"{name}, without copies": partial(bench.run, alone, again=True),
            f"{name}, collectives over {job.transport.collectives}": partial(bench.run, collective, again=True),
        }
        medians = job.note_times(job.time_in_turns(runs))
    share = 1 - medians[f"{name}, without copies"] / medians[name]
    job.notes.measured(f"{name}, exposed share", share, "")


def trace_block(job: Job, tokens: int, attention: Attention) -> None:
    bench = Bench(job, tokens, attention)
    exchange = make_exchange(job.transport, tokens, mesh=job.mesh, device=job.device, stall_timeout=STALL_S)
    with exchange:
        if isinstance(exchange, PipelinedExchange):
            exchange.ranges = RANGES
        run = partial(bench.run, UlyssesAttention(exchange, attention=attention), again=True)
        run()
        trace(job, run, call_name(tokens, job.ranks, "call in a block"), job.flags.out, picture=True)


def main() -> None:
    with job(attention_parser(__doc__)) as here:
        chosen = here.choose_attention(DTYPE)
        for tokens in here.sizes.tokens:
            measure(here, tokens, chosen)
        trace_block(here, here.sizes.tokens[0], chosen)


if __name__ == "__main__":
    main()
