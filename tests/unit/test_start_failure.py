"""One fault, one message: who speaks when several ranks fail, and what the message says."""

import time

import pytest
import torch.distributed as dist

from usp.errors import UserError
from usp.launch import failure
from usp.launch.failure import is_lost_contact, report_failure
from usp.launch.world import World

LOST = RuntimeError("[gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:9: Connection reset by peer.")


class GoneStore:
    """A store whose host has died."""

    def compare_set(self, *_arguments):
        raise dist.DistNetworkError("Connection was likely closed")

    set = check = compare_set


class StuckStore:
    """A store that never answers."""

    def compare_set(self, *_arguments):
        time.sleep(60)

    set = check = compare_set


@pytest.fixture(autouse=True)
def no_head_start(monkeypatch):
    monkeypatch.setattr(failure, "FIRST_SECONDS", 0.0)
    monkeypatch.setattr(failure, "HOST_SECONDS", 0.0)


def _report(store, rank, error, capsys):
    try:
        raise error
    except type(error) as raised:
        code = report_failure(store, World(rank, 4, rank, 4, "torchrun"), raised, "sampling")
    return code, capsys.readouterr().err


def test_only_the_first_rank_speaks_and_all_leave_nonzero(capsys):
    """D20: the first real traceback, once."""
    store = dist.HashStore()
    code, said = _report(store, 2, ValueError("a bug"), capsys)
    assert code == 1
    assert said.startswith("rank 2 of 4 failed while sampling:\nTraceback (most recent call last):\n")
    assert said.count("ValueError: a bug") == 1
    for rank, error in ((0, LOST), (1, ValueError("another")), (3, UserError("a third"))):
        code, said = _report(store, rank, error, capsys)
        assert code != 0
        assert said == ""


def test_a_user_error_is_its_message_alone(capsys):
    assert _report(dist.HashStore(), 0, UserError("12 heads do not fit"), capsys) == (2, "error: 12 heads do not fit\n")
    assert _report(dist.HashStore(), 3, UserError("no"), capsys) == (2, "rank 3: error: no\n")


def test_a_lost_connection_names_the_rank_and_the_phase_without_a_traceback(capsys):
    """D22: a killed rank cannot speak, so a survivor does."""
    code, said = _report(dist.HashStore(), 1, LOST, capsys)
    assert code == 1
    assert said.startswith("rank 1 of 4 failed while sampling: lost contact with another rank (")
    assert said.count("\n") == 1


def test_a_rank_that_lost_contact_lets_the_cause_speak_first(monkeypatch, capsys):
    monkeypatch.setattr(failure, "FIRST_SECONDS", 0.3)
    start = time.monotonic()
    _report(dist.HashStore(), 1, LOST, capsys)
    assert time.monotonic() - start >= 0.3
    start = time.monotonic()
    _report(dist.HashStore(), 1, ValueError("own"), capsys)
    assert time.monotonic() - start < 0.3


@pytest.mark.parametrize("store", [GoneStore(), StuckStore()])
def test_without_a_store_the_message_still_comes_in_bounded_time(store, monkeypatch, capsys):
    monkeypatch.setattr("usp.launch.claim.STORE_SECONDS", 0.2)
    monkeypatch.setattr(failure.claim, "__kwdefaults__", {"seconds": 0.2})
    start = time.monotonic()
    code, said = _report(store, 2, ValueError("own"), capsys)
    assert code == 1
    assert "ValueError: own" in said
    assert time.monotonic() - start < 2.0


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (LOST, True),
        (dist.DistNetworkError("The client socket has timed out"), True),
        (dist.DistBackendError("NCCL error: remote process exited, Connection closed by remote peer"), True),
        (RuntimeError("[gloo] Broken pipe"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("Connection closed by peer"), False),
        (BrokenPipeError(32, "Broken pipe"), False),
        (UserError("store is full"), False),
    ],
)
def test_lost_contact_is_told_from_a_fault_of_ones_own(error, lost):
    assert is_lost_contact(error) is lost
