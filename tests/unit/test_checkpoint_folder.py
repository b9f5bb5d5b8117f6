"""Layouts, model kinds, settings, fingerprints and names of checkpoints."""

import json
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import tiny_checkpoint, tiny_copy
from usp.errors import CheckpointError, UserError
from usp.models.wan.checkpoint.defaults import KEYS
from usp.models.wan.checkpoint.folder import open_checkpoint, packaged_checkpoint
from usp.models.wan.checkpoint.hub import resolve_checkpoint

LAYOUTS = ("diffusers", "original")


def edit(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


@pytest.mark.parametrize("experts", [1, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_checkpoint_is_described_alike_in_both_layouts(layout: str, experts: int) -> None:
    checkpoint = open_checkpoint(tiny_checkpoint(layout=layout, experts=experts))
    assert checkpoint.layout == layout
    assert (checkpoint.low is not None) == (experts == 2)
    assert checkpoint.high.tensors.keys() == checkpoint.high.config.parameter_shapes().keys()
    assert (checkpoint.high.config.num_heads, checkpoint.high.config.head_dim) == (4, 12)
    assert checkpoint.boundary_ratio == (0.875 if layout == "diffusers" and experts == 2 else None)
    assert checkpoint.scheduler.get("flow_shift") == (3.0 if layout == "diffusers" else None)
    assert checkpoint.defaults == {}


def test_high_and_low_are_not_exchanged() -> None:
    diffusers, original = (open_checkpoint(tiny_checkpoint(layout=layout)) for layout in LAYOUTS)
    assert diffusers.low is not None and original.low is not None
    assert (diffusers.high.name, diffusers.low.name) == ("transformer", "transformer_2")
    assert (original.high.name, original.low.name) == ("high_noise_model", "low_noise_model")


def test_the_original_layout_names_keys_as_its_files_do(tmp_path: Path) -> None:
    root = tiny_copy(tmp_path, layout="original")
    edit(root / "low_noise_model" / "config.json", ffn_dim=80)
    with pytest.raises(CheckpointError, match=r"low_noise_model.*'blocks\.0\.ffn\.0\.weight'.*\(96, 48\).*\(80, 48\)"):
        open_checkpoint(root)


# Kinds of models that are not supported

REFUSED = {
    "a pipeline for images": (
        "model_index.json",
        {"_class_name": "WanImageToVideoPipeline"},
        "WanImageToVideoPipeline",
    ),
    "TI2V-5B": ("model_index.json", {"expand_timesteps": True}, "TI2V-5B"),
    "a boundary in timesteps": ("model_index.json", {"boundary_ratio": 875}, "boundary_ratio is 875"),
    "a boundary in words": ("model_index.json", {"boundary_ratio": "0.875"}, "boundary_ratio is '0.875'"),
    "a boundary for one expert": ("model_index.json", {"transformer_2": [None, None]}, "no transformer_2"),
    "an image transformer": ("transformer/config.json", {"image_dim": 1280}, "image-to-video"),
    "another transformer": ("transformer/config.json", {"_class_name": "WanVACETransformer3DModel"}, "WanVACE"),
    "36 channels in": ("transformer_2/config.json", {"in_channels": 36}, "36 channels in and 16 out"),
    "the VAE of TI2V-5B": ("vae/config.json", {"is_residual": True, "patch_size": 2}, "TI2V-5B"),
    "a VAE of 48 channels": ("vae/config.json", {"z_dim": 48}, "z_dim is 48.*16 channels"),
    "a T5 encoder": ("text_encoder/config.json", {"model_type": "t5"}, "'t5'"),
    "a wider text encoder": ("text_encoder/config.json", {"d_model": 64}, "d_model is 64.*text_dim is 32"),
    "another scheduler": (
        "scheduler/scheduler_config.json",
        {"_class_name": "EulerDiscreteScheduler"},
        "EulerDiscrete",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_an_unsupported_kind_is_refused_by_name(kind: str, tmp_path: Path) -> None:
    name, values, message = REFUSED[kind]
    root = tiny_copy(tmp_path)
    edit(root / name, **values)
    with pytest.raises(CheckpointError, match=f"{name}.*{message}"):
        open_checkpoint(root)


@pytest.mark.parametrize("model_type", ["i2v", "ti2v"])
def test_an_original_model_of_another_kind_is_refused_by_name(model_type: str, tmp_path: Path) -> None:
    root = tiny_copy(tmp_path, layout="original", experts=1)
    edit(root / "config.json", model_type=model_type)
    with pytest.raises(CheckpointError, match=rf"config\.json.*'{model_type}'"):
        open_checkpoint(root)


def test_experts_of_different_sizes_are_refused(tmp_path: Path) -> None:
    root = tiny_copy(tmp_path)
    shutil.rmtree(root / "transformer_2")
    shutil.copytree(tiny_checkpoint(layers=1) / "transformer", root / "transformer_2")
    with pytest.raises(CheckpointError, match="num_layers is 2 in transformer and 1 in transformer_2"):
        open_checkpoint(root)


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"model_index\.json.*high_noise_model"):
        open_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="no such folder"):
        open_checkpoint(tmp_path / "nothing")


# usp_defaults.json


def test_defaults_are_read_as_they_are() -> None:
    defaults = open_checkpoint(tiny_checkpoint(defaults=True)).defaults
    assert defaults["size"] == "80*48" and defaults["frames"] == 9 and defaults["guidance_low"] == 3.0
    assert defaults.keys() < KEYS.keys()


BAD_DEFAULTS = [
    ("step", 4, "unknown key 'step'"),
    ("steps", "4", "steps is '4'; expected a positive integer"),
    ("steps", 4.0, "steps is 4.0"),
    ("steps", True, "steps is True"),
    ("frames", 0, "frames is 0"),
    ("shift", None, "shift is None; expected a number"),
    ("shift", float("nan"), "shift is nan"),
    ("guidance_high", [4.0], "guidance_high is"),
    ("size", "80x48", r"size is '80x48'; expected a string 'width\*height'"),
    ("size", "80*", r"size is '80\*'"),
    ("negative_prompt", None, "negative_prompt is None; expected a string"),
]


@pytest.mark.parametrize(("key", "value", "message"), BAD_DEFAULTS)
def test_a_bad_default_is_named(key: str, value: Any, message: str, tmp_path: Path) -> None:
    root = tiny_copy(tmp_path)
    (root / "usp_defaults.json").write_text(json.dumps({key: value}))
    with pytest.raises(CheckpointError, match=rf"usp_defaults\.json: {message}"):
        open_checkpoint(root)


# Fingerprint


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_fingerprint_is_that_of_the_files_and_not_of_the_place(layout: str, tmp_path: Path) -> None:
    first = open_checkpoint(tiny_checkpoint(layout=layout)).fingerprint
    assert len(first) == 64
    assert open_checkpoint(tiny_copy(tmp_path, layout=layout)).fingerprint == first


def test_each_change_of_a_checkpoint_changes_its_fingerprint(tmp_path: Path) -> None:
    variants = [
        {},
        {"layout": "original"},
        {"experts": 1},
        {"layers": 1},
        {"ffn": 80},
        {"dtype": "bf16"},
        {"dtype": "fp16"},
        {"shards": 2},
        {"boundary": 0.9},
        {"vae_base_dim": 4},
        {"text_layers": 1},
        {"defaults": True},
        {"layout": "original", "seed": 1},  # of .pth files even the values count, through their checksums
    ]
    prints = [open_checkpoint(tiny_checkpoint(**sizes)).fingerprint for sizes in variants]
    root = tiny_copy(tmp_path)
    for name in ("scheduler/scheduler_config.json", "tokenizer/tokenizer_config.json", "transformer/config.json"):
        edit(root / name, comment=name)
        prints.append(open_checkpoint(root).fingerprint)
    assert len(set(prints)) == len(prints)


# Names


def test_a_local_folder_wins_over_a_hub_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "model").mkdir(parents=True)
    assert resolve_checkpoint("org/model") == Path("org/model")


def test_what_can_be_no_hub_name_is_refused_as_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="is a file"):
        resolve_checkpoint(str(tmp_path / "file"))
    for name in ("/nowhere/at/all", "./here", "nothing", "a/b/c", "", "~nobody/x", "x" * 5000, "a\0b"):
        with pytest.raises(UserError, match="there is no folder"):
            resolve_checkpoint(name)


def in_subprocess(name: str, *, env: dict[str, str], before: str = "") -> "subprocess.CompletedProcess[str]":
    lines = ["from usp.models.wan.checkpoint import hub", before, f"print(hub.resolve_checkpoint({name!r}))"]
    command = [sys.executable, "-c", "\n".join(lines)]
    folder = Path(__file__).parents[2]
    return subprocess.run(command, cwd=folder, env={"PATH": "", **env}, capture_output=True, text=True, timeout=120)


def test_without_network_the_message_says_what_to_download(tmp_path: Path) -> None:
    env = {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    finished = in_subprocess("Wan-AI/Wan2.2-T2V-A14B-Diffusers", env=env)
    message = finished.stderr.strip().splitlines()[-1]
    assert finished.returncode != 0
    assert "hf download Wan-AI/Wan2.2-T2V-A14B-Diffusers --local-dir Wan2.2-T2V-A14B-Diffusers" in message
    assert "offline" in message.lower()


def test_without_network_a_cached_download_is_found(tmp_path: Path) -> None:
    snapshot = tmp_path / "hub" / "models--org--model" / "snapshots" / ("a" * 40)
    shutil.copytree(tiny_checkpoint(), snapshot)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("a" * 40)
    finished = in_subprocess("org/model", env={"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"})
    assert finished.stdout.strip() == str(snapshot), finished.stderr


def test_a_hub_that_does_not_answer_is_given_up_soon(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        env = {"HF_HOME": str(tmp_path), "HF_ENDPOINT": f"http://127.0.0.1:{silent.getsockname()[1]}"}
        began = time.monotonic()
        finished = in_subprocess("org/model", env=env, before="hub.ANSWER_SECONDS = 0.5")
    assert finished.returncode != 0 and "hf download org/model" in finished.stderr
    assert time.monotonic() - began < 10


# The packaged model


def test_the_packaged_model_is_whole_small_and_says_how_to_sample_it() -> None:
    checkpoint = open_checkpoint(packaged_checkpoint())
    assert checkpoint.low is not None and checkpoint.boundary_ratio == 0.875
    assert {"size", "frames", "fps", "steps", "shift", "guidance_high", "guidance_low"} <= checkpoint.defaults.keys()
    assert sum(file.stat().st_size for file in checkpoint.root.rglob("*") if file.is_file()) < 1_500_000
    assert (checkpoint.root / "README.md").is_file()
