"""`usp_defaults.json`: how a checkpoint wants to be sampled when no flag says otherwise. All keys are optional."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from usp.errors import CheckpointError
from usp.models.wan.checkpoint.files import read_json

DEFAULTS_FILE = "usp_defaults.json"


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 1


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_size(value: Any) -> bool:
    sides = value.split("*") if isinstance(value, str) else []
    return len(sides) == 2 and all(side.isascii() and side.isdigit() for side in sides)


KEYS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "size": (_is_size, "a string 'width*height'"),
    "frames": (_is_count, "a positive integer"),
    "fps": (_is_number, "a number"),
    "steps": (_is_count, "a positive integer"),
    "shift": (_is_number, "a number"),
    "guidance_high": (_is_number, "a number"),
    "guidance_low": (_is_number, "a number"),
    "negative_prompt": (_is_text, "a string"),
    "task": (_is_text, "a string"),
}


def read_defaults(root: Path) -> dict[str, Any]:
    """The file's settings, {} where there is none. Raises CheckpointError for an unknown key or a wrong type."""
    file = root / DEFAULTS_FILE
    if not file.exists():
        return {}
    defaults = read_json(file)
    for key, value in defaults.items():
        if key not in KEYS:
            raise CheckpointError(f"{file}: unknown key {key!r}; known are {', '.join(KEYS)}")
        is_valid, wanted = KEYS[key]
        if not is_valid(value):
            raise CheckpointError(f"{file}: {key} is {value!r}; expected {wanted}")
    return defaults
