"""The Ulysses exchange as a pipeline over shared memory: one head group travels while the group before is attended.

Owns the arena, the engine, one executor per plan, and the watchdog. All ranks of the group make the same calls in the
same order; a new shape meets once on the CPU, after that a call meets nobody. Bits are those of `CollectiveExchange`.
Used through `usp.ulysses`.
"""

import logging
import os
import time
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist

from usp.attention import Attention, writes_out
from usp.exchange import CollectiveExchange, dense_heads
from usp.execute import Call, Executor, KeyValue
from usp.fill import FillAll
from usp.ipc.arena import Arena
from usp.ipc.engine import MAIN, Engine
from usp.ipc.futex import reached
from usp.ipc.provider import Provider
from usp.ipc.rendezvous import Rendezvous
from usp.ipc.watchdog import STALL_TIMEOUT_S, Failure, Watchdog
from usp.mesh import Axis
from usp.placement import arena_sizes, flag_offsets
from usp.plan import AttentionPlan, make_plan
from usp.ranges import Ranges, layer_name, ranges_from, who

log = logging.getLogger(__name__)

CYCLE = 2**32  # flags are 32-bit words, compared as signed differences
POISON = 2**30  # ahead of the last call: past every wait, and still ahead cyclically
EXIT_CODE = 1


class ExchangeBrokenError(RuntimeError):
    """An earlier call on this exchange failed; it can only be closed."""


class PipelinedExchange(CollectiveExchange):
    """Swaps tokens for heads over one mesh axis whose ranks share a host. `with` it, or `close()` it, on every rank.

    `num_groups` overrides the rule for head groups. The first call of a shape, and every change of shape, is collective
    on the CPU and may enlarge the arena; what an earlier call returned is invalid from then on.

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
        attend_streams: int = 1,
        stall_timeout: float = STALL_TIMEOUT_S,
        ranges: Ranges | None = None,
    ) -> None:
        super().__init__(num_tokens, axis=axis)
        self.ranges = ranges_from(os.environ) if ranges is None else ranges
        self._names = dist.get_process_group_ranks(axis.group)  # what the job calls the ranks of this axis
        self._who = who(dist.get_rank(), self._names)
        self.num_groups, self.attend_streams = num_groups, attend_streams
        self._rendezvous, self._provider = rendezvous, provider
        self.engine = make_engine()
        self.arena: Arena | None = None
        self.plan: AttentionPlan | None = None
        self._executors: dict[tuple[str, int], Executor] = {}
        self._running: Executor | None = None  # of the latest call that was issued
        self._epoch, self._number = 0, 0  # of the arena, and of the latest call in it
        self._calls, self._issued, self._step, self._layer = 0, 0, -1, -1
        self.issue_seconds: list[float] = []  # of the host, for each call; on host memory the call itself
        self._broken: BaseException | None = None
        self._failure: Failure | None = None  # of another rank, if that is what broke it
        self._closed = False
        self._done = torch.zeros(1, dtype=torch.int32, pin_memory=bool(provider.device))  # calls done, set by a stream
        self._watchdog = Watchdog(
            rendezvous=rendezvous,
            on_failure=self._fail,
            stall_timeout=stall_timeout,
            completed=self._completed,
            names=self._names,
            awaiting=self._awaiting,
        )

    def at(self, *, step: int | None = None, layer: int | None = None) -> None:
        self._step = self._step if step is None else step
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
        v = dense_heads(v_bskd)
        plan = self._plan_of(attention, v, num_heads, prefix_kv, suffix_kv)
        self._calls, self._layer = self._calls + 1, self._layer + 1
        try:
            if plan == self.plan:
                self._watchdog.begin(self._calls, plan=plan.hash, step=self._step, layer=self._layer)
            else:
                self._change_plan(plan)
            executor = self._running = self._executor(plan, attention)
            self._number, self._issued = (self._number + 1) % CYCLE, self._calls
            began = time.perf_counter()
            with self.ranges.range(layer_name(self._layer, self._who)):
                result = executor.run(Call(self._number, v, fill, prefix_kv, suffix_kv))
            self.issue_seconds.append(time.perf_counter() - began)
            self.engine.signal(MAIN, self._done.data_ptr(), self._calls)
        except BaseException as error:
            self._give_up(error)
            raise
        return result

    def check(self) -> None:
        """Raise if this exchange is broken. To be asked wherever results leave the device."""
        if isinstance(self._broken, Failure.errors()):
            raise self._broken
        if self._broken is not None:
            raise ExchangeBrokenError(f"an earlier call failed: {self._broken!r}") from self._broken

    def close(self) -> None:
        """Collective after success; a broken exchange lets go without waiting for anybody. May be called twice."""
        if self._closed:
            return
        self._closed = True
        if self._broken is not None:
            self._let_go(self._broken)
            return
        try:
            self.engine.synchronize()
        except BaseException as error:  # the last calls failed after they were issued
            self._give_up(error)
            self._let_go(error)
            raise
        self._close_together()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self._give_up(error)
        self.close()

    def _close_together(self) -> None:
        self._log_issue_cost()
        self._forget_executors()
        try:
            self._watchdog.close()
            if self.arena is not None:
                self.arena.close()
        finally:
            self.engine.close()

    def _log_issue_cost(self) -> None:
        if self._provider.device and self.axis.index == 0 and self.issue_seconds:
            typical, slowest = (1e3 * pick(self.issue_seconds) for pick in (median, max))
            count = len(self.issue_seconds)
            log.info(
                f"exchange: {count} calls, {typical:.2f} ms of host time to issue one; the slowest {slowest:.2f} ms"
            )

    def _let_go(self, error: BaseException) -> None:
        """Streams first: what is still queued reads and writes the arena."""
        self._tell_others()
        self.engine.fail(error)
        is_idle = self._release()
        self._forget_executors()
        self.engine.close()
        if self.arena is not None:
            self.arena.abandon(idle=is_idle)

    def _forget_executors(self) -> None:
        """They hold tensors over the arena, which none may outlive."""
        self._executors.clear()
        self._running = None

    def _completed(self) -> int:
        return int(self._done)

    def _awaiting(self) -> str:
        """What the oldest call that is not done waits for: the first of its flags that has not come."""
        executor, behind = self._running, self._issued - self._completed()
        if executor is None or behind <= 0:
            return ""
        addresses = [address for address, _ in executor.waits]
        oldest = self._number - behind + 1
        for value, (_, flag) in zip(self.engine.peek(addresses), executor.waits, strict=False):
            if not reached(value, oldest):
                return f"it awaits {flag} from rank {self._names[flag.writer]}"
        return ""

    def _give_up(self, error: BaseException) -> None:
        """This rank failed: keep the first reason, and let the others know at once."""
        if self._broken is None:
            self._broken = error
        self._tell_others()

    def _tell_others(self) -> None:
        assert self._broken is not None
        if self._failure is None:
            self._watchdog.give_up(f"{type(self._broken).__name__}: {self._broken}")
        else:
            self._watchdog.give_up(self._failure.cause, at_fault=self._failure.rank)

    def _fail(self, failure: Failure) -> None:
        """In the watchdog's thread: another rank failed. Let go of every wait, whose signal may never come."""
        error = failure.error()
        if self._broken is None:
            self._broken, self._failure = error, failure
        self.engine.fail(error)
        if not self._release():
            log.error("rank %d: %s; and its streams do not end, so the process does", dist.get_rank(), failure.text)
            os._exit(EXIT_CODE)

    def _release(self) -> bool:
        """Poison the own flags until the own streams are idle; whether they are."""
        if self.arena is None:
            return True
        own = self.arena.base[self.axis.index]
        return self.engine.release([own + offset for offset in flag_offsets()], (self._number + POISON) % CYCLE)

    def _plan_of(
        self,
        attention: Attention,
        v: torch.Tensor,
        num_heads: int,
        prefix_kv: KeyValue | None,
        suffix_kv: KeyValue | None,
    ) -> AttentionPlan:
        batch, _, num_kv_heads, head_dim = v.shape
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
            direct=writes_out(attention),
            attend_streams=self.attend_streams,
        )

    def _executor(self, plan: AttentionPlan, attention: Attention) -> Executor:
        key = plan.hash, id(attention)
        if key not in self._executors:
            assert self.arena is not None
            self._executors[key] = Executor(
                plan,
                arena=self.arena,
                engine=self.engine,
                attention=attention,
                ranges=self.ranges,
            )
        return self._executors[key]

    def _change_plan(self, plan: AttentionPlan) -> None:
        """QUIESCE: own streams idle, then all ranks meet; only then may the new plan lie over the old one's buffers.

        They meet on the control pages, where a rank that comes with another plan, or not at all, is noticed.
        """
        self.engine.synchronize()
        self._watchdog.begin(self._calls, plan=plan.hash, step=self._step, layer=self._layer)
        self._watchdog.meet(self._calls, check=self.check)
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
        self._epoch, self._number = self._epoch + 1, 0
        own = max(sizes[self.axis.index], held[self.axis.index])
        self.arena = Arena(
            own, rendezvous=self._rendezvous, provider=self._provider, layout=plan.hash, epoch=self._epoch
        )
