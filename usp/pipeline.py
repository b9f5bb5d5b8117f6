"""The Ulysses exchange as a pipeline over shared memory: one head group travels while the group before is attended.

Owns the arena, the engine, one executor per plan, and the watchdog. All ranks of the group make the same calls in the
same order; a new shape meets once on the CPU, after that a call meets nobody. Bits are those of `CollectiveExchange`.
Used through `usp.ulysses`.
"""

import logging
import os
import time
from collections import deque
from collections.abc import Callable
from statistics import median

import torch

from usp.attention import Attention, writes_out
from usp.call_numbers import CallNumbers
from usp.exchange import CollectiveExchange, check_rows, dense_heads
from usp.execute import Call, Executor, KeyValue
from usp.fill import FillAll
from usp.ipc.arena import Arena
from usp.ipc.engine import MAIN, Engine
from usp.ipc.futex import reached
from usp.ipc.provider import Provider
from usp.ipc.rendezvous import Rendezvous, agreed_engine
from usp.ipc.watchdog import STALL_TIMEOUT_S
from usp.layout import split_counts
from usp.liveness import ExchangeBrokenError, Liveness
from usp.mesh import Axis
from usp.placement import arena_sizes, flag_offsets
from usp.plan import AttentionPlan, make_plan
from usp.ranges import Ranges, layer_name, ranges_from, who

__all__ = ["ExchangeBrokenError", "PipelinedExchange"]

log = logging.getLogger(__name__)

MAX_EXECUTORS = 32  # shapes times attentions that stay prepared
MAX_TIMES = 10_000
POLL_S = 0.001


class PipelinedExchange(CollectiveExchange):
    """Swaps tokens for heads over one mesh axis whose ranks share a host. `with` it, or `close()` it, on every rank.

    `num_groups`, or `group_widths` in key/value heads, overrides the rule for head groups. The first call of a shape,
    and every change of shape, is collective on the CPU and may enlarge the arena; what an earlier call returned is
    invalid from then on. In the first step of a shape, or its first call where `at` tells of no steps, the host waits
    for what the peers send; later calls are only enqueued.

    A rank that dies, gives up or strays, and an issued call that is not done within `stall_timeout` seconds, break the
    exchange on every rank: waits are released, and calls and `check` raise PeerLostError, StallError or
    PlanMismatchError. A broken exchange can only be closed.
    """

    def __init__(
        self,
        num_tokens: int,
        *,
        axis: Axis,
        rendezvous: Rendezvous,
        provider: Provider,
        make_engine: Callable[[], Engine],
        num_groups: int | None = None,
        group_widths: tuple[int, ...] | None = None,
        attend_streams: int = 1,
        stall_timeout: float = STALL_TIMEOUT_S,
        ranges: Ranges | None = None,
    ) -> None:
        super().__init__(num_tokens, axis=axis)
        self.ranges = ranges_from(os.environ) if ranges is None else ranges
        self._names = rendezvous.names
        self._who = who(self._names[rendezvous.rank], self._names)
        self.num_groups, self.group_widths, self.attend_streams = num_groups, group_widths, attend_streams
        self._provider = provider
        self.engine = agreed_engine(rendezvous, make_engine)
        self.arena: Arena | None = None
        self.plan: AttentionPlan | None = None
        self._executors: dict[tuple[str, int], Executor] = {}
        self._running: Executor | None = None  # of the latest call that was issued
        self._numbers = CallNumbers(pinned=bool(provider.device))
        self._epoch, self._step, self._layer, self._num_steps = 0, -1, -1, 0
        self._latest_parking = 0  # the last call whose waits its streams do
        self.issue_seconds: deque[float] = deque(maxlen=MAX_TIMES)  # of the host; on host memory the call itself
        self._closed = False
        try:
            self.liveness = Liveness(
                rendezvous=rendezvous,
                engine=self.engine,
                stall_timeout=stall_timeout,
                completed=self._numbers.completed,
                awaiting=self._awaiting,
                flags=self._own_flags,
                is_parked=lambda: self._is_parked,
            )
        except BaseException:
            self.engine.close()
            raise

    def at(self, *, step: int | None = None, layer: int | None = None) -> None:
        if step is not None and step != self._step:
            self._step, self._num_steps = step, self._num_steps + 1
        self._layer = self._layer if layer is None else layer - 1

    def attend(
        self,
        attention: Attention,
        v_bskd: torch.Tensor,
        fill: FillAll,
        *,
        num_heads: int,
        prefix_kv: KeyValue | None = None,
        suffix_kv: KeyValue | None = None,
    ) -> torch.Tensor:
        """One call: `fill` writes q and k into the blocks it is given. Returns [B, S_r, H, D], a view of the arena.

        The view is valid until the next call on this exchange. Collective over the axis.
        """
        self.check()
        self._check_tokens(v_bskd.shape[1])
        self._check_inputs(v_bskd, prefix_kv, suffix_kv)
        self.engine.begin()
        v = dense_heads(v_bskd)
        plan = self._plan_of(attention, v, num_heads, prefix_kv, suffix_kv)
        self._numbers.begin()
        self._layer += 1
        try:
            if plan == self.plan:
                self._begin(plan)
            else:
                self._change_plan(plan)
            executor = self._running = self._executor(plan, attention)
            number = self._numbers.enqueue()
            call = Call(number, v, fill, prefix_kv, suffix_kv, self._gate(executor))
            began = time.perf_counter()
            with self.ranges.range(layer_name(self._layer, self._who)):
                result = executor.run(call)
            if call.await_flag is None:
                self.issue_seconds.append(time.perf_counter() - began)
            self.engine.signal(MAIN, self._numbers.done_address, self._numbers.begun)
        except BaseException as error:
            self.liveness.give_up(error)
            raise
        return result

    def check(self) -> None:
        """Raise if this exchange is broken, here or on another rank. To be asked wherever results leave the device."""
        if not self._closed:
            self.liveness.check()

    def close(self) -> None:
        """Collective after success; a broken exchange lets go without waiting for anybody. May be called twice.

        Raises what broke it since the last call, with everything let go.
        """
        if self._closed:
            return
        try:
            if self.liveness.broken is None:
                self._close_together()
        except BaseException as error:  # the last calls failed after they were issued, or a rank is lost
            self.liveness.give_up(error)
            raise
        finally:
            self._closed = True
            if self.liveness.broken is not None:
                self._let_go()
            if self.liveness.is_quiet:
                self.engine.close()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self.liveness.give_up(error)
        self.close()

    def _close_together(self) -> None:
        self.engine.synchronize()
        self.liveness.check()
        self._log_issue_cost()
        self._forget_executors()
        if self.arena is not None:
            self.arena.close()
        self.liveness.rendezvous.barrier()  # nobody ends while another one watches
        self.liveness.close()

    def _let_go(self) -> None:
        """Streams first: what is still queued reads and writes the arena."""
        is_idle = self.liveness.let_go()
        self._forget_executors()
        if self.arena is not None and self.liveness.is_quiet:
            self.arena.abandon(idle=is_idle)

    def _log_issue_cost(self) -> None:
        if self._provider.device and self.axis.index == 0 and self.issue_seconds:
            typical, slowest = (1e3 * pick(self.issue_seconds) for pick in (median, max))
            cost = f"{typical:.2f} ms of host time to issue one; the slowest {slowest:.2f} ms"
            log.info(f"exchange: {self._numbers.begun} calls, {cost}")

    def _forget_executors(self) -> None:
        """They hold tensors over the arena, which none may outlive."""
        for executor in self._executors.values():
            executor.clear()
        self._executors.clear()
        self._running = None

    def _awaiting(self, rank: int) -> str:
        """What the oldest call that is not done waits for: the first flag that has not come, of that rank if any."""
        executor, oldest = self._running, self._numbers.oldest()
        if executor is None or not self._numbers.are_outstanding:
            return ""
        values = self.engine.peek([address for address, _ in executor.waits])
        missing = [flag for value, (_, flag) in zip(values, executor.waits, strict=False) if not reached(value, oldest)]
        for flag in sorted(missing, key=lambda flag: flag.writer != rank):
            return f"it awaits {flag} from rank {self._names[flag.writer]}"
        return ""

    def _own_flags(self) -> tuple[list[int], int]:
        """Their addresses, and a number past every wait; none where no call is outstanding, and so no wait."""
        if self.arena is None or not self._numbers.are_outstanding:
            return [], 0
        own = self.arena.base[self.axis.index]
        return [own + offset for offset in flag_offsets()], self._numbers.past_every_wait()

    def _check_inputs(self, v: torch.Tensor, prefix_kv: KeyValue | None, suffix_kv: KeyValue | None) -> None:
        """What a copy by address would misread is refused before anything is enqueued."""
        if v.device.type != self.engine.device_type:
            raise ValueError(f"v is on {v.device}; this exchange moves memory of {self.engine.device_type} devices")
        if torch.is_grad_enabled() and v.requires_grad:
            raise ValueError("v requires a gradient, and the exchange passes none back; call it under torch.no_grad()")
        own_heads = split_counts(v.shape[2], self.axis.size)[self.axis.index]
        for name, pair in (("prefix_kv", prefix_kv), ("suffix_kv", suffix_kv)):
            for part in pair or ():
                length = pair[0].shape[1] if pair else 0
                check_rows(name, part, like=v, shape=(v.shape[0], length, own_heads, v.shape[3]))

    def _gate(self, executor: Executor) -> Callable[[int, int], None] | None:
        """Holds the host, not the stream, until a flag has come: in a first call, and in all of its step if `at` tells.

        Kernels are loaded then, for which the driver makes this thread wait for all streams, and lets no other thread
        in: behind a wait for a lost peer, nothing could ever release that wait.
        """
        is_first = executor.first_step is None
        if is_first:
            executor.first_step = self._num_steps
        if not is_first and not executor.first_step == self._num_steps > 0:
            self._latest_parking = self._numbers.begun
            return None
        while self._is_parked:
            self.check()
            time.sleep(POLL_S)
        return self._await_flag

    def _await_flag(self, address: int, value: int) -> None:
        self.engine.hold(address, value, stopped=lambda: self.liveness.is_over)
        self.check()

    @property
    def _is_parked(self) -> bool:
        """Whether a stream may be waiting for a flag."""
        return self._numbers.completed() < self._latest_parking

    def _begin(self, plan: AttentionPlan) -> None:
        self.liveness.watchdog.begin(self._numbers.begun, plan=plan.hash, step=self._step, layer=self._layer)

    def _plan_of(
        self,
        attention: Attention,
        v: torch.Tensor,
        num_heads: int,
        prefix_kv: KeyValue | None,
        suffix_kv: KeyValue | None,
    ) -> AttentionPlan:
        batch, _, num_kv_heads, head_dim = v.shape
        if self.attend_streams > 1 and getattr(attention, "one_stream", False):
            raise ValueError("this attention's calls share memory, so they need attend_streams=1")
        return make_plan(
            token_counts=self.token_counts,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            dtype=str(v.dtype).removeprefix("torch."),
            batch=batch,
            prefix=prefix_kv[0].shape[1] if prefix_kv else 0,
            suffix=suffix_kv[0].shape[1] if suffix_kv else 0,
            num_groups=self.num_groups,
            group_widths=self.group_widths,
            direct=writes_out(attention),
            attend_streams=self.attend_streams,
        )

    def _executor(self, plan: AttentionPlan, attention: Attention) -> Executor:
        assert self.arena is not None
        key = plan.hash, id(attention)
        found = self._executors.pop(key, None) or Executor(
            plan, arena=self.arena, engine=self.engine, attention=attention, ranges=self.ranges
        )
        self._executors[key] = found  # the latest is last
        if len(self._executors) > MAX_EXECUTORS:
            self._executors.pop(next(iter(self._executors))).clear()
        return found

    def _change_plan(self, plan: AttentionPlan) -> None:
        """QUIESCE: own streams idle, then all ranks meet; only then may the new plan lie over the old one's buffers.

        They meet on the control pages, where a rank that comes with another plan, or not at all, is noticed.
        """
        self.engine.synchronize()
        self._begin(plan)
        self.liveness.watchdog.meet(self._numbers.begun, check=self.check)
        sizes = arena_sizes(plan)
        if self.arena is None or any(need > has for need, has in zip(sizes, self.arena.nbytes, strict=True)):
            self._grow(sizes, plan)
        self.plan = plan

    def _grow(self, sizes: tuple[int, ...], plan: AttentionPlan) -> None:
        """A larger arena is a new one: zeroed flags, so call numbers begin again. Every rank decides alike."""
        held = self.arena.nbytes if self.arena is not None else (0,) * len(sizes)
        self._forget_executors()
        if self.arena is not None:
            self.arena.close()
            self.arena = None
        self._epoch += 1
        self._numbers.restart()
        own = max(sizes[self.axis.index], held[self.axis.index])
        meet = self.liveness.rendezvous
        self.arena = Arena(own, rendezvous=meet, provider=self._provider, layout=plan.hash, epoch=self._epoch)
