"""How long each operation of a schedule takes: measured where a table says so, modelled from a few rates elsewhere.

The defaults describe one H200 with FlashAttention 3 and the copy engines of NVLink 4. Times are microseconds. Plain
arithmetic, no torch. Used by the simulator.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from usp.errors import UserError
from usp.grouping import NUM_SMS, TILE_ROWS
from usp.plan import ITEMSIZE, AttentionPlan, HeadGroup
from usp.schedule import Kind, Op, Region

COPIES = (Kind.SEND, Kind.RETURN)
ARRIVALS = "arrivals"  # the stream that stands for the peers, where one process plays one rank (usp/emulate.py)
PINNED_GBPS = 53.0  # to or from pinned host memory: the emulated link
MEASURED, MODELLED = "measured", "modelled"

Key = tuple[str, str, int | None]  # kind, what, group; None: any group

# TFLOP/s of one launch over so many heads, each of RATED_TOKENS tokens and head_dim 128
RATED_TOKENS = 75_600
ATTENTION_TFLOPS = ((1, 716.0), (2, 735.0), (4, 698.0), (5, 686.0), (10, 666.0), (20, 674.0))


class Duration(NamedTuple):
    us: float
    label: str  # measured or modelled


@dataclass(frozen=True)
class Costs:
    """Rates and overheads; `measured` overrides them by (kind, what, group), kinds named as by `key`.

    `row_overhead_bytes` is what a row of a 2-D copy costs in bytes not copied. `latency_us` passes between a signal's
    end and the moment when the peer sees it, `event_us` likewise within a rank. `issue_us` is the host's time per
    operation. `shared_ingress`: a rank receives one copy at a time.
    """

    link_gbps: float = 375.0
    copy_overhead_us: float = 2.0
    row_overhead_bytes: float = 0.0
    shared_ingress: bool = True
    fill_tbps: float = 3.77  # read and written, as the next one
    memory_tbps: float = 4.2
    attention_tflops: tuple[tuple[int, float], ...] = ATTENTION_TFLOPS
    launch_us: float = 3.0
    signal_us: float = 1.0
    latency_us: float = 1.5
    event_us: float = 1.0
    issue_us: float = 0.0
    measured: Mapping[Key, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, value in ((one.name, getattr(self, one.name)) for one in fields(self)):
            if name.endswith("bps") and not 0 < value < float("inf"):
                raise UserError(f"{name} is {value}; give a rate above 0")
            if name.endswith(("_us", "_bytes")) and not 0 <= value < float("inf"):
                raise UserError(f"{name} is {value}; give at least 0")
        heads = [count for count, _ in self.attention_tflops]
        if not heads or heads != sorted(set(heads)) or min(rate for _, rate in self.attention_tflops) <= 0:
            raise UserError(f"attention_tflops is {self.attention_tflops}; give (heads, rate > 0), heads rising")

    def duration(self, plan: AttentionPlan, op: Op) -> Duration:
        kind, what, group = key(op)
        for entry in ((kind, what, group), (kind, what, None)):
            if entry in self.measured:
                return Duration(self.measured[entry], MEASURED)
        return Duration(self._modelled(plan, op), MODELLED)

    def tail(self, plan: AttentionPlan, op: Op) -> float:
        """Of an attention launch, the time that SMs stand idle in its last wave, where another launch may run."""
        if op.kind is not Kind.ATTEND:
            return 0.0
        group = _group(plan, op.reads[0].rank, op.group)
        full = _wave_efficiency(group.count * plan.batch, plan.num_tokens)
        return (1 - full) * max(0.0, self.duration(plan, op).us - self.launch_us)

    def _modelled(self, plan: AttentionPlan, op: Op) -> float:
        match op.kind:
            case Kind.FILL:
                return self.launch_us + 2 * nbytes(plan, op) / (self.fill_tbps * 1e6)
            case Kind.PLACE | Kind.KEEP:
                return self.launch_us + 2 * nbytes(plan, op) / (self.memory_tbps * 1e6)
            case Kind.SEND | Kind.RETURN:
                return self._copy(plan, op)
            case Kind.ATTEND:
                return self._attend(plan, _group(plan, op.reads[0].rank, op.group))
            case Kind.SIGNAL:
                return self.signal_us
            case _:
                return 0.0

    def _copy(self, plan: AttentionPlan, op: Op) -> float:
        """One copy per sample, each over as many rows as tokens; q and k blocks are read and written whole."""
        share = 1.0
        if op.kind is Kind.RETURN or op.what == "v":
            row = nbytes(plan, op) / (plan.batch * num_rows(op.writes[0]))
            share = row / (row + self.row_overhead_bytes)
        return self.copy_overhead_us * plan.batch + nbytes(plan, op) / (self.link_gbps * 1e3 * share)

    def _attend(self, plan: AttentionPlan, group: HeadGroup) -> float:
        heads = group.count * plan.batch
        flops = 4 * heads * plan.num_tokens * plan.num_kv_rows * plan.head_dim
        rate = self._rate_of_full_waves(heads) * _wave_efficiency(heads, plan.num_tokens)
        return self.launch_us + flops / (rate * 1e6)

    def _rate_of_full_waves(self, heads: int) -> float:
        """TFLOP/s if the last wave were full, between the neighbours in the table."""
        table = [(count, rate / _wave_efficiency(count, RATED_TOKENS)) for count, rate in self.attention_tflops]
        for (low, slow), (high, fast) in pairwise(table):
            if low <= heads <= high:
                return slow + (fast - slow) * (heads - low) / (high - low)
        return table[0][1] if heads < table[0][0] else table[-1][1]


def key(op: Op) -> Key:
    """What a table of measured durations calls an operation; copies by the emulated peers begin with `peer_`."""
    return ("peer_" if op.stream == ARRIVALS else "") + op.kind.value, op.what, op.group


def nbytes(plan: AttentionPlan, op: Op) -> int:
    """Bytes that an operation writes."""
    cells = sum(num_rows(region) * _num_heads(plan, region) for region in op.writes)
    return cells * plan.head_dim * ITEMSIZE[plan.dtype] * plan.batch


def num_rows(region: Region) -> int:
    return region.rows[1] - region.rows[0]


def read_measured(path: Path) -> dict[Key, float]:
    """A JSON list of {"kind", "what", "group", "us"}; `what` and `group` may be left out. Raises UserError."""
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
        return {_entry_key(entry): _positive(entry["us"]) for entry in entries}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f'{path}: {error}; give a JSON list of {{"kind": "attend", "group": 0, "us": 1.5}}') from error


def _entry_key(entry: Mapping[str, Any]) -> Key:
    known = {kind.value for kind in Kind} | {f"peer_{kind.value}" for kind in (*COPIES, Kind.SIGNAL)}
    if entry["kind"] not in known:
        raise ValueError(f"no operation is called {entry['kind']!r}")
    return entry["kind"], entry.get("what", ""), entry.get("group")


def _positive(us: Any) -> float:
    if not 0 <= float(us) < float("inf"):
        raise ValueError(f"{us} us is no duration")
    return float(us)


def _wave_efficiency(heads: int, num_tokens: int) -> float:
    """Tiles over the places for tiles in all waves, the last one included."""
    tiles = heads * -(-num_tokens // TILE_ROWS)
    return tiles / (NUM_SMS * -(-tiles // NUM_SMS))


def _num_heads(plan: AttentionPlan, region: Region) -> int:
    match region.buffer:
        case ("slot", what, int(index)):
            group = _group(plan, region.rank, index)
        case ("send", what, int(receiver), int(index)):
            group = _group(plan, receiver, index)
        case ("kept", int(index), _):
            what, group = "q", _group(plan, region.rank, index)
        case _:  # the result, of which only some heads are written
            return region.cols[1] - region.cols[0]
    return group.count if what == "q" else group.kv_count


def _group(plan: AttentionPlan, rank: int, index: int) -> HeadGroup:
    return next(group for group in plan.groups(rank) if group.index == index)
