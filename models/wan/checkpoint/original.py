"""The `.pth` files of the original Wan layout: weights alone, their sizes, and their names in the library's terms."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from usp.errors import CheckpointError
from usp.models.wan.checkpoint.fill import NamedTensors, blamed_on
from usp.models.wan.checkpoint.names import text_encoder_names, vae_names
from usp.models.wan.checkpoint.weights import refuse

LATENT_CHANNELS = 16  # of the Wan2.1 VAE, the only one whose latent statistics are known without a config file
FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def open_vae(file: Path) -> tuple[dict[str, Any], NamedTensors]:
    """Config and (library name, tensor) pairs of `Wan2.1_VAE.pth`."""
    stored = read_torch_archive(file)
    return vae_config(file, stored), renamed(file, stored, vae_names())


def open_text_encoder(file: Path) -> tuple[dict[str, Any], NamedTensors]:
    """Config and (library name, tensor) pairs of the umT5 encoder's file."""
    stored = read_torch_archive(file)
    config = text_encoder_config(file, stored)
    return config, renamed(file, stored, text_encoder_names(config["num_layers"]))


def read_torch_archive(file: Path) -> dict[str, torch.Tensor]:
    """A state dict, mapped and not read. Only tensors are unpickled: no code that a file brings along is run."""
    with blamed_on(file, "reading it as a file of weights alone"):
        stored = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    if not isinstance(stored, dict):
        raise CheckpointError(f"{file}: holds a {type(stored).__name__}, but a table of named weights is needed")
    for name, tensor in stored.items():
        if not isinstance(tensor, torch.Tensor) or tensor.dtype not in FLOAT_DTYPES:
            kind = getattr(tensor, "dtype", type(tensor).__name__)
            raise CheckpointError(
                f"{file}: {name!r} is {kind}; only float32, bfloat16 and float16 weights are supported"
            )
    return stored


def renamed(file: Path, stored: Mapping[str, torch.Tensor], names: Mapping[str, str]) -> NamedTensors:
    """(our name, tensor) of every original name, which must be exactly those of `names`."""
    refuse(file, "missing", [original for original in names.values() if original not in stored])
    refuse(file, "unexpected", sorted(stored.keys() - names.values()))
    return ((name, stored[original]) for name, original in names.items())


def vae_config(file: Path, stored: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    shapes = _shapes(file, stored, "encoder.conv1.weight", "decoder.head.2.weight", "conv2.weight")
    (base_dim, _), (_, decoder_base_dim), (channels, _) = (shape[:2] for shape in shapes)
    if channels != LATENT_CHANNELS:
        raise CheckpointError(f"{file}: a VAE of {channels} latent channels; only the Wan2.1 VAE, of 16, is supported")
    return {"base_dim": base_dim, "decoder_base_dim": decoder_base_dim, "z_dim": channels}


def text_encoder_config(file: Path, stored: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    block = "blocks.0."
    embedding, query, up, bias = _shapes(
        file,
        stored,
        "token_embedding.weight",
        block + "attn.q.weight",
        block + "ffn.fc1.weight",
        block + "pos_embedding.embedding.weight",
    )
    num_buckets, num_heads = bias
    return {
        "vocab_size": embedding[0],
        "d_model": embedding[1],
        "d_kv": query[0] // num_heads,
        "d_ff": up[0],
        "num_heads": num_heads,
        "num_layers": sum(name.endswith(".norm1.weight") for name in stored),
        "relative_attention_num_buckets": num_buckets,
        "feed_forward_proj": "gated-gelu",
    }


def _shapes(file: Path, stored: Mapping[str, torch.Tensor], *names: str) -> list[tuple[int, ...]]:
    """Shapes of tensors that have at least two axes."""
    refuse(file, "missing", [name for name in names if name not in stored])
    refuse(file, "misshapen", [name for name in names if stored[name].dim() < 2])
    return [tuple(stored[name].shape) for name in names]
