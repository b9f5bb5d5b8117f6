"""Handles: small, picklable, and refused where they cannot mean what they say."""

import pickle
from dataclasses import replace
from pathlib import Path

import pytest

from usp.ipc.errors import SetupError
from usp.ipc.handle import Handle, boot_id, check_same_host, check_same_memory, pid_namespace

HERE = Handle("host", 4096, 0, "a1", boot_id(), pid_namespace(), "", (1, 2, 3))


def test_a_handle_survives_pickling_and_is_small() -> None:
    packed = pickle.dumps(HERE)
    assert pickle.loads(packed) == HERE
    assert len(packed) < 500


def test_handles_of_this_host_agree() -> None:
    assert HERE.host == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    check_same_host([HERE, replace(HERE, nbytes=8, payload=(4, 5, 6))], range(2))
    check_same_memory([HERE, replace(HERE, nbytes=8, device="GPU-1")], range(2))


@pytest.mark.parametrize(
    ("change", "words"),
    [({"host": "another-boot"}, "hosts"), ({"pid_namespace": "pid:[7]"}, "one container")],
)
def test_handles_of_another_host_or_container_are_refused(change: dict[str, str], words: str) -> None:
    """D24: known before any driver call, with the ranks named."""
    with pytest.raises(SetupError, match=words) as error:
        check_same_host([HERE, replace(HERE, **change), HERE], range(3))
    assert "ranks 0, 2" in str(error.value) and f"{next(iter(change.values()))}: ranks 1" in str(error.value)


@pytest.mark.parametrize("change", [{"provider": "cuda"}, {"layout": "b2"}, {"epoch": 1}])
def test_handles_of_different_arenas_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(SetupError, match="2 different"):
        check_same_memory([HERE, replace(HERE, **change)], range(2))
