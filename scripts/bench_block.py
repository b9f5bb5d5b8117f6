"""Times one block of Wan A14B against the block of diffusers, in one process, by turns, on the same weights.

    python scripts/bench_block.py --attention fa3 --tokens 75600 --json block.json
    python scripts/bench_block.py --attention fa3 --tokens 75600 --ranks 2

`ours` is a block of models/wan as sampling runs it: text keys and values are projected once per prompt, and the last
residual sum of the block before is added by the first norm. `diffusers` runs eagerly and compiled, with our attention
kernel in place of its own, and, as `as shipped`, with cuDNN through SDPA. `floor` is the sum of our own attention and
matrix products, each timed alone. First all are compared with diffusers' block in fp32 arithmetic on a few tokens. With
--ranks P the block works on its share of the tokens and heads against all keys, exchange left out.
"""

import argparse
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench_kernels import versions
from kernel_designs.timing import Timing, time_alternating
from scripts.git_commit import commit_here
from usp.attention import choose_attention
from usp.kernels import kernels_for
from usp.models.wan.config import TransformerConfig
from usp.models.wan.rope import RopeTable
from usp.models.wan.transformer import Addend, TextKV, WanBlock

CONFIG = TransformerConfig(num_layers=1)
DIM, HEADS, HEAD_DIM, TEXT = CONFIG.dim, CONFIG.num_heads, CONFIG.head_dim, 512
DEVICE = torch.device("cuda")
BF16 = torch.bfloat16


class Inputs:
    """Random tokens, text, modulation and angles."""

    def __init__(self, tokens: int) -> None:
        self.x = torch.randn(1, tokens, DIM, device=DEVICE).to(BF16)
        self.context = torch.randn(1, TEXT, DIM, device=DEVICE).to(BF16)
        self.modulation = torch.randn(1, 6, DIM, device=DEVICE) * 0.3
        angles = torch.rand(tokens, HEAD_DIM // 2, device=DEVICE) * 6.3
        self.rope = RopeTable(angles.cos(), angles.sin())
        # diffusers repeats every angle for both of its columns
        self.repeated = tuple(one.repeat_interleave(2, dim=-1)[None, :, None] for one in self.rope)


class Share:
    """Attention of one of P ranks: own queries' share of heads against all keys, as after the exchange."""

    def __init__(self, attention: Any, tokens: int, ranks: int) -> None:
        heads = HEADS // ranks
        shape = (1, tokens, heads, HEAD_DIM)
        self.attention, self.ranks = attention, ranks
        self.qkv = tuple(torch.randn(shape, device=DEVICE).to(BF16) for _ in "qkv")

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if self.ranks == 1:
            return self.attention(q, k, v)
        out = self.attention(*self.qkv)  # [1, S, H/P, D]; the exchange back is left out
        return out.view(q.shape)


def make_blocks() -> tuple[WanBlock, torch.nn.Module]:
    """Ours and diffusers', with the same weights."""
    from diffusers.models.transformers.transformer_wan import WanTransformerBlock

    with DEVICE:
        ours = WanBlock(CONFIG)
        theirs = WanTransformerBlock(DIM, CONFIG.ffn_dim, HEADS, "rms_norm_across_heads", True, CONFIG.eps)
    for name, parameter in ours.named_parameters():
        scale = parameter[0].numel() ** -0.5 if parameter.ndim == 2 else 0.1
        parameter.data.normal_(std=scale)
        if "norm" in name and name.endswith("weight"):
            parameter.data += 1
    theirs.load_state_dict(ours.state_dict())
    for block in (ours, theirs):
        block.requires_grad_(False).to(BF16).eval()
        for name, parameter in block.named_parameters():
            if "norm2" in name or "table" in name:
                parameter.data = parameter.data.float()
    ours.attn1.fuse()
    return ours, theirs


def ours_of(block: WanBlock, given: Inputs, self_attention: Any, attention: Any) -> Callable[[], torch.Tensor]:
    kernels, text = kernels_for(DEVICE), block.attn2.project_text(given.context)
    addend = Addend(torch.zeros_like(given.x), torch.ones(1, 1, DIM, device=DEVICE))
    stream = given.x.clone()

    def run() -> torch.Tensor:
        x, last = block(
            stream,  # which it writes over
            addend,
            modulation=given.modulation,
            text_kv=TextKV(*text),
            rope=given.rope,
            self_attention=self_attention,
            cross_attention=attention,
            kernels=kernels,
        )
        return x, last

    return run


@contextmanager
def attending_with(attention: Callable[..., torch.Tensor]) -> Iterator[None]:
    """diffusers' block calls our kernel where it would pick its own."""
    from diffusers.models.transformers import transformer_wan

    def dispatch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **_: object) -> torch.Tensor:
        return attention(q, k, v)

    before = transformer_wan.dispatch_attention_fn
    transformer_wan.dispatch_attention_fn = dispatch
    try:
        yield
    finally:
        transformer_wan.dispatch_attention_fn = before


def split_attention(share: Share, attention: Any) -> Callable[..., torch.Tensor]:
    """Self-attention through the share, cross-attention as it is."""

    @torch.compiler.disable
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return share(q, k, v) if k.shape[1] != TEXT else attention(q, k, v)

    return attend


def floor_parts(block: WanBlock, given: Inputs, share: Share, attention: Any) -> dict[str, Callable[[], object]]:
    """Our attention and products alone, on inputs of their shapes."""
    from usp.models.wan.fused import fused_rows

    x, tokens = given.x, given.x.shape[1]
    wide = torch.randn(1, tokens, CONFIG.ffn_dim, device=DEVICE).to(BF16)
    q = torch.randn(1, tokens, HEADS, HEAD_DIM, device=DEVICE).to(BF16)
    text = block.attn2.project_text(given.context)
    weight, bias = fused_rows(block.attn1.to_q, block.attn1.to_k, block.attn1.to_v)
    k, v = (torch.randn_like(q) for _ in "kv")
    return {
        "qkv": lambda: torch.nn.functional.linear(x, weight, bias),
        "attention": lambda: share(q, k, v),
        "out": lambda: block.attn1.to_out[0](x),
        "cross q": lambda: block.attn2.to_q(x),
        "cross attention": lambda: attention(q, *text),
        "cross out": lambda: block.attn2.to_out[0](x),
        "up": lambda: block.ffn.net[0].proj(x),
        "down": lambda: block.ffn.net[2](wide),
    }


def finished(result: tuple[torch.Tensor, Addend]) -> torch.Tensor:
    x, (y, gate) = result
    return (x.float() + y.float() * gate).to(x.dtype)


def check(block: WanBlock, theirs: torch.nn.Module, attention: Any) -> dict[str, float]:
    """Errors against diffusers' block in fp32, of ours and of diffusers' own in bf16; ours may be twice as large."""
    given = Inputs(2048)
    found = finished(ours_of(block, given, attention, attention)())
    inputs = (given.x, given.context, given.modulation, given.repeated)
    with attending_with(lambda q, k, v: attention(q, k, v)):
        same = theirs(*inputs)
    exact_block = type(theirs)(DIM, CONFIG.ffn_dim, HEADS, "rms_norm_across_heads", True, CONFIG.eps).to(DEVICE)
    exact_block.load_state_dict(theirs.state_dict())
    with sdpa_kernel(SDPBackend.MATH):
        exact = exact_block(given.x.float(), given.context.float(), *inputs[2:])
    errors = {
        name: float((one.float() - exact).norm() / exact.norm()) for name, one in (("ours", found), ("theirs", same))
    }
    assert errors["ours"] <= 2 * errors["theirs"], errors
    return errors


def profile_table(run: Callable[[], object]) -> dict[str, float]:
    """Milliseconds on the GPU by kind of kernel, of one run."""
    run()
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(3):
            run()
        torch.cuda.synchronize()
    kinds: defaultdict[str, float] = defaultdict(float)
    for event in profiler.key_averages():
        kinds[kind_of(event.key)] += event.self_device_time_total / 3e3
    return dict(kinds)


def kind_of(kernel: str) -> str:
    lowered = kernel.lower()
    if any(word in lowered for word in ("flash", "fmha", "attention")):
        return "attention"
    if any(word in lowered for word in ("gemm", "nvjet", "cutlass", "cublas", "xmma")):
        return "products"
    return "memory passes"


def host_time(run: Callable[[], object], repeats: int = 20) -> float:
    """Milliseconds of the host to enqueue a run, the device asleep."""
    found = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        torch.cuda._sleep(40_000_000)
        start = time.perf_counter()
        run()
        found.append((time.perf_counter() - start) * 1e3)
    torch.cuda.synchronize()
    return median(found)


def variants(
    block: WanBlock, theirs: torch.nn.Module, given: Inputs, share: Share, attention: Any, compiled: bool
) -> dict[str, Callable[[], object]]:
    inputs = (given.x, given.context, given.modulation, given.repeated)
    attend = split_attention(share, attention)
    shipped = split_attention(Share(cudnn, share.qkv[0].shape[1], share.ranks), cudnn)

    def under(attention: Callable[..., torch.Tensor], module: Callable[..., object]) -> Callable[[], object]:
        def run() -> object:
            with attending_with(attention):
                return module(*inputs)

        return run

    found = {
        "ours": ours_of(block, given, share, attention),
        "diffusers": under(attend, theirs),
        "diffusers as shipped": under(shipped, theirs),
    }
    if compiled:
        found["diffusers compiled"] = under(attend, torch.compile(theirs))
        found["diffusers compiled, as shipped"] = under(cudnn, torch.compile(theirs)) if share.ranks == 1 else None
    return {name: run for name, run in found.items() if run is not None}


def cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        out = torch.nn.functional.scaled_dot_product_attention(*(one.transpose(1, 2) for one in (q, k, v)))
    return out.transpose(1, 2)


def measure(flags: argparse.Namespace, tokens: int, attention: Any) -> dict[str, Any]:
    own = tokens // flags.ranks
    block, theirs = make_blocks()
    errors = check(block, theirs, attention)
    given, share = Inputs(own), Share(attention, tokens, flags.ranks)
    runs = variants(block, theirs, given, share, attention, flags.compile)
    pieces = floor_parts(block, given, share, attention)
    both = time_alternating(runs | pieces, nbytes=0, repeats=flags.repeats, warmup=2)  # in turns: clocks drift
    timed, parts = both[: len(runs)], both[len(runs) :]
    floor = sum(one.median for one in parts) / 1e3
    ours = timed[0].median / 1e3
    return {
        "tokens": tokens,
        "ranks": flags.ranks,
        "relative_error": errors,
        "ms": {one.name: _summary(one) for one in timed},
        "ratio": {one.name: one.median / 1e3 / ours for one in timed},
        "floor_ms": floor,
        "ours_over_floor": ours / floor,
        "floor_parts_ms": {one.name: one.median / 1e3 for one in parts},
        "profile_ms": profile_table(runs["ours"]),
        "host_ms": host_time(runs["ours"]),
        "peak_GB": peak_memory(runs),
    }


def peak_memory(
    runs: dict[str, Callable[[], object]], *, before: Callable[[], None] = lambda: None
) -> dict[str, float]:
    """Of a run, above what is held anyway, which is counted after `before`."""
    found = {}
    for name, run in runs.items():
        before()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        found[name] = round((torch.cuda.max_memory_allocated() - held) / 1e9, 3)
    return found


def _summary(timing: Timing) -> dict[str, float]:
    low, high = timing.spread
    return {"median": timing.median / 1e3, "p10": low / 1e3, "p90": high / 1e3}


def main(argv: Sequence[str] | None = None) -> int:
    flags = _parser().parse_args(argv)
    chosen = choose_attention(flags.attention, device=DEVICE, dtype=BF16, head_dim=HEAD_DIM)
    about = {"gpu": torch.cuda.get_device_name(), "versions": versions(), "commit": commit_here(), "command": sys.argv}
    records = []
    with torch.inference_mode():
        for tokens in flags.tokens:
            records.append(measure(flags, tokens, chosen.backend))
            print(json.dumps(records[-1], indent=1), flush=True)
    if flags.json:
        flags.json.write_text(json.dumps({**about, "attention": chosen.reason, "records": records}, indent=1))
    for one in records:
        print(f"{one['tokens']:,} tokens, {one['ranks']} ranks: {one['ours_over_floor']:.3f} x floor", one["ratio"])
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[75_600, 32_760])
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--no-compile", dest="compile", action="store_false", help="diffusers eagerly only")
    parser.add_argument("--json", type=Path)
    return parser


if __name__ == "__main__":
    sys.exit(main())
