"""The pipelined exchange: bit-equal to the sequential path, call after call, under random delays.

Real processes, real shared memory, real blocking waits. Without a GPU over `host`; with one, the ranks share it over
`ipc`, and the delays are left to the device. References are collectives, which bring ranks together: all of them are
computed before the first call, and results are compared after the last.
"""

import random
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.multi_gpu.ranks import RankEnv, mesh_of
from usp.attention import sdpa
from usp.fill import fill_from
from usp.ipc.engine import MAIN
from usp.ipc.host import HostProvider
from usp.ipc.host_engine import HostEngine
from usp.ipc.rendezvous import GroupRendezvous
from usp.layout import MeshShape, split_counts, split_offsets
from usp.mesh import Axis
from usp.pipeline import PipelinedExchange
from usp.ulysses import UlyssesAttention

on_host_engine = pytest.mark.skipif(torch.cuda.is_available(), reason="delays and mutants are of the host engine")


def each_head(q, k, v):
    """Attention whose bits cannot depend on which heads are launched together, on any device."""
    ratio = q.shape[2] // k.shape[2]
    heads = [
        sdpa(q[:, :, h : h + 1], *(x[:, :, h // ratio : h // ratio + 1] for x in (k, v))) for h in range(q.shape[2])
    ]
    return torch.cat(heads, dim=2)


class Into:
    """Attention that writes to its place, as FA3 does."""

    writes_out = True

    def __call__(self, q, k, v, *, out=None):
        result = each_head(q, k, v)
        return result if out is None else out.copy_(result)


@dataclass(frozen=True)
class Shape:
    tokens: int
    heads: int
    kv_heads: int
    groups: int = 2
    batch: int = 1
    prefix: int = 0
    suffix: int = 0
    direct: bool = True
    attend_streams: int = 1
    dtype: torch.dtype = torch.float32
    head_dim: int = 8
    strided: bool = True


SHAPES = [
    Shape(45, 5, 5),
    Shape(45, 6, 6, groups=3, direct=False, attend_streams=2),
    Shape(30, 8, 4, groups=2, batch=2, prefix=5),
    Shape(7, 12, 4, groups=3, batch=3, suffix=3, direct=False, dtype=torch.bfloat16),
    Shape(3, 7, 7, groups=5, attend_streams=2, dtype=torch.float16, strided=False),
    Shape(1, 4, 4, groups=1, prefix=2, suffix=4, direct=False),
    Shape(64, 3, 3, groups=2, batch=2, attend_streams=2),
]


def delays(seed: int) -> Callable[[str], None]:
    """Random sleeps of up to a millisecond before some operations, an own sequence for each stream."""
    sources: dict[str, random.Random] = {}

    def delay(stream: str) -> None:
        source = sources.setdefault(stream, random.Random(f"{seed} {stream}"))
        if source.random() < 0.3:
            time.sleep(source.random() * 1e-3)

    return delay


def late_copies(env: RankEnv, seed: int) -> Callable[[str], None]:
    """As `delays`, but the last rank's copies are late: others come to the next call while it still returns rows."""
    delay = delays(seed + env.rank)
    is_late = env.rank == env.world - 1
    return lambda stream: time.sleep(2e-3) if is_late and stream == "copy" else delay(stream)


def pipelined(
    env: RankEnv,
    axis: Axis,
    shape: Shape,
    *,
    delay: Callable[[str], None] | None = None,
    like_cuda: bool = False,
    **others: Any,
) -> UlyssesAttention:
    if env.device == "cuda":
        from usp.ipc.cuda import CudaProvider
        from usp.ipc.cuda_engine import CudaEngine

        provider, make_engine = CudaProvider(), CudaEngine
    else:
        provider, make_engine = HostProvider(), partial(HostEngine, delay=delay, like_cuda=like_cuda)
    exchange = PipelinedExchange(
        shape.tokens,
        axis=axis,
        rendezvous=GroupRendezvous(axis.group),
        provider=provider,
        make_engine=make_engine,
        num_groups=shape.groups,
        attend_streams=shape.attend_streams,
        **others,
    )
    return UlyssesAttention(exchange, attention=Into() if shape.direct else each_head)


def inputs(env: RankEnv, shape: Shape, generator: torch.Generator) -> tuple[list[torch.Tensor], dict]:
    """This rank's q, k, v, a slice of a fused projection's output, and its own heads of prefix and suffix."""
    own = split_counts(shape.tokens, env.world)[env.rank]
    start = split_offsets(split_counts(shape.tokens, env.world))[env.rank]
    counts = [shape.heads, shape.kv_heads, shape.kv_heads]

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator).to(env.device, shape.dtype)

    fused = draw(shape.batch, shape.tokens, sum(counts), shape.head_dim)[:, start : start + own]
    qkv = list(fused.split(counts, dim=2))
    if not shape.strided:
        qkv = [x.transpose(2, 3).contiguous().transpose(2, 3) for x in qkv]
    kv_counts = split_counts(shape.kv_heads, env.world)
    first = split_offsets(kv_counts)[env.rank]
    ends = {}
    for name, length in (("prefix_kv", shape.prefix), ("suffix_kv", shape.suffix)):
        whole = [draw(shape.batch, length, shape.kv_heads, shape.head_dim) for _ in "kv"]
        if length:
            ends[name] = tuple(x[:, :, first : first + kv_counts[env.rank]] for x in whole)
    return qkv, ends


def back_to_back(attn: UlyssesAttention, given: list[tuple[list[torch.Tensor], dict]]) -> list[torch.Tensor]:
    """Every call's result, kept by the stream that made it. Nothing waits between calls but the exchange itself."""
    found = []
    for (q, k, v), ends in given:
        kept = torch.full(q.shape, float("nan"), dtype=q.dtype, device=q.device)
        view = attn.filled(v, fill_from(q, k), num_heads=q.shape[2], **ends)
        assert view.dtype == q.dtype
        attn.exchange.engine.launch(MAIN, partial(kept.copy_, view))
        found.append(kept)
    return found


def wrong_calls(
    env: RankEnv,
    shapes: list[Shape],
    *,
    delay: Callable[[str], None],
    seed: int,
    like_cuda: bool = False,
    mutants: tuple[str, ...] = (),
) -> tuple[list[int], int]:
    """Which of the calls, one for each shape, gave other bits than the sequential path; and how many arenas it took."""
    axis = mesh_of(MeshShape(1, env.world)).ulysses
    attn = pipelined(env, axis, shapes[0], delay=delay, like_cuda=like_cuda)
    generator = torch.Generator().manual_seed(seed)
    given = [inputs(env, shape, generator) for shape in shapes]
    expected = [attn.plain(*qkv, **ends) for qkv, ends in given]
    with attn.exchange:
        with ExitStack() as stack:
            for mutant in mutants:
                stack.enter_context(MUTANTS[mutant](attn.exchange))
            found = back_to_back(attn, given)
        attn.exchange.engine.synchronize()
        num_arenas = attn.exchange._epoch
    pairs = enumerate(zip(found, expected, strict=True))
    return [call for call, (one, other) in pairs if not torch.equal(one, other)], num_arenas


def no_meeting(exchange: PipelinedExchange):
    """And no watchdog that sees one rank at the new plan and another at the old."""
    return patch.multiple(exchange.liveness.watchdog, meet=lambda *_, **__: None, _strayed=lambda _: None)


def no_idle_streams(exchange: PipelinedExchange):
    return patch.object(exchange.engine, "synchronize", lambda: None)


def early_waits(exchange: PipelinedExchange):
    """The flags of the call before are taken for this call's."""
    wait = exchange.engine.wait
    return patch.object(exchange.engine, "wait", lambda stream, address, value: wait(stream, address, value - 1))


MUTANTS = {"no meeting": no_meeting, "no idle streams": no_idle_streams, "early waits": early_waits}


def check_calls(env: RankEnv, shape: Shape, calls: int, seed: int, like_cuda: bool = False) -> None:
    """The first half of the calls returns owned copies, made at once; of the other half a stream keeps the results."""
    axis = mesh_of(MeshShape(1, env.world)).ulysses
    generator = torch.Generator().manual_seed(seed)
    attn = pipelined(env, axis, shape, delay=delays(seed + env.rank), like_cuda=like_cuda)
    given = [inputs(env, shape, generator) for _ in range(calls)]
    expected = [attn.plain(*qkv, **ends) for qkv, ends in given]
    num_owned = 0 if like_cuda else calls // 2
    with attn.exchange:
        found = [attn(*qkv, **ends) for qkv, ends in given[:num_owned]]
        found += back_to_back(attn, given[num_owned:])
    for call, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert one.dtype == other.dtype and torch.equal(one, other), f"call {call} of {shape}"


@pytest.mark.parametrize("world", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("shape", SHAPES, ids=range(len(SHAPES)))
def test_pipelined_equals_sequential_call_after_call_under_random_delays(ranks, world: int, shape: Shape) -> None:
    ranks(world).run(check_calls, shape, 40, random.randrange(2**31))


@on_host_engine
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("shape", SHAPES, ids=range(len(SHAPES)))
def test_calls_that_are_only_enqueued_equal_the_sequential_path(ranks, world: int, shape: Shape) -> None:
    shape = replace(shape, strided=True)  # a dense copy made on the way would be gone before it is sent
    ranks(world).run(check_calls, shape, 25, random.randrange(2**31), True)


@on_host_engine
@pytest.mark.parametrize("like_cuda", [False, True])
def test_waits_that_end_a_call_early_would_be_found(ranks, like_cuda: bool) -> None:
    seed = random.randrange(2**31)
    found = ranks(3).run(run_turns, [SHAPES[0]] * 5, seed, like_cuda, ("early waits",))
    assert any(wrong for wrong, _ in found), f"seed {seed}"


@pytest.mark.long
@pytest.mark.parametrize("world", [2, 3, 4, 5, 6, 7])
def test_pipelined_equals_sequential_for_random_shapes(ranks, world: int) -> None:
    seed = random.randrange(2**31)
    source = random.Random(seed)
    for number in range(25):
        shape = random_shape(source)
        print(f"seed {seed}, shape {number}: {shape}")
        ranks(world).run(check_calls, shape, 20, seed + number)


def random_shape(source: random.Random) -> Shape:
    kv_heads, ratio = source.randint(1, 9), source.choice((1, 1, 2, 3))
    return Shape(
        tokens=source.randint(1, 60),
        heads=kv_heads * ratio,
        kv_heads=kv_heads,
        groups=source.randint(1, 5),
        batch=source.randint(1, 3),
        prefix=source.choice((0, 0, 3)),
        suffix=source.choice((0, 0, 4)),
        direct=source.random() < 0.5,
        attend_streams=source.choice((1, 2)),
        dtype=source.choice((torch.float32, torch.bfloat16, torch.float16)),
        strided=source.random() < 0.7,
    )


def test_six_ranks_with_fewer_heads_than_groups_want(ranks) -> None:
    ranks(6).run(check_calls, Shape(45, 7, 7, groups=2), 6, 1)
    ranks(6).run(check_calls, Shape(4, 12, 6, groups=2, direct=False), 6, 2)


GROWING = ((4, 1), (8, 2), (4, 1), (4, 1), (6, 3), (8, 2), (5, 1))
IN_ONE_ARENA = ((12, 3), (4, 1), (12, 3), (5, 2), (11, 3), (4, 1), (10, 3), (4, 1), (12, 3))


def turns(plans: tuple[tuple[int, int], ...], calls: int) -> list[Shape]:
    """Shapes by (heads, batch), each for a few calls."""
    return [Shape(45, heads, heads, batch=batch) for heads, batch in plans for _ in range(calls)]


def run_turns(
    env: RankEnv, shapes: list[Shape], seed: int, like_cuda: bool = False, mutants: tuple[str, ...] = ()
) -> tuple[list[int], int]:
    delay = late_copies(env, seed)
    return wrong_calls(env, shapes, delay=delay, seed=seed, like_cuda=like_cuda, mutants=mutants)


@pytest.mark.parametrize("like_cuda", [False, pytest.param(True, marks=on_host_engine)])
@pytest.mark.parametrize("world", [2, 3])
def test_plans_follow_each_other_in_one_arena_which_grows_when_it_must(ranks, world: int, like_cuda: bool) -> None:
    seed = random.randrange(2**31)
    assert ranks(world).run(run_turns, turns(GROWING, 3), seed, like_cuda) == [([], 3)] * world, f"seed {seed}"
    assert ranks(world).run(run_turns, turns(IN_ONE_ARENA, 1), seed, like_cuda) == [([], 1)] * world, f"seed {seed}"


@on_host_engine
@pytest.mark.parametrize(
    ("like_cuda", "mutants"),
    [
        (False, ("no meeting",)),  # where a call ends when it returns, its meeting implies idle streams
        (False, ("no meeting", "no idle streams")),
        (True, ("no meeting",)),
        (True, ("no idle streams",)),
    ],
)
def test_plans_that_do_not_wait_for_each_other_would_be_found(ranks, like_cuda: bool, mutants: tuple[str, ...]) -> None:
    seed = random.randrange(2**31)
    found = ranks(3).run(run_turns, turns(IN_ONE_ARENA, 1), seed, like_cuda, mutants)
    assert any(wrong for wrong, _ in found), f"seed {seed}"


def check_views(env: RankEnv) -> None:
    axis = mesh_of(MeshShape(1, env.world)).ulysses
    attn = pipelined(env, axis, SHAPES[0])
    generator = torch.Generator().manual_seed(0)
    given = [inputs(env, SHAPES[0], generator)[0] for _ in range(3)]
    expected = [attn.plain(*qkv) for qkv in given]
    filled_with: list[int] = []

    def fill_with(q, k):
        def fill_all(blocks) -> None:
            filled_with.append(len(blocks))
            for block in blocks:
                block.q_dst.copy_(q[:, :, block.head_start : block.head_start + block.head_count])
                block.k_dst.copy_(k[:, :, block.kv_head_start : block.kv_head_start + block.kv_head_count])

        return fill_all

    with attn.exchange:
        for (q, k, v), right in zip(given[:2], expected, strict=False):
            view = attn.filled(v, fill_with(q, k), num_heads=q.shape[2])
            assert torch.equal(view, right)
        owned = attn(*given[2])
        arena, plan = attn.exchange.arena, attn.exchange.plan
        memory = range(arena.base[env.rank], arena.base[env.rank] + arena.nbytes[env.rank])
        assert view.data_ptr() in memory and owned.data_ptr() not in memory
        assert torch.equal(view, owned), "the memory that the view shows is the latest call's"
    assert torch.equal(owned, expected[2])
    assert filled_with == [sum(len(plan.groups(rank)) for rank in range(env.world))] * 2, "every block, in one go"


def test_filled_returns_a_view_of_the_arena_and_a_call_an_owned_copy(ranks) -> None:
    ranks(2).run(check_views)


def check_waits_sleep(env: RankEnv) -> float:
    """Rank 1 comes a second late; rank 0 waits for it in the kernel. CPU seconds that rank 0 burnt meanwhile."""
    axis = mesh_of(MeshShape(1, env.world)).ulysses
    attn = pipelined(env, axis, SHAPES[0])
    with attn.exchange:
        (q, k, v), _ = inputs(env, SHAPES[0], torch.Generator().manual_seed(0))
        attn(q, k, v)
        time.sleep(1.0 * env.rank)
        before = time.process_time()
        attn(q, k, v)
        burnt = time.process_time() - before
        assert threading.active_count() < 12
    return burnt


def test_waiting_for_a_late_peer_burns_no_cpu(ranks) -> None:
    assert ranks(2).run(check_waits_sleep)[0] < 0.2


def check_mismatch(env: RankEnv) -> str:
    axis = mesh_of(MeshShape(1, env.world)).ulysses
    attn = pipelined(env, axis, SHAPES[0])
    try:
        (q, k, v), _ = inputs(env, Shape(45, 4 + env.rank, 4 + env.rank), torch.Generator().manual_seed(0))
        attn(q, k, v)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        attn.exchange.close()
    return "nothing raised"


def test_different_plans_raise_on_every_rank_and_name_both(ranks) -> None:
    said = ranks(2).run(check_mismatch)
    assert any(text.startswith("PlanMismatchError: rank ") for text in said), said
    assert all(
        text.startswith(("PlanMismatchError", "PeerLostError")) and text.count("of plan") == 2 for text in said
    ), said


def check_broken(env: RankEnv) -> list[str]:
    axis = mesh_of(MeshShape(1, env.world)).ulysses
    attn, said = pipelined(env, axis, SHAPES[0]), []
    (_, _, v), _ = inputs(env, SHAPES[0], torch.Generator().manual_seed(0))

    def fill_all(blocks) -> None:
        raise RuntimeError("the norm failed")

    for _ in range(2):
        try:
            attn.filled(v, fill_all, num_heads=5)
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
    attn.exchange.close()
    attn.exchange.close()
    return said


def test_an_exchange_that_failed_in_a_call_refuses_further_use(ranks) -> None:
    first, second = ranks(2).run(check_broken)[0]
    assert first == "RuntimeError: the norm failed"
    assert second.startswith("ExchangeBrokenError: an earlier call failed: RuntimeError('the norm failed')")
