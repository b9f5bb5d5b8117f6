"""The command line of the simulator: one grouping as text, picture and trace, or several groupings in one table."""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from usp.costs import PINNED_GBPS, Costs, read_measured
from usp.errors import UserError
from usp.layout import split_counts
from usp.plan import ITEMSIZE, AttentionPlan, make_plan
from usp.simulate import simulate, simulate_emulated
from usp.tables import OVERLAP_HEADER, describe, describe_groups, overlap_cells, table
from usp.timeline import Timeline


def main(argv: Sequence[str] | None = None) -> int:
    flags = _parser().parse_args(argv)
    try:
        for text in _compare(flags) if flags.compare else _show(flags):
            sys.stdout.write(text)
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


def _show(flags: argparse.Namespace) -> Iterator[str]:
    timeline = _timeline(flags, _plan(flags, flags.groups))
    yield timeline.text()
    for path, content in ((flags.json, timeline.json), (flags.trace, timeline.chrome_trace)):
        if path:
            path.write_text(content(), encoding="utf-8")
            yield f"wrote {path}\n"
    if flags.png:
        from usp.draw import draw

        width, height = draw(timeline, flags.png)
        yield f"wrote {flags.png}, {width} x {height}\n"


def _compare(flags: argparse.Namespace) -> Iterator[str]:
    """A row per grouping: its slowest rank in the last call, the fastest grouping first."""
    if flags.png or flags.trace or flags.json or flags.groups:
        raise UserError("--compare prints one table; leave out --groups, --png, --trace and --json")
    timelines = [_timeline(flags, _plan(flags, groups)) for groups in flags.compare]
    rows = [(one.overlap(one.slowest(flags.calls), flags.calls), one.plan) for one in timelines]
    yield f"{describe(timelines[0].plan).partition(', groups')[0]}; slowest rank, times in ms\n\n"
    ordered = sorted(rows, key=lambda row: row[0].total)
    cells = [[describe_groups(plan), *overlap_cells(overlap)] for overlap, plan in ordered]
    yield "\n".join([*table(["groups", *OVERLAP_HEADER[1:]], cells), ""])


def _timeline(flags: argparse.Namespace, plan: AttentionPlan) -> Timeline:
    costs = _costs(flags)
    if flags.emulate is None:
        return simulate(plan, costs, calls=flags.calls)
    if not 0 <= flags.emulate < plan.num_ranks:
        raise UserError(f"--emulate {flags.emulate}: the plan has ranks 0 to {plan.num_ranks - 1}")
    return simulate_emulated(plan, flags.emulate, costs, calls=flags.calls)


def _plan(flags: argparse.Namespace, groups: str | None) -> AttentionPlan:
    kv_heads = flags.kv_heads or flags.heads
    if min(flags.tokens, flags.heads, flags.ranks, flags.calls) < 1:
        raise UserError(
            f"{flags.tokens} tokens, {flags.heads} heads, {flags.ranks} ranks, {flags.calls} calls: use at least 1 each"
        )
    shape = {"num_heads": flags.heads, "num_kv_heads": kv_heads, "head_dim": flags.head_dim, "dtype": flags.dtype}
    ways = {"batch": flags.batch, "direct": not flags.not_direct, "attend_streams": flags.attend_streams}
    counts = split_counts(flags.tokens, flags.ranks)
    if groups is None:
        return make_plan(token_counts=counts, **shape, **ways)
    return AttentionPlan(token_counts=counts, group_widths=_widths(groups, flags.ranks, kv_heads), **shape, **ways)


def _widths(groups: str, ranks: int, kv_heads: int) -> tuple[tuple[int, ...], ...]:
    """2-5-6-5-2 for every rank, or as many lists as ranks, separated by commas."""
    try:
        lists = [tuple(int(width) for width in part.split("-")) for part in groups.split(",")]
    except ValueError:
        raise UserError(f"groups {groups!r}; give heads per group, such as 2-5-6-5-2") from None
    if len(lists) == 1:
        lists *= ranks
    if len(lists) != ranks or sum(map(sum, lists)) != kv_heads:
        raise UserError(
            f"groups {groups} hold {sum(map(sum, lists))} key/value heads on {len(lists)} ranks, "
            f"not {kv_heads} on {ranks}; give one list for all ranks, or {ranks} separated by commas"
        )
    return tuple(lists)


def _costs(flags: argparse.Namespace) -> Costs:
    link = flags.link_gbps or (Costs.link_gbps if flags.emulate is None else PINNED_GBPS)
    measured = read_measured(flags.measured) if flags.measured else {}
    return Costs(link_gbps=link, issue_us=flags.issue_us, measured=measured)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m usp.simulate", description=__doc__, allow_abbrev=False)
    parser.add_argument("--tokens", type=int, default=75_600, help="of all ranks together (default: %(default)s)")
    parser.add_argument("--heads", type=int, default=40, help="query heads of the model (default: %(default)s)")
    parser.add_argument("--kv-heads", type=int, help="key/value heads (default: as many as query heads)")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--dtype", choices=list(ITEMSIZE), default="bfloat16")
    parser.add_argument("--groups", help="key/value heads per group, such as 2-5-6-5-2 (default: the plan's own rule)")
    parser.add_argument("--compare", nargs="+", metavar="GROUPS", help="one table of several groupings, fastest first")
    parser.add_argument("--not-direct", action="store_true", help="attention cannot write into the result")
    parser.add_argument("--attend-streams", type=int, default=1)
    parser.add_argument("--calls", type=int, default=3, help="back to back; the last one is reported")
    parser.add_argument("--link-gbps", type=float, help=f"one way (default: {Costs.link_gbps:.0f})")
    parser.add_argument("--issue-us", type=float, default=0.0, help="host time per operation")
    parser.add_argument("--emulate", type=int, metavar="RANK", help="one GPU plays this rank, over pinned memory")
    parser.add_argument("--measured", type=Path, metavar="JSON", help='list of {"kind", "what", "group", "us"}')
    parser.add_argument("--png", type=Path)
    parser.add_argument("--trace", type=Path, metavar="JSON", help="Chrome trace, for Perfetto")
    parser.add_argument("--json", type=Path)
    return parser
