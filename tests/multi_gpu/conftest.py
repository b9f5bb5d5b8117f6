from collections.abc import Callable, Iterator

import pytest

from tests.multi_gpu.ranks import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], Ranks]]:
    """`ranks(world)` is the running group of that size, started when first asked for."""
    groups: dict[int, Ranks] = {}

    def get(world: int) -> Ranks:
        if world not in groups or groups[world].broken:
            groups[world] = Ranks(world)
        return groups[world]

    yield get
    for group in groups.values():
        group.close()
