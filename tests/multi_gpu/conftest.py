from collections.abc import Callable, Iterator

import pytest
import torch

from tests.multi_gpu.ranks import Ranks, skip_unless_asked_for


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], Ranks]]:
    """`ranks(world)` is the running group of that size, started when first asked for.

    Where they share a GPU one group runs at a time: a GPU serves idle processes with contexts slowly.
    """
    groups: dict[int, Ranks] = {}

    def get(world: int) -> Ranks:
        skip_unless_asked_for(world)  # before another group is closed for it
        if world not in groups or groups[world].broken:
            if torch.cuda.is_available():
                for group in groups.values():
                    group.close()
            groups[world] = Ranks(world)
        return groups[world]

    yield get
    for group in groups.values():
        group.close()
