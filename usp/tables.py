"""Plans and accounts in words and columns. Used by the timeline's text, its picture and the command line."""

from collections.abc import Iterable, Sequence

from usp.overlap import Overlap
from usp.plan import AttentionPlan

OVERLAP_HEADER = ["rank", "total", "attention", "work", "exposed", "stall", "idle"]
OVERLAP_HEADER += ["copies", "outside", "hidden", "inner hidden"]


def describe(plan: AttentionPlan) -> str:
    tokens = f"{plan.num_tokens:,} tokens" + (f" x {plan.batch}" if plan.batch > 1 else "")
    heads = f"{plan.num_heads} heads" + (f" ({plan.num_kv_heads} kv)" if plan.num_kv_heads < plan.num_heads else "")
    ranks = f"{plan.num_ranks} rank" + ("s" if plan.num_ranks > 1 else "")
    return f"{ranks}, {tokens}, {heads} of {plan.head_dim}, {plan.dtype}, groups {describe_groups(plan)}"


def describe_groups(plan: AttentionPlan) -> str:
    """2-5-6-5-2, or one such list per rank where they differ."""
    lists = ["-".join(map(str, widths)) for widths in plan.group_widths]
    return lists[0] if len(set(lists)) == 1 else ",".join(lists)


def overlap_cells(overlap: Overlap) -> list[str]:
    """The columns of OVERLAP_HEADER after the first."""
    times = (overlap.total, overlap.attention, overlap.work, overlap.exposed, overlap.stall, overlap.idle)
    shares = (overlap.hidden_share, overlap.inner_hidden_share)
    return [*map(ms, (*times, overlap.communication, overlap.outside)), *map(percent, shares)]


def percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}%"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines with columns aligned to the right."""
    lines = [header, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]


def ms(us: float) -> str:
    return f"{us / 1e3:.3f}"
