"""What the day looks at: shapes of Wan2.2 A14B, or tiny ones, with which all of it runs on any machine."""

from dataclasses import dataclass

from usp.layout import split_counts

SIZES_720P, SIZES_480P = 75_600, 32_760  # tokens


@dataclass(frozen=True)
class Sizes:
    tokens: tuple[int, ...]  # the first is the one that most is measured at
    num_heads: int
    head_dim: int
    dtype: str
    rounds: int  # of turns between contenders; medians are of these
    calls: int  # back to back in one timing
    litmus_rounds: int
    litmus_words: tuple[int, ...]  # 32-bit, of one copy
    block_layers: int

    def groupings(self, ranks: int) -> list[tuple[int, ...]]:
        """Heads per group that are worth comparing: one, two, many equal ones, and small ends."""
        heads = self.num_heads // ranks
        if heads * ranks != self.num_heads:
            return []
        equal = [split_counts(heads, count) for count in (1, 2, 5, 10) if count <= heads]
        ends = {20: [(2, 5, 6, 5, 2)], 10: [(1, 3, 3, 2, 1), (2, 6, 2), (1, 8, 1)], 5: [(1, 2, 2), (2, 2, 1)]}
        return list(dict.fromkeys([*equal, *ends.get(heads, [])]))


REAL = Sizes(
    tokens=(SIZES_720P, SIZES_480P),
    num_heads=40,
    head_dim=128,
    dtype="bfloat16",
    rounds=7,
    calls=3,
    litmus_rounds=100_000,
    litmus_words=tuple(4**power for power in range(12)),  # 4 bytes to 16 MiB
    block_layers=1,
)
SMALL = Sizes(
    tokens=(75, 45),
    num_heads=8,
    head_dim=16,
    dtype="float32",
    rounds=2,
    calls=2,
    litmus_rounds=60,
    litmus_words=(1, 64, 4096),
    block_layers=1,
)


def sizes_of(*, small: bool) -> Sizes:
    return SMALL if small else REAL
