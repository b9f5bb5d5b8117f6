"""One recorded call as a picture: the same call on every recorded rank, work above, copies below.

Exposed communication is hatched in red on the work lane, stalls are grey. In the colours of the simulator's pictures,
so that a plan and its trace can lie side by side.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import floor, log10
from pathlib import Path

from usp.draw import COLOURS, EXPOSED, GRID, GUTTER, MARGIN, PALE, TRACK, WIDTH, not_hidden
from usp.errors import UserError
from usp.overlap import Span, Spans, difference, intersection, union
from usp.recorded_call import Call, Marked, spans_of
from usp.schedule import Kind
from usp.sheet import PAPER, Sheet, text_width
from usp.tables import ms, percent

TOP, LANE, LANE_GAP, RANK_GAP, BOTTOM = 150, 30, 4, 14, 64
OTHER = "#b8c4d0"  # work that is not attention
LABEL = 15


@dataclass(frozen=True)
class Scale:
    span: Span

    def x(self, time: float) -> float:
        share = (time - self.span[0]) / (self.span[1] - self.span[0])
        return MARGIN + GUTTER + share * (WIDTH - 2 * MARGIN - GUTTER)


def draw_call(calls: Sequence[Call], path: Path) -> tuple[int, int]:
    """Write the PNG of a typical call, the last step's median one; (width, height). Raises OSError, UserError."""
    shown = typical(calls)
    span = min(call.window[0] for call in shown), max(call.window[1] for call in shown)
    if span[0] >= span[1]:
        raise UserError(f"step {shown[0].step}, layer {shown[0].key[1]} takes no time, so there is nothing to draw")
    scale, rank_height = Scale(span), 2 * (LANE + LANE_GAP) + RANK_GAP
    bottom = TOP + len(shown) * rank_height
    sheet = Sheet(WIDTH, bottom + BOTTOM)
    _title(sheet, shown)
    _legend(sheet)
    _axis(sheet, scale, bottom)
    for place, call in enumerate(shown):
        _rank(sheet, scale, call, TOP + place * rank_height)
    return sheet.save(path)


def typical(calls: Sequence[Call]) -> list[Call]:
    """The call of the last step that takes the first rank the median time, on every rank that has it."""
    last = max(call.step for call in calls)
    first = min(call.rank for call in calls if call.step == last)
    own = sorted(
        (call for call in calls if (call.rank, call.step) == (first, last)), key=lambda call: call.overlap.total
    )
    return [call for call in calls if call.key == own[len(own) // 2].key]


def _title(sheet: Sheet, shown: list[Call]) -> None:
    step, layer, _ = shown[0].key
    slowest = max(shown, key=lambda call: call.overlap.total).overlap
    where = f"step {step}, layer {layer}" if step >= 0 else f"layer {layer}"
    sheet.text(MARGIN, 48, f"One attention call, {where}, as recorded", size=30)
    numbers = [f"{ms(slowest.total)} ms", f"attention {ms(slowest.attention)} ms", f"stalls {ms(slowest.stall)} ms"]
    if slowest.hidden_share is not None:
        copies = f"copies {ms(slowest.communication)} ms, of which {not_hidden(slowest)}"
        numbers += [copies, f"hidden {percent(slowest.hidden_share)}"]
    sheet.text(MARGIN, 88, "   |   ".join(numbers), size=20, colour=PALE)


def _legend(sheet: Sheet) -> None:
    x, y = float(MARGIN), 122
    entries = ((COLOURS[Kind.ATTEND], "attention"), (OTHER, "other work"), (COLOURS[Kind.WAIT], "stall"))
    for colour, name in (*entries, (COLOURS[Kind.SEND], "send"), (COLOURS[Kind.RETURN], "return")):
        sheet.box(x, y - 9, x + 26, y + 9, colour)
        x = _name(sheet, x + 34, y, name)
    sheet.hatch(x, y - 9, x + 26, y + 9, EXPOSED)
    _name(sheet, x + 34, y, "exposed communication")


def _name(sheet: Sheet, x: float, y: float, text: str) -> float:
    sheet.text(x, y, text, size=17)
    return x + text_width(text, 17) + 24


def _rank(sheet: Sheet, scale: Scale, call: Call, top: int) -> None:
    below = top + LANE + LANE_GAP
    for name, lane in (("work", top), ("copies", below)):
        sheet.text(MARGIN + GUTTER - 12, lane + LANE / 2, f"rank {call.rank} {name}", size=LABEL, anchor="rm")
        sheet.box(scale.x(scale.span[0]), lane, scale.x(scale.span[1]), lane + LANE, TRACK)
    quiet = difference(difference(union([call.window]), call.work), call.copies)
    _boxes(sheet, scale, intersection(quiet, call.waits), top, COLOURS[Kind.WAIT])
    _boxes(sheet, scale, difference(call.work, spans_of(call.attends)), top, OTHER)
    for one in call.attends:
        _box(sheet, scale, one, top)
    for start, end in _shown(call.exposed(), scale):
        sheet.hatch(scale.x(start), top, max(scale.x(end), scale.x(start) + 2), top + LANE, EXPOSED)
    for one in call.own:
        _box(sheet, scale, one, below)


def _box(sheet: Sheet, scale: Scale, one: Marked, top: int) -> None:
    """With the number of its head group where there is room."""
    kind, label = ("send", "") if one.mark is None else (one.mark.kind, str(one.mark.number))
    _boxes(sheet, scale, (one.span,), top, COLOURS[Kind(kind)])
    left, right = (scale.x(time) for time in one.span)
    if text_width(label, LABEL) + 6 < right - left:
        sheet.text((left + right) / 2, top + LANE / 2, label, size=LABEL, colour=PAPER, anchor="mm")


def _boxes(sheet: Sheet, scale: Scale, spans: Spans, top: int, colour: str) -> None:
    for start, end in _shown(spans, scale):
        left, right = scale.x(start), scale.x(end)
        sheet.box(left, top, right - (0.5 if right - left > 3 else 0.0), top + LANE, colour)  # neighbours stay apart


def _shown(spans: Iterable[Span], scale: Scale) -> Spans:
    return intersection(union(spans), (scale.span,))


def _axis(sheet: Sheet, scale: Scale, bottom: int) -> None:
    width = (scale.span[1] - scale.span[0]) / 1e3
    power = 10.0 ** floor(log10(width / 10))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= width / 10)
    digits = max(0, -floor(log10(step)))
    for tick in range(int(width / step + 1e-9) + 1):
        x = scale.x(scale.span[0] + tick * step * 1e3)
        sheet.line(x, TOP - 6, x, bottom, GRID)
        sheet.text(x, bottom + 14, f"{tick * step:.{digits}f}", size=LABEL, colour=PALE, anchor="mm")
    sheet.text(
        WIDTH - MARGIN, bottom + 40, "ms; numbers in boxes are head groups", size=LABEL, colour=PALE, anchor="rm"
    )
