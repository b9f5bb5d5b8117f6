"""An attention call without a copy, a flag or a wait: what is left of it when nothing crosses the link."""

import torch

from usp.execute import Call
from usp.fill import FillAll
from usp.pipeline import PipelinedExchange
from usp.schedule import Kind
from usp.ulysses import UlyssesAttention

WORK = (Kind.FILL, Kind.PLACE, Kind.ATTEND, Kind.KEEP)


class KernelsAlone(UlyssesAttention):
    """Launches what a call of a pipelined exchange, which has made one before, launches; its result is of no use."""

    def filled(self, v: torch.Tensor, fill_all: FillAll, *, num_heads: int, **_: object) -> torch.Tensor:
        assert isinstance(self.exchange, PipelinedExchange) and self.exchange.plan is not None
        executor, call = self.exchange._executor(self.exchange.plan, self.attention), Call(0, v, fill_all)
        for op, step in zip(executor.ops, executor.steps, strict=True):
            if op.kind in WORK:
                step(call)
        top, bottom = executor.places[executor.rank].result_rows
        return executor.views[("out",)][:, top:bottom]
