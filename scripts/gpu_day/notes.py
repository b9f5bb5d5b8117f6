"""What a part found, one JSON line at a time, so that what was found before a failure is kept.

A measurement carries the name under which its prediction was filed; a check says whether something held; a remark says
why a thing was not done. Used by every part, and by the day that reads them.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Note = dict[str, Any]


class CheckError(AssertionError):
    """Something that must hold did not; nothing that rests on it is timed."""


@dataclass(frozen=True)
class Notes:
    """Written by one rank; `path` is None on the others, which go through the same motions."""

    path: Path | None

    def measured(self, name: str, value: float, unit: str, **detail: object) -> None:
        self._write({"name": name, "value": value, "unit": unit, **detail})

    def check(self, name: str, is_met: bool, **detail: object) -> None:
        """Raises CheckError if it is not met."""
        self._write({"check": name, "met": is_met, **detail})
        if not is_met:
            raise CheckError(f"{name}: {detail}")

    def remark(self, text: str, **detail: object) -> None:
        self._write({"remark": text, **detail})

    def _write(self, note: Note) -> None:
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(note) + "\n")


def read_notes(path: Path) -> list[Note]:
    """All whole lines; a part that was killed may have left half a one."""
    notes = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            notes.append(json.loads(line))
        except ValueError:
            notes.append({"remark": f"a line was cut short: {line[:80]}"})
    return notes


def call_name(tokens: int, ranks: int, what: str) -> str:
    """What a call of attention is filed under, predicted or measured."""
    return f"P={ranks}, {tokens:,} tokens: {what}"
