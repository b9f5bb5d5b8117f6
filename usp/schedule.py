"""One attention call as a list: every copy, kernel, signal and wait of a rank, in the order in which it is enqueued.

The same list is executed (CUDA streams, or threads on host memory), checked, simulated and drawn. An operation names
its stream, the regions that it reads and writes, in whose memory, and the flag or event that it raises or awaits.
Streams: `main` is the model's, `copy` carries what crosses ranks, `aux` is the second attend stream of a plan with two.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

from usp.plan import AttentionPlan, HeadGroup


class Kind(Enum):
    """What an operation does. The first and last two stand for the caller, and the checker alone looks at them."""

    PRODUCE = "produce"  # the caller writes q, k, v on the main stream
    FILL = "fill"  # norm, RoPE: q and k to own slots and to send blocks
    PLACE = "place"  # own v rows, and prefix and suffix, to own slots
    SEND = "send"  # rows to a peer's slot
    ATTEND = "attend"
    KEEP = "keep"  # attention's output to the result and to the blocks that are returned
    RETURN = "return"  # rows to their place in a peer's result
    RECORD = "record"  # an event on this stream
    AWAIT = "await"  # this stream waits for an event of another stream of this rank
    SIGNAL = "signal"  # the call's number into a peer's flag
    WAIT = "wait"  # this stream waits until an own flag has reached the call's number
    CONSUME = "consume"  # the caller reads the result
    QUIESCE = "quiesce"  # all streams of all ranks are idle, and every rank knows
    FREE = "free"  # the arena may be given to somebody else


@dataclass(frozen=True)
class Region:
    """Rows and columns (heads) of a named buffer in the memory of `rank`, over the whole batch."""

    rank: int
    buffer: tuple[str | int, ...]
    rows: tuple[int, int]
    cols: tuple[int, int] = (0, 1)

    def overlaps(self, other: "Region") -> bool:
        return (
            (self.rank, self.buffer) == (other.rank, other.buffer)
            and max(self.rows[0], other.rows[0]) < min(self.rows[1], other.rows[1])
            and max(self.cols[0], other.cols[0]) < min(self.cols[1], other.cols[1])
        )

    @property
    def area(self) -> int:
        return (self.rows[1] - self.rows[0]) * (self.cols[1] - self.cols[0])


@dataclass(frozen=True)
class Flag:
    """A word in the memory of `owner`, who waits on it; only `writer` writes it. `name` is full or back."""

    name: str
    owner: int
    writer: int
    group: int

    def __str__(self) -> str:
        """What its arrival means."""
        return f"{'q, k and v' if self.name == 'full' else 'the results'} of group {self.group}"


@dataclass(frozen=True)
class Op:
    kind: Kind
    rank: int
    stream: str
    what: str = ""  # which tensor: q, k, v, qk, kv
    group: int = -1
    peer: int = -1
    reads: tuple[Region, ...] = ()
    writes: tuple[Region, ...] = ()
    flag: Flag | None = None
    event: str = ""

    def __str__(self) -> str:
        parts = [f"rank {self.rank} {self.stream}: {self.kind.name}"]
        parts += [self.what] if self.what else []
        parts += [f"group {self.group}"] if self.group >= 0 and self.flag is None else []
        parts += [f"-> rank {self.peer}"] if self.peer >= 0 and self.flag is None else []
        if self.flag is not None:
            parts.append(f"{self.flag.name}[{self.flag.group}][{self.flag.writer}] of rank {self.flag.owner}")
        return " ".join([*parts, self.event])


Schedule = tuple[Op, ...]


@lru_cache(maxsize=256)
def build(plan: AttentionPlan, rank: int) -> Schedule:
    """One call of one rank, in issue order. A pure function of the plan: every rank can build every rank's list."""
    return tuple(_call(plan, rank))


def quiesce(rank: int) -> Op:
    """All ranks meet with idle streams: before another plan, growth, or the end."""
    return Op(Kind.QUIESCE, rank, "main")


def free(plan: AttentionPlan, rank: int) -> Op:
    """The arena's memory goes back: nobody may touch it any more."""
    return Op(Kind.FREE, rank, "main", writes=tuple(arena_regions(plan, rank)))


def slot_rows(plan: AttentionPlan, what: str, rank: int) -> tuple[int, int]:
    """Where a rank's tokens lie in a slot: key and value slots begin with the prefix."""
    tokens, shift = plan.tokens(rank), 0 if what == "q" else plan.prefix
    return tokens.start + shift, tokens.stop + shift


def arena_regions(plan: AttentionPlan, rank: int) -> Iterator[Region]:
    """Every buffer of a rank's arena, whole."""
    for group in plan.groups(rank):
        for what in "qkv":
            yield Region(rank, ("slot", what, group.index), (0, plan.num_tokens if what == "q" else plan.num_kv_rows))
        if not plan.direct:
            for peer in plan.senders(rank):
                yield Region(rank, ("kept", group.index, peer), (0, plan.token_counts[peer]))
    for peer in plan.peers(rank):
        for group in plan.groups(peer) if plan.token_counts[rank] else ():
            for what in "qk":
                yield Region(rank, ("send", what, peer, group.index), (0, plan.token_counts[rank]))
    yield from _result(plan, rank)


def _call(plan: AttentionPlan, rank: int) -> Iterator[Op]:
    num_own, own_groups = plan.token_counts[rank], plan.groups(rank)
    receivers = [peer for peer in plan.peers(rank) if plan.groups(peer)] if num_own else []
    yield from _fill_and_send(plan, rank, receivers)
    on_aux = own_groups[1::2] if plan.attend_streams == 2 else ()
    if on_aux:
        yield Op(Kind.RECORD, rank, "main", event="placed")
        yield Op(Kind.AWAIT, rank, "aux", event="placed")
    for group in own_groups:
        yield from _attend(plan, rank, group, "aux" if group in on_aux else "main")
    for group in on_aux:
        yield Op(Kind.AWAIT, rank, "main", event=f"attended {group.index}")
    for peer in receivers:
        last = plan.groups(peer)[-1].index
        yield Op(Kind.WAIT, rank, "main", group=last, flag=Flag("back", rank, peer, last))
    yield Op(Kind.CONSUME, rank, "main", reads=tuple(_own_result(plan, rank)))


def _fill_and_send(plan: AttentionPlan, rank: int, receivers: list[int]) -> Iterator[Op]:
    """All that leaves this rank, and its own rows. Every send and signal is queued before the first wait for a peer."""
    num_own = plan.token_counts[rank]
    inputs = tuple(Region(rank, (what,), (0, num_own)) for what in "qkv") if num_own else ()
    yield Op(Kind.PRODUCE, rank, "main", writes=inputs)
    first = min((group.index for peer in receivers for group in plan.groups(peer)), default=-1)
    if receivers:  # the first group's v is queued before the wait for the fill, so it leaves under norm and RoPE
        yield Op(Kind.RECORD, rank, "main", event="produced")
        yield Op(Kind.AWAIT, rank, "copy", event="produced")
        yield from (_send(plan, "v", rank, group) for group in _to_peers(plan, receivers, first))
    if num_own:
        yield _fill(plan, rank, receivers)
    if receivers:
        yield Op(Kind.RECORD, rank, "main", event="filled")
        yield Op(Kind.AWAIT, rank, "copy", event="filled")
    for index in range(plan.num_groups):
        for group in _to_peers(plan, receivers, index):
            if index != first:
                yield _send(plan, "v", rank, group)
            yield from _send_qk(plan, rank, group)
            yield Op(Kind.SIGNAL, rank, "copy", group=index, flag=Flag("full", group.rank, rank, index))
    yield from _place(plan, rank)


def _to_peers(plan: AttentionPlan, receivers: list[int], index: int) -> list[HeadGroup]:
    """The peers' groups number `index`, those that hold heads."""
    return [group for peer in receivers for group in plan.groups(peer) if group.index == index]


def _fill(plan: AttentionPlan, rank: int, receivers: list[int]) -> Op:
    writes = [_slot(plan, what, group, rank) for group in plan.groups(rank) for what in "qk"]
    writes += [_block(plan, what, rank, group) for peer in receivers for group in plan.groups(peer) for what in "qk"]
    reads = tuple(Region(rank, (what,), (0, plan.token_counts[rank])) for what in "qk")
    return Op(Kind.FILL, rank, "main", what="qk", reads=reads, writes=tuple(writes))


def _place(plan: AttentionPlan, rank: int) -> Iterator[Op]:
    groups, num_own = plan.groups(rank), plan.token_counts[rank]
    if groups and num_own:
        writes = tuple(_slot(plan, "v", group, rank) for group in groups)
        yield Op(Kind.PLACE, rank, "main", what="v", reads=(Region(rank, ("v",), (0, num_own)),), writes=writes)
    ends = [(0, plan.prefix), (plan.num_kv_rows - plan.suffix, plan.num_kv_rows)]
    writes = tuple(
        Region(rank, ("slot", what, group.index), rows)
        for group in groups
        for what in "kv"
        for rows in ends
        if rows[0] < rows[1]
    )
    if writes:
        yield Op(Kind.PLACE, rank, "main", what="kv", writes=writes)


def _send_qk(plan: AttentionPlan, rank: int, group: HeadGroup) -> Iterator[Op]:
    for what in ("qk",) if plan.joint_qk else ("q", "k"):
        yield _send(plan, what, rank, group)


def _send(plan: AttentionPlan, what: str, rank: int, group: HeadGroup) -> Op:
    reads = tuple(
        Region(rank, ("v",), (0, plan.token_counts[rank])) if one == "v" else _block(plan, one, rank, group)
        for one in what
    )
    writes = tuple(_slot(plan, one, group, rank) for one in what)
    return Op(Kind.SEND, rank, "copy", what=what, group=group.index, peer=group.rank, reads=reads, writes=writes)


def _attend(plan: AttentionPlan, rank: int, group: HeadGroup, stream: str) -> Iterator[Op]:
    index, senders, cols = group.index, plan.senders(rank), (group.start, group.start + group.count)
    for peer in senders:
        yield Op(Kind.WAIT, rank, stream, group=index, flag=Flag("full", rank, peer, index))
    slots = tuple(
        Region(rank, ("slot", what, index), (0, plan.num_tokens if what == "q" else plan.num_kv_rows)) for what in "qkv"
    )
    if plan.direct:
        written = Region(rank, ("out",), (0, plan.num_tokens), cols)
        yield Op(Kind.ATTEND, rank, stream, group=index, reads=slots, writes=(written,))
    else:
        # One buffer for all groups of a stream: so does an allocator hand out what was dropped.
        fresh = Region(rank, ("fresh", stream), (0, plan.num_tokens))
        yield Op(Kind.ATTEND, rank, stream, group=index, reads=slots, writes=(fresh,))
        kept = [Region(rank, ("kept", index, peer), (0, plan.token_counts[peer])) for peer in senders]
        own = [Region(rank, ("out",), (0, plan.token_counts[rank]), cols)] if plan.token_counts[rank] else []
        yield Op(Kind.KEEP, rank, stream, group=index, reads=(fresh,), writes=(*own, *kept))
    yield Op(Kind.RECORD, rank, stream, event=f"attended {index}")
    yield Op(Kind.AWAIT, rank, "copy", event=f"attended {index}")
    for peer in senders:
        yield _return(plan, rank, group, peer)
        if group == plan.groups(rank)[-1]:  # one copy stream: whoever sees the last return sees them all
            yield Op(Kind.SIGNAL, rank, "copy", group=index, flag=Flag("back", peer, rank, index))


def _return(plan: AttentionPlan, rank: int, group: HeadGroup, peer: int) -> Op:
    cols, tokens = (group.start, group.start + group.count), plan.tokens(peer)
    source = Region(rank, ("kept", group.index, peer), (0, len(tokens)))
    if plan.direct:
        source = Region(rank, ("out",), (tokens.start, tokens.stop), cols)
    target = Region(peer, ("out",), result_rows(plan, peer), cols)
    return Op(Kind.RETURN, rank, "copy", group=group.index, peer=peer, reads=(source,), writes=(target,))


def result_rows(plan: AttentionPlan, rank: int) -> tuple[int, int]:
    """Where a rank's own rows lie in its output buffer, which holds all tokens if attention writes there directly."""
    tokens = plan.tokens(rank)
    return (tokens.start, tokens.stop) if plan.direct else (0, len(tokens))


def _result(plan: AttentionPlan, rank: int) -> Iterator[Region]:
    rows = plan.num_tokens if plan.direct else plan.token_counts[rank]
    if rows:
        yield Region(rank, ("out",), (0, rows), (0, plan.num_heads))


def _own_result(plan: AttentionPlan, rank: int) -> Iterator[Region]:
    if plan.token_counts[rank]:
        yield Region(rank, ("out",), result_rows(plan, rank), (0, plan.num_heads))


def _slot(plan: AttentionPlan, what: str, group: HeadGroup, sender: int) -> Region:
    """The rows of `sender` in the slot of the group's own rank."""
    return Region(group.rank, ("slot", what, group.index), slot_rows(plan, what, sender))


def _block(plan: AttentionPlan, what: str, rank: int, group: HeadGroup) -> Region:
    """The send block of `rank` for a peer's group."""
    return Region(rank, ("send", what, group.rank, group.index), (0, plan.token_counts[rank]))
