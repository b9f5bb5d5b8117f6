"""D15: a half-finished or damaged checkpoint stops with the file or key named, before anything loads."""

import json
import random
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import tiny_checkpoint, tiny_copy
from usp.errors import CheckpointError
from usp.models.wan.checkpoint.folder import open_checkpoint

SHARD = "diffusion_pytorch_model-00002-of-00003.safetensors"
INDEX = "diffusion_pytorch_model.safetensors.index.json"
KEY = "blocks.1.attn1.norm_k.weight"  # in the second of three shards


def edit_json(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    value = json.loads(file.read_text())
    change(value)
    file.write_text(json.dumps(value))


def edit_shard(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Rewrite a shard with its tensors changed; the format's own library writes it."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def rename(folder: Path) -> None:
    edit_shard(folder / SHARD, lambda tensors: tensors.update({"blocks.1.renamed": tensors.pop(KEY)}))
    edit_json(
        folder / INDEX, lambda index: index["weight_map"].update({"blocks.1.renamed": index["weight_map"].pop(KEY)})
    )


def make_integer(folder: Path) -> None:
    import torch

    edit_shard(folder / SHARD, lambda tensors: tensors.update({KEY: tensors[KEY].to(torch.int64)}))


def misshape(folder: Path) -> None:
    edit_shard(folder / SHARD, lambda tensors: tensors.update({KEY: tensors[KEY][:-1].clone()}))


def drop_everywhere(folder: Path) -> None:
    edit_shard(folder / SHARD, lambda tensors: tensors.pop(KEY))
    edit_json(folder / INDEX, lambda index: index["weight_map"].pop(KEY))


def only_bin_index(folder: Path) -> None:
    for file in folder.glob("*.safetensors"):
        file.unlink()
    (folder / INDEX).rename(folder / "diffusion_pytorch_model.bin.index.json")


def stretch_header(folder: Path) -> None:
    file = folder / SHARD
    file.write_bytes((1 << 40).to_bytes(8, "little") + file.read_bytes()[8:])


def truncate(file: Path, nbytes: int) -> None:
    file.write_bytes(file.read_bytes()[:-nbytes])


DAMAGES: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "shard deleted": (lambda t: (t / SHARD).unlink(), [SHARD, "not on disk", INDEX]),
    "shard truncated by one byte": (lambda t: truncate(t / SHARD, 1), [SHARD, "truncated"]),
    "shard cut in half": (lambda t: truncate(t / SHARD, (t / SHARD).stat().st_size // 2), [SHARD, "truncated"]),
    "shard empty": (lambda t: (t / SHARD).write_bytes(b""), [SHARD, "0 bytes"]),
    "shard is garbage": (
        lambda t: (t / SHARD).write_bytes(b"not a tensor" * 99),
        [SHARD, "truncated or no safetensors"],
    ),
    "shard is a web page": (lambda t: (t / SHARD).write_bytes(b"<html>" + b" " * 4096), [SHARD]),
    "header longer than the file": (stretch_header, [SHARD, str(1 << 40)]),
    "key dropped from the shard": (lambda t: edit_shard(t / SHARD, lambda s: s.pop(KEY)), [SHARD, "missing", KEY]),
    "key dropped from the index": (
        lambda t: edit_json(t / INDEX, lambda i: i["weight_map"].pop(KEY)),
        [SHARD, "unexpected", KEY, "does not name"],
    ),
    "key dropped from both": (drop_everywhere, [INDEX, "1 missing parameter", KEY]),
    "key renamed in both": (rename, [INDEX, "missing", KEY]),
    "key added": (lambda t: edit_shard(t / SHARD, lambda s: s.update(extra=s[KEY].clone())), [SHARD, "extra"]),
    "key misshapen": (misshape, [SHARD, KEY, "(47,)", "(48,)"]),
    "key of integers": (make_integer, [SHARD, KEY, "I64"]),
    "index puts a key into another shard": (
        lambda t: edit_json(t / INDEX, lambda i: i["weight_map"].update({KEY: SHARD.replace("00002-", "00001-")})),
        [KEY],
    ),
    "index points outside": (
        lambda t: edit_json(t / INDEX, lambda i: i["weight_map"].update({KEY: f"../vae/{SHARD}"})),
        [INDEX, KEY, "beside it"],
    ),
    "index is no JSON": (lambda t: (t / INDEX).write_text("{"), [INDEX, "JSON"]),
    "index without a map": (lambda t: (t / INDEX).write_text("{}"), [INDEX, "weight_map"]),
    "index of .bin files only": (only_bin_index, ["safetensors", "diffusion_pytorch_model.bin.index.json"]),
    "index deleted": (lambda t: (t / INDEX).unlink(), [INDEX]),
    "config missing": (lambda t: (t / "config.json").unlink(), ["transformer_2/config.json", "missing"]),
    "config without a closing brace": (lambda t: truncate(t / "config.json", 3), ["transformer_2/config.json", "JSON"]),
    "config of more layers": (
        lambda t: edit_json(t / "config.json", lambda c: c.update(num_layers=3)),
        [INDEX, "27 missing parameters", "blocks.2", "24 more"],
    ),
    "config of absurdly many layers": (
        lambda t: edit_json(t / "config.json", lambda c: c.update(num_layers=10**12)),
        ["transformer_2/config.json", "69 tensors"],
    ),
    "config of another type": (
        lambda t: edit_json(t / "config.json", lambda c: c.update(patch_size=2)),
        ["transformer_2/config.json"],
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_to_one_expert_is_named(damage: str, tmp_path: Path) -> None:
    root = tiny_copy(tmp_path)
    spoil, named = DAMAGES[damage]
    spoil(root / "transformer_2")
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(root)
    message = str(caught.value)
    assert all(part in message for part in named), message
    assert "\n" not in message


MISSING = {
    "diffusers": [
        "transformer/config.json",
        "transformer_2",
        "vae",
        "vae/config.json",
        "vae/diffusion_pytorch_model.safetensors",
        "text_encoder",
        "text_encoder/config.json",
        "text_encoder/model-00002-of-00003.safetensors",
        "text_encoder/model.safetensors.index.json",
        "tokenizer",
        "tokenizer/tokenizer.json",
        "tokenizer/tokenizer_config.json",
        "scheduler/scheduler_config.json",
    ],
    "original": [
        "high_noise_model",
        "low_noise_model",
        "low_noise_model/config.json",
        "Wan2.1_VAE.pth",
        "models_t5_umt5-xxl-enc-bf16.pth",
        "google/umt5-xxl",
        "google/umt5-xxl/tokenizer.json",
    ],
}


@pytest.mark.parametrize(("layout", "name"), [(layout, name) for layout in MISSING for name in MISSING[layout]])
def test_a_missing_file_or_folder_is_named(layout: str, name: str, tmp_path: Path) -> None:
    root = tiny_copy(tmp_path, layout=layout)
    (root / name).rename(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=Path(name).name):
        open_checkpoint(root)


@pytest.mark.parametrize("name", ["Wan2.1_VAE.pth", "models_t5_umt5-xxl-enc-bf16.pth"])
@pytest.mark.parametrize("kept", [0.0, 0.5, 0.999])
def test_a_truncated_pth_file_is_named(name: str, kept: float, tmp_path: Path) -> None:
    root = tiny_copy(tmp_path, layout="original")
    content = (root / name).read_bytes()
    (root / name).write_bytes(content[: int(len(content) * kept)])
    with pytest.raises(CheckpointError, match=name):
        open_checkpoint(root)


@pytest.mark.parametrize(
    ("layout", "name", "key"),
    [
        ("diffusers", "vae/diffusion_pytorch_model.safetensors", "decoder.up_blocks.3.resnets.2.conv2.bias"),
        ("diffusers", "text_encoder/model.safetensors", "encoder.block.1.layer.1.DenseReluDense.wo.weight"),
        ("diffusers", "text_encoder/model.safetensors", "shared.weight"),
        ("original", "Wan2.1_VAE.pth", "decoder.upsamples.14.residual.6.bias"),
        ("original", "models_t5_umt5-xxl-enc-bf16.pth", "blocks.1.ffn.fc2.weight"),
        ("original", "models_t5_umt5-xxl-enc-bf16.pth", "token_embedding.weight"),
    ],
)
def test_a_key_missing_from_the_vae_or_the_text_encoder_is_named(
    layout: str, name: str, key: str, tmp_path: Path
) -> None:
    """Before anything loads: the VAE is needed last, after all the work."""
    import torch

    root = tiny_copy(tmp_path, layout=layout, shards=1)
    if layout == "original":
        tensors = torch.load(root / name, weights_only=True)
        del tensors[key]
        torch.save(tensors, root / name)
    else:
        edit_shard(root / name, lambda tensors: tensors.pop(key))
    with pytest.raises(CheckpointError, match=f"{name}: 1 missing parameter: '{key}'"):
        open_checkpoint(root)


def test_no_flipped_bit_in_a_pth_file_gives_a_traceback_when_it_is_opened(tmp_path: Path) -> None:
    root = tiny_copy(tmp_path, layout="original")
    file = root / "models_t5_umt5-xxl-enc-bf16.pth"
    content, randomness = file.read_bytes(), random.Random(16)
    for _ in range(100):
        damaged = bytearray(content)
        place = randomness.choice([randomness.randrange(4000), len(content) - 1 - randomness.randrange(4000)])
        damaged[place] ^= 1 << randomness.randrange(8)
        file.write_bytes(damaged)
        with suppress(CheckpointError):
            open_checkpoint(root)


def test_a_zip_that_torch_did_not_write_is_named(tmp_path: Path) -> None:
    import zipfile

    root = tiny_copy(tmp_path, layout="original")
    with zipfile.ZipFile(root / "Wan2.1_VAE.pth", "w") as archive:
        archive.writestr("readme.txt", "nothing")
    with pytest.raises(CheckpointError, match=r"Wan2\.1_VAE\.pth.*data\.pkl"):
        open_checkpoint(root)


def test_a_key_that_the_reference_ignores_is_no_surprise(tmp_path: Path) -> None:
    root = tiny_copy(tmp_path)
    ignored = "blocks.1.attn2.norm_added_q.weight"
    edit_shard(root / "transformer" / SHARD, lambda tensors: tensors.update({ignored: tensors[KEY].clone()}))
    edit_json(root / "transformer" / INDEX, lambda index: index["weight_map"].update({ignored: SHARD}))
    assert ignored not in open_checkpoint(root).high.tensors


def test_no_flipped_bit_in_a_small_file_or_header_gives_a_traceback(tmp_path: Path) -> None:
    """Whatever the damage, the answer is a checkpoint or a CheckpointError."""
    root = tiny_copy(tmp_path)
    places = [root / "transformer" / SHARD, root / "transformer" / INDEX, root / "transformer" / "config.json"]
    places += [root / "model_index.json", root / "vae" / "config.json", root / "scheduler" / "scheduler_config.json"]
    randomness = random.Random(15)
    outcomes = [_opens_with_flipped_bit(root, randomness.choice(places), randomness) for _ in range(300)]
    assert outcomes.count(False) > 100  # most bits of these files matter


def _opens_with_flipped_bit(root: Path, file: Path, randomness: random.Random) -> bool:
    content = file.read_bytes()
    damaged = bytearray(content)
    damaged[randomness.randrange(min(len(content), 3000))] ^= 1 << randomness.randrange(8)
    file.write_bytes(damaged)
    try:
        open_checkpoint(root)
    except CheckpointError:
        return False
    finally:
        file.write_bytes(content)
    return True


CHECK_WITHOUT_TORCH = """
import sys
from pathlib import Path
from usp.errors import CheckpointError
from usp.models.wan.checkpoint.folder import open_checkpoint, packaged_checkpoint

for folder in map(Path, sys.argv[1:]):
    open_checkpoint(folder)
open_checkpoint(packaged_checkpoint())
try:
    open_checkpoint(Path(sys.argv[1]) / "vae")
except CheckpointError as error:
    print(error)
heavy = {"torch", "numpy", "diffusers", "transformers", "safetensors", "huggingface_hub"} & set(sys.modules)
sys.exit(f"imported {sorted(heavy)}" if heavy else 0)
"""


def test_opening_a_checkpoint_imports_nothing_heavy() -> None:
    folders = [tiny_checkpoint(layout=layout) for layout in ("diffusers", "original")]
    command = [sys.executable, "-c", CHECK_WITHOUT_TORCH, *map(str, folders)]
    finished = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=120)
    assert finished.returncode == 0, finished.stderr
    assert "AutoencoderKLWan" in finished.stdout
