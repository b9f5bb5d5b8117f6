"""A timeline as a picture for a slide: one call of every rank, and its first and last moments enlarged.

Lanes are streams, boxes are operations, numbers are head groups. Exposed communication is hatched in red on the main
lane. Used by the simulator's command.
"""

from dataclasses import dataclass
from math import floor, log10
from pathlib import Path

from usp.costs import ARRIVALS, COPIES
from usp.errors import UserError
from usp.overlap import Overlap, Span
from usp.schedule import Kind, Op
from usp.sheet import PAPER, Sheet, text_width
from usp.tables import describe, ms, percent
from usp.timeline import KERNELS, Event, Timeline

WIDTH, MARGIN, GUTTER = 1600, 48, 140  # pixels of the finished picture; the gutter holds the lanes' names
TITLE_HEIGHT, LEGEND_HEIGHT, CAPTION_HEIGHT, AXIS_HEIGHT, RANK_GAP, LANE_GAP = 104, 44, 34, 40, 14, 4
LANE_HEIGHTS = ((2, 40), (4, 30), (16, 20))  # up to so many ranks
ZOOM_RANKS = 4
SHOWN_US = 0.5  # less is 0.000 ms
MAX_ZOOM = 0.25  # of the call; a longer end is seen well enough in the whole

PALE, GRID, TRACK, EXPOSED = "#6b7785", "#e3e8ee", "#f6f8fa", "#d1242f"
COLOURS = {
    Kind.FILL: "#2a9d8f",
    Kind.PLACE: "#8fd0c6",
    Kind.ATTEND: "#3d6fb4",
    Kind.KEEP: "#8a64b8",
    Kind.SEND: "#f0932b",
    Kind.RETURN: "#7aa63c",
    Kind.WAIT: "#d5dae0",
}
LEGEND = (
    (Kind.FILL, "fill q, k (norm, RoPE)"),
    (Kind.PLACE, "place own v"),
    (Kind.ATTEND, "attention"),
    (Kind.KEEP, "copy out"),
    (Kind.SEND, "send q, k, v"),
    (Kind.RETURN, "return"),
    (Kind.WAIT, "wait for a peer"),
)


@dataclass(frozen=True)
class Panel:
    """A piece of time on a piece of the sheet; positions in pixels of the finished picture."""

    left: int
    top: int
    width: int
    lane: int  # height
    span: Span
    ranks: tuple[int, ...]
    caption: str

    def x(self, time: float) -> float:
        share = (time - self.span[0]) / (self.span[1] - self.span[0])
        return self.left + GUTTER + share * (self.width - GUTTER)

    def height(self, timeline: Timeline) -> int:
        lanes = sum(len(_streams(timeline, rank)) for rank in self.ranks)
        return CAPTION_HEIGHT + lanes * (self.lane + LANE_GAP) + len(self.ranks) * RANK_GAP + AXIS_HEIGHT


def draw(timeline: Timeline, path: Path, *, call: int | None = None) -> tuple[int, int]:
    """Write the PNG of one call, the last by default; (width, height) in pixels. Raises OSError, UserError."""
    call = timeline.num_calls if call is None else call
    panels = _panels(timeline, call)
    sheet = Sheet(WIDTH, max(panel.top + panel.height(timeline) for panel in panels) + MARGIN // 2)
    _title(sheet, timeline, call)
    _legend(sheet, timeline)
    for panel in panels:
        _panel(sheet, panel, timeline, call)
    return sheet.save(path)


def _panels(timeline: Timeline, call: int) -> list[Panel]:
    windows = [timeline.window(rank, call) for rank in timeline.ranks]
    whole = min(start for start, _ in windows), max(end for _, end in windows)
    if whole[0] >= whole[1]:
        raise UserError(f"call {call} takes no time, so there is nothing to draw; give durations above 0")
    lane = next(height for ranks, height in LANE_HEIGHTS if len(timeline.ranks) <= ranks)
    top = MARGIN // 2 + TITLE_HEIGHT + LEGEND_HEIGHT
    labels = sorted({event.label for event in timeline.events if event.op.kind in (*KERNELS, *COPIES)})
    caption = f"one call, time in ms; durations {' and '.join(labels)}"
    first = Panel(MARGIN, top, WIDTH - 2 * MARGIN, lane, whole, timeline.ranks, caption)
    below = top + first.height(timeline) + RANK_GAP
    half, ranks = (WIDTH - 3 * MARGIN) // 2, timeline.ranks[:ZOOM_RANKS]
    zooms = zip((MARGIN, 2 * MARGIN + half), _ends(timeline, call, whole), ("first", "last"), strict=False)
    return [
        first,
        *(Panel(left, below, half, lane, span, ranks, _zoom_caption(name, span)) for left, span, name in zooms),
    ]


def _zoom_caption(name: str, span: Span) -> str:
    return f"its {name} {(span[1] - span[0]) / 1e3:.2f} ms enlarged"


def _ends(timeline: Timeline, call: int, whole: Span) -> list[Span]:
    """Until attention has begun on every rank, and from when it has ended on one; [] if they need no enlarging."""
    events = [event for event in timeline.events if event.call == call]
    attention = [event for event in events if event.op.kind is Kind.ATTEND]
    if not attention or not any(event.op.kind in COPIES for event in events):
        return []
    begun = max(min((one.start for one in attention if one.op.rank == rank), default=0.0) for rank in timeline.ranks)
    ended = min(max((one.end for one in attention if one.op.rank == rank), default=whole[1]) for rank in timeline.ranks)
    before, after = 1.5 * (begun - whole[0]), 1.5 * (whole[1] - ended)
    if min(before, after) <= 0 or max(before, after) > MAX_ZOOM * (whole[1] - whole[0]):
        return []
    return [(whole[0], whole[0] + before), (whole[1] - after, whole[1])]


def _streams(timeline: Timeline, rank: int) -> list[str]:
    """Those with something to draw."""
    drawn = {event.op.stream for event in timeline.events if event.op.rank == rank and event.op.kind in COLOURS}
    return [stream for stream in timeline.streams(rank) if stream in drawn]


def _title(sheet: Sheet, timeline: Timeline, call: int) -> None:
    shape, _, groups = describe(timeline.plan).partition(", groups ")
    overlap = timeline.overlap(timeline.slowest(call), call)
    title = f"Head groups {groups} on {shape}"
    sheet.text(MARGIN, MARGIN // 2 + 24, title, size=_fitting(title, (30, 24, 18)))
    numbers = "   |   ".join(_key_numbers(overlap))
    sheet.text(MARGIN, MARGIN // 2 + 68, numbers, size=_fitting(numbers, (22, 19)), colour=PALE)


def _fitting(text: str, sizes: tuple[int, ...]) -> int:
    """The first size in which a line fits the sheet."""
    return next((size for size in sizes if text_width(text, size) <= WIDTH - 2 * MARGIN), 13)


def _key_numbers(overlap: Overlap) -> list[str]:
    numbers = [f"{overlap.total / 1e3:.2f} ms a call", f"attention {overlap.attention / 1e3:.2f} ms"]
    if overlap.hidden_share is None:
        return [*numbers, "nothing is copied"]
    numbers += [f"copies {overlap.communication / 1e3:.2f} ms, of which {not_hidden(overlap)}"]
    return [*numbers, f"hidden {percent(overlap.hidden_share)} (inner groups {percent(overlap.inner_hidden_share)})"]


def not_hidden(overlap: Overlap) -> str:
    """The copies that no kernel of the call hides, in words."""
    exposed = f"{ms(overlap.exposed)} ms exposed"
    return f"{exposed}, {ms(overlap.outside)} ms outside the call" if overlap.outside > SHOWN_US else exposed


def _legend(sheet: Sheet, timeline: Timeline) -> None:
    present = {event.op.kind for event in timeline.events}
    x, y = float(MARGIN), MARGIN // 2 + TITLE_HEIGHT + LEGEND_HEIGHT // 2
    for kind, text in LEGEND:
        if kind in present:
            sheet.box(x, y - 9, x + 26, y + 9, COLOURS[kind])
            x = _name(sheet, x + 34, y, text)
    if any(event.op.kind in COPIES for event in timeline.events):
        sheet.hatch(x, y - 9, x + 26, y + 9, EXPOSED)
        _name(sheet, x + 34, y, "exposed communication")
    sheet.text(WIDTH - MARGIN, y, "numbers: head groups", size=17, colour=PALE, anchor="rm")


def _name(sheet: Sheet, x: float, y: float, text: str) -> float:
    """Writes a legend entry; where the next one begins."""
    sheet.text(x, y, text, size=17)
    return x + text_width(text, 17) + 24


def _panel(sheet: Sheet, panel: Panel, timeline: Timeline, call: int) -> None:
    bottom = panel.top + panel.height(timeline) - AXIS_HEIGHT
    sheet.text(panel.left, panel.top + 12, panel.caption, size=18, colour=PALE)
    _axis(sheet, panel, bottom)
    top = panel.top + CAPTION_HEIGHT
    for rank in panel.ranks:
        for stream in _streams(timeline, rank):
            name, size = f"rank {rank} {stream}", _label_size(panel)
            sheet.text(panel.left + GUTTER - 12, top + panel.lane / 2, name, size=size, anchor="rm")
            sheet.box(panel.x(panel.span[0]), top, panel.x(panel.span[1]), top + panel.lane, TRACK)
            _lane(sheet, panel, timeline, (rank, stream), top)
            if stream == "main":
                for span in timeline.exposed(rank, call):
                    _mark(sheet, panel, span, top)
            top += panel.lane + LANE_GAP
        top += RANK_GAP


def _lane(sheet: Sheet, panel: Panel, timeline: Timeline, lane: tuple[int, str], top: int) -> None:
    for event in timeline.events:
        span = _clipped(event.span, panel.span)
        if (event.op.rank, event.op.stream) == lane and event.op.kind in COLOURS and span is not None:
            left, right = panel.x(span[0]), panel.x(span[1])
            seam = 0.5 if right - left > 3 else 0.0  # neighbours stay apart
            sheet.box(left, top, right - seam, top + panel.lane, COLOURS[event.op.kind])
            _label(sheet, panel, timeline, event, (left + right) / 2, right - left, top)


def _label(sheet: Sheet, panel: Panel, timeline: Timeline, event: Event, centre: float, width: float, top: int) -> None:
    """The first text about the operation that fits into its box."""
    size = _label_size(panel)
    fitting = [text for text in _labels(timeline, event.op) if text_width(text, size) + 6 < width]
    if fitting:
        sheet.text(centre, top + panel.lane / 2, fitting[0], size=size, colour=PAPER, anchor="mm")


def _labels(timeline: Timeline, op: Op) -> list[str]:
    """Longest first."""
    match op.kind:
        case Kind.ATTEND:
            heads = next(one.count for one in timeline.plan.groups(op.rank) if one.index == op.group)
            return [f"{op.group}: {heads} head" + "s" * (heads > 1), str(op.group)]
        case Kind.FILL | Kind.PLACE:
            return [f"{op.kind.value} {op.what}", op.what]
        case Kind.SEND:
            return [f"{op.group}: {op.what} {_other_end(op)}", f"{op.group} {op.what}", str(op.group)]
        case Kind.RETURN:
            return [f"{op.group}: {_other_end(op)}", str(op.group)]
        case Kind.KEEP:
            return [str(op.group)]
        case _:
            return []


def _other_end(op: Op) -> str:
    return f"from {op.reads[0].rank}" if op.stream == ARRIVALS else f"to {op.peer}"


def _mark(sheet: Sheet, panel: Panel, span: Span, top: int) -> None:
    shown = _clipped(span, panel.span)
    if shown is not None:
        left, right = panel.x(shown[0]), panel.x(shown[1])
        sheet.hatch(left, top, max(right, left + 2), top + panel.lane, EXPOSED)


def _axis(sheet: Sheet, panel: Panel, bottom: float) -> None:
    start, length = panel.span[0], (panel.span[1] - panel.span[0]) / 1e3
    step = _nice(length * 90 / (panel.width - GUTTER))
    digits = max(0, -floor(log10(step)))
    for tick in range(int(length / step + 1e-9) + 1):
        x = panel.x(start + tick * step * 1e3)
        sheet.line(x, panel.top + CAPTION_HEIGHT - 4, x, bottom, GRID)
        sheet.text(x, bottom + 14, f"{tick * step:.{digits}f}", size=15, colour=PALE, anchor="mm")


def _nice(least: float) -> float:
    """The smallest of 1, 2, 5 times a power of ten that is not below `least`."""
    power = 10.0 ** floor(log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9))


def _clipped(span: Span, window: Span) -> Span | None:
    start, end = max(span[0], window[0]), min(span[1], window[1])
    return (start, end) if start < end else None


def _label_size(panel: Panel) -> int:
    return 17 if panel.lane >= 30 else 14
