"""Who happens before whom, over all ranks and several calls: vector clocks over the schedules, and the issue-order run.

`Trace` numbers the operations of a sequence of calls and orders them by stream order, events, signals and meetings.
`stuck_in_issue_order` runs each rank's list strictly one after another, as hardware may if streams share a queue.
Used by the checker and by the simulator.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from usp.plan import AttentionPlan
from usp.schedule import Kind, Op, build, free, quiesce

Stream = tuple[int, str]


@dataclass(eq=False)
class Step:
    """One operation of one call. `before` are the steps that directly precede it; `clock` is its vector clock.

    `stint` counts the changes of plan before it on its rank; each lays the buffers out anew, one to an old plan too.
    """

    op: Op
    call: int
    plan: AttentionPlan | None
    index: int  # in its stream
    stint: int
    before: list["Step"] = field(default_factory=list)
    clock: dict[Stream, int] = field(default_factory=dict)

    @property
    def stream(self) -> Stream:
        return self.op.rank, self.op.stream

    def follows(self, other: "Step") -> bool:
        """Whether `other` is finished before this step starts, on every run."""
        return self.clock.get(other.stream, -1) >= other.index

    def __str__(self) -> str:
        return f"call {self.call}, {self.op}"


def calls(plan: AttentionPlan, count: int, *, first: int = 1) -> list[list[tuple[Op, int, AttentionPlan | None]]]:
    """Per rank, the operations of `count` calls numbered from `first`."""
    return [
        [(op, first + turn, plan) for turn in range(count) for op in build(plan, rank)]
        for rank in range(plan.num_ranks)
    ]


def meeting(plan: AttentionPlan, call: int) -> list[list[tuple[Op, int, AttentionPlan | None]]]:
    return [[(quiesce(rank), call, None)] for rank in range(plan.num_ranks)]


def freeing(plan: AttentionPlan, call: int) -> list[list[tuple[Op, int, AttentionPlan | None]]]:
    return [[(free(plan, rank), call, None)] for rank in range(plan.num_ranks)]


def joined(
    *parts: list[list[tuple[Op, int, AttentionPlan | None]]],
) -> list[list[tuple[Op, int, AttentionPlan | None]]]:
    """Parts one after another, rank by rank."""
    return [[item for part in parts for item in part[rank]] for rank in range(len(parts[0]))]


class Trace:
    """The steps of all ranks, ordered. `stuck` are steps that can never start, with what each of them waits for.

    `line` holds the others one after another, each behind all that precede it; what is not ordered stands as it came.
    """

    def __init__(self, per_rank: Iterable[Iterable[tuple[Op, int, AttentionPlan | None]]]) -> None:
        self.ranks: list[list[Step]] = [_numbered(items) for items in per_rank]
        self._signals = self._find_signals()
        self._records = self._find_records()
        self.stuck: list[tuple[Step, str]] = []
        self.line: list[Step] = []
        self._order()

    @property
    def steps(self) -> list[Step]:
        return [step for rank in self.ranks for step in rank]

    def source(self, step: Step) -> Step | None:
        """The signal or record that lets a waiting step go on; None if there is none."""
        if step.op.kind is Kind.WAIT:
            reached = (signal for signal in self._signals.get(step.op.flag, ()) if signal.call >= step.call)
            return next(reached, None)
        return self._records.get(id(step))

    def _find_signals(self) -> dict[object, list[Step]]:
        found: dict[object, list[Step]] = {}
        for step in self.steps:
            if step.op.kind is Kind.SIGNAL:
                found.setdefault(step.op.flag, []).append(step)
        return found

    def _find_records(self) -> dict[int, Step]:
        """An event is what its latest record in issue order was."""
        found: dict[int, Step] = {}
        for rank in self.ranks:
            latest: dict[str, Step] = {}
            for step in rank:
                if step.op.kind is Kind.RECORD:
                    latest[step.op.event] = step
                elif step.op.kind is Kind.AWAIT and step.op.event in latest:
                    found[id(step)] = latest[step.op.event]
        return found

    def _order(self) -> None:
        """Between two meetings each stream runs on by itself; a meeting joins every stream of every rank."""
        parts = [_split_at_meetings(rank) for rank in self.ranks]
        joint: dict[Stream, int] = {}
        meetings: list[Step] = []
        for part in range(max(map(len, parts), default=0)):
            present = [rank[part] if part < len(rank) else [] for rank in parts]
            begun = len(self.line)
            self._order_part([step for rank in present for step in rank], joint, meetings)
            meetings = [rank[-1] for rank in present if rank and rank[-1].op.kind is Kind.QUIESCE]
            for step in self.line[begun:]:
                _merge(joint, step.clock)
            for step in meetings:
                step.clock = dict(joint)

    def _order_part(self, steps: list[Step], joint: dict[Stream, int], meetings: list[Step]) -> None:
        queues: dict[Stream, list[Step]] = {}
        for step in steps:
            queues.setdefault(step.stream, []).append(step)
        done: set[int] = set()
        heads = dict.fromkeys(queues, 0)
        progress = True
        while progress:
            progress = False
            for stream, queue in queues.items():
                while heads[stream] < len(queue) and self._advance(queue, heads[stream], done, joint, meetings):
                    heads[stream] += 1
                    progress = True
        for stream, queue in queues.items():
            if heads[stream] < len(queue):
                self.stuck.append((queue[heads[stream]], self._reason(queue[heads[stream]])))

    def _advance(
        self, queue: list[Step], head: int, done: set[int], joint: dict[Stream, int], meetings: list[Step]
    ) -> bool:
        step = queue[head]
        if step.op.kind in (Kind.WAIT, Kind.AWAIT):
            source = self.source(step)
            if source is None and step.op.kind is Kind.WAIT:
                return False
            if source is not None and id(source) not in done and not source.clock:
                return False
            step.before = [source] if source is not None else []
        step.before += [queue[head - 1]] if head else meetings
        step.clock = dict(joint)
        for earlier in step.before:
            _merge(step.clock, earlier.clock)
        step.clock[step.stream] = step.index
        done.add(id(step))
        self.line.append(step)
        return True

    def _reason(self, step: Step) -> str:
        source = self.source(step)
        return "nobody signals it" if source is None else f"waits for {source}"


def stuck_in_issue_order(trace: Trace) -> list[Step]:
    """Where ranks stop for ever if each runs its list strictly in issue order; [] if all come through."""
    heads, raised = [0] * len(trace.ranks), set[int]()
    progress = True
    while progress:
        progress = False
        for rank, steps in enumerate(trace.ranks):
            while heads[rank] < len(steps) and _may_pass(trace, steps[heads[rank]], heads, raised):
                raised.add(id(steps[heads[rank]]))
                heads[rank] += 1
                progress = True
    return [steps[head] for steps, head in zip(trace.ranks, heads, strict=True) if head < len(steps)]


def _may_pass(trace: Trace, step: Step, heads: list[int], raised: set[int]) -> bool:
    if step.op.kind is Kind.QUIESCE:
        number = _meetings_until(trace.ranks[step.op.rank], heads[step.op.rank])
        return all(
            _meetings_until(steps, head + 1) > number if head < len(steps) else True
            for steps, head in zip(trace.ranks, heads, strict=True)
        )
    if step.op.kind is not Kind.WAIT:
        return True
    source = trace.source(step)
    return source is not None and id(source) in raised


def _meetings_until(steps: Sequence[Step], end: int) -> int:
    return sum(step.op.kind is Kind.QUIESCE for step in steps[:end])


def _numbered(items: Iterable[tuple[Op, int, AttentionPlan | None]]) -> list[Step]:
    counts: dict[str, int] = {}
    steps: list[Step] = []
    stint, latest = -1, None
    for op, call, plan in items:
        if op.kind is not Kind.QUIESCE and (stint < 0 or (plan is not latest and plan != latest)):
            stint, latest = stint + 1, plan
        steps.append(Step(op, call, plan, counts.get(op.stream, 0), stint))
        counts[op.stream] = counts.get(op.stream, 0) + 1
    return steps


def _split_at_meetings(steps: Sequence[Step]) -> list[list[Step]]:
    parts: list[list[Step]] = [[]]
    for step in steps:
        parts[-1].append(step)
        if step.op.kind is Kind.QUIESCE:
            parts.append([])
    return parts


def _merge(clock: dict[Stream, int], other: dict[Stream, int]) -> None:
    for stream, index in other.items():
        if clock.get(stream, -1) < index:
            clock[stream] = index
