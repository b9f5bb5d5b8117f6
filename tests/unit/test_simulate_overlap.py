"""Interval arithmetic against counting moments one by one."""

import random
from itertools import pairwise

import pytest

from usp.overlap import account, difference, exposed_spans, intersection, length, union


def moments(spans) -> set[int]:
    return {moment for start, end in spans for moment in range(start, end)}


def random_spans(rng: random.Random) -> list[tuple[int, int]]:
    starts = [rng.randrange(60) for _ in range(rng.randrange(8))]
    return [(start, start + rng.randrange(12)) for start in starts]


@pytest.mark.parametrize("seed", range(40))
def test_sets_of_moments_are_what_counting_says(seed: int) -> None:
    rng = random.Random(seed)
    one, other = random_spans(rng), random_spans(rng)
    left, right = union(one), union(other)
    assert moments(left) == moments(one) and length(left) == len(moments(one))
    assert all(start < end for start, end in left)
    assert all(first[1] < second[0] for first, second in pairwise(left))
    assert moments(intersection(left, right)) == moments(one) & moments(other)
    assert moments(difference(left, right)) == moments(one) - moments(other)
    assert length(difference(left, right)) == len(moments(one) - moments(other))


@pytest.mark.parametrize("seed", range(40))
def test_the_account_is_what_counting_says(seed: int) -> None:
    rng = random.Random(seed)
    work, copies, waits = (random_spans(rng) for _ in range(3))
    inner = copies[1:]
    window = (rng.randrange(20), rng.randrange(30, 60))
    sets = {"work": union(work), "copies": union(copies), "inner": union(inner), "waits": union(waits)}
    found = account(window, attention=union(work[:2]), **sets)
    inside = moments([window]) - moments(work)
    assert (found.total, found.work) == (window[1] - window[0], len(moments([window]) & moments(work)))
    assert found.exposed == len(inside & moments(copies))
    assert moments(exposed_spans(window, work=sets["work"], copies=sets["copies"])) == inside & moments(copies)
    under_work = moments([window]) & moments(work)
    assert (found.communication, found.inner_communication) == (len(moments(copies)), len(moments(inner)))
    assert (found.hidden, found.inner_hidden) == (len(moments(copies) & under_work), len(moments(inner) & under_work))
    assert found.outside == len(moments(copies) - moments([window]))
    assert found.inner_outside == len(moments(inner) - moments([window]))
    assert found.stall == len((inside - moments(copies)) & moments(waits))
    assert found.idle == len(inside - moments(copies) - moments(waits))
    assert found.inner_exposed == len(inside & moments(inner)) and found.attention == len(moments(work[:2]))


def test_what_runs_after_the_call_is_not_hidden_by_it() -> None:
    """Though a kernel of the next call runs beside it."""
    work, copies = ((0.0, 100.0), (101.0, 400.0)), ((90.0, 290.0),)
    found = account((0.0, 100.0), work=work, attention=work[:1], copies=copies, inner=copies, waits=())
    assert (found.communication, found.hidden, found.exposed, found.outside) == (200, 10, 0, 190)
    assert (found.hidden_share, found.inner_hidden_share) == (0.05, 0.05)


def test_without_copies_no_share_is_hidden_and_none_is_claimed() -> None:
    found = account((0, 10), work=((0, 4),), attention=(), copies=(), inner=(), waits=((4, 9),))
    assert (found.hidden_share, found.inner_hidden_share) == (None, None)
    assert (found.exposed, found.stall, found.idle) == (0, 5, 1)
