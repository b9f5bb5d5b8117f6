"""Where buffers lie: nothing overlaps, everything is aligned, and a region's pieces are exactly its bytes."""

import itertools
import math

import pytest

from usp.placement import HEADER_BYTES, Piece, Placement, arena_sizes, flag_offset, flag_offsets
from usp.plan import ALIGNMENT, MAX_RANKS
from usp.schedule import Flag, Kind, Region, build
from usp.sweep import plans


def _bytes(piece: Piece) -> set[int]:
    return {piece.offset + row * piece.pitch + byte for row in range(piece.height) for byte in range(piece.width)}


def _cells(place: Placement, region: Region) -> set[int]:
    """The region's bytes, cell by cell from the shape alone."""
    batch, rows, heads, dim = place.shapes[region.buffer]
    columns = range(*region.cols) if region.buffer == ("out",) else range(heads)
    size = dim * place.itemsize
    found = set()
    for sample in range(batch):
        for row in range(*region.rows):
            for head in columns:
                start = place.offsets[region.buffer] + ((sample * rows + row) * heads + head) * size
                found |= set(range(start, start + size))
    return found


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_buffers_lie_apart_behind_the_flags_and_inside_the_arena(ranks: int) -> None:
    for plan in plans(range(ranks, ranks + 1)):
        for rank, nbytes in enumerate(arena_sizes(plan)):
            place = Placement(plan, rank)
            spans = [(offset, offset + math.prod(place.shapes[b]) * 2) for b, offset in place.offsets.items()]
            assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
            assert all(start >= HEADER_BYTES and end <= nbytes for start, end in spans)
            for buffer, (start, _) in zip(place.offsets, spans, strict=True):
                assert start % ALIGNMENT == 0 or (plan.joint_qk and buffer[1] == "k")


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_copy_moves_the_bytes_of_its_regions_and_no_others(ranks: int) -> None:
    for plan in list(plans(range(ranks, ranks + 1)))[::3]:
        small = type(plan)(**{**{f: getattr(plan, f) for f in plan.__dataclass_fields__}, "head_dim": 2, "batch": 2})
        places = [Placement(small, rank) for rank in range(ranks)]
        for op in (op for rank in range(ranks) for op in build(small, rank) if op.kind in (Kind.SEND, Kind.RETURN)):
            for region in (*op.reads, *op.writes):
                if region.buffer[0] != "v":
                    pieces = places[region.rank].pieces(region)
                    found = [_bytes(piece) for piece in pieces]
                    assert set().union(*found) == _cells(places[region.rank], region)
                    assert sum(map(len, found)) == len(set().union(*found))
            if op.what == "qk":
                joint = _bytes(places[op.peer].joint_piece(op.writes[0]))
                assert joint == set().union(*(_cells(places[op.peer], region) for region in op.writes))


def test_flags_have_lines_of_their_own_whatever_the_plan() -> None:
    flags = [Flag("full", 0, writer, group) for writer in range(MAX_RANKS) for group in range(32)]
    flags += [Flag("back", 0, writer, 5) for writer in range(MAX_RANKS)]
    offsets = [flag_offset(flag) for flag in flags]
    assert len(set(offsets)) == len(flags) and set(offsets) == set(flag_offsets())
    assert max(offsets) + 64 <= HEADER_BYTES and min(offsets) == 0
