"""A rank played alone computes what it computes among real peers, and sends them what they would get."""

import pytest
import torch

from usp.attention import sdpa
from usp.costs import ARRIVALS
from usp.emulated_rank import EmulatedRank
from usp.fill import fill_from
from usp.ipc.engine import AUX, COPY
from usp.ipc.host_engine import HostEngine
from usp.plan import AttentionPlan, make_plan
from usp.schedule import result_rows, slot_rows

NO_GPU = not torch.cuda.is_available()
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(NO_GPU, reason="needs a GPU")])]
PLANS = [
    make_plan(token_counts=(23, 22), num_heads=6, head_dim=8, dtype="float32", num_groups=3),
    make_plan(
        token_counts=(8, 8, 7), num_heads=12, num_kv_heads=6, head_dim=8, dtype="bfloat16", batch=2, direct=False
    ),
    make_plan(token_counts=(5, 5, 5, 4), num_heads=9, head_dim=8, dtype="float16", num_groups=2, attend_streams=2),
    make_plan(token_counts=(7, 0, 6), num_heads=3, head_dim=8, dtype="float32"),
]


class Into:
    writes_out = True

    def __call__(self, q, k, v, *, out=None):
        result = sdpa(q, k, v)
        return result if out is None else out.copy_(result)


def make_engine(device: str):
    streams = (COPY, AUX, ARRIVALS)
    if device == "cpu":
        return HostEngine(streams=streams)
    from usp.ipc.cuda_engine import CudaEngine

    return CudaEngine(streams=streams)


def poison(tensor: torch.Tensor) -> None:
    tensor.fill_(float("nan"))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("plan", PLANS, ids=range(len(PLANS)))
def test_a_rank_alone_computes_and_sends_what_it_does_among_peers(plan: AttentionPlan, device: str) -> None:
    for rank in range(plan.num_ranks):
        engine = make_engine(device)
        played = EmulatedRank(plan, rank, engine=engine, attention=Into(), device=torch.device(device))
        for _ in range(3):
            check_call(plan, rank, played, device)
        engine.close()


def check_call(plan: AttentionPlan, rank: int, played: EmulatedRank, device: str) -> None:
    dtype, tokens = getattr(torch, plan.dtype), plan.tokens(rank)
    q, k, v = (
        torch.randn(plan.batch, plan.num_tokens, heads, plan.head_dim).to(dtype)
        for heads in (plan.num_heads, plan.num_kv_heads, plan.num_kv_heads)
    )
    expected = torch.randn(plan.batch, len(tokens), plan.num_heads, plan.head_dim).to(device, dtype)
    write_peers(plan, rank, played, (q, k, v), expected)
    for buffer, view in played.views.items():
        if buffer[0] in ("out", "slot"):
            poison(view)
    for group in plan.groups(rank):
        parts = [
            x[:, :, start : start + count].to(device)
            for x, start, count in (
                (q, group.start, group.count),
                (k, group.kv_start, group.kv_count),
                (v, group.kv_start, group.kv_count),
            )
        ]
        expected[:, :, group.start : group.start + group.count] = sdpa(*parts)[:, tokens.start : tokens.stop]
    own = [x[:, tokens.start : tokens.stop].to(device) for x in (q, k, v)]
    found = played.attend(own[2], fill_from(*own[:2])).clone()
    played.engine.synchronize()
    assert torch.equal(found, expected)
    check_sent(plan, rank, played, (q, k, v))


def write_peers(plan: AttentionPlan, rank: int, played: EmulatedRank, qkv, returned: torch.Tensor) -> None:
    """What the peers send from, and the results of their heads for this rank's tokens; what they get is poisoned."""
    mine = plan.tokens(rank)
    for peer in plan.peers(rank):
        tokens = plan.tokens(peer)
        played.peer_v[peer].copy_(qkv[2][:, tokens.start : tokens.stop])
        for group in plan.groups(rank) if tokens else ():
            for what, x, start, count in (
                ("q", qkv[0], group.start, group.count),
                ("k", qkv[1], group.kv_start, group.kv_count),
            ):
                block = played.peer_view(peer, ("send", what, rank, group.index))
                block.copy_(x[:, tokens.start : tokens.stop, start : start + count])
        for group in plan.groups(peer):
            heads = slice(group.start, group.start + group.count)
            for what in "qkv":
                poison(played.peer_view(peer, ("slot", what, group.index)))
            if plan.direct:
                played.peer_view(peer, ("out",))[:, mine.start : mine.stop, heads] = returned[:, :, heads].cpu()
            elif mine:
                played.peer_view(peer, ("kept", group.index, rank)).copy_(returned[:, :, heads])


def check_sent(plan: AttentionPlan, rank: int, played: EmulatedRank, qkv) -> None:
    """Own rows in the peers' slots, and own results in their place."""
    mine = plan.tokens(rank)
    for peer in plan.peers(rank) if mine else ():
        for group in plan.groups(peer):
            for what, x in zip("qkv", qkv, strict=True):
                start, count = (group.start, group.count) if what == "q" else (group.kv_start, group.kv_count)
                rows = slice(*slot_rows(plan, what, rank))
                found = played.peer_view(peer, ("slot", what, group.index))[:, rows]
                assert torch.equal(found, x[:, mine.start : mine.stop, start : start + count])
        if plan.tokens(peer):
            rows = slice(*result_rows(plan, peer))
            for group in plan.groups(rank):
                heads = slice(group.start, group.start + group.count)
                parts = [
                    x[:, :, first : first + size].to(played.views[("out",)].device)
                    for x, first, size in (
                        (qkv[0], group.start, group.count),
                        (qkv[1], group.kv_start, group.kv_count),
                        (qkv[2], group.kv_start, group.kv_count),
                    )
                ]
                sent = sdpa(*parts)[:, plan.tokens(peer).start : plan.tokens(peer).stop]
                assert torch.equal(played.peer_view(peer, ("out",))[:, rows, heads], sent.cpu())
