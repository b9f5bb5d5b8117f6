"""Tiny checkpoints for tests, built once per process and set of sizes, and the reference pipeline on them.

tiny_checkpoint(layout="original", experts=1)   shared by all tests of the process: read it, never change it
tiny_copy(folder, shards=3)                     an own copy in `folder`, to be damaged
"""

import json
import shutil
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any

from make_tiny_checkpoint import TinySpec, make_tiny_checkpoint


def tiny_checkpoint(**sizes: Any) -> Path:
    """The folder of a checkpoint with these fields of TinySpec, the others at their defaults."""
    return _built(TinySpec(**sizes))


def tiny_copy(folder: Path, **sizes: Any) -> Path:
    """A copy of `tiny_checkpoint(**sizes)` below `folder`."""
    return Path(shutil.copytree(tiny_checkpoint(**sizes), folder / "checkpoint"))


@cache
def _built(spec: TinySpec) -> Path:
    return make_tiny_checkpoint(Path(mkdtemp(dir=_folder().name)), spec)


@cache
def _folder() -> "TemporaryDirectory[str]":
    return TemporaryDirectory(prefix="usp-tiny-")  # goes with the process


def reference_pipeline(folder: Path) -> Any:
    """`diffusers.WanPipeline` in fp32 from a tiny checkpoint in the Diffusers layout, read without our loader."""
    from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline
    from transformers import AutoTokenizer, UMT5EncoderModel

    index = json.loads((folder / "model_index.json").read_text())
    pipeline = WanPipeline(
        tokenizer=AutoTokenizer.from_pretrained(folder / "tokenizer"),
        text_encoder=UMT5EncoderModel.from_pretrained(folder / "text_encoder", dtype="float32"),
        vae=AutoencoderKLWan.from_pretrained(folder / "vae"),
        scheduler=UniPCMultistepScheduler.from_pretrained(folder / "scheduler"),
        transformer=reference_transformer(folder / "transformer"),
        transformer_2=reference_transformer(folder / "transformer_2") if index["transformer_2"][0] else None,
        boundary_ratio=index["boundary_ratio"],
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def reference_transformer(folder: Path) -> Any:
    """`WanTransformer3DModel` in fp32. Its own from_pretrained asks for one more package to do that."""
    from diffusers import WanTransformer3DModel
    from safetensors.torch import load_file

    module = WanTransformer3DModel.from_config(WanTransformer3DModel.load_config(folder))
    shards = [load_file(file) for file in folder.glob("*.safetensors")]
    module.load_state_dict({name: tensor for shard in shards for name, tensor in shard.items()})
    return module.eval()
