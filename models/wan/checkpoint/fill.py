"""From tensors in files to parameters of a module: one at a time, strict both ways.

No parameter keeps the noise that memory held, and no tensor of a file goes unused. At any moment one tensor is held
twice at most, which is what a cast needs.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

import torch
from torch import nn

from usp.errors import CheckpointError
from usp.models.wan.checkpoint.weights import StoredTensor, refuse

NamedTensors = Iterable[tuple[str, torch.Tensor]]


def fill(
    module: nn.Module,
    tensors: NamedTensors,
    *,
    source: Path,
    device: torch.device,
    dtype_of: Callable[[str], torch.dtype],
) -> None:
    """Give every parameter of a module on meta its tensor. Raises CheckpointError naming `source` and the keys."""
    empty = dict(module.named_parameters())
    for name, tensor in tensors:
        if name not in empty:
            raise CheckpointError(f"{source}: unexpected parameter {name!r}")
        wanted = empty.pop(name).shape
        if tensor.shape != wanted:
            raise CheckpointError(
                f"{source}: {name!r} has shape {tuple(tensor.shape)}, but the model needs {tuple(wanted)}"
            )
        # On the CPU a copy even in the same dtype: arithmetic must not depend on how a mapped file is aligned.
        owned = tensor.to(device).to(dtype_of(name), copy=device.type == "cpu")
        owner, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(owner), leaf, nn.Parameter(owned, requires_grad=False))
    refuse(source, "missing", sorted(empty))
    assert not any(tensor.is_meta for tensor in chain(module.parameters(), module.buffers()))
    module.eval()


def read_stored(tensors: Mapping[str, StoredTensor], device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """Our name and tensor, one at a time, each file opened once."""
    from safetensors import safe_open

    by_file: dict[Path, dict[str, str]] = {}
    for name, stored in tensors.items():
        by_file.setdefault(stored.file, {})[name] = stored.name
    for file, names in by_file.items():
        with blamed_on(file, "opening it"):
            shard = safe_open(file, framework="pt", device=str(device))
        with shard:
            for name, name_in_file in names.items():
                with blamed_on(file, f"reading {name_in_file!r}"):
                    tensor = shard.get_tensor(name_in_file)  # type: ignore[no-untyped-call]
                yield name, tensor


@contextmanager
def blamed_on(file: Path, doing: str) -> Iterator[None]:
    """Turn whatever a library raises over a damaged file into one sentence that names the file."""
    try:
        yield
    except (CheckpointError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        raise CheckpointError(f"{file}: {doing} failed ({type(error).__name__}: {reason})") from error
