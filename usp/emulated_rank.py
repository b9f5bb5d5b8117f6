"""One rank of a plan, played alone on one device: its sends go to host memory, its arrivals are replayed from there.

Copies between device and pinned host memory run on true copy engines, as those between GPUs do, while copies within a
device run on its SMs. So overlap can be seen, timed and compared with the simulator on a single GPU. The list that runs
is `usp.emulate.emulated`. Used by scripts/emulated_link.py.
"""

from collections.abc import Sequence

import torch

from usp.attention import Attention
from usp.costs import ARRIVALS
from usp.emulate import emulated
from usp.execute import Call, Executor, Rows, rows_of
from usp.fill import FillAll
from usp.ipc.engine import Engine
from usp.placement import Buffer, Placement, arena_sizes
from usp.plan import AttentionPlan
from usp.ranges import Ranges
from usp.schedule import Op, Schedule


class EmulatedArena:
    """Memory of all ranks in one process: the own rank's on `device`, the peers' in host memory, pinned for a GPU."""

    def __init__(self, plan: AttentionPlan, rank: int, *, device: torch.device) -> None:
        self.rank = rank
        self._bytes = [
            torch.zeros(nbytes, dtype=torch.uint8, device=device)
            if owner == rank
            else torch.zeros(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
            for owner, nbytes in enumerate(arena_sizes(plan))
        ]
        self.base = tuple(memory.data_ptr() for memory in self._bytes)

    def view(self, rank: int, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        return self._bytes[rank][offset : offset + nbytes].view(dtype).view(*shape)


class EmulatedRank(Executor):
    """`engine` has a stream `arrivals`. What the peers send lies in `peer_view` and `peer_v`, for the caller to write.

    `peer_v[p]` is [B, S_p, K, D] in the memory of peer p.
    """

    def __init__(
        self,
        plan: AttentionPlan,
        rank: int,
        *,
        engine: Engine,
        attention: Attention,
        device: torch.device,
        ranges: Ranges | None = None,
    ) -> None:
        dtype = getattr(torch, plan.dtype)
        self.peer_v = {
            peer: torch.zeros(
                plan.batch,
                plan.token_counts[peer],
                plan.num_kv_heads,
                plan.head_dim,
                dtype=dtype,
                pin_memory=device.type == "cuda",
            )
            for peer in plan.peers(rank)
        }
        self._number = 0
        arena = EmulatedArena(plan, rank, device=device)
        super().__init__(plan, arena=arena, engine=engine, attention=attention, ranges=ranges)

    def attend(self, v: torch.Tensor, fill: FillAll) -> torch.Tensor:
        """One call: [B, S_r, K, D] with dense heads; the result is a view until the next call."""
        return self.run(self.next_call(v, fill))

    def next_call(self, v: torch.Tensor, fill: FillAll) -> Call:
        self._number += 1
        return Call(self._number, v, fill)

    def peer_view(self, peer: int, buffer: Buffer) -> torch.Tensor:
        """A buffer of a peer's arena: the blocks it sends from, and the results it returns."""
        place = Placement(self.plan, peer)
        return self.arena.view(peer, place.offsets[buffer], place.shapes[buffer], self.dtype)

    def _schedule(self) -> Schedule:
        return emulated(self.plan, self.rank)

    def _rows_of_v(self, op: Op, call: Call) -> Rows:
        return rows_of(self.peer_v[op.reads[0].rank]) if op.stream == ARRIVALS else call.rows_of_v
