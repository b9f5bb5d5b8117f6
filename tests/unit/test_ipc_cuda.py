"""What the CUDA side decides before it touches a GPU."""

import logging
import subprocess
import sys

import pytest

from usp.ipc.cuda import CudaProvider
from usp.ipc.cuda_engine import check_connections
from usp.ipc.driver import call
from usp.ipc.errors import CudaError, SetupError


@pytest.mark.parametrize("text", ["1", "0"])
def test_a_single_hardware_queue_is_refused(text: str) -> None:
    with pytest.raises(SetupError, match=f"CUDA_DEVICE_MAX_CONNECTIONS is {text}.*set it to 32"):
        check_connections({"CUDA_DEVICE_MAX_CONNECTIONS": text})


@pytest.mark.parametrize("environ", [{}, {"CUDA_DEVICE_MAX_CONNECTIONS": "31"}])
def test_few_hardware_queues_are_warned_of(environ: dict[str, str], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        check_connections(environ)
    assert len(caplog.records) == 1
    assert environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "not set, so 8") in caplog.text


def test_enough_hardware_queues_are_silent(caplog: pytest.LogCaptureFixture) -> None:
    check_connections({"CUDA_DEVICE_MAX_CONNECTIONS": "32"})
    assert not caplog.records


def test_a_driver_call_gives_its_value() -> None:
    assert call(lambda number: (0, number + 1), 4) == 5
    assert call(lambda: (0,)) is None


def test_a_driver_error_names_the_call_and_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    class Driver:
        @staticmethod
        def cuGetErrorString(code: int) -> tuple[int, bytes]:  # noqa: N802
            return 0, b"peer access is not supported"

    monkeypatch.setattr("usp.ipc.driver.load_driver", Driver)

    def cuIpcOpenMemHandle() -> tuple[int, int]:  # noqa: N802
        return 217, 0

    with pytest.raises(CudaError) as error:
        call(cuIpcOpenMemHandle)
    assert str(error.value) == "cuIpcOpenMemHandle: peer access is not supported (217)"


class Scarce:
    """A driver that has memory only once torch has given back what it keeps."""

    def __init__(self, failures: int) -> None:
        self.failures, self.asked = failures, []

    def cuMemAlloc(self, size: int) -> tuple[int, int]:  # noqa: N802
        self.asked.append(size)
        return (2, 0) if len(self.asked) <= self.failures else (0, 4096)

    @staticmethod
    def cuGetErrorString(code: int) -> tuple[int, bytes]:  # noqa: N802
        return 0, b"out of memory"


@pytest.mark.parametrize("failures", [0, 1, 2])
def test_memory_that_torch_keeps_is_asked_back_once(failures: int, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    provider, given_back = object.__new__(CudaProvider), []
    provider._driver, provider.torch_device = Scarce(failures), torch.device("cuda", 0)
    monkeypatch.setattr("usp.ipc.driver.load_driver", lambda: provider._driver)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: given_back.append("idle"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: given_back.append("given back"))
    if failures == 2:
        with pytest.raises(SetupError, match=r"64 bytes of GPU memory for the exchange cannot be had: .*out of memory"):
            provider._take(64)
    else:
        assert provider._take(64) == 4096
    assert given_back == ["idle", "given back"] * (failures > 0) and provider._driver.asked == [64] * min(
        2, failures + 1
    )


def test_handles_errors_and_engines_names_load_nothing_heavy() -> None:
    """What cheap checks may import stays cheap; cuda-python is loaded by whoever makes a CUDA object."""
    modules = "errors, handle, provider, rendezvous, arena, engine, host, futex, control, watchdog, cuda, cuda_engine"
    program = (
        f"import sys; from usp.ipc import {modules}\n"
        "print([name for name in ('torch', 'numpy', 'cuda', 'mpi4py') if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=150, check=True)
    assert found.stdout.strip() == "[]"
