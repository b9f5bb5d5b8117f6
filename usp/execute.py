"""Runs one rank's schedule on an engine: CUDA streams and copy engines, or threads on host memory.

The list that the checker read is turned into calls once per plan, with every address worked out; a call then walks the
list. What differs from call to call is the call's number, where the caller's v lies, and what fills q and k.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol, cast

import torch

from usp.attention import Attention, AttentionInto
from usp.destinations import FillBlock, FillBlocks, HeadRun
from usp.fill import FillAll, make_placer
from usp.ipc.engine import Block, Engine, PreparedCopy
from usp.placement import Piece, Placement, flag_offset
from usp.plan import AttentionPlan
from usp.ranges import Ranges
from usp.schedule import Flag, Kind, Op, Region, Schedule, build, slot_rows

KeyValue = tuple[torch.Tensor, torch.Tensor]


class Memory(Protocol):
    """Memory of every rank, as far as a call needs it: an `Arena`, or what stands for one."""

    rank: int
    base: tuple[int, ...]

    def view(self, rank: int, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor: ...


Rows = tuple[int, int, int]  # address of the first, bytes from sample to sample, and from row to row


def rows_of(x: torch.Tensor) -> Rows:
    itemsize, (sample, row, *_) = x.element_size(), x.stride()
    return x.data_ptr(), sample * itemsize, row * itemsize


@dataclass
class Call:
    """What one attention call brings. `v` is [B, S_r, K, D] with dense heads; its rows may be far apart.

    `await_flag(address, value)`, if given, is called before each wait is enqueued, and returns when the flag has come.
    """

    number: int
    v: torch.Tensor
    fill: FillAll
    prefix_kv: KeyValue | None = None
    suffix_kv: KeyValue | None = None
    await_flag: Callable[[int, int], None] | None = None
    fresh: dict[str, torch.Tensor] = field(default_factory=dict)

    @cached_property
    def rows_of_v(self) -> Rows:
        return rows_of(self.v)


Step = Callable[[Call], None]


class Executor:
    """A plan, ready to run at one rank of an arena."""

    def __init__(
        self,
        plan: AttentionPlan,
        *,
        arena: Memory,
        engine: Engine,
        attention: Attention,
        ranges: Ranges | None = None,
    ) -> None:
        self.plan, self.rank, self.arena, self.engine, self.attention = plan, arena.rank, arena, engine, attention
        self.places = [Placement(plan, rank) for rank in range(plan.num_ranks)]
        self.dtype: torch.dtype = getattr(torch, plan.dtype)
        own = self.places[self.rank]
        self.views = {
            buffer: arena.view(self.rank, own.offsets[buffer], shape, self.dtype)
            for buffer, shape in own.shapes.items()
        }
        self.fill_blocks = self._fill_blocks()
        makers = {
            Kind.RECORD: self._record,
            Kind.AWAIT: self._await,
            Kind.FILL: self._fill,
            Kind.PLACE: self._place,
            Kind.SEND: self._send,
            Kind.SIGNAL: self._signal,
            Kind.WAIT: self._wait,
            Kind.ATTEND: self._attend,
            Kind.KEEP: self._keep,
            Kind.RETURN: self._return,
        }
        self.first_step: int | None = None  # when it ran first, as whoever runs it counts
        self.ops = [op for op in self._schedule() if op.kind in makers]
        self.steps: list[Step] = (ranges or Ranges()).steps(self.ops, [makers[op.kind](op) for op in self.ops])

    def _schedule(self) -> Schedule:
        return build(self.plan, self.rank)

    def run(self, call: Call) -> torch.Tensor:
        """Enqueue the whole call; the result [B, S_r, H, D] is a view of the arena, valid until the next call."""
        for step in self.steps:
            step(call)
        top, bottom = self.places[self.rank].result_rows
        if top == bottom:
            return call.v.new_empty(self.plan.batch, 0, self.plan.num_heads, self.plan.head_dim)
        return self.views[("out",)][:, top:bottom]

    def clear(self) -> None:
        """Let go of every tensor over the arena: the steps refer back to the executor, which else would live on."""
        self.steps.clear()
        self.views.clear()
        self.fill_blocks = FillBlocks()

    @cached_property
    def waits(self) -> list[tuple[int, Flag]]:
        """Every flag that is awaited, in order, and its address."""
        awaited = [op for op in self.ops if op.kind is Kind.WAIT]
        return [(self._address(op), op.flag) for op in awaited if op.flag is not None]

    def _address(self, op: Op) -> int:
        """Where the flag of a signal or a wait lies."""
        assert op.flag is not None
        return self.arena.base[op.flag.owner] + flag_offset(op.flag)

    def _record(self, op: Op) -> Step:
        return lambda call: self.engine.record(op.stream, op.event)

    def _await(self, op: Op) -> Step:
        return lambda call: self.engine.await_event(op.stream, op.event)

    def _signal(self, op: Op) -> Step:
        address, signal, stream = self._address(op), self.engine.signal, op.stream
        return lambda call: signal(stream, address, call.number)

    def _wait(self, op: Op) -> Step:
        address, wait, stream = self._address(op), self.engine.wait, op.stream

        def hold(call: Call) -> None:
            if call.await_flag is not None:
                call.await_flag(address, call.number)
            wait(stream, address, call.number)

        return hold

    def _fill(self, op: Op) -> Step:
        return lambda call: self.engine.launch(op.stream, lambda: call.fill(self.fill_blocks))

    def _place(self, op: Op) -> Step:
        if op.what == "v":
            place = self._placer_of_own_v()
            return lambda call: self.engine.launch(op.stream, lambda: place(call.v))
        return lambda call: self.engine.launch(op.stream, lambda: self._place_ends(call))

    def _placer_of_own_v(self) -> Callable[[torch.Tensor], None]:
        rows = slice(*slot_rows(self.plan, "v", self.rank))
        groups = self.plan.groups(self.rank)
        runs: list[HeadRun] = [(group.kv_start, self.views["slot", "v", group.index][:, rows]) for group in groups]
        return make_placer(runs, num_heads=self.plan.num_kv_heads)

    def _place_ends(self, call: Call) -> None:
        """Prefix and suffix hold this rank's own key/value heads only."""
        first = self.plan.groups(self.rank)[0].kv_start
        for ends, rows in ((call.prefix_kv, slice(0, self.plan.prefix)), (call.suffix_kv, self._suffix_rows())):
            for what, tensor in zip("kv", ends or (), strict=False):
                for group in self.plan.groups(self.rank):
                    heads = slice(group.kv_start - first, group.kv_start - first + group.kv_count)
                    self.views["slot", what, group.index][:, rows].copy_(tensor[:, :, heads])

    def _suffix_rows(self) -> slice:
        return slice(self.plan.num_kv_rows - self.plan.suffix, self.plan.num_kv_rows)

    def _send(self, op: Op) -> Step:
        if op.what == "v":
            return self._send_v(op)
        if op.what == "qk":
            source = self.places[op.reads[0].rank].joint_piece(op.reads[0])
            target = self.places[op.peer].joint_piece(op.writes[0])
            return self._copy(op, [(target, source)])
        return self._copy_regions(op)

    def _send_v(self, op: Op) -> Step:
        """Straight from the projection's output, whose rows may be those of a fused product."""
        plan, itemsize = self.plan, self.places[self.rank].itemsize
        group = next(group for group in plan.groups(op.peer) if group.index == op.group)
        region = op.writes[0]
        (slot,) = self.places[op.peer].pieces(region)
        width = group.kv_count * plan.head_dim * itemsize
        base, shift = self.arena.base[op.peer] + slot.offset, group.kv_start * plan.head_dim * itemsize
        num_rows = region.rows[1] - region.rows[0]
        targets = [Block(base + sample * slot.pitch, width, width, num_rows) for sample in range(plan.batch)]
        prepared: dict[int, list[PreparedCopy]] = {}  # by the pitch of v, which a caller hardly ever changes
        enqueue = self.engine.enqueue

        def prepare(start: int, pitch: int) -> list[PreparedCopy]:
            sources = [Block(start, pitch, width, num_rows)] * plan.batch
            return [self.engine.prepare_copy(*pair) for pair in zip(targets, sources, strict=True)]

        def send(call: Call) -> None:
            first, sample_bytes, pitch = self._rows_of_v(op, call)
            start = first + shift
            if pitch not in prepared:
                prepared[pitch] = prepare(start, pitch)
            for copy in prepared[pitch]:
                copy.source = start
                enqueue(op.stream, copy)
                start += sample_bytes

        return send

    def _rows_of_v(self, op: Op, call: Call) -> Rows:
        """What a SEND of v reads."""
        return call.rows_of_v

    def _return(self, op: Op) -> Step:
        return self._copy_regions(op)

    def _copy_regions(self, op: Op) -> Step:
        source, target = op.reads[0], op.writes[0]
        pairs = self._pairs(self.places[target.rank].pieces(target), self.places[source.rank].pieces(source))
        return self._copy(op, pairs)

    def _pairs(self, targets: list[Piece], sources: list[Piece]) -> list[tuple[Piece, Piece]]:
        """The same bytes on both sides: blocks of whole rows are cut where the other side is a piece a sample."""
        if len(sources) == len(targets) and sources[0].width == targets[0].width:
            return list(zip(targets, sources, strict=True))
        return [(target, _row_by_row(sources[0], sample, target)) for sample, target in enumerate(targets)]

    def _copy(self, op: Op, pairs: list[tuple[Piece, Piece]]) -> Step:
        prepared = [
            self.engine.prepare_copy(self._block(op.peer, target), self._block(op.reads[0].rank, source))
            for target, source in pairs
        ]

        enqueue, stream = self.engine.enqueue, op.stream

        def copy(call: Call) -> None:
            for one in prepared:
                enqueue(stream, one)

        return copy

    def _block(self, rank: int, piece: Piece) -> Block:
        return Block(self.arena.base[rank] + piece.offset, piece.pitch, piece.width, piece.height)

    def _attend(self, op: Op) -> Step:
        q, k, v = (self.views["slot", what, op.group] for what in "qkv")
        if not self.plan.direct:

            def attend(call: Call) -> None:
                call.fresh[op.stream] = self.attention(q, k, v)

        else:
            region = op.writes[0]
            out = self.views[("out",)][:, :, slice(*region.cols)]
            attend_into = cast(AttentionInto, self.attention)

            def attend(call: Call) -> None:
                attend_into(q, k, v, out=out)

        return lambda call: self.engine.launch(op.stream, lambda: attend(call))

    def _keep(self, op: Op) -> Step:
        targets = [(self._rows_of(region), self._view(region)) for region in op.writes]

        def keep(call: Call) -> None:
            fresh = call.fresh.pop(op.stream)
            for rows, view in targets:
                view.copy_(fresh[:, slice(*rows)])

        return lambda call: self.engine.launch(op.stream, lambda: keep(call))

    def _rows_of(self, region: Region) -> tuple[int, int]:
        """The rows of attention's output that go into a result or kept region."""
        owner = self.rank if region.buffer == ("out",) else int(region.buffer[2])
        tokens = self.plan.tokens(owner)
        return tokens.start, tokens.stop

    def _view(self, region: Region) -> torch.Tensor:
        view = self.views[region.buffer][:, slice(*region.rows)]
        return view[:, :, slice(*region.cols)] if region.buffer == ("out",) else view

    def _fill_blocks(self) -> FillBlocks:
        plan, blocks = self.plan, FillBlocks()
        for rank in (self.rank, *plan.peers(self.rank)) if plan.token_counts[self.rank] else ():
            for group in plan.groups(rank):
                q, k = (self._fill_view(what, rank, group.index) for what in "qk")
                blocks.append(FillBlock(group.start, group.count, q, k, group.kv_start, group.kv_count))
        return blocks

    def _fill_view(self, what: str, rank: int, group: int) -> torch.Tensor:
        if rank != self.rank:
            return self.views["send", what, rank, group]
        return self.views["slot", what, group][:, slice(*slot_rows(self.plan, what, rank))]


def _row_by_row(source: Piece, sample: int, target: Piece) -> Piece:
    """A sample's rows of a block of whole rows, cut to the target's width."""
    assert source.width == target.width * target.height
    return Piece(source.offset + sample * source.pitch, target.width, target.width, target.height)
