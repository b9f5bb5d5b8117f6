"""The collective exchange against plain slicing of the full tensor, bit for bit (D01, D02, D03, D25)."""

import pytest
import torch

from tests.multi_gpu.ranks import RankEnv, mesh_of
from usp.exchange import CollectiveExchange
from usp.layout import MeshShape, split_counts, split_offsets
from usp.mesh import Mesh

WORLDS = [1, 2, 3, 4]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64]
HEAD_DIM = 6


def _full(batch: int, tokens: int, heads: int, dtype: torch.dtype) -> torch.Tensor:
    """Every (batch, token, head, column) has its own value; a random sign pattern would hide misplacement."""
    count = batch * tokens * heads * HEAD_DIM
    values = torch.arange(count, dtype=torch.int64) + torch.randint(1000, (1,))
    if dtype.is_floating_point:  # 16-bit floats cannot count far; their bit patterns can
        as_int = {4: torch.int32, 2: torch.int16}[dtype.itemsize]
        values = (values % 30000).to(as_int).view(dtype)
    return values.to(dtype).view(batch, tokens, heads, HEAD_DIM)


def _strided(own: torch.Tensor, kind: str) -> torch.Tensor:
    """The same values behind other strides: what callers really pass."""
    if kind == "fused":  # a third of a fused projection's output
        fused = torch.cat([own.flatten(2)] * 3, dim=-1)
        return fused[..., own[0, 0].numel() :][..., : own[0, 0].numel()].unflatten(-1, own.shape[2:])
    if kind == "transposed":
        return own.transpose(1, 2).contiguous().transpose(1, 2)
    if kind == "offset":
        return torch.cat([own.flatten()[:7], own.flatten()])[7:].view(own.shape)
    return own


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8).cpu()


def _mesh(env: RankEnv) -> Mesh:
    return mesh_of(MeshShape(1, env.world))


def check_round_trip(env: RankEnv, cases: list[tuple[int, int, int, str]], seed: int) -> None:
    mesh = _mesh(env)
    for batch, tokens, heads, strides in cases:
        for dtype in DTYPES:
            torch.manual_seed(seed)  # the same full tensor on every rank
            full = _full(batch, tokens, heads, dtype).to(env.device)
            exchange = CollectiveExchange(tokens, axis=mesh.ulysses)
            token, head = split_counts(tokens, env.world), split_counts(heads, env.world)
            t0, h0 = split_offsets(token)[env.rank], split_offsets(head)[env.rank]
            own = _strided(full[:, t0 : t0 + token[env.rank]], strides if token[env.rank] else "plain")
            scattered = exchange.scatter_heads(own)
            case = f"{batch=} {tokens=} {heads=} {strides=} {dtype=}"
            assert torch.equal(_bits(scattered), _bits(full[:, :, h0 : h0 + head[env.rank]])), case
            back = exchange.gather_heads(scattered, num_heads=heads)
            assert torch.equal(_bits(back), _bits(full[:, t0 : t0 + token[env.rank]])), case
            gathered = exchange.gather_tokens(own.flatten(2))
            assert torch.equal(_bits(gathered), _bits(full.flatten(2))), case


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("batch", [1, 2, 3])
def test_exchange_equals_slicing_and_its_inverse_restores(ranks, world: int, batch: int) -> None:
    cases = [
        (batch, tokens, heads, strides)
        for tokens in (1, 30, 45)
        for heads in (4, 5, 6)
        for strides in ("plain", "fused", "transposed", "offset")
    ]
    ranks(world).run(check_round_trip, cases, int(torch.randint(2**31, (1,))))


def check_expanded_input(env: RankEnv) -> None:
    """D03: an expanded tensor repeats memory; its bytes must still be sent value by value."""
    own = torch.arange(4, device=env.device).view(1, 1, 4, 1).expand(1, 5, 4, HEAD_DIM)
    scattered = CollectiveExchange(5 * env.world, axis=_mesh(env).ulysses).scatter_heads(own)
    heads, offset = split_counts(4, env.world)[env.rank], split_offsets(split_counts(4, env.world))[env.rank]
    expected = torch.arange(offset, offset + heads).view(1, 1, heads, 1).expand(1, 5 * env.world, heads, HEAD_DIM)
    assert torch.equal(scattered.cpu(), expected)


def test_expanded_input_is_sent_by_value(ranks) -> None:
    ranks(2).run(check_expanded_input)


def check_wrong_share_is_refused(env: RankEnv) -> str:
    exchange = CollectiveExchange(45, axis=_mesh(env).ulysses)
    with pytest.raises(ValueError, match="holds") as error:
        exchange.scatter_heads(torch.zeros(1, 45, 4, HEAD_DIM))
    return str(error.value)


def test_a_share_of_the_wrong_length_is_refused_before_anything_is_sent(ranks) -> None:
    assert ranks(2).run(check_wrong_share_is_refused)[1] == "got 45 tokens; rank 1 of 2 holds 22"
