"""The parts of a checkpoint: experts, VAE, text encoder, tokenizer. Each is opened once, checked and described.

Imports no torch. Names are checked in full; shapes of the VAE and the text encoder are checked when they load.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from usp.errors import CheckpointError
from usp.models.wan.checkpoint.archive import archived_names
from usp.models.wan.checkpoint.files import read_json, require_file, require_folder
from usp.models.wan.checkpoint.names import EMBEDDING, TIED_EMBEDDING, text_encoder_names, transformer_names, vae_names
from usp.models.wan.checkpoint.weights import StoredTensor, find_weights, match_parameters, refuse
from usp.models.wan.config import TransformerConfig

Layout = Literal["diffusers", "original"]
TRANSFORMER_STEM = "diffusion_pytorch_model"
TRANSFORMER_CLASS: Mapping[Layout, str] = {"diffusers": "WanTransformer3DModel", "original": "WanModel"}
TOKENIZER_FILES = ("tokenizer_config.json", "tokenizer.json")  # spiece.model alone would need one more package


@dataclass(frozen=True)
class ExpertFiles:
    """One transformer: its sizes, and where each parameter (by our name) lies."""

    name: str
    config: TransformerConfig
    tensors: Mapping[str, StoredTensor]
    files: tuple[Path, ...]

    @property
    def folder(self) -> Path:
        return self.files[0].parent


@dataclass(frozen=True)
class ComponentFiles:
    """VAE or text encoder. A `.pth` file is the only one of `files`; `config` and `tensors` are empty then."""

    name: str
    config: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]
    files: tuple[Path, ...]


def open_expert(folder: Path, *, layout: Layout) -> ExpertFiles:
    """A transformer folder of either layout, with every parameter found at its right shape."""
    config_file = require_folder(folder) / "config.json"
    config = _transformer_config(config_file, layout)
    weights = find_weights(folder, TRANSFORMER_STEM)
    if config.num_layers > len(weights.tensors):
        raise CheckpointError(
            f"{config_file}: {config.num_layers} layers, but there are only {len(weights.tensors)} tensors"
        )
    shapes = config.parameter_shapes()
    names = transformer_names(config) if layout == "original" else {name: name for name in shapes}
    tensors = match_parameters(weights, shapes, names)
    return ExpertFiles(folder.name, config, tensors, (config_file, *weights.files))


def open_vae(folder: Path) -> ComponentFiles:
    """The VAE folder of the Diffusers layout."""
    vae = _open_component(folder, TRANSFORMER_STEM)
    _check_names(vae.files[1], vae.tensors, vae_names())
    return vae


def open_text_encoder(folder: Path) -> ComponentFiles:
    """The text encoder folder of the Diffusers layout."""
    encoder = _open_component(folder, "model")
    num_layers = encoder.config.get("num_layers")
    if type(num_layers) is not int or not 1 <= num_layers <= len(encoder.tensors):
        raise CheckpointError(
            f"{encoder.files[0]}: num_layers is {num_layers!r}, but there are {len(encoder.tensors)} tensors"
        )
    found = {EMBEDDING if name == TIED_EMBEDDING else name for name in encoder.tensors}
    _check_names(encoder.files[1], found, text_encoder_names(num_layers))
    return encoder


def open_original_vae(file: Path) -> ComponentFiles:
    """The VAE file of the original layout."""
    refuse(file, "missing", sorted(set(vae_names().values()) - archived_names(require_file(file))))
    return ComponentFiles("vae", {}, {}, (file,))


def open_original_text_encoder(file: Path) -> ComponentFiles:
    """The text encoder file of the original layout; how many layers it has follows from its names."""
    found = archived_names(require_file(file))
    num_layers = max(1, sum(name.startswith("blocks.") and name.endswith(".norm1.weight") for name in found))
    refuse(file, "missing", sorted(set(text_encoder_names(num_layers).values()) - found))
    return ComponentFiles("text_encoder", {}, {}, (file,))


def tokenizer_files(folder: Path) -> tuple[Path, ...]:
    """The files that make the tokenizer."""
    return tuple(require_file(require_folder(folder) / name) for name in TOKENIZER_FILES)


def check_vae_config(vae: ComponentFiles, *, latent_channels: int) -> None:
    """Raise CheckpointError unless this is the Wan2.1 VAE, of the channels that the transformer works on."""
    file, config = vae.files[0], vae.config
    if config.get("is_residual") or config.get("patch_size") is not None:
        raise CheckpointError(f"{file}: the VAE of TI2V-5B (16 x 16 pixels a cell); only the Wan2.1 VAE is supported")
    channels = config.get("z_dim", 16)
    if channels != latent_channels:
        raise CheckpointError(f"{file}: z_dim is {channels!r}, but the transformer works on {latent_channels} channels")


def check_text_config(text_encoder: ComponentFiles, *, text_dim: int) -> None:
    """Raise CheckpointError unless this is a UMT5 encoder as wide as the transformer expects."""
    file, config = text_encoder.files[0], text_encoder.config
    if config.get("model_type") != "umt5":
        raise CheckpointError(f"{file}: model_type is {config.get('model_type')!r}; only 'umt5' is supported")
    if config.get("d_model") != text_dim:
        raise CheckpointError(
            f"{file}: d_model is {config.get('d_model')!r}, but the transformer's text_dim is {text_dim}"
        )


def _open_component(folder: Path, stem: str) -> ComponentFiles:
    config_file = require_folder(folder) / "config.json"
    config = read_json(config_file)
    weights = find_weights(folder, stem)
    return ComponentFiles(folder.name, config, weights.tensors, (config_file, *weights.files))


def _check_names(source: Path, found: Iterable[str], wanted: Iterable[str]) -> None:
    refuse(source, "missing", sorted(set(wanted) - set(found)))
    refuse(source, "unexpected", sorted(set(found) - set(wanted)))


def _transformer_config(file: Path, layout: Layout) -> TransformerConfig:
    values = read_json(file)
    kind = values.get("_class_name", TRANSFORMER_CLASS[layout])
    if kind != TRANSFORMER_CLASS[layout]:
        raise CheckpointError(f"{file}: a {kind}, but a {TRANSFORMER_CLASS[layout]} is needed in this place")
    parse = TransformerConfig.from_original if layout == "original" else TransformerConfig.from_diffusers
    try:
        return parse(values, source=str(file))
    except (TypeError, ArithmeticError) as error:  # a value of another JSON type than it should have
        raise CheckpointError(f"{file}: a value has the wrong type or size ({error})") from error
