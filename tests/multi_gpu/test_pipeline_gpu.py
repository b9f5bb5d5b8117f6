"""The exchange over ipc with FlashAttention 3: real `filled` calls, at sizes where attention libraries change kernels.

Ranks share the GPU. The sequential path, over gloo, is the reference; at the large size plain attention over all heads.
"""

import importlib.util
import time

import pytest
import torch

from tests.multi_gpu.ranks import RankEnv, mesh_of
from usp.attention import choose_attention
from usp.fill import fill_from
from usp.ipc.cuda import CudaProvider
from usp.ipc.cuda_engine import CudaEngine
from usp.ipc.rendezvous import GroupRendezvous
from usp.layout import MeshShape, split_counts, split_offsets
from usp.pipeline import PipelinedExchange
from usp.ulysses import UlyssesAttention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.skipif(importlib.util.find_spec("fa3_fwd") is None, reason="needs fa3-fwd"),
]
DEVICE = torch.device("cuda")


def attention_of(env: RankEnv, tokens: int) -> UlyssesAttention:
    axis = mesh_of(MeshShape(1, env.world)).ulysses
    exchange = PipelinedExchange(
        tokens,
        axis=axis,
        rendezvous=GroupRendezvous(axis.group),
        provider=CudaProvider(DEVICE),
        make_engine=CudaEngine,
        stall_timeout=60.0,
    )
    backend = choose_attention("fa3", device=DEVICE, dtype=torch.bfloat16, head_dim=128).backend
    return UlyssesAttention(exchange, attention=backend)


def own_qkv(env: RankEnv, tokens: int, heads: int, seed: int, batch: int = 1) -> list[torch.Tensor]:
    """This rank's rows, as slices of a fused projection's output; the same clip on every rank."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    count = split_counts(tokens, env.world)[env.rank]
    start = split_offsets(split_counts(tokens, env.world))[env.rank]
    fused = torch.randn(batch, tokens, 3 * heads, 128, device=DEVICE, generator=generator, dtype=torch.bfloat16)
    own = fused[:, start : start + count].clone()
    return list(own.split(heads, dim=2))


def check_filled(env: RankEnv, tokens: int, heads: int, batch: int, calls: int, seed: int) -> None:
    """References first: they are collectives. Then every call with inputs of its own; a stream keeps the results."""
    attn = attention_of(env, tokens)
    given = [own_qkv(env, tokens, heads, seed + call, batch) for call in range(calls)]
    expected = [attn.plain(*qkv) for qkv in given]
    with attn.exchange:
        found = [kept(attn.filled(v, fill_from(q, k), num_heads=heads)) for q, k, v in given]
    for call, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert one.isfinite().all() and torch.equal(one, other), f"call {call}"


def kept(view: torch.Tensor) -> torch.Tensor:
    """A copy in memory that cannot hold an earlier result."""
    return torch.full_like(view, float("nan"), memory_format=torch.contiguous_format).copy_(view)


SMALL = [(45, 5, 1), (45, 40, 1), (1000, 40, 1), (1001, 12, 2), (2310, 40, 1), (4000, 40, 1), (3999, 24, 2)]


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(("tokens", "heads", "batch"), SMALL)
def test_filled_calls_equal_the_sequential_path(ranks, world: int, tokens: int, heads: int, batch: int) -> None:
    ranks(world).run(check_filled, tokens, heads, batch, 4, tokens)


def check_large(env: RankEnv, tokens: int, heads: int, calls: int) -> float:
    """Against attention over the whole clip at once, which every rank computes for itself. Seconds a call."""
    attn = attention_of(env, tokens)
    given, expected = [], []
    for seed in range(calls):
        qkv, right = own_part_of_a_clip(env, attn, tokens, heads, seed)
        given.append(qkv)
        expected.append(right)
    with attn.exchange:
        found = [kept(attn.filled(v, fill_from(q, k), num_heads=heads)) for q, k, v in given[:1]]  # makes the arena
        torch.cuda.synchronize()
        began = time.monotonic()
        found += [kept(attn.filled(v, fill_from(q, k), num_heads=heads)) for q, k, v in given[1:]]
        torch.cuda.synchronize()
        seconds = time.monotonic() - began
    wrong = [call for call, pair in enumerate(zip(found, expected, strict=True)) if not torch.equal(*pair)]
    assert not wrong, f"calls {wrong}"
    return seconds / (calls - 1)


def own_part_of_a_clip(
    env: RankEnv, attn: UlyssesAttention, tokens: int, heads: int, seed: int
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """This rank's q, k and v of a clip, and its rows of attention over all of it."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    fused = torch.randn(1, tokens, 3 * heads, 128, device=DEVICE, generator=generator, dtype=torch.bfloat16)
    count = split_counts(tokens, env.world)[env.rank]
    start = split_offsets(split_counts(tokens, env.world))[env.rank]
    whole = attn.attention(*fused.split(heads, dim=2))
    own = fused[:, start : start + count].clone()
    return list(own.split(heads, dim=2)), whole[:, start : start + count].clone()


@pytest.mark.parametrize("world", [2, 4])
def test_filled_calls_equal_plain_attention_at_the_size_of_a_clip(ranks, world: int) -> None:
    print([f"{one:.3f} s" for one in ranks(world).run(check_large, 37_800, 40, 4)])


def check_back_to_back(env: RankEnv, calls: int) -> None:
    """Nothing waits between calls; every result is kept and compared afterwards."""
    tokens, heads = 45, 5
    attn = attention_of(env, tokens)
    given = [own_qkv(env, tokens, heads, seed) for seed in range(calls)]
    expected = [attn.plain(*qkv) for qkv in given]
    with attn.exchange:
        found = [attn(*qkv) for qkv in given]
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("world", [2, 4])
def test_two_hundred_calls_back_to_back(ranks, world: int) -> None:
    ranks(world).run(check_back_to_back, 200)


def check_plans(env: RankEnv, plans: list[tuple[int, int]], calls: int) -> int:
    """As above, while (heads, batch) change every few calls. How many arenas it took."""
    tokens = 1001
    attn = attention_of(env, tokens)
    shapes = [plan for plan in plans for _ in range(calls)]
    given = [own_qkv(env, tokens, heads, seed, batch) for seed, (heads, batch) in enumerate(shapes)]
    expected = [attn.plain(*qkv) for qkv in given]
    with attn.exchange:
        found = [kept(attn.filled(v, fill_from(q, k), num_heads=q.shape[2])) for q, k, v in given]
        num_arenas = attn.exchange._epoch
    pairs = enumerate(zip(found, expected, strict=True))
    wrong = [call for call, (one, other) in pairs if not torch.equal(one, other)]
    assert not wrong, f"calls {wrong}"
    return num_arenas


@pytest.mark.parametrize("world", [2, 4])
def test_changes_of_plan_back_to_back_stay_in_one_arena(ranks, world: int) -> None:
    plans = [(40, 2), (4, 1), (40, 2), (12, 2), (24, 2), (4, 1), (32, 2), (4, 1), (40, 2)]
    assert ranks(world).run(check_plans, plans, 3) == [1] * world


def check_streams(env: RankEnv, calls: int) -> None:
    """Calls from two streams in turn, each with its own inputs; nobody waits in between but the exchange itself."""
    tokens, heads = 2310, 12
    attn = attention_of(env, tokens)
    streams = [torch.cuda.Stream() for _ in range(2)]
    given = [own_qkv(env, tokens, heads, seed) for seed in range(calls)]
    expected = [attn.plain(*qkv) for qkv in given]
    torch.cuda.synchronize()
    found = []
    with attn.exchange:
        for number, (q, k, v) in enumerate(given):
            with torch.cuda.stream(streams[number % 2]):
                found.append(attn(q, k, v))
        torch.cuda.synchronize()
        attn.exchange.check()
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_calls_from_other_streams_wait_for_the_ones_before(ranks) -> None:
    ranks(2).run(check_streams, 12)


def check_capture(env: RankEnv) -> str:
    attn = attention_of(env, 45)
    with attn.exchange:
        qkv = own_qkv(env, 45, 5, 0)
        attn(*qkv)
        torch.cuda.synchronize()
    try:
        attn = attention_of(env, 45)
        attn(*qkv)
        torch.cuda.synchronize()
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            attn(*qkv)
    except RuntimeError as error:
        return str(error)
    finally:
        attn.exchange.close()
    return "nothing"


def test_graph_capture_is_refused(ranks) -> None:
    assert all("cannot be captured in a CUDA graph" in text for text in ranks(2).run(check_capture))


def used_memory() -> int:
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free


def check_memory(env: RankEnv, plans: int) -> list[int]:
    """Bytes in use on the whole GPU after each of many plans that grow, shrink and come back."""
    attn = attention_of(env, 1000)
    rendezvous, used = GroupRendezvous(attn.exchange.axis.group), []
    with attn.exchange:
        for number in range(plans):
            heads, batch = 4 + number % 5 * 4, 1 + number % 3
            q, k, v = own_qkv(env, 1000, heads, number, batch)
            attn.filled(v, fill_from(q, k), num_heads=heads)
            del q, k, v
            torch.cuda.empty_cache()
            rendezvous.barrier()
            used.append(used_memory())
            rendezvous.barrier()
    return used


def test_memory_is_flat_over_fifty_plans(ranks) -> None:
    used = ranks(2).run(check_memory, 50)[0]
    assert len({*used[15:]}) <= 2 and max(used[15:]) <= used[14], used  # after one round of all 15 plans


def check_memory_after_close(env: RankEnv, rounds: int) -> list[int]:
    used = []
    for number in range(rounds):
        attn = attention_of(env, 1000)
        with attn.exchange:
            q, k, v = own_qkv(env, 1000, 40, number)
            attn.filled(v, fill_from(q, k), num_heads=40)
        del q, k, v, attn
        torch.cuda.empty_cache()
        GroupRendezvous().barrier()
        used.append(used_memory())
        GroupRendezvous().barrier()
    return used


def test_a_closed_exchange_leaves_no_memory(ranks) -> None:
    used = ranks(2).run(check_memory_after_close, 8)[0]
    assert max(used[2:]) <= used[1], used
