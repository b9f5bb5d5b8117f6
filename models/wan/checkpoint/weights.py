"""The safetensors files of one component, single or sharded: where each tensor lies, and whether all of them are there.

Checked both ways: what the index names must be on disk, and what is on disk must be named by the index. A parameter
that nothing fills would leave noise in the model. Reads headers alone; imports no torch.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from usp.errors import CheckpointError
from usp.models.wan.checkpoint.files import read_json
from usp.models.wan.checkpoint.headers import TensorInfo, read_header

FLOAT_DTYPES = ("F32", "BF16", "F16")
IGNORED = ("norm_added_q",)  # written by some converters and read by nobody, the reference included
MAX_NAMED = 3  # keys spelt out in one message


@dataclass(frozen=True)
class StoredTensor:
    """One tensor on disk, under the name that its file gives it."""

    file: Path
    name: str
    info: TensorInfo


@dataclass(frozen=True)
class Weights:
    """All tensors of one component by their names on disk; `source` is the index, or the only file."""

    source: Path
    tensors: Mapping[str, StoredTensor]
    files: tuple[Path, ...]


def find_weights(folder: Path, stem: str) -> Weights:
    """Read `stem.safetensors`, or the shards of `stem.safetensors.index.json`. Raises CheckpointError."""
    index, single = folder / f"{stem}.safetensors.index.json", folder / f"{stem}.safetensors"
    if index.is_file():
        return _read_shards(index)
    if single.is_file():
        return Weights(single, _float_tensors(single), (single,))
    pickled = sorted(file.name for file in folder.iterdir() if file.name.startswith(stem) and ".bin" in file.name)
    if pickled:
        raise CheckpointError(
            f"{folder}: only PyTorch weights ({pickled[0]}), but {single.name} or {index.name} is needed; "
            "save the model again with safe_serialization=True, or download the safetensors files"
        )
    raise CheckpointError(f"{folder}: neither {single.name} nor {index.name} is there; the download is incomplete")


def match_parameters(
    weights: Weights, shapes: Mapping[str, tuple[int, ...]], names: Mapping[str, str]
) -> dict[str, StoredTensor]:
    """Our name -> stored tensor, for exactly the parameters in `shapes`; `names` maps ours to those on disk."""
    stored = weights.tensors
    refuse(weights.source, "missing", [names[name] for name in shapes if names[name] not in stored])
    surprises = stored.keys() - {names[name] for name in shapes}
    refuse(weights.source, "unexpected", sorted(surprises), where=lambda name: f" in {stored[name].file.name}")
    matched = {name: stored[names[name]] for name in shapes}
    for name, tensor in matched.items():
        if tensor.info.shape != shapes[name]:
            raise CheckpointError(
                f"{tensor.file}: {tensor.name!r} has shape {tensor.info.shape}, but config.json asks for {shapes[name]}"
            )
    return matched


def refuse(source: Path, fault: str, names: Iterable[str], *, where: Callable[[str], str] = lambda _: "") -> None:
    """Raise CheckpointError naming up to three of `names` and how many there are; no names, no error."""
    names = list(names)
    if not names:
        return
    listed = ", ".join(repr(name) for name in names[:MAX_NAMED])
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    noun = "parameter" if len(names) == 1 else "parameters"
    raise CheckpointError(f"{source}: {len(names)} {fault} {noun}: {listed}{more}{where(names[0])}")


def _read_shards(index: Path) -> Weights:
    shards = _keys_by_shard(index)
    tensors: dict[str, StoredTensor] = {}
    for shard, keys in shards.items():
        if not shard.is_file():
            raise CheckpointError(
                f"{index} names the shard {shard.name}, which is not on disk; the download is incomplete"
            )
        found = _float_tensors(shard)
        refuse(shard, "missing", sorted(keys - found.keys()), where=lambda _: f", which {index.name} says are here")
        refuse(shard, "unexpected", sorted(found.keys() - keys), where=lambda _: f", which {index.name} does not name")
        tensors |= found
    return Weights(index, tensors, (index, *shards))


def _keys_by_shard(index: Path) -> dict[Path, set[str]]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: has no weight_map, so it is no index of safetensors shards")
    shards: dict[Path, set[str]] = {}
    for key, name in weight_map.items():
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise CheckpointError(f"{index}: puts {key!r} into {name!r}, which is no safetensors file beside it")
        shards.setdefault(index.with_name(name), set())
        if not _is_ignored(key):
            shards[index.with_name(name)].add(key)
    return shards


def _float_tensors(file: Path) -> dict[str, StoredTensor]:
    header = {name: info for name, info in read_header(file).items() if not _is_ignored(name)}
    for name, info in header.items():
        if info.dtype not in FLOAT_DTYPES:
            raise CheckpointError(f"{file}: {name!r} is {info.dtype}; only {', '.join(FLOAT_DTYPES)} are supported")
    return {name: StoredTensor(file, name, info) for name, info in header.items()}


def _is_ignored(name: str) -> bool:
    return any(part in IGNORED for part in name.split("."))
