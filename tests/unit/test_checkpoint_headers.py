"""D15: the header of a safetensors file tells a whole file from a damaged one."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from usp.errors import CheckpointError
from usp.models.wan.checkpoint.headers import read_header


def write(file: Path, entries: Any, data: bytes) -> Path:
    raw = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    file.write_bytes(len(raw).to_bytes(8, "little") + raw + data)
    return file


def entry(start: int, end: int, *, dtype: str = "F32", shape: list[int] | None = None) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape or [(end - start) // 4], "data_offsets": [start, end]}


def test_a_header_says_what_the_library_wrote(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    tensors = {
        "a": torch.randn(3, 5),
        "b": torch.randn(7).bfloat16(),
        "c": torch.zeros(()),
        "d": torch.zeros(0, 4).half(),
    }
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})
    header = read_header(tmp_path / "x.safetensors")
    assert {name: info.shape for name, info in header.items()} == {"a": (3, 5), "b": (7,), "c": (), "d": (0, 4)}
    assert {name: info.dtype for name, info in header.items()} == {"a": "F32", "b": "BF16", "c": "F32", "d": "F16"}
    assert {name: info.nbytes for name, info in header.items()} == {"a": 60, "b": 14, "c": 4, "d": 0}


BAD = {
    "overlap": ({"a": entry(0, 8), "b": entry(4, 12)}, b"x" * 12, "'b'.*overlaps"),
    "gap": ({"a": entry(0, 8), "b": entry(12, 16)}, b"x" * 16, "'b'.*gap"),
    "beyond the file": ({"a": entry(0, 8), "b": entry(8, 16)}, b"x" * 15, "truncated, 'b' ends at byte 16"),
    "bytes left over": ({"a": entry(0, 8)}, b"x" * 9, "1 bytes behind"),
    "shape and size disagree": ({"a": entry(0, 8, shape=[3])}, b"x" * 8, "'a'.*cannot take 8 bytes"),
    "ends before it starts": ({"a": entry(8, 4, shape=[1])}, b"x" * 8, "'a'.*cannot take -4 bytes"),
    "unknown dtype": ({"a": entry(0, 8, dtype="F99")}, b"x" * 8, "'a'.*'F99'"),
    "negative size": ({"a": entry(0, 8, shape=[-2])}, b"x" * 8, "'a' is damaged"),
    "size is true": ({"a": entry(0, 4, shape=[True])}, b"x" * 4, "'a' is damaged"),
    "three offsets": ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4, 8]}}, b"x" * 4, "'a' is damaged"),
    "entry is a number": ({"a": 3}, b"", "'a' is damaged"),
    "a list": ([], b"", "no JSON object"),
    "no JSON": (b"{nothing", b"", "damaged"),
    "no text": (b"\xff\xfe{}", b"", "damaged"),
    "deep nesting": (b"[" * 100_000, b"", "damaged"),
    "a number of many digits": (b'{"a": ' + b"9" * 10_000 + b"}", b"", "damaged"),
}


@pytest.mark.parametrize("fault", BAD)
def test_a_bad_header_is_refused_by_file_and_key(fault: str, tmp_path: Path) -> None:
    entries, data, message = BAD[fault]
    file = write(tmp_path / "bad.safetensors", entries, data)
    with pytest.raises(CheckpointError, match=f"bad.safetensors.*{message}"):
        read_header(file)


@pytest.mark.parametrize("nbytes", [0, 1, 7, 8, 9, 40])
def test_a_file_cut_anywhere_is_refused(nbytes: int, tmp_path: Path) -> None:
    whole = write(tmp_path / "whole", {"a": entry(0, 8)}, b"x" * 8).read_bytes()
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(whole[:nbytes])
    with pytest.raises(CheckpointError, match=r"cut\.safetensors"):
        read_header(cut)


def test_a_folder_in_place_of_a_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_header(tmp_path)


def test_random_damage_gives_tensors_or_a_checkpoint_error(tmp_path: Path) -> None:
    randomness = random.Random(7)
    whole = write(tmp_path / "whole", {"a": entry(0, 8), "b": entry(8, 16)}, b"x" * 16).read_bytes()
    refused = 0
    for _ in range(500):
        damaged = bytearray(whole)
        for _ in range(randomness.randrange(1, 4)):
            damaged[randomness.randrange(len(damaged))] = randomness.randrange(256)
        (tmp_path / "damaged").write_bytes(damaged)
        try:
            read_header(tmp_path / "damaged")
        except CheckpointError:
            refused += 1
    assert refused > 300
