"""Turns the JSON files of the benchmarks into docs/benchmarks.md and a bar chart.

    python scripts/render_benchmarks.py docs/benchmarks/*.json

Each file says which GPU, versions, commit and command it is of; nothing is printed that is not in one.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.gpu_day import table as day
from usp.sheet import Sheet, text_width

DOCS = Path(__file__).resolve().parent.parent / "docs"
OURS, OTHERS, FLOOR = "#2b6cb0", "#a0aec0", "#dd6b20"
Record = dict[str, Any]


def markdown(reports: Sequence[tuple[Path, Record]]) -> str:
    lines = ["# Benchmarks", ""]
    lines += [
        "Written by `scripts/render_benchmarks.py` from the JSON files in `docs/benchmarks`, which `make bench` makes"
    ]
    lines += ["anew on the GPU at hand; `docs/log.md` has what was tried. A part that is missing was not run.", ""]
    lines += ["![blocks](benchmarks.png)", ""]
    for path, report in reports:
        if "parts" in report:
            lines += [f"## {path.stem}", "", day.markdown(report), ""]
            continue
        lines += [f"## {path.stem}", "", f"{about(report)}", ""]
        lines += [f"{report['note']}", ""] if "note" in report else []
        failures = report.get("failures", [])
        lines += [*(f"Failed: `{one}`" for one in failures), ""] if failures else []
        lines += [*table(report), ""]
    return "\n".join(lines)


def about(report: Record) -> str:
    found = ", ".join(f"{name} {one}" for name, one in report["versions"].items() if one)
    command = " ".join(report["command"]) if isinstance(report["command"], list) else report["command"]
    return f"{report['gpu']}; {found}; commit {report['commit']}; `{command}`"


def table(report: Record) -> Iterator[str]:
    first = report["records"][0]
    if "us" in first:
        yield from kernel_rows(report["records"])
    elif "floor_ms" in first:
        yield from block_rows(report["records"])
    else:
        yield from step_rows(report["records"])


def kernel_rows(records: list[Record]) -> Iterator[str]:
    yield "| shape | | us (p10 to p90) | GB/s | of a copy | time over ours |"
    yield "|---|---|---|---|---|---|"
    for one in records:
        if "designs" not in one["shape"]:
            spread = f"{one['us']:.1f} ({one['us_p10']:.1f} to {one['us_p90']:.1f})"
            share = f"{one['percent_of_copy']:.1f}%"
            cells = [one["shape"], one["name"], spread, f"{one['gb_per_s']:.0f}", share, f"{one['ratio']:.2f}"]
            yield f"| {' | '.join(cells)} |"


def block_rows(records: list[Record]) -> Iterator[str]:
    yield "| block | | ms (p10 to p90) | time over ours | memory beside the inputs |"
    yield "|---|---|---|---|---|"
    for one in records:
        shape = shape_of(one)
        for name, time in one["ms"].items():
            spread = f"{time['median']:.1f} ({time['p10']:.1f} to {time['p90']:.1f})"
            yield f"| {shape} | {name} | {spread} | {one['ratio'][name]:.3f} | {one['peak_GB'][name]:.2f} GB |"
        floor = f"{one['floor_ms']:.1f}"
        yield f"| {shape} | floor: our attention and products alone | {floor} | {1 / one['ours_over_floor']:.3f} | |"
        passes = ", ".join(f"{kind} {ms:.1f} ms" for kind, ms in one["profile_ms"].items())
        yield f"| {shape} | ours, by kind: {passes}; host {one['host_ms']:.1f} ms | | | |"


def shape_of(block: Record) -> str:
    return f"{block['tokens']:,} tokens" + (f", 1 of {block['ranks']} ranks" if block["ranks"] > 1 else "")


def step_rows(records: list[Record]) -> Iterator[str]:
    yield "| step | | s | time over ours | memory beside the weights |"
    yield "|---|---|---|---|---|"
    for one in records:
        for name, seconds in one["s"].items():
            ratio = seconds / one["s"]["ours"]
            yield f"| {one['size']} | {name} | {seconds:.2f} | {ratio:.3f} | {one['added_GB'][name]:.2f} GB |"


def chart(records: list[Record], path: Path) -> None:
    """A bar per contender, in milliseconds, from zero."""
    bars = [
        (f"{shape_of(one)}: {name}", time["median"], OURS if name == "ours" else OTHERS)
        for one in records
        for name, time in [*one["ms"].items(), ("floor", {"median": one["floor_ms"]})]
    ]
    bars = [(name, ms, FLOOR if name.endswith("floor") else colour) for name, ms, colour in bars]
    left = 24 + max(text_width(name, 14) for name, _, _ in bars)
    width, row = 1000, 26
    sheet = Sheet(width, 70 + row * len(bars))
    sheet.text(16, 28, "One block of Wan2.2 A14B, milliseconds", size=18)
    scale = (width - left - 80) / max(ms for _, ms, _ in bars)
    for place, (name, ms, colour) in enumerate(bars):
        top = 56 + row * place
        sheet.text(left - 10, top + 9, name, size=14, anchor="rm")
        sheet.box(left, top, left + ms * scale, top + 18, colour)
        sheet.text(left + ms * scale + 8, top + 9, f"{ms:.1f}", size=14)
    sheet.save(path)


def main(argv: Sequence[str] | None = None) -> int:
    files = [Path(one) for one in (sys.argv[1:] if argv is None else argv)]
    reports = [(path, json.loads(path.read_text(encoding="utf-8"))) for path in files]
    (DOCS / "benchmarks.md").write_text(markdown(reports), encoding="utf-8")
    blocks = [one for _, report in reports for one in report.get("records", []) if "floor_ms" in one]
    if blocks:
        chart(blocks, DOCS / "benchmarks.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
