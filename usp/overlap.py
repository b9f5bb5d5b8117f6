"""How much communication hides under computation, by interval arithmetic on spans of time.

Spans are (start, end) pairs; a sorted tuple of disjoint spans is a set of moments. It makes no difference whether they
were simulated or traced. Used by the timeline and by reports about real traces.
"""

from collections.abc import Iterable
from dataclasses import dataclass

Span = tuple[float, float]
Spans = tuple[Span, ...]


def union(spans: Iterable[Span]) -> Spans:
    """Sorted and disjoint; empty spans are dropped."""
    merged: list[Span] = []
    for start, end in sorted(span for span in spans if span[0] < span[1]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return tuple(merged)


def intersection(one: Spans, other: Spans) -> Spans:
    common, left, right = [], 0, 0
    while left < len(one) and right < len(other):
        start, end = max(one[left][0], other[right][0]), min(one[left][1], other[right][1])
        if start < end:
            common.append((start, end))
        if one[left][1] < other[right][1]:
            left += 1
        else:
            right += 1
    return tuple(common)


def difference(one: Spans, other: Spans) -> Spans:
    """What of `one` is not in `other`."""
    if not one:
        return ()
    edges = [one[0][0], *(edge for span in other for edge in span), max(one[-1][1], other[-1][1] if other else 0.0)]
    outside = union((start, end) for start, end in zip(edges[::2], edges[1::2], strict=True))
    return intersection(one, outside)


def length(spans: Spans) -> float:
    return sum(end - start for start, end in spans)


@dataclass(frozen=True)
class Overlap:
    """One rank, one call, in microseconds.

    total = work + exposed + stall + idle: its window. communication = hidden + exposed + outside: all its copies, to
    and from this rank. `work` is time with a kernel running; copies beside it are `hidden`. `exposed` is without one
    while copies run: communication that somebody waits for. `outside` is copying before or after the window: an early
    peer's sends, or returns to a late one. Other calls' kernels may run then, but this call neither hides it nor waits
    for it, so it lowers the hidden shares. `stall` is waiting for a flag with no such copy running: a late peer. `idle`
    is the rest: launches, events, the host. `inner` leaves out the first group's sends and the last group's returns,
    for which there is no attention to hide under.
    """

    total: float
    work: float
    attention: float
    communication: float
    exposed: float
    outside: float
    stall: float
    inner_communication: float
    inner_exposed: float
    inner_outside: float

    @property
    def hidden(self) -> float:
        return self.communication - self.exposed - self.outside

    @property
    def inner_hidden(self) -> float:
        return self.inner_communication - self.inner_exposed - self.inner_outside

    @property
    def idle(self) -> float:
        return self.total - self.work - self.exposed - self.stall

    @property
    def hidden_share(self) -> float | None:
        """Of the communication; None if there is none."""
        return self.hidden / self.communication if self.communication else None

    @property
    def inner_hidden_share(self) -> float | None:
        return self.inner_hidden / self.inner_communication if self.inner_communication else None


def exposed_spans(window: Span, *, work: Spans, copies: Spans) -> Spans:
    """When copies run in the window and no kernel does."""
    return intersection(difference(union([window]), work), copies)


def account(window: Span, *, work: Spans, attention: Spans, copies: Spans, inner: Spans, waits: Spans) -> Overlap:
    """Account for the window of one call: `work` and `waits` of the rank, `copies` and `inner` ones of the call."""
    whole = union([window])
    quiet = difference(difference(whole, work), copies)
    return Overlap(
        total=window[1] - window[0],
        work=length(intersection(whole, work)),
        attention=length(attention),
        communication=length(copies),
        exposed=length(exposed_spans(window, work=work, copies=copies)),
        outside=length(difference(copies, whole)),
        stall=length(intersection(quiet, waits)),
        inner_communication=length(inner),
        inner_exposed=length(exposed_spans(window, work=work, copies=inner)),
        inner_outside=length(difference(inner, whole)),
    )
