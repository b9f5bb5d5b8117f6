"""Which commit a result is of."""

import subprocess
from pathlib import Path


def commit_here() -> str:
    """`git describe` of this checkout, `-dirty` if files differ from it; `unknown` where there is no git."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return "unknown"
    return done.stdout.strip() or "unknown"
