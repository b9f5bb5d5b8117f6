"""Who holds what: uneven splits and the (cfg, ulysses) mesh shape, as plain arithmetic.

Costs nothing and imports no torch, so it runs in the checks that come before anything is loaded.
Used by the mesh, the exchange, the checks of the command line and the tests.
"""

from dataclasses import dataclass
from itertools import accumulate

from usp.errors import UserError

CFG_SIZES = (1, 2)  # one guidance branch each, so at most two


def split_counts(total: int, num_parts: int) -> tuple[int, ...]:
    """Share `total` items among `num_parts`, in order; the first `total % num_parts` parts hold one more."""
    assert total >= 0 and num_parts >= 1
    base, extra = divmod(total, num_parts)
    return tuple(base + (part < extra) for part in range(num_parts))


def split_offsets(counts: tuple[int, ...]) -> tuple[int, ...]:
    """First item of each part, for the counts of `split_counts`."""
    return (0, *accumulate(counts))[:-1]


@dataclass(frozen=True)
class MeshShape:
    """Ranks as a (cfg, ulysses) grid. `ulysses` is the inner axis: its ranks are neighbours."""

    cfg: int
    ulysses: int

    def __post_init__(self) -> None:
        if self.cfg not in CFG_SIZES:
            raise UserError(f"cfg_size is {self.cfg}; use 1 (both guidance branches on every rank) or 2 (one each)")
        if self.ulysses < 1:
            raise UserError(f"ulysses_size is {self.ulysses}; use at least 1")

    @property
    def world(self) -> int:
        return self.cfg * self.ulysses

    def coordinates(self, rank: int) -> tuple[int, int]:
        """(cfg index, ulysses index) of a rank."""
        return divmod(rank, self.ulysses)

    def check_fits(self, *, world: int, num_heads: int) -> None:
        """Raise UserError unless the grid has exactly `world` ranks and every ulysses rank gets a head."""
        if self.world != world:
            raise UserError(
                f"cfg_size {self.cfg} x ulysses_size {self.ulysses} = {self.world} ranks, but {world} were started; "
                f"start {self.world}, or choose sizes whose product is {world}"
            )
        if self.ulysses > num_heads:
            raise UserError(f"{num_heads} heads do not fit {self.ulysses} ulysses ranks; use at most {num_heads}")


def choose_mesh(
    *, world: int, num_heads: int, guided: bool, cfg_size: int | None = None, ulysses_size: int | None = None
) -> MeshShape:
    """Pick the mesh: flags first; silent, cfg is 2 if guidance is on and the world is even, the rest is ulysses.

    Raises UserError when the sizes do not multiply to `world` or there are more ulysses ranks than heads.
    """
    for name, size in (("cfg_size", cfg_size), ("ulysses_size", ulysses_size)):
        if size is not None and size < 1:
            raise UserError(f"{name} is {size}; use at least 1")
    if cfg_size is None and ulysses_size is None:
        cfg_size = 2 if guided and world % 2 == 0 else 1
    if cfg_size is None:
        assert ulysses_size is not None
        cfg_size = max(1, world // ulysses_size)
        if cfg_size not in CFG_SIZES:
            raise UserError(
                f"ulysses_size {ulysses_size} in a world of {world} leaves a cfg_size of {cfg_size}, over 2; "
                f"start {ulysses_size} or {2 * ulysses_size} ranks, or leave ulysses_size out"
            )
    shape = MeshShape(cfg_size, ulysses_size or max(1, world // cfg_size))
    shape.check_fits(world=world, num_heads=num_heads)
    return shape
