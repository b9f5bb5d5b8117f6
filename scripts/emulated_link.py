"""Shows on one GPU how much of the exchange hides under attention, and whether the simulator knows it beforehand.

    python scripts/emulated_link.py --ranks 2 --tokens 75600 --heads 40 --attention fa3 --out outputs/emulated

One process plays one rank: what it sends is copied to pinned host memory, what it gets is replayed from there, each by
a copy engine of its own, as between GPUs, but over the host's link. First the result and everything sent are compared
with plain attention. Then three things alternate: the call's kernels alone, the pipelined call, and the call with an
event around each operation. The copies, both ways at once, are timed without kernels as well. From the durations of
kernels alone and copies alone the simulator predicts the call.
Writes report.json, durations.json (for python -m usp.simulate --measured), trace.json (torch's profiler), call.png.
"""

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from scripts.git_commit import commit_here
from usp.attention import choose_attention
from usp.costs import ARRIVALS, COPIES, Costs, key
from usp.draw import draw
from usp.emulated_rank import EmulatedRank
from usp.execute import Call
from usp.fill import fill_from
from usp.ipc.cuda_engine import CudaEngine
from usp.ipc.engine import AUX, COPY
from usp.layout import split_counts
from usp.plan import AttentionPlan, make_plan
from usp.ranges import Ranges, layer_name, record_functions, who
from usp.schedule import Kind
from usp.simulate import simulate_emulated
from usp.simulate_command import _widths
from usp.stopwatch import HEAD_START_CYCLES, WORK, Timed, durations, time_call, timeline_of
from usp.tables import describe
from usp.trace_calls import calls_of
from usp.trace_read import read
from usp.trace_report import sums, text

DEVICE = torch.device("cuda")
MOVED = (*COPIES, Kind.SIGNAL)
MOVES = (*MOVED, Kind.RECORD, Kind.AWAIT)  # everything that crosses the link, in its order, with no kernel beside it


class Played:
    """A rank with random inputs, and random arrivals from its peers."""

    def __init__(self, plan: AttentionPlan, rank: int, attention: Any, ranges: Ranges | None = None) -> None:
        self.plan, self.rank, self.attention = plan, rank, attention
        self.engine = CudaEngine(streams=(COPY, AUX, ARRIVALS))
        self.executor = EmulatedRank(plan, rank, engine=self.engine, attention=attention, device=DEVICE, ranges=ranges)
        shape = (plan.batch, plan.token_counts[rank])
        heads = (plan.num_heads, plan.num_kv_heads, plan.num_kv_heads)
        fused = torch.randn(*shape, sum(heads), plan.head_dim, device=DEVICE).to(self.executor.dtype)
        self.q, self.k, self.v = fused.split(heads, dim=2)  # slices of a fused projection's output
        for peer in plan.peers(rank):
            fill_random(self.executor.peer_v[peer])
            for group in plan.groups(rank):
                for what in "qk":
                    fill_random(self.executor.peer_view(peer, ("send", what, rank, group.index)))
            for buffer in [("out",)] if plan.direct else [("kept", one.index, rank) for one in plan.groups(peer)]:
                fill_random(self.executor.peer_view(peer, buffer))

    def run(self) -> torch.Tensor:
        return self.executor.attend(self.v, fill_from(self.q, self.k))

    def call(self) -> Call:
        """The next call, for a stopwatch to issue."""
        return self.executor.next_call(self.v, fill_from(self.q, self.k))

    def check(self) -> None:
        """Own heads against attention over what lies in the slots, the peers' heads against what they returned, and
        the slots and the peers' memory against what was sent."""
        executor, plan, mine = self.executor, self.plan, self.plan.tokens(self.rank)
        for view in executor.views.values():
            view.view(torch.int16).fill_(0x7FC1)  # NaN
        found = self.run().clone()
        torch.cuda.synchronize()
        assert found.isfinite().all()
        for group in plan.groups(self.rank):
            q, k, v = (executor.views["slot", what, group.index] for what in "qkv")
            heads = slice(group.start, group.start + group.count)
            assert torch.equal(q[:, mine.start : mine.stop], self.q[:, :, heads])
            assert torch.equal(v[:, mine.start : mine.stop], self.v[:, :, heads])
            for peer in plan.peers(self.rank):
                rows, block = plan.tokens(peer), executor.peer_view(peer, ("send", "k", self.rank, group.index))
                assert torch.equal(k[:, rows.start : rows.stop].cpu(), block)
                sent = executor.peer_v[peer][:, :, heads]
                assert torch.equal(v[:, rows.start : rows.stop].cpu(), sent)
            assert torch.equal(found[:, :, heads], self.attention(q, k, v)[:, mine.start : mine.stop])
        for peer in plan.peers(self.rank):
            self._check_peer(peer, found)

    def _check_peer(self, peer: int, found: torch.Tensor) -> None:
        executor, mine = self.executor, self.plan.tokens(self.rank)
        for group in self.plan.groups(peer):
            heads = slice(group.start, group.start + group.count)
            for what, x in zip("qkv", (self.q, self.k, self.v), strict=True):
                slot = executor.peer_view(peer, ("slot", what, group.index))[:, mine.start : mine.stop]
                assert torch.equal(slot, x[:, :, heads].cpu())
            if self.plan.direct:
                returned = executor.peer_view(peer, ("out",))[:, mine.start : mine.stop, heads]
                assert torch.equal(found[:, :, heads].cpu(), returned)


def fill_random(pinned: torch.Tensor) -> None:
    pinned.copy_(torch.randn(pinned.shape, device=DEVICE).to(pinned.dtype))


def end_to_end(run: Callable[[], Any], calls: int = 1) -> float:
    """Microseconds a call on the main stream; the host issues ahead."""
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in "se")
    torch.cuda._sleep(HEAD_START_CYCLES)
    start.record()
    for _ in range(calls):
        run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1e3 / calls


def host_issue(played: Played, repeats: int = 30) -> dict[str, Any]:
    """Microseconds of host time to issue a call, the stand-ins for peers left out: median, slowest, and by kind."""
    executor = played.executor
    steps = [(op, step) for op, step in zip(executor.ops, executor.steps, strict=True) if op.stream != ARRIVALS]
    others = [step for op, step in zip(executor.ops, executor.steps, strict=True) if op.stream == ARRIVALS]
    found, by_kind = [], Counter[str]()
    for number in range(2 * repeats):
        call = played.call()
        torch.cuda.synchronize()
        torch.cuda._sleep(HEAD_START_CYCLES)  # nothing may be waited for while it is issued
        start = before = time.perf_counter()
        executor.engine.begin()
        for op, step in steps:
            step(call)
            if number % 2:
                now = time.perf_counter()
                by_kind[op.kind.value] += (now - before) * 1e6 / repeats
                before = now
        if number % 2 == 0:
            found.append((time.perf_counter() - start) * 1e6)
        for step in others:
            step(call)
    torch.cuda.synchronize()
    counts = Counter(op.kind.value for op, _ in steps)
    each = {kind: f"{counts[kind]} x {us / counts[kind]:.1f}" for kind, us in by_kind.items()}
    return {"median_us": median(found), "slowest_us": max(found), "operations": len(steps), "by_kind": each}


def profile(plan: AttentionPlan, rank: int, attention: Any, path: Path, calls: int) -> None:
    ranges = record_functions()
    played = Played(plan, rank, attention, ranges)
    name = who(rank, range(plan.num_ranks))
    played.run()
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        for number in range(calls):
            with ranges.range(layer_name(number, name)):
                played.run()
        torch.cuda.synchronize()
    profiler.export_chrome_trace(str(path))
    played.engine.close()


def measure(played: Played, rounds: int) -> tuple[dict[str, float], list[list[Timed]], list[Timed]]:
    totals: dict[str, list[float]] = {"work": [], "call": [], "back_to_back": []}
    calls, work = [], []
    for _ in range(rounds):
        kernels = time_call(played.executor, played.call(), kinds=WORK)
        work += kernels
        totals["work"].append(kernels[-1].span[1])
        totals["call"].append(end_to_end(played.run))
        calls.append(time_call(played.executor, played.call()))
        totals["back_to_back"].append(end_to_end(played.run, calls=4))
    return {name: median(all_) for name, all_ in totals.items()}, calls, work


def compare(plans: dict[str, AttentionPlan], rank: int, attention: Any, rounds: int) -> list[dict[str, Any]]:
    """Groupings that take turns: the kernels of a call alone, and the call, back to back; medians in milliseconds."""
    played = {name: Played(plan, rank, attention) for name, plan in plans.items()}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in plans}
    for one in played.values():
        one.check()
    for _ in range(rounds):
        for name, one in played.items():
            kernels = time_call(one.executor, one.call(), kinds=WORK)[-1].span[1]
            found[name].append((kernels / 1e3, end_to_end(one.run, calls=3) / 1e3))
    columns = {name: [median(column) for column in zip(*all_, strict=True)] for name, all_ in found.items()}
    return [{"groups": name, "kernels_ms": work, "call_ms": call} for name, (work, call) in columns.items()]


def report(plan: AttentionPlan, rank: int, played: Played, rounds: int, out: Path) -> dict[str, Any]:
    totals, calls, work = measure(played, rounds)
    moved = [time_call(played.executor, played.call(), kinds=MOVES) for _ in range(5)]
    copies = [one for call in moved for one in call if one.op.kind in MOVED]
    known = durations([*work, *copies])
    entries = [{"kind": kind, "what": what, "group": group, "us": us} for (kind, what, group), us in known.items()]
    (out / "durations.json").write_text(json.dumps(entries, indent=1))
    simulated = simulate_emulated(plan, rank, Costs(measured=known), calls=4)
    measured = timeline_of(plan, calls)
    picture = timeline_of(plan, [min(calls, key=lambda call: abs(call[-1].span[1] - totals["call"]))])
    draw(picture, out / "call.png")
    (out / "timeline.json").write_text(picture.chrome_trace())
    seen = [measured.overlap(rank, call) for call in range(1, len(calls) + 1)]
    beside = durations(one for call in calls for one in call if one.op.kind is Kind.ATTEND)
    alone = sum(known[name] for name in beside)
    predicted = simulated.overlap(rank, 1).total
    return {
        "totals_us": totals,
        "copies_alone_us": sum(known[key(one.op)] for one in calls[0] if one.op.kind in COPIES),
        "attention_alone_us": alone,
        "attention_beside_us": sum(beside.values()),
        "attention_slowed": sum(beside.values()) / alone - 1,
        "inner_hidden_share": median(one.inner_hidden_share or 0.0 for one in seen),
        "hidden_share": median(one.hidden_share or 0.0 for one in seen),
        "exposed_us": median(one.exposed for one in seen),
        "predicted_us": predicted,
        "prediction_error": predicted / totals["call"] - 1,
        "predicted_inner_hidden_share": simulated.overlap(rank, 1).inner_hidden_share,
        "back_to_back_error": simulated.overlap(rank, 4).total / totals["back_to_back"] - 1,
        "host_issue": host_issue(played),
    }


def main(argv: Sequence[str] | None = None) -> int:
    flags = _parser().parse_args(argv)
    flags.out.mkdir(parents=True, exist_ok=True)
    chosen = choose_attention(flags.attention, device=DEVICE, dtype=torch.bfloat16, head_dim=128)
    counts = split_counts(flags.tokens, flags.ranks)
    shape = {"token_counts": counts, "num_heads": flags.heads, "head_dim": 128, "dtype": "bfloat16"}

    def grouped(groups: str) -> AttentionPlan:
        widths = _widths(groups, flags.ranks, flags.heads)
        return AttentionPlan(**shape, num_kv_heads=flags.heads, group_widths=widths)

    plan = grouped(flags.groups) if flags.groups else make_plan(**shape)
    if flags.compare:
        with torch.inference_mode():
            rows = compare({one: grouped(one) for one in flags.compare}, flags.rank, chosen.backend, flags.rounds)
        (flags.out / "groups.json").write_text(json.dumps(rows, indent=1))
        print(describe(plan).partition(", groups")[0], *rows, sep="\n")
        return 0
    print(f"{describe(plan)}; attention {chosen.backend.name}: {chosen.reason}", flush=True)
    with torch.inference_mode():
        played = Played(plan, flags.rank, chosen.backend)
        played.check()
        print("checked: equal bits", flush=True)
        found = report(plan, flags.rank, played, flags.rounds, flags.out)
        played.engine.synchronize()
        played.engine.close()
        del played
        if flags.profile:
            profile(plan, flags.rank, chosen.backend, flags.out / "trace.json", flags.profile)
            calls = calls_of(read(flags.out / "trace.json"))
            print(text(calls))
            traced = [one.overlap.inner_hidden_share for one in sums(calls)]
            found["traced_inner_hidden_share"] = traced
    found |= {"plan": describe(plan), "gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    found |= {"attention": chosen.reason, "commit": commit_here(), "command": " ".join(sys.argv)}
    (flags.out / "report.json").write_text(json.dumps(found, indent=1))
    print(json.dumps(found, indent=1))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--tokens", type=int, default=75_600)
    parser.add_argument("--heads", type=int, default=40)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rank", type=int, default=0, help="the one that is played")
    parser.add_argument("--groups", help="heads per group, such as 2-5-6-5-2 (default: the plan's own rule)")
    parser.add_argument("--compare", nargs="+", metavar="GROUPS", help="only time these groupings, in turns")
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--profile", type=int, default=3, metavar="CALLS", help="under torch's profiler; 0: none")
    parser.add_argument("--out", type=Path, default=Path("outputs/emulated"))
    return parser


if __name__ == "__main__":
    sys.exit(main())
