"""The picture of a timeline: its size, and that areas of colour are shares of time."""

from collections import Counter
from dataclasses import replace

import pytest
from PIL import Image, ImageColor

from usp.costs import Costs
from usp.draw import COLOURS, draw, not_hidden
from usp.errors import UserError
from usp.plan import AttentionPlan
from usp.schedule import Kind
from usp.simulate import simulate, simulate_emulated

ROUND = {
    ("fill", "qk", None): 200.0,
    ("attend", "", None): 400.0,
    ("send", "v", None): 50.0,
    ("send", "qk", None): 100.0,
}


def colours(path) -> Counter:
    with Image.open(path) as image:
        return Counter({colour: count for count, colour in image.convert("RGB").getcolors(1 << 24)})


def area(counts: Counter, colour: str) -> int:
    return counts[ImageColor.getrgb(colour)]


def reddish(counts: Counter) -> int:
    """The hatching and its smoothed edges; of the other colours, only orange is warm, and less blue."""
    return sum(count for (r, g, b), count in counts.items() if r - g > 60 and abs(g - b) < 40)


def plan(*tokens: int, **changes) -> AttentionPlan:
    widths = ((1, 1),) * len(tokens)
    heads = 2 * len(tokens)
    return AttentionPlan(tokens, heads, heads, 64, "float32", widths, **changes)


@pytest.mark.parametrize(
    ("tokens", "changes"),
    [
        ((500,), {}),
        ((500, 300), {}),
        ((500, 300), {"direct": False, "attend_streams": 2}),
        ((0, 9, 1), {}),
        ((0, 9, 1), {"attend_streams": 2}),
        ((400,) * 8, {"direct": False}),
        ((7,) * 16, {}),
    ],
)
def test_the_picture_has_the_announced_size_and_is_wide_enough_for_a_slide(tmp_path, tokens, changes) -> None:
    size = draw(simulate(plan(*tokens, **changes), Costs()), tmp_path / "a.png")
    with Image.open(tmp_path / "a.png") as image:
        assert image.format == "PNG" and image.size == size
    assert size[0] == 1600 and 300 < size[1] < 2400
    assert len(colours(tmp_path / "a.png")) > 20  # letters and edges are smooth


def test_areas_are_shares_of_time(tmp_path) -> None:
    timeline = simulate(plan(500, 500), Costs(measured=ROUND), calls=1)
    draw(timeline, tmp_path / "a.png")
    counts = colours(tmp_path / "a.png")
    fill, attend = area(counts, COLOURS[Kind.FILL]), area(counts, COLOURS[Kind.ATTEND])
    assert attend / fill == pytest.approx(4, rel=0.1)  # two launches of 400 to one fill of 200, less their letters
    assert area(counts, COLOURS[Kind.SEND]) / fill == pytest.approx(1.5, rel=0.2)  # five letters in narrow boxes


def test_exposed_communication_is_red_in_proportion_and_absent_where_nothing_is_copied(tmp_path) -> None:
    slow, fast = dict(ROUND), dict(ROUND)
    slow["send", "qk", None] = 400.0
    red = []
    for number, table in enumerate((fast, slow)):
        draw(simulate(plan(500, 500), Costs(measured=table)), tmp_path / f"{number}.png")
        red.append(reddish(colours(tmp_path / f"{number}.png")))
    assert 0 < 2 * red[0] < red[1]
    draw(simulate(plan(500), Costs()), tmp_path / "alone.png")
    assert reddish(colours(tmp_path / "alone.png")) == 0


def test_copies_outside_the_call_are_named_where_there_are_any() -> None:
    costs = Costs(link_gbps=1, measured={("attend", "", None): 400.0})
    even, uneven = (
        simulate_emulated(plan(*tokens), 1, costs, calls=1).overlap(1, 1) for tokens in ((500, 500), (900, 100))
    )
    assert uneven.outside > 0
    exposed, outside = f"{uneven.exposed / 1e3:.3f} ms exposed", f"{uneven.outside / 1e3:.3f} ms outside the call"
    assert not_hidden(uneven) == f"{exposed}, {outside}"
    assert not_hidden(even) == f"{even.exposed / 1e3:.3f} ms exposed"


def test_long_calls_have_their_ends_enlarged(tmp_path) -> None:
    heights = [
        draw(simulate(plan(500, 500), Costs(measured={**ROUND, ("attend", "", None): us})), tmp_path / "a.png")[1]
        for us in (400.0, 40_000.0)
    ]
    assert heights[1] > 1.4 * heights[0]


def test_the_call_that_was_asked_for_is_drawn(tmp_path) -> None:
    timeline = simulate(plan(500, 300), Costs(issue_us=8, measured=ROUND))  # the host is ahead from the second call on
    for name, call in (("first", 1), ("last", 3), ("default", None)):
        draw(timeline, tmp_path / name, call=call)
    first, last, default = ((tmp_path / name).read_bytes() for name in ("first", "last", "default"))
    assert first != last == default


def test_one_emulated_rank_is_drawn_with_its_arrivals(tmp_path) -> None:
    costs = Costs(measured={**ROUND, ("peer_send", "v", None): 50.0, ("peer_send", "qk", None): 100.0})
    draw(simulate(plan(500, 500), costs, calls=1), tmp_path / "both.png")
    draw(simulate_emulated(plan(500, 500), 1, costs, calls=1), tmp_path / "one.png")
    sends = [area(colours(tmp_path / name), COLOURS[Kind.SEND]) for name in ("both.png", "one.png")]
    attends = [area(colours(tmp_path / name), COLOURS[Kind.ATTEND]) for name in ("both.png", "one.png")]
    assert sends[1] == pytest.approx(sends[0], rel=0.1)  # what leaves and what arrives
    assert attends[1] == pytest.approx(attends[0] / 2, rel=0.1)


def test_a_call_that_takes_no_time_is_refused_and_ends_without_returns_are_not_enlarged(tmp_path) -> None:
    kinds = ("fill", "qk"), ("place", "v"), ("send", "v"), ("send", "qk"), ("attend", ""), ("return", "")
    nothing = Costs(signal_us=0, latency_us=0, event_us=0, measured={(*kind, None): 0.0 for kind in kinds})
    with pytest.raises(UserError, match="call 2 takes no time"):
        draw(simulate(plan(500, 500), nothing), tmp_path / "a.png", call=2)
    attention_alone = replace(nothing, measured={**nothing.measured, ("attend", "", None): 5.0})
    assert draw(simulate(plan(500, 500), attention_alone), tmp_path / "a.png")[0] == 1600
