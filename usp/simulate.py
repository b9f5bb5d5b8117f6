"""Plays a plan's schedules against a clock: durations in, timeline out, before anything runs.

Each stream runs its operations in order; one starts when its stream is free, what it awaits has happened, the host has
issued it and its resource is free. Kernels of a rank share its SMs; copies to a rank share its link. Event-driven and
exact: the same plan and costs give the same timeline. `python -m usp.simulate --help` prints, draws and compares.
"""

import sys
from heapq import heappop, heappush

from usp.check import check
from usp.costs import COPIES, Costs
from usp.emulate import emulated
from usp.order import Step, Trace, calls, stuck_in_issue_order
from usp.plan import AttentionPlan
from usp.schedule import Kind
from usp.timeline import KERNELS, Event, Timeline

Ready = tuple[float, int, str, int]  # when, rank, stream, place in the stream: all runs pick in the same order


class StuckError(RuntimeError):
    """A schedule that would never end; the message is the checker's."""


def simulate(plan: AttentionPlan, costs: Costs, *, calls: int = 3) -> Timeline:
    """All ranks over a link between peers, `calls` calls back to back. Times in microseconds."""
    return play(_trace(plan, calls), plan, costs)


def simulate_emulated(plan: AttentionPlan, rank: int, costs: Costs, *, calls: int = 3) -> Timeline:
    """One rank, its sends copied to pinned memory, the peers' arrivals replayed from there by a second engine."""
    ops = [(op, call, plan) for call in range(1, calls + 1) for op in emulated(plan, rank)]
    return play(Trace([ops]), plan, costs)


def play(trace: Trace, plan: AttentionPlan, costs: Costs) -> Timeline:
    """The timeline of a trace of calls of one plan. Raises StuckError where an operation can never start."""
    if trace.stuck or stuck_in_issue_order(trace):
        raise StuckError("\n".join(map(str, check(trace))))
    return Timeline(plan, _Run(trace, plan, costs).events())


def _trace(plan: AttentionPlan, count: int) -> Trace:
    return Trace(calls(plan, count))


class _Run:
    """The clock and what is pending. A step is ready when all steps before it are done and the host has issued it."""

    def __init__(self, trace: Trace, plan: AttentionPlan, costs: Costs) -> None:
        self.plan, self.costs, self.trace = plan, costs, trace
        self.done: dict[Step, Event] = {}
        self.free: dict[tuple[str, int], float] = {}  # resource of a rank: when it is free
        self.issued = {step: costs.issue_us * place for steps in trace.ranks for place, step in enumerate(steps, 1)}
        self.pending = {step: len(step.before) for step in trace.steps}
        self.followers: dict[Step, list[Step]] = {step: [] for step in trace.steps}
        for step in trace.steps:
            for earlier in step.before:
                self.followers[earlier].append(step)

    def events(self) -> tuple[Event, ...]:
        """Every step's, in issue order, rank by rank."""
        steps = {self._place(step): step for step in self.trace.steps}
        ready: list[Ready] = []
        for step, count in self.pending.items():
            if not count:
                heappush(ready, (self._ready(step), *self._place(step)))
        while ready:
            step = steps[heappop(ready)[1:]]
            self.done[step] = self._event(step)
            for later in self.followers[step]:
                self.pending[later] -= 1
                if not self.pending[later]:
                    heappush(ready, (self._ready(later), *self._place(later)))
        return tuple(self.done[step] for step in self.trace.steps)

    def _place(self, step: Step) -> tuple[int, str, int]:
        return step.op.rank, step.op.stream, step.index

    def _reached(self, step: Step) -> float:
        """When its stream comes to it."""
        own = [self.done[earlier].end for earlier in step.before if earlier.stream == step.stream]
        return max(own, default=0.0)

    def _ready(self, step: Step) -> float:
        return max([self._reached(step), self.issued[step], *self._passes(step)])

    def _passes(self, step: Step) -> list[float]:
        """When what it awaits on another stream can be seen here."""
        delay = self.costs.latency_us if step.op.kind is Kind.WAIT else self.costs.event_us
        return [self.done[earlier].end + delay for earlier in step.before if earlier.stream != step.stream]

    def _event(self, step: Step) -> Event:
        us, label = self.costs.duration(self.plan, step.op)
        if step.op.kind in (Kind.WAIT, Kind.AWAIT):  # the time that the stream stands at it
            start, end = max(self._reached(step), self.issued[step]), self._ready(step) + us
        else:
            start = max(self._ready(step), *(self.free.get(one, 0.0) for one in self._resources(step)), 0.0)
            end = start + us
        for resource in self._resources(step):
            self.free[resource] = end - self.costs.tail(self.plan, step.op)
        source = next((self.done[earlier] for earlier in step.before if earlier.stream != step.stream), None)
        return Event(step.op, step.call, start, end, label, source)

    def _resources(self, step: Step) -> list[tuple[str, int]]:
        if step.op.kind in KERNELS:
            return [("sms", step.op.rank)]
        if step.op.kind in COPIES and self.costs.shared_ingress:
            return [("ingress", step.op.peer)]
        return []


if __name__ == "__main__":
    from usp.simulate_command import main

    sys.exit(main())
