"""The maker of tiny checkpoints: complete, repeatable, and read by the reference libraries themselves."""

import filecmp
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from make_tiny_checkpoint import TinySpec, make_tiny_checkpoint
from tests.tiny import reference_pipeline, tiny_checkpoint
from usp.models.wan.checkpoint.folder import open_checkpoint, packaged_checkpoint
from usp.models.wan.checkpoint.loader import load_transformer

ROOT = Path(__file__).parents[2]


def files_of(folder: Path) -> list[str]:
    return sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file())


@pytest.mark.parametrize("layout", ["diffusers", "original"])
def test_the_same_seed_gives_the_same_bytes(layout: str, tmp_path: Path) -> None:
    spec = TinySpec(layout=layout, defaults=True)
    first, second = (make_tiny_checkpoint(tmp_path / name, spec) for name in "ab")
    names = files_of(first)
    assert names == files_of(second)
    assert filecmp.cmpfiles(first, second, names, shallow=False)[0] == names


def test_another_seed_gives_other_weights() -> None:
    first, second = (open_checkpoint(tiny_checkpoint(seed=seed)).high for seed in (0, 1))
    cpu = torch.device("cpu")
    one, two = (load_transformer(files, device=cpu, dtype=torch.float32).state_dict() for files in (first, second))
    assert not any(torch.equal(one[name], two[name]) for name in one)


def test_no_weight_is_at_a_neutral_value() -> None:
    """Biases, norms and tables must show up in parity tests, so none of them is 0 or 1 throughout."""
    module = load_transformer(open_checkpoint(tiny_checkpoint()).high, device=torch.device("cpu"), dtype=torch.float32)
    for name, parameter in module.named_parameters():
        assert parameter.std() > 0.01, name


@pytest.mark.parametrize("shards", [1, 3, 5])
def test_the_transformer_lies_in_as_many_files_as_asked(shards: int) -> None:
    folder = tiny_checkpoint(shards=shards) / "transformer"
    assert len(list(folder.glob("*.safetensors"))) == shards
    assert (folder / "diffusion_pytorch_model.safetensors.index.json").is_file() == (shards > 1)


def test_the_reference_pipeline_samples_a_sane_clip_from_it() -> None:
    pipeline = reference_pipeline(tiny_checkpoint())
    generator = torch.Generator().manual_seed(0)
    clip = pipeline(
        "a boat", height=48, width=80, num_frames=9, num_inference_steps=4, generator=generator, output_type="pt"
    ).frames
    assert clip.shape == (1, 9, 3, 48, 80)
    assert clip.isfinite().all() and 0.05 < clip.std() < 0.45


def test_sizes_come_from_the_flags(tmp_path: Path) -> None:
    sizes = {"layers": 1, "heads": 6, "head-dim": 8, "ffn": 40, "text-dim": 16, "experts": 1}
    flags = [f"--{name}={value}" for name, value in sizes.items()]
    flags += ["--layout=original", "--dtype=bf16", "--defaults", "--size=32*16"]
    script = ROOT / "scripts" / "make_tiny_checkpoint.py"
    command = [sys.executable, str(script), str(tmp_path / "out"), *flags]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=150, capture_output=True)
    checkpoint = open_checkpoint(tmp_path / "out")
    config = checkpoint.high.config
    assert (config.num_layers, config.num_heads, config.head_dim, config.ffn_dim, config.text_dim) == (1, 6, 8, 40, 16)
    assert {tensor.info.dtype for tensor in checkpoint.high.tensors.values()} == {"BF16"}
    assert checkpoint.low is None and checkpoint.defaults["size"] == "32*16"


def test_the_packaged_model_is_what_its_command_makes(tmp_path: Path) -> None:
    """Weights and settings alike; configs of libraries carry version numbers and may differ."""
    spec = TinySpec(dtype="bf16", shards=2, defaults=True, size="128*128", frames=17, steps=8)
    made, packaged = make_tiny_checkpoint(tmp_path, spec), packaged_checkpoint()
    assert set(files_of(packaged)) - set(files_of(made)) == {"README.md"}
    compared = [
        name for name in files_of(made) if name.endswith((".safetensors", "usp_defaults.json", "tokenizer.json"))
    ]
    assert filecmp.cmpfiles(made, packaged, compared, shallow=False)[0] == compared


def test_an_impossible_checkpoint_is_refused() -> None:
    with pytest.raises(ValueError, match="layout none"):
        TinySpec(layout="none")
    with pytest.raises(ValueError, match="text_dim is 30"):
        TinySpec(text_dim=30)
