"""Which transport is chosen, by all ranks alike, and what is said of it."""

import pytest
import torch

from tests.multi_gpu.ranks import RankEnv
from usp import proof, transport
from usp.ipc.engine import PreparedCopy
from usp.ipc.errors import SetupError
from usp.ipc.handle import Handle
from usp.ipc.host import HostProvider
from usp.ipc.host_engine import HostEngine
from usp.ipc.provider import Segment
from usp.layout import MeshShape
from usp.transport import choose_transport, make_exchange, mesh_of, proven

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


class NoMemory(HostProvider):
    """A host that does not let this rank share memory."""

    def allocate(self, nbytes: int) -> Segment:
        raise SetupError("memfd_create: not permitted")


class Elsewhere(HostProvider):
    """A rank that opens its own memory in place of its peers'."""

    def open(self, handle: Handle) -> Segment:
        return self.allocate(handle.nbytes)


class NoSignals(HostEngine):
    """A platform that drops what is written to a peer: nobody answers a posted write."""

    def signal(self, stream: str, address: int, value: int) -> None:
        return None


class NoCopies(HostEngine):
    """Flags arrive, and the rows before them do not."""

    def enqueue(self, stream: str, copy: PreparedCopy) -> None:
        return None


class NoEngine(HostEngine):
    def __init__(self) -> None:
        raise SetupError("CUDA_DEVICE_MAX_CONNECTIONS is 1")


def prove(
    env: RankEnv,
    asked: str,
    shape: MeshShape,
    provider: type[HostProvider],
    at_fault: int,
    engine: type[HostEngine] = HostEngine,
) -> str:
    usual, limit_s = transport._host, proof.LIMIT_S
    if env.rank == at_fault:
        transport._host = lambda: (provider(), engine)
    proof.LIMIT_S = 1.0
    try:
        chosen = choose_transport(asked, shape=shape, device=CPU)
        found = proven(chosen, asked, mesh=mesh_of(chosen, shape), device=CPU)
        return f"{found.name}: {found.reason}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        transport._host, proof.LIMIT_S = usual, limit_s


@pytest.mark.parametrize("shape", [(1, 4), (2, 2)])
def test_one_rank_that_cannot_share_memory_sends_all_ranks_to_the_collectives(ranks, shape) -> None:
    """D24: decided together; forced, it raises on every rank. Also the ranks of the other guidance branch."""
    for provider, at_fault, said in ((NoMemory, 1, "memfd_create: not permitted"), (Elsewhere, 0, "does not see")):
        found = ranks(4).run(prove, "auto", MeshShape(*shape), provider, at_fault)
        assert len(set(found)) == 1 and found[0].startswith("gloo: no host, since rank ") and said in found[0], found
        forced = ranks(4).run(prove, "host", MeshShape(*shape), provider, at_fault)
        assert len(set(forced)) == 1 and forced[0].startswith("UserError: --exchange host cannot run: rank "), forced


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        (NoSignals, "rank 0 (and 1 more): no flag of rank 1 came within 1 s"),
        (NoCopies, "rank 0 (and 1 more): the flag of rank 1 came, but not the rows that were sent before it"),
        (NoEngine, "rank 1: CUDA_DEVICE_MAX_CONNECTIONS is 1"),
    ],
)
def test_writes_to_a_peer_that_do_not_arrive_are_noticed_before_anything_relies_on_them(ranks, engine, said) -> None:
    found = ranks(3).run(prove, "auto", MeshShape(1, 3), HostProvider, 1, engine)
    assert found == [f"gloo: no host, since {said}; it always works"] * 3


def test_memory_that_can_be_shared_is_proven(ranks) -> None:
    assert (
        ranks(4).run(prove, "auto", MeshShape(2, 2), HostProvider, 0)
        == ["host: the ranks of a group share host memory"] * 4
    )


def test_one_ulysses_rank_needs_no_exchange(ranks) -> None:
    assert ranks(2).run(choose, "auto", MeshShape(2, 1), None)[0].startswith("host CollectiveExchange")
