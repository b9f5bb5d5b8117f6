"""generate.py several times in one set of ranks, which pay for their start once.

Started by a launcher like generate.py, with one argument: a JSON file that lists the arguments of each run. An argument
`--base_seed=@NAME` stands for the seed that NAME.json, an earlier run's report, holds. Every rank leaves
`modules.<rank>.json`, the names of all modules that it has imported by the end.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from usp.launch import world
from usp.launch.main import main

CONNECT = world._STORES["torchrun"]
REPLAY = "--base_seed=@"


def generate_many(runs: list[list[str]]) -> None:
    for number, argv in enumerate(runs):
        world._STORES["torchrun"] = _store_of(number)
        assert main([_replayed(argument) for argument in argv]) == 0, argv
    rank = world.detect_world(os.environ).rank
    Path(f"modules.{rank}.json").write_text(json.dumps(sorted(sys.modules)))


def _store_of(number: int) -> Any:
    """Every run meets in a corner of its own of the launcher's store; a second job would have a new store."""

    def connect(*args: Any) -> Any:
        from torch.distributed import PrefixStore

        return PrefixStore(f"run {number}", CONNECT(*args))

    return connect


def _replayed(argument: str) -> str:
    if not argument.startswith(REPLAY):
        return argument
    report = json.loads(Path(f"{argument.removeprefix(REPLAY)}.json").read_text())
    return f"--base_seed={report['base_seed']}"


if __name__ == "__main__":
    generate_many(json.loads(Path(sys.argv[1]).read_text()))
