"""An exchange that ends badly, or begins badly: in growth, between calls, at close, at set-up. And what it refuses.

Nobody waits for a rank that is lost, whatever it was about to do together with it.
"""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.multi_gpu.ranks import RankEnv, Ranks, new_mesh
from tests.multi_gpu.test_pipeline import Shape, each_head, inputs, pipelined
from usp.execute import Executor
from usp.fill import fill_from
from usp.ipc.control import LETTER, LETTER_NBYTES, LETTER_OFFSET, ControlPages, Entry
from usp.ipc.errors import PeerLostError, SetupError
from usp.ipc.host import HostProvider
from usp.ipc.host_engine import HostEngine
from usp.ipc.rendezvous import GroupRendezvous
from usp.ipc.watchdog import Watchdog
from usp.layout import MeshShape
from usp.liveness import ExchangeBrokenError
from usp.mesh import Axis
from usp.pipeline import PipelinedExchange
from usp.plan import make_plan
from usp.ranges import parse, record_functions
from usp.ulysses import UlyssesAttention

SMALL, LARGE = Shape(45, 6, 6, groups=2), Shape(45, 12, 12, groups=2)
CULPRIT = 1
LIMIT_S = 10.0


def axis_of(env: RankEnv, cfg: int = 1) -> Axis:
    return new_mesh(MeshShape(cfg, env.world // cfg)).ulysses


def told(body: Callable[[], object]) -> tuple[str, float]:
    """What a call raised or returned, and after how many seconds."""
    start = time.monotonic()
    try:
        said = str(body())
    except BaseException as error:
        said = f"{type(error).__name__}: {error}"
    return said, time.monotonic() - start


@pytest.fixture
def fresh_ranks():
    group = Ranks(3)
    yield group
    group.close()


def fail_in_growth(env: RankEnv, how: str) -> tuple[tuple[str, float], str]:
    attn = pipelined(env, axis_of(env), SMALL, stall_timeout=2.0)
    exchange, generator = attn.exchange, torch.Generator().manual_seed(0)
    attn(*inputs(env, SMALL, generator)[0])
    allocate = exchange._provider.allocate

    def failing(nbytes: int):
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "raise":
            raise KeyboardInterrupt
        if how == "stall":
            time.sleep(6.0)
        return allocate(nbytes)

    if env.rank == CULPRIT:
        exchange._provider.allocate = failing
    said = told(lambda: attn(*inputs(env, LARGE, generator)[0]))
    exchange.close()
    return said, told(exchange.check)[0]


@pytest.mark.parametrize("how", ["kill", "raise", "stall"])
def test_a_failure_in_growth_is_told_to_all(fresh_ranks, how: str) -> None:
    answers = fresh_ranks.run_to_the_end(fail_in_growth, how, limit_s=90.0)
    for rank in (0, 2):
        assert answers[rank][0], answers
        said, seconds = answers[rank][1][0]
        assert seconds < LIMIT_S, answers
        if how == "stall":
            assert said.startswith(("StallError", "PeerLostError")), answers
            assert f"rank {CULPRIT} has begun it, but does not come to the meeting" in said
        else:
            assert said.startswith(f"PeerLostError: rank {CULPRIT} "), answers
    assert how == "kill" or answers[CULPRIT][0]


def fail_before_close(env: RankEnv, how: str) -> tuple[tuple[str, float], bool]:
    """The others are in `close` when rank 1 fails."""
    attn = pipelined(env, axis_of(env), SMALL, stall_timeout=2.0)
    exchange, generator = attn.exchange, torch.Generator().manual_seed(0)

    def body() -> str:
        with exchange:
            attn(*inputs(env, SMALL, generator)[0])
            if env.rank == CULPRIT:
                time.sleep(0.7)
                if how == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                if how == "raise":
                    raise ValueError("decoding failed")
                time.sleep(3.0)  # longer than the stall timeout: a slow end is none
        return "closed"

    said = told(body)
    exchange.close()
    return said, exchange.arena._closed


@pytest.mark.parametrize("how", ["kill", "raise", "slow"])
def test_nobody_waits_in_close_for_a_rank_that_is_lost(fresh_ranks, how: str) -> None:
    answers = fresh_ranks.run_to_the_end(fail_before_close, how, limit_s=90.0)
    for rank in (0, 2):
        assert answers[rank][0], answers
        (said, seconds), is_closed = answers[rank][1]
        assert is_closed and seconds < LIMIT_S
        assert said == "closed" if how == "slow" else said.startswith(f"PeerLostError: rank {CULPRIT} "), answers


def notice_late(env: RankEnv) -> str:
    """Rank 0 declares a stall in its watchdog while its main thread is elsewhere; rank 1 never issued the call."""
    attn = pipelined(env, axis_of(env), SMALL, stall_timeout=0.5)
    exchange = attn.exchange
    attn(*inputs(env, SMALL, torch.Generator().manual_seed(0))[0])
    if env.rank == 0:
        exchange.liveness.watchdog.begin(2, plan=exchange.plan.hash)  # issued, and never completed
        time.sleep(2.0)
    else:
        time.sleep(1.5)
    said = told(exchange.check)[0]
    exchange.close()
    return said


def test_a_rank_that_declares_failure_says_so_before_its_main_thread_knows(ranks) -> None:
    first, second = ranks(2).run(notice_late)
    assert first.startswith("StallError: rank 0 waits for call 2")
    assert second.startswith("PeerLostError: ") and "rank 0 waits for call 2" in second


def attend_slowly(env: RankEnv) -> tuple[str, str]:
    """Rank 1 gives up while rank 0 attends, which takes longer than a wait may be stuck."""

    def slow(q, k, v):
        if env.rank == 0:
            time.sleep(7.0)
        return each_head(q, k, v)

    attn = pipelined(env, axis_of(env), SMALL)
    shape = Shape(45, 6, 6, groups=1, direct=False)
    q, k, v = inputs(env, shape, torch.Generator().manual_seed(0))[0]
    if env.rank == CULPRIT:

        def raising(q, k, v):
            raise ValueError("planted")

        said = told(lambda: UlyssesAttention(attn.exchange, attention=raising)(q, k, v))[0]
    else:
        said = told(lambda: UlyssesAttention(attn.exchange, attention=slow)(q, k, v))[0]
    attn.exchange.close()
    return said, "alive"


def test_a_rank_whose_healthy_work_takes_long_raises_and_lives(ranks) -> None:
    survivor, culprit = ranks(2).run(attend_slowly)
    assert survivor[0].startswith(f"PeerLostError: rank {CULPRIT} gave up: ValueError: planted"), survivor
    assert culprit[0] == "ValueError: planted"


def fail_while_idle(env: RankEnv) -> str:
    """Rank 1 ends after the last call; rank 0 is busy on its own streams, and nothing of it waits for anybody."""
    attn = pipelined(env, axis_of(env), SMALL)
    exchange = attn.exchange
    attn(*inputs(env, SMALL, torch.Generator().manual_seed(0))[0])
    exchange.engine.synchronize()
    GroupRendezvous(exchange.axis.group).barrier()
    if env.rank == CULPRIT:
        exchange.liveness.give_up(ValueError("planted"))
    exchange.engine.release = lambda *args, **kwargs: False  # as with streams that are busy for long
    time.sleep(1.0)
    said = told(exchange.check)[0]
    exchange.close()
    return said


def test_a_failure_after_the_last_call_ends_no_busy_rank(ranks) -> None:
    assert ranks(2).run(fail_while_idle)[0].startswith(f"PeerLostError: rank {CULPRIT} gave up: ValueError: planted")


def want_gradients(env: RankEnv) -> list[str]:
    attn = pipelined(env, axis_of(env), SMALL)
    given = inputs(env, SMALL, torch.Generator().manual_seed(0))[0]
    said = []
    with attn.exchange:
        for place in range(3):
            qkv = [x.clone().requires_grad_(index == place) for index, x in enumerate(given)]
            said += [told(lambda qkv=qkv, call=call: call(*qkv))[0] for call in (attn, attn.plain)]
        with torch.no_grad():
            said.append(str(attn(*qkv).requires_grad))
    return said


def test_gradients_are_refused_where_ranks_exchange(ranks) -> None:
    *refused, allowed = ranks(2).run(want_gradients)[0]
    assert len(refused) == 6 and all("q, k or v requires a gradient" in text for text in refused)
    assert allowed == "False"


def run_ahead(env: RankEnv) -> tuple[str, int]:
    """Rank 0 has issued 20 calls of one plan when rank 1 comes to call 5 with another: no call is on both pages."""
    found: list[str] = []
    meet = GroupRendezvous()
    watchdog = Watchdog(rendezvous=meet, on_failure=lambda failure: found.append(failure.text))
    for call in range(1, 21 if env.rank == 0 else 5):
        watchdog.begin(call, plan="x")
    meet.barrier()
    said = "nothing"
    if env.rank == 1:
        watchdog.begin(5, plan="y")
        said = told(lambda: watchdog.meet(5, check=lambda: None))[0]
    time.sleep(0.5)
    watchdog.give_up("done")
    return said, len(found)


def test_a_rank_far_ahead_under_another_plan_is_a_mismatch(ranks) -> None:
    said, _ = ranks(2).run(run_ahead)[1]
    assert said.startswith("PlanMismatchError: rank 1 is at call 5 of plan y, but rank 0 at call "), said


def wait_ahead(env: RankEnv) -> list[str]:
    """Rank 0 is three calls ahead and waits to change its plan; nothing is wrong with that."""
    found: list[str] = []
    meet = GroupRendezvous()
    watchdog = Watchdog(rendezvous=meet, on_failure=lambda failure: found.append(failure.text))
    for call in range(1, 9 if env.rank == 0 else 6):
        watchdog.begin(call, plan="x")
    if env.rank == 0:
        watchdog.begin(9, plan="y")
    meet.barrier()
    time.sleep(0.6)
    meet.barrier()
    watchdog.close()
    return found


def test_a_rank_that_waits_to_change_its_plan_is_none(ranks) -> None:
    assert ranks(2).run(wait_ahead) == [[], []]


def make_half(env: RankEnv) -> str:
    def make_engine() -> HostEngine:
        if env.rank == CULPRIT:
            raise RuntimeError("one queue only")
        return HostEngine()

    axis = axis_of(env)
    return told(
        lambda: PipelinedExchange(
            45, axis=axis, rendezvous=GroupRendezvous(axis.group), provider=HostProvider(), make_engine=make_engine
        )
    )[0]


def test_an_engine_that_one_rank_cannot_make_is_made_by_none(ranks) -> None:
    assert ranks(2).run(make_half) == [f"SetupError: rank {CULPRIT}: RuntimeError: one queue only"] * 2


def allocate_half(env: RankEnv) -> str:
    """Rank 3 of a job of cfg 2 x ulysses 2 has no memory."""
    axis = axis_of(env, cfg=2)

    class Provider(HostProvider):
        def allocate(self, nbytes: int):
            if env.rank == 3:
                raise SetupError("no memory here")
            return super().allocate(nbytes)

    exchange = PipelinedExchange(
        45, axis=axis, rendezvous=GroupRendezvous(axis.group), provider=Provider(), make_engine=HostEngine
    )
    x = torch.randn(1, exchange.token_counts[axis.index], 4, 8)
    said = told(lambda: UlyssesAttention(exchange, attention=each_head)(x, x, x).shape)[0]
    told(exchange.close)
    return said


def test_a_failed_set_up_names_the_rank_of_the_job(ranks) -> None:
    said = ranks(4).run(allocate_half)
    assert all(text.startswith("torch.Size") for text in said[:2]), said
    assert all("rank 3" in text and "no memory here" in text for text in said[2:]), said


def refuse(env: RankEnv) -> list[str]:
    """What does not fit is refused on every rank before anything is enqueued, so the exchange lives on."""
    shape = Shape(45, 8, 4, prefix=5)
    attn = pipelined(env, axis_of(env), shape)
    (q, k, v), ends = inputs(env, shape, torch.Generator().manual_seed(0))
    wide = inputs(env, Shape(45, 8, 8), torch.Generator().manual_seed(0))[0]
    whole = tuple(torch.zeros(1, 5, 4, 8) for _ in "kv")
    wrong = [
        (q, wide[1], v, {}),
        (q, k[:, :1], v, {}),
        (q[..., :1], k, v, {}),
        (q.double(), k, v, {}),
        (q, k.half(), v, {}),
        (q, k, v, {"prefix_kv": whole}),
        (q, k, v, {"prefix_kv": tuple(x.double() for x in ends["prefix_kv"])}),
        (q, k, v, {"suffix_kv": (ends["prefix_kv"][0], ends["prefix_kv"][1][:, :-1])}),
    ]
    with attn.exchange:
        said = [told(lambda one=one: attn(*one[:3], **one[3]))[0] for one in wrong]
        right = attn.plain(q, k, v, **ends)
        assert torch.equal(attn(q, k, v, **ends), right)
    return said


def test_what_does_not_fit_is_refused_and_breaks_nothing(ranks) -> None:
    for said in ranks(2).run(refuse):
        assert all(text.startswith("ValueError: ") for text in said), said
        names = ["k", "k", "q", "q", "k", "prefix_kv", "prefix_kv", "suffix_kv"]
        assert [text.split()[1] for text in said] == names


def change_modes(env: RankEnv) -> None:
    attn = pipelined(env, axis_of(env), SMALL)
    generator = torch.Generator().manual_seed(0)
    with attn.exchange:
        for mode in (torch.inference_mode, torch.no_grad, torch.inference_mode, torch.enable_grad):
            with mode():
                q, k, v = inputs(env, SMALL, generator)[0]
                assert torch.equal(attn(q, k, v), attn.plain(q, k, v))


def test_calls_under_other_autograd_modes_share_an_arena(ranks) -> None:
    ranks(2).run(change_modes)


def mark_ranges(env: RankEnv) -> set[str]:
    """First calls, whose waits are the host's, and later ones, under torch's profiler."""
    attn = pipelined(env, axis_of(env), SMALL, ranges=record_functions())
    generator = torch.Generator().manual_seed(0)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler, attn.exchange:
        for step in (0, 0, 1):
            attn.exchange.at(step=step, layer=0)
            q, k, v = inputs(env, SMALL, generator)[0]
            assert torch.equal(attn(q, k, v), attn.plain(q, k, v))
    return {mark.kind for event in profiler.events() if (mark := parse(event.name)) is not None}


def test_calls_under_ranges_have_the_same_bits_and_are_marked(ranks) -> None:
    marked = ranks(2).run(mark_ranges)
    assert all(kinds >= {"layer", "group", "fill", "send", "wait", "attend", "return"} for kinds in marked), marked


def expand(env: RankEnv) -> None:
    """One row of v for all tokens, and one head for all heads."""
    attn = pipelined(env, axis_of(env), SMALL)
    with attn.exchange:
        q, k, v = inputs(env, SMALL, torch.Generator().manual_seed(0))[0]
        for same in (v[:, :1].expand(v.shape), v[:, :, :1].expand(v.shape), v[:1, :1, :1].expand(v.shape)):
            assert torch.equal(attn(q, k, same), attn.plain(q, k, same.contiguous()))


def test_expanded_values_are_sent_as_they_are(ranks) -> None:
    ranks(2).run(expand)


def hold_little(env: RankEnv) -> tuple[list[int], int, int]:
    """Mapped arenas over many growths without the garbage collector, executors over many attentions, kept times."""
    import gc

    attn = pipelined(env, axis_of(env), SMALL)
    exchange, generator, mapped = attn.exchange, torch.Generator().manual_seed(0), []
    gc.disable()
    try:
        with exchange:
            for number in range(1, 9):
                attn(*inputs(env, Shape(45, 6 * number, 6 * number, groups=2), generator)[0])
                mapped.append(Path("/proc/self/maps").read_text(encoding="utf-8").count("memfd:usp"))
            qkv = inputs(env, SMALL, generator)[0]
            for _ in range(40):
                UlyssesAttention(exchange, attention=lambda q, k, v: each_head(q, k, v))(*qkv)
            dropped = [executor for executor in gc.get_objects() if isinstance(executor, Executor)]
            assert sum(bool(executor.views) for executor in dropped) <= 32, "what is let go holds no memory"
            return mapped, len(exchange._executors), exchange.issue_seconds.maxlen
    finally:
        gc.enable()


def test_what_is_outgrown_is_let_go_at_once(ranks) -> None:
    for mapped, executors, times in ranks(2).run(hold_little):
        assert len(set(mapped)) == 1, mapped
        assert executors <= 32 and times


def pass_two_to_the_31(env: RankEnv) -> list[bool]:
    attn = pipelined(env, axis_of(env), SMALL, stall_timeout=0.6)
    exchange, generator = attn.exchange, torch.Generator().manual_seed(0)
    attn(*inputs(env, SMALL, generator)[0])
    numbers = exchange._numbers
    numbers.begun = numbers.enqueued = numbers._completed = 2**31 - 3
    numbers._done.fill_(2**31 - 3)
    equal = []
    for _ in range(6):
        q, k, v = inputs(env, SMALL, generator)[0]
        equal.append(torch.equal(attn(q, k, v), attn.plain(q, k, v)))
    time.sleep(1.5)
    exchange.check()
    exchange.close()
    return equal


def test_the_count_of_calls_outlives_its_word(ranks) -> None:
    assert ranks(2).run(pass_two_to_the_31) == [[True] * 6] * 2


def use_after_failure(env: RankEnv) -> list[str]:
    attn = pipelined(env, axis_of(env), SMALL)
    q, k, v = inputs(env, SMALL, torch.Generator().manual_seed(0))[0]
    said = []
    if env.rank == 0:
        said.append(told(lambda: attn.filled(v, lambda blocks: 1 / 0, num_heads=6))[0])
    else:
        said.append(told(lambda: attn.filled(v, fill_from(q, k), num_heads=6))[0])
    said.append(told(lambda: attn(q, k, v))[0])
    attn.exchange.close()
    return said


def test_a_fill_that_raises_breaks_the_exchange_for_all(ranks) -> None:
    first, second = ranks(2).run(use_after_failure)
    assert first[0] == "ZeroDivisionError: division by zero"
    assert first[1].startswith(f"{ExchangeBrokenError.__name__}: an earlier call failed")
    assert all(text.startswith(f"{PeerLostError.__name__}: rank 0 gave up: ZeroDivisionError") for text in second)


def share_memory(env: RankEnv) -> list[str]:
    class Shared:
        one_stream = True

        def __call__(self, q, k, v):
            return each_head(q, k, v)

    said, qkv = [], inputs(env, SMALL, torch.Generator().manual_seed(0))[0]
    for streams in (2, 1):
        attn = pipelined(env, axis_of(env), Shape(45, 6, 6, direct=False, attend_streams=streams))
        with attn.exchange:
            shared = UlyssesAttention(attn.exchange, attention=Shared())
            said.append(told(lambda shared=shared: tuple(shared(*qkv).shape))[0])
    return said


def test_an_attention_whose_calls_share_memory_gets_one_stream(ranks) -> None:
    two, one = ranks(2).run(share_memory)[0]
    assert two.startswith("ValueError: this attention's calls share memory") and one == "(1, 23, 6, 8)"


def test_more_groups_than_flags_are_refused() -> None:
    with pytest.raises(ValueError, match="40 head groups; a plan takes at most 32"):
        make_plan(token_counts=(9, 9), num_heads=80, head_dim=8, dtype="float32", num_groups=40)


def test_a_state_that_is_being_written_is_not_read() -> None:
    from usp.ipc.rendezvous import LoneRendezvous

    pages = ControlPages(LoneRendezvous())
    pages.post(Entry(1, "a"))
    pages.give_up("a path with \udcff in it", at_fault=3)
    assert "udcff" in pages.read(0).reason
    pages.give_up("a reason that is long enough to be cut", at_fault=3)
    whole = pages.read(0)
    assert (whole.at_fault, whole.reason) == (3, "a reason that is long enough to be cut")
    page = pages._pages[0]
    page[512 + 20] ^= 0xFF  # a byte of the reason is not yet there
    assert pages.read(0).state.name == "RUNNING" and pages.read(0).reason == ""
    pages.abandon()


def test_a_letter_that_is_being_written_is_not_read() -> None:
    """Its head is zeroed, then filled from the front; the content is there before."""
    from usp.ipc.rendezvous import LoneRendezvous

    pages = ControlPages(LoneRendezvous())
    page = pages._pages[0]
    for meeting, letter in ((1, b""), (2, b"a"), (3, b"x" * 300), (4, b"\0" * 8), (5, b"y" * LETTER_NBYTES)):
        pages.send(meeting, letter)
        assert pages.letter(0, meeting) == letter
        start = LETTER_OFFSET + meeting % 2 * (LETTER.size + LETTER_NBYTES)
        head = bytes(page[start : start + LETTER.size])
        for written in range(LETTER.size):
            if any(head[written:]):
                page[start : start + LETTER.size] = head[:written] + bytes(LETTER.size - written)
                assert pages.letter(0, meeting) is None, (meeting, written)
    pages.abandon()
