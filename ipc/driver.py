"""Calls to the CUDA driver through cuda-python, with codes turned into errors that name the call."""

from collections.abc import Callable
from typing import Any

from usp.ipc.errors import CudaError, SetupError


def load_driver() -> Any:
    """cuda-python's driver module. Raises SetupError where it is not installed."""
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise SetupError(
            f"CUDA IPC needs cuda-python ({error}); install it with `pip install 'usp-runtime[gpu]'`, "
            "or choose the nccl or gloo exchange"
        ) from error
    return driver


def call(function: Callable[..., tuple[Any, ...]], *arguments: Any) -> Any:
    """The value of a driver call, None if it has none. Raises CudaError("cuIpcOpenMemHandle: ... (217)")."""
    result = function(*arguments)
    if result[0] != 0:
        raise cuda_error(function.__name__, result[0])
    return result[1] if len(result) > 1 else None


def cuda_error(name: str, code: Any) -> CudaError:
    status, text = load_driver().cuGetErrorString(code)
    words = text.decode() if int(status) == 0 and text else str(code)
    return CudaError(f"{name}: {words} ({int(code)})")
