"""Stand-ins for the launch tests: a checkpoint without files, worlds of any size, and requests made from flags."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from usp.launch.flags import parse
from usp.launch.request import Request, resolve
from usp.launch.world import World
from usp.models.wan.config import TransformerConfig


def checkpoint(*, experts: int = 2, heads: int = 4, boundary: float | None = 0.875, **others: Any) -> Any:
    """As `open_checkpoint` gives it, as far as requests look at it."""
    config = TransformerConfig(num_layers=2, num_heads=heads, head_dim=others.pop("head_dim", 12))
    fields = {"root": Path("stand-in"), "scheduler": {}, "defaults": {}, **others}
    low = SimpleNamespace(config=config) if experts == 2 else None
    ratio = boundary if experts == 2 else None
    return SimpleNamespace(high=SimpleNamespace(config=config), low=low, boundary_ratio=ratio, **fields)


def world(size: int = 1, rank: int = 0) -> World:
    return World(rank, size, rank, size, "single" if size == 1 else "torchrun")


def request(*argv: str, ranks: int = 1, rank: int = 0, **of_checkpoint: Any) -> Request:
    return resolve(parse(argv), world=world(ranks, rank), checkpoint=checkpoint(**of_checkpoint))
