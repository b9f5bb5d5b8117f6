"""Who holds what: uneven shares, and which meshes are legal (D01, D06)."""

import pytest

from usp.errors import UserError
from usp.layout import MeshShape, choose_mesh, split_counts, split_offsets


@pytest.mark.parametrize("total", [0, 1, 30, 45, 56_700, 75_600])
@pytest.mark.parametrize("parts", [1, 2, 3, 4, 8])
def test_shares_cover_everything_in_order_and_differ_by_at_most_one(total: int, parts: int) -> None:
    counts = split_counts(total, parts)
    held = [
        item for count, start in zip(counts, split_offsets(counts), strict=True) for item in range(start, start + count)
    ]
    assert held == list(range(total))
    assert max(counts) - min(counts) <= 1 and list(counts) == sorted(counts, reverse=True)


@pytest.mark.parametrize("cfg", [1, 2])
def test_ulysses_ranks_are_neighbours(cfg: int) -> None:
    shape = MeshShape(cfg, 3)
    assert [shape.coordinates(rank) for rank in range(shape.world)] == [(c, u) for c in range(cfg) for u in range(3)]


@pytest.mark.parametrize(
    ("world", "guided", "flags", "expected"),
    [
        (1, True, {}, (1, 1)),
        (2, True, {}, (2, 1)),
        (4, True, {}, (2, 2)),
        (3, True, {}, (1, 3)),
        (4, False, {}, (1, 4)),
        (4, True, {"cfg_size": 1}, (1, 4)),
        (4, True, {"ulysses_size": 4}, (1, 4)),
        (4, True, {"ulysses_size": 2}, (2, 2)),
        (4, False, {"cfg_size": 2}, (2, 2)),
        (6, True, {}, (2, 3)),
    ],
)
def test_silent_flags_follow_from_the_world(world, guided, flags, expected) -> None:
    assert choose_mesh(world=world, num_heads=4, guided=guided, **flags) == MeshShape(*expected)


@pytest.mark.parametrize(
    ("world", "heads", "flags", "words"),
    [
        (4, 4, {"cfg_size": 2, "ulysses_size": 4}, ["2", "4", "8 ranks", "4 were started"]),
        (4, 4, {"cfg_size": 4, "ulysses_size": 1}, ["cfg_size is 4", "1", "2"]),
        (4, 4, {"cfg_size": 1, "ulysses_size": 3}, ["1", "3", "4 were started"]),
        (4, 4, {"cfg_size": 0}, ["cfg_size is 0", "at least 1"]),
        (4, 4, {"ulysses_size": 0}, ["ulysses_size is 0", "at least 1"]),
        (4, 4, {"ulysses_size": 8}, ["8", "4 were started"]),
        (8, 4, {"cfg_size": 1}, ["4 heads", "8 ulysses ranks", "at most 4"]),
        (12, 40, {"ulysses_size": 3}, ["cfg_size of 4"]),
        (3, 4, {"cfg_size": 2}, ["2", "3 were started"]),
    ],
)
def test_an_illegal_mesh_is_refused_with_its_numbers(world, heads, flags, words) -> None:
    with pytest.raises(UserError) as error:
        choose_mesh(world=world, num_heads=heads, guided=True, **flags)
    assert all(word in str(error.value) for word in words), error.value
