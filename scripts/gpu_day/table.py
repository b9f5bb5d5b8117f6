"""The day as Markdown: what was expected beside what was measured, what held, what was not run, and the goals."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scripts.gpu_day.notes import Note

MISS = 0.03  # of a prediction, from which it is to be explained
Report = Mapping[str, Any]


@dataclass(frozen=True)
class Goal:
    """What some measurement shall be; `ends` and `starts` pick it by name."""

    text: str
    starts: str
    ends: str
    bar: float
    is_at_least: bool

    def judged(self, measured: Mapping[str, Note]) -> tuple[str, str]:
        """(the best value found, reached or not)."""
        values = [
            note["value"]
            for name, note in measured.items()
            if name.startswith(self.starts) and name.endswith(self.ends)
        ]
        if not values:
            return "-", "not run"
        best = max(values) if self.is_at_least else min(values)
        is_met = best >= self.bar if self.is_at_least else best <= self.bar
        return f"{best:.4g}", "reached" if is_met else "not reached"


GOALS = (
    Goal("hidden share of all copy time at P=2, best grouping", "P=2, 75,600", "hidden share", 0.88, True),
    Goal("exposed share of a 720p block at P=2", "P=2, 75,600", "block, exposed share", 0.005, False),
    Goal("exposed share of a 720p block at P=8", "P=8, 75,600", "block, exposed share", 0.018, False),
    Goal("efficiency of a 720p step on 2x2", "step of 75,600 tokens, mesh 2x2", "efficiency", 0.985, True),
)


def markdown(report: Report) -> str:
    sections = (_head, _goals, _measured, _slower, _checks, _rest) if report["parts"] else (_expected,)
    return "\n".join([line for section in sections for line in section(report)] + [""])


def measured_of(report: Report) -> dict[str, Note]:
    notes = [note for part in report["parts"] for note in part["notes"]]
    return {note["name"]: note for note in notes if "name" in note}


def misses(report: Report) -> list[tuple[str, float]]:
    """Measurements that differ from their prediction by more than MISS, and by how much."""
    found = []
    for name, note in measured_of(report).items():
        wanted = report["predictions"].get(name)
        off = _off(note["value"], wanted["value"]) if wanted else None
        if off is not None and abs(off) > MISS:
            found.append((name, off))
    return found


def _off(value: float, wanted: float) -> float | None:
    return value / wanted - 1 if wanted else None


def _head(report: Report) -> Iterator[str]:
    yield f"Commit {report['commit']}, {report['date']}, {report['ranks']} ranks; `{report['command']}`"
    yield ""
    yield "| part | status | seconds | |"
    yield "|---|---|---|---|"
    for part in report["parts"]:
        reason = part["reason"].replace("|", "/")[:300]
        yield f"| {part['name']} | {part['status']} | {part['seconds']:.0f} | {reason} |"
    yield ""


def _expected(report: Report) -> Iterator[str]:
    yield f"Not run yet. What the simulator expects (`{report['command']}`, {report['date']}):"
    yield ""
    yield "| | predicted |"
    yield "|---|---|"
    yield from (f"| {name} | {_value(note)} |" for name, note in report["predictions"].items())


def _goals(report: Report) -> Iterator[str]:
    measured = measured_of(report)
    yield "| goal | bar | best | |"
    yield "|---|---|---|---|"
    for goal in GOALS:
        best, verdict = goal.judged(measured)
        yield f"| {goal.text} | {'>=' if goal.is_at_least else '<='} {goal.bar} | {best} | {verdict} |"
    yield ""


def _measured(report: Report) -> Iterator[str]:
    measured, predictions = measured_of(report), report["predictions"]
    yield "| | predicted | measured | least to most | off |"
    yield "|---|---|---|---|---|"
    for name in [*predictions, *(name for name in measured if name not in predictions)]:
        yield f"| {' | '.join(_cells(name, predictions.get(name), measured.get(name)))} |"
    yield ""


def _cells(name: str, wanted: Note | None, note: Note | None) -> Iterator[str]:
    yield name
    yield _value(wanted)
    yield _value(note)
    yield f"{note['least']:.4g} to {note['most']:.4g}" if note and "least" in note else ""
    off = _off(note["value"], wanted["value"]) if note and wanted else None
    yield "" if off is None else f"{off:+.1%}"


def _value(note: Note | None) -> str:
    return f"{note['value']:.4g} {note['unit']}".strip() if note else "-"


def _slower(report: Report) -> Iterator[str]:
    """Shapes at which the collectives were faster: there `auto` must take them."""
    measured = measured_of(report)
    for name, note in measured.items():
        ours, is_other, _ = name.partition(", collectives over ")
        rival = measured.get(f"{ours}, pipelined") or measured.get(ours)
        if is_other and not name.endswith("rate") and rival and rival["value"] > note["value"]:
            yield f"Ours is slower: {name} {note['value']:.4g} ms, ours {rival['value']:.4g} ms."
            yield ""


def _checks(report: Report) -> Iterator[str]:
    notes = [note for part in report["parts"] for note in part["notes"] if "check" in note]
    failed = [note for note in notes if not note["met"]]
    yield f"{len(notes) - len(failed)} of {len(notes)} checks held."
    yield ""
    yield from (f"- does not hold: {note['check']}" for note in failed)


def _rest(report: Report) -> Iterator[str]:
    remarks = [note["remark"] for part in report["parts"] for note in part["notes"] if "remark" in note]
    yield from (f"- {one}" for one in _once(remarks))


def _once(lines: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(lines))
