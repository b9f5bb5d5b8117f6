"""The header of a safetensors file: what it holds and where, checked against the size of the file.

Reads a few kilobytes of a file of any size and imports no torch, so a damaged download is found before anything loads.
Format: 8 bytes little-endian header length, a JSON object, then the tensors without gaps.
"""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from usp.errors import CheckpointError

LENGTH_BYTES = 8
ITEM_BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    **dict.fromkeys(("F4",), 4),
}


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a file; `start` and `end` are bytes behind the header."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.start


def read_header(file: Path) -> dict[str, TensorInfo]:
    """Name -> TensorInfo. Raises CheckpointError naming the file, and the key where one is at fault."""
    raw, data_bytes = header_bytes(file)
    try:
        entries = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{file}: the safetensors header is damaged ({error}); download the file again"
        ) from error
    if not isinstance(entries, dict):
        raise CheckpointError(f"{file}: the safetensors header is no JSON object; download the file again")
    tensors = {name: _tensor_info(file, name, entry) for name, entry in entries.items() if name != "__metadata__"}
    _check_offsets(file, tensors, data_bytes)
    return tensors


def header_bytes(file: Path) -> tuple[bytes, int]:
    """The JSON text of the header and the number of bytes that follow it."""
    try:
        with file.open("rb") as stream:
            total = os.fstat(stream.fileno()).st_size
            if total < LENGTH_BYTES:
                raise CheckpointError(f"{file}: {total} bytes, too short for a safetensors file; download it again")
            length = int.from_bytes(stream.read(LENGTH_BYTES), "little")
            if length > total - LENGTH_BYTES:
                raise CheckpointError(
                    f"{file}: announces a header of {length} bytes, but only {total - LENGTH_BYTES} follow; "
                    "it is truncated or no safetensors file"
                )
            return stream.read(length), total - LENGTH_BYTES - length
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read ({error.strerror})") from error


def _tensor_info(file: Path, name: str, entry: Any) -> TensorInfo:
    fields: Mapping[str, Any] = entry if isinstance(entry, Mapping) else {}
    dtype, shape, offsets = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
    if not (isinstance(dtype, str) and _is_sizes(shape) and _is_sizes(offsets) and len(offsets) == 2):
        raise CheckpointError(f"{file}: the header's entry for {name!r} is damaged; download the file again")
    if dtype not in ITEM_BITS:
        raise CheckpointError(f"{file}: {name!r} has the unknown dtype {dtype!r}")
    info = TensorInfo(dtype, tuple(shape), *offsets)
    if info.nbytes * 8 != math.prod(shape) * ITEM_BITS[dtype]:
        raise CheckpointError(f"{file}: {name!r} of shape {shape} and dtype {dtype} cannot take {info.nbytes} bytes")
    return info


def _is_sizes(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _check_offsets(file: Path, tensors: Mapping[str, TensorInfo], data_bytes: int) -> None:
    position = 0
    for name, info in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].end)):
        if info.end > data_bytes:
            raise CheckpointError(
                f"{file}: truncated, {name!r} ends at byte {info.end} of the data, but only {data_bytes} are there; "
                "download the file again"
            )
        if info.start != position:
            kind = "overlaps the tensor before it" if info.start < position else "leaves a gap before it"
            raise CheckpointError(f"{file}: {name!r} starts at byte {info.start} and {kind} (expected {position})")
        position = info.end
    if position != data_bytes:
        raise CheckpointError(f"{file}: {data_bytes - position} bytes behind the last tensor belong to no tensor")
