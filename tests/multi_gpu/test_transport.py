"""Which transport is chosen, by all ranks alike, and what is said of it."""

import pytest
import torch

from tests.multi_gpu.ranks import RankEnv
from usp import transport
from usp.layout import MeshShape
from usp.transport import choose_transport, make_exchange, mesh_of

CPU = torch.device("cpu")


def choose(env: RankEnv, asked: str, shape: MeshShape, hosts: list[str] | None) -> str:
    """`name: reason`, or the error; `hosts` pretends that ranks are on these."""
    if hosts is not None:
        plain = transport._describe(CPU)
        transport._describe = lambda device: transport._Rank("cpu", "", hosts[env.rank], plain.has_nccl)
    try:
        chosen = choose_transport(asked, shape=shape, device=CPU)
        with make_exchange(chosen, 45, mesh=mesh_of(chosen, shape), device=CPU) as exchange:
            return f"{chosen.name} {type(exchange).__name__}: {chosen.reason}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        if hosts is not None:
            transport._describe = DESCRIBE


DESCRIBE = transport._describe


@pytest.mark.parametrize(
    ("asked", "shape", "hosts", "said"),
    [
        ("auto", (1, 4), None, "host PipelinedExchange: the ranks of a group share host memory"),
        ("host", (2, 2), None, "host PipelinedExchange: asked for"),
        ("gloo", (1, 4), None, "gloo CollectiveExchange: asked for"),
        ("auto", (2, 2), ["a", "a", "b", "b"], "host PipelinedExchange: the ranks of a group share host memory"),
        (
            *("auto", (1, 4), ["a", "a", "b", "b"]),
            "gloo CollectiveExchange: no host, since ranks 0 to 3 are on 2 hosts or in separate containers; "
            "it always works",
        ),
        (
            *("host", (1, 4), ["a", "a", "b", "b"]),
            "UserError: --exchange host cannot run: ranks 0 to 3 are on 2 hosts or in separate containers; "
            "use --exchange auto",
        ),
        ("ipc", (1, 4), None, "UserError: --exchange ipc cannot run: rank 0 runs on cpu; use --exchange auto"),
        ("nccl", (1, 4), None, "UserError: --exchange nccl cannot run: rank 0 runs on the CPU; use --exchange auto"),
    ],
)
def test_every_rank_makes_the_same_choice_and_says_why(ranks, asked, shape, hosts, said) -> None:
    assert ranks(4).run(choose, asked, MeshShape(*shape), hosts) == [said] * 4


def test_one_ulysses_rank_needs_no_exchange(ranks) -> None:
    assert ranks(2).run(choose, "auto", MeshShape(2, 1), None)[0].startswith("host CollectiveExchange")
