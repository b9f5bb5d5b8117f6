"""Write a small Wan checkpoint with random weights: the real file formats, complete, in either layout.

    python scripts/make_tiny_checkpoint.py OUT --layout diffusers --experts 2

The whole program runs from such a folder: tokenizer, text encoder, both experts, VAE. The seed fixes every byte of the
weight files; both layouts of one seed hold the same weights. Its videos show noise.
"""

import argparse
import json
import math
import sys
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tiny_tokenizer import write_tokenizer
from usp.models.wan.checkpoint.names import text_encoder_names, transformer_names, vae_names
from usp.models.wan.config import TransformerConfig

if TYPE_CHECKING:
    import torch

    Tensors = dict[str, torch.Tensor]

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
TEXT_HEADS = 4
LATENT_CHANNELS = 16


@dataclass(frozen=True)
class TinySpec:
    """Sizes of a small checkpoint. One expert has no boundary; `defaults` also writes usp_defaults.json."""

    layout: str = "diffusers"
    experts: int = 2
    layers: int = 2
    heads: int = 4
    head_dim: int = 12
    ffn: int = 96
    text_dim: int = 32
    text_layers: int = 2
    vae_base_dim: int = 3
    shards: int = 3
    dtype: str = "fp32"
    boundary: float = 0.875
    seed: int = 0
    defaults: bool = False
    size: str = "80*48"
    frames: int = 9
    steps: int = 4

    def __post_init__(self) -> None:
        if self.layout not in ("diffusers", "original") or self.experts not in (1, 2) or self.dtype not in DTYPES:
            raise ValueError(f"no such checkpoint: layout {self.layout}, {self.experts} experts, dtype {self.dtype}")
        if self.text_dim % TEXT_HEADS:
            raise ValueError(f"text_dim is {self.text_dim}; it must be a multiple of {TEXT_HEADS}")

    @property
    def transformer(self) -> TransformerConfig:
        return TransformerConfig(
            num_layers=self.layers,
            num_heads=self.heads,
            head_dim=self.head_dim,
            ffn_dim=self.ffn,
            text_dim=self.text_dim,
        )


def make_tiny_checkpoint(out: Path, spec: TinySpec) -> Path:
    """Write the checkpoint into the folder `out` and return it."""
    out.mkdir(parents=True, exist_ok=True)
    if spec.layout == "diffusers":
        _write_diffusers(out, spec)
    else:
        _write_original(out, spec)
    if spec.defaults:
        write_json(out / "usp_defaults.json", _sampling_defaults(spec))
    return out


def _sampling_defaults(spec: TinySpec) -> dict[str, Any]:
    clip = {"size": spec.size, "frames": spec.frames, "fps": 16, "steps": spec.steps}
    return clip | {"shift": 3.0, "guidance_high": 4.0, "guidance_low": 3.0, "negative_prompt": ""}


# Diffusers layout: the libraries write the configs, and their modules say which weights there are.


def _write_diffusers(out: Path, spec: TinySpec) -> None:
    from diffusers import UniPCMultistepScheduler

    names = ("transformer", "transformer_2")[: spec.experts]
    for name in names:
        module = transformer_module(spec)
        module.save_config(out / name)
        write_weights(out / name, "diffusion_pytorch_model", expert_weights(spec, name), shards=spec.shards)
    vae, text_encoder = vae_module(spec), text_encoder_module(spec, write_tokenizer(out / "tokenizer"))
    vae.save_config(out / "vae")
    write_weights(out / "vae", "diffusion_pytorch_model", vae_weights(spec), shards=1)
    text_encoder.config.save_pretrained(out / "text_encoder")
    write_weights(out / "text_encoder", "model", text_weights(spec, text_encoder), shards=spec.shards)
    scheduler = UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0, num_train_timesteps=1000
    )
    scheduler.save_pretrained(out / "scheduler")
    write_json(out / "model_index.json", _pipeline_index(spec))


def _pipeline_index(spec: TinySpec) -> dict[str, Any]:
    import diffusers

    expert = ["diffusers", "WanTransformer3DModel"]
    return {
        "_class_name": "WanPipeline",
        "_diffusers_version": diffusers.__version__,
        "boundary_ratio": spec.boundary if spec.experts == 2 else None,
        "expand_timesteps": False,
        "scheduler": ["diffusers", "UniPCMultistepScheduler"],
        "text_encoder": ["transformers", "UMT5EncoderModel"],
        "tokenizer": ["transformers", "PreTrainedTokenizerFast"],
        "transformer": expert,
        "transformer_2": expert if spec.experts == 2 else [None, None],
        "vae": ["diffusers", "AutoencoderKLWan"],
    }


# Original layout: the same weights under their original names.


def _write_original(out: Path, spec: TinySpec) -> None:
    import torch

    folders = [out] if spec.experts == 1 else [out / "high_noise_model", out / "low_noise_model"]
    for name, folder in zip(("transformer", "transformer_2"), folders, strict=False):
        weights = renamed(expert_weights(spec, name), transformer_names(spec.transformer))
        write_weights(folder, "diffusion_pytorch_model", weights, shards=spec.shards)
        write_json(folder / "config.json", _original_config(spec))
    text_encoder = text_encoder_module(spec, write_tokenizer(out / "google" / "umt5-xxl"))
    text = renamed(text_weights(spec, text_encoder), text_encoder_names(spec.text_layers))
    torch.save(text, out / "models_t5_umt5-xxl-enc-bf16.pth")
    torch.save(renamed(vae_weights(spec), vae_names()), out / "Wan2.1_VAE.pth")


def _original_config(spec: TinySpec) -> dict[str, Any]:
    config = spec.transformer
    return {
        "_class_name": "WanModel",
        "model_type": "t2v",
        "dim": config.dim,
        "eps": config.eps,
        "ffn_dim": config.ffn_dim,
        "freq_dim": config.freq_dim,
        "in_dim": config.in_channels,
        "num_heads": config.num_heads,
        "num_layers": config.num_layers,
        "out_dim": config.out_channels,
        "text_dim": config.text_dim,
        "text_len": 512,
    }


def renamed(tensors: "Tensors", names: Mapping[str, str]) -> "Tensors":
    return {names[name]: tensor for name, tensor in tensors.items()}


# The reference libraries' modules, without memory: they know configs, names and shapes.


def transformer_module(spec: TinySpec) -> Any:
    import torch
    from diffusers import WanTransformer3DModel

    with torch.device("meta"):
        return WanTransformer3DModel(
            num_layers=spec.layers,
            num_attention_heads=spec.heads,
            attention_head_dim=spec.head_dim,
            in_channels=LATENT_CHANNELS,
            out_channels=LATENT_CHANNELS,
            ffn_dim=spec.ffn,
            text_dim=spec.text_dim,
        )


def vae_module(spec: TinySpec) -> Any:
    import torch
    from diffusers import AutoencoderKLWan

    with torch.device("meta"):
        return AutoencoderKLWan(base_dim=spec.vae_base_dim, z_dim=LATENT_CHANNELS)


def text_encoder_module(spec: TinySpec, vocab_size: int) -> Any:
    import torch
    from transformers import UMT5Config, UMT5EncoderModel

    config = UMT5Config(
        vocab_size=vocab_size,
        d_model=spec.text_dim,
        d_kv=spec.text_dim // TEXT_HEADS,
        d_ff=2 * spec.text_dim,
        num_layers=spec.text_layers,
        num_heads=TEXT_HEADS,
    )
    with torch.device("meta"):
        return UMT5EncoderModel(config)


# Random weights. Every tensor has its own seed, so it depends on its name alone and not on what is drawn before it.


def expert_weights(spec: TinySpec, name: str) -> "Tensors":
    return _random_weights(transformer_module(spec).state_dict(), spec, name)


def vae_weights(spec: TinySpec) -> "Tensors":
    return _random_weights(vae_module(spec).state_dict(), spec, "vae")


def text_weights(spec: TinySpec, module: Any) -> "Tensors":
    shapes = module.state_dict()
    del shapes["encoder.embed_tokens.weight"]  # another name of shared.weight
    return _random_weights(shapes, spec, "text_encoder")


def _random_weights(like: Mapping[str, "torch.Tensor"], spec: TinySpec, component: str) -> "Tensors":
    import torch

    weights = {}
    for name, tensor in like.items():
        generator = torch.Generator().manual_seed(zlib.crc32(f"{spec.seed} {component} {name}".encode()))
        noise = torch.randn(tuple(tensor.shape), generator=generator)
        weights[name] = _scaled(name, noise).to(getattr(torch, DTYPES[spec.dtype]))
    return weights


def _scaled(name: str, noise: "torch.Tensor") -> "torch.Tensor":
    """Noise at a scale that keeps activations near one, and nothing at its neutral value, so that every part counts."""
    if name.endswith("bias"):
        return 0.1 * noise
    if "table" in name or "relative_attention_bias" in name:
        return 0.3 * noise
    if "norm" in name:
        return 1.0 + 0.1 * noise
    if name == "shared.weight":
        return noise
    scaled = noise / math.sqrt(math.prod(noise.shape[1:]))
    return (
        scaled / math.sqrt(noise.shape[0] / TEXT_HEADS) if "SelfAttention.q" in name else scaled
    )  # T5 scales no scores


# Files


def write_weights(folder: Path, stem: str, tensors: "Tensors", *, shards: int) -> None:
    """One safetensors file, or `shards` of them with an index, as the libraries name them."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    names, weight_map = sorted(tensors), dict[str, str]()
    for shard in range(shards):
        file = f"{stem}.safetensors" if shards == 1 else f"{stem}-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = names[shard * len(names) // shards : (shard + 1) * len(names) // shards]
        save_file({name: tensors[name] for name in part}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    if shards > 1:
        total_size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
        write_json(folder / f"{stem}.safetensors.index.json", index)


def write_json(file: Path, value: Any) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the folder to write")
    choices: dict[str, list[Any]] = {"layout": ["diffusers", "original"], "experts": [1, 2], "dtype": list(DTYPES)}
    for field in fields(TinySpec):
        flag = "--" + field.name.replace("_", "-")
        if field.default is False:
            parser.add_argument(flag, action="store_true")
        else:
            parser.add_argument(flag, type=type(field.default), default=field.default, choices=choices.get(field.name))
    flags = vars(parser.parse_args())
    out = make_tiny_checkpoint(flags.pop("out"), TinySpec(**flags))
    print(out)


if __name__ == "__main__":
    main()
