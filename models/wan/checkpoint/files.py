"""Small files of a checkpoint: JSON that must be there, folders that must be there, and the fingerprint of all files.

The fingerprint stands for gigabytes without reading them: it covers configs whole, and of weight files the lists of
what they hold and bytes from many places. Ranks compare it to find out that they look at different checkpoints.
Imports no torch.
"""

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from usp.errors import CheckpointError
from usp.models.wan.checkpoint.archive import archive_entries
from usp.models.wan.checkpoint.headers import header_bytes

SAMPLES, SAMPLE_BYTES = 512, 64  # of a weight file, for its fingerprint


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in `file`. Raises CheckpointError where it is missing or damaged."""
    require_file(file)
    try:
        value = json.loads(file.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: no valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file}: expected a JSON object, found {type(value).__name__}")
    return value


def require_file(file: Path) -> Path:
    if not file.is_file():
        raise CheckpointError(f"{file} is missing; the download is incomplete")
    return file


def require_folder(folder: Path) -> Path:
    if not folder.is_dir():
        raise CheckpointError(f"the folder {folder} is missing; the download is incomplete")
    return folder


def fingerprint(root: Path, files: Iterable[Path]) -> str:
    """sha256 over the names (relative to `root`) of `files`, and over their contents.

    Of a weight file that is its list of tensors and SAMPLES spread over its bytes, not the gigabytes.
    """
    digest = hashlib.sha256()
    for file in sorted(set(files)):
        digest.update(json.dumps([file.relative_to(root).as_posix(), _content_digest(file)]).encode())
    return digest.hexdigest()


def _content_digest(file: Path) -> str:
    if file.suffix == ".safetensors":
        header, data_bytes = header_bytes(file)
        return hashlib.sha256(header + b"%d" % data_bytes + _sampled(file)).hexdigest()
    if file.suffix == ".pth":
        return hashlib.sha256(json.dumps(archive_entries(file)).encode() + _sampled(file)).hexdigest()
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _sampled(file: Path) -> bytes:
    """Bytes from evenly spaced places: of a 5 GB shard, a few from every tensor."""
    nbytes = file.stat().st_size
    with file.open("rb", buffering=0) as stream:
        places = {nbytes * sample // SAMPLES for sample in range(SAMPLES)}
        return b"".join(os.pread(stream.fileno(), SAMPLE_BYTES, place) for place in sorted(places))
