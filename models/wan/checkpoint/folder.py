"""A checkpoint folder of the Diffusers or the original Wan layout: what is in it, checked before anything loads.

    Diffusers   model_index.json, transformer/ and, with two experts, transformer_2/; vae/, text_encoder/,
                tokenizer/, scheduler/
    original    high_noise_model/ and low_noise_model/, or one expert at the root; Wan2.1_VAE.pth,
                models_t5_umt5-xxl-enc-bf16.pth, google/umt5-xxl/

Imports neither torch nor numpy. Used by the command line's checks and by the loader.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from usp.errors import CheckpointError
from usp.models.wan.checkpoint.components import (
    ComponentFiles,
    ExpertFiles,
    Layout,
    check_text_config,
    check_vae_config,
    open_expert,
    open_original_text_encoder,
    open_original_vae,
    open_text_encoder,
    open_vae,
    tokenizer_files,
)
from usp.models.wan.checkpoint.defaults import DEFAULTS_FILE, read_defaults
from usp.models.wan.checkpoint.files import fingerprint, read_json

PIPELINE_FILE = "model_index.json"
SCHEDULER_FILE = "scheduler/scheduler_config.json"
ORIGINAL_EXPERTS = ("high_noise_model", "low_noise_model")
ORIGINAL_VAE = "Wan2.1_VAE.pth"
ORIGINAL_TEXT_ENCODER = "models_t5_umt5-xxl-enc-bf16.pth"
ORIGINAL_TOKENIZER = "google/umt5-xxl"


@dataclass(frozen=True)
class Checkpoint:
    """All files of one checkpoint. With one expert, `high` is it and `low` is None.

    `boundary_ratio` is None for one expert, and where the files have none: the task decides then.
    `scheduler` and `defaults` are the JSON files' settings, {} where there is none.
    """

    root: Path
    layout: Layout
    high: ExpertFiles
    low: ExpertFiles | None
    boundary_ratio: float | None
    scheduler: Mapping[str, Any]
    defaults: Mapping[str, Any]
    vae: ComponentFiles
    text_encoder: ComponentFiles
    tokenizer: Path
    fingerprint: str = ""

    @property
    def files(self) -> tuple[Path, ...]:
        """Every file that has a say in the result."""
        parts = [part for part in (self.high, self.low, self.vae, self.text_encoder) if part]
        settings = [self.root / name for name in (PIPELINE_FILE, SCHEDULER_FILE, DEFAULTS_FILE)]
        return (
            *(file for part in parts for file in part.files),
            *tokenizer_files(self.tokenizer),
            *(file for file in settings if file.is_file()),
        )


def open_checkpoint(path: Path) -> Checkpoint:
    """Find the layout, check every file. Raises CheckpointError naming the file, and the key where one is at fault."""
    if not path.is_dir():
        raise CheckpointError(f"{path}: there is no such folder")
    if (path / PIPELINE_FILE).is_file():
        checkpoint = _open_diffusers(path)
    elif any((path / name).is_dir() for name in ORIGINAL_EXPERTS) or (path / "config.json").is_file():
        checkpoint = _open_original(path)
    else:
        raise CheckpointError(
            f"{path}: no Wan checkpoint, since it has neither {PIPELINE_FILE} (Diffusers layout) nor "
            f"{ORIGINAL_EXPERTS[0]}/ or config.json (original layout)"
        )
    _check_experts_agree(checkpoint)
    return replace(checkpoint, fingerprint=fingerprint(path, checkpoint.files))


def packaged_checkpoint() -> Path:
    """The folder of the small model that comes with this package."""
    return Path(__file__).parents[1] / "packaged"


def _open_diffusers(root: Path) -> Checkpoint:
    index = read_json(root / PIPELINE_FILE)
    _check_pipeline(root / PIPELINE_FILE, index)
    high = open_expert(root / "transformer", layout="diffusers")
    low = open_expert(root / "transformer_2", layout="diffusers") if _has_second_expert(index) else None
    vae = open_vae(root / "vae")
    check_vae_config(vae, latent_channels=high.config.in_channels)
    text_encoder = open_text_encoder(root / "text_encoder")
    check_text_config(text_encoder, text_dim=high.config.text_dim)
    return Checkpoint(
        root=root,
        layout="diffusers",
        high=high,
        low=low,
        boundary_ratio=_boundary_ratio(root / PIPELINE_FILE, index),
        scheduler=_scheduler_config(root / SCHEDULER_FILE),
        defaults=read_defaults(root),
        vae=vae,
        text_encoder=text_encoder,
        tokenizer=root / "tokenizer",
    )


def _open_original(root: Path) -> Checkpoint:
    is_pair = any((root / name).is_dir() for name in ORIGINAL_EXPERTS)
    folders = [root / name for name in ORIGINAL_EXPERTS] if is_pair else [root]
    experts = [open_expert(folder, layout="original") for folder in folders]
    return Checkpoint(
        root=root,
        layout="original",
        high=experts[0],
        low=experts[1] if is_pair else None,
        boundary_ratio=None,
        scheduler={},
        defaults=read_defaults(root),
        vae=open_original_vae(root / ORIGINAL_VAE),
        text_encoder=open_original_text_encoder(root / ORIGINAL_TEXT_ENCODER),
        tokenizer=root / ORIGINAL_TOKENIZER,
    )


def _check_pipeline(file: Path, index: Mapping[str, Any]) -> None:
    kind = index.get("_class_name")
    if kind != "WanPipeline":
        raise CheckpointError(f"{file}: a {kind}; only WanPipeline, which is text-to-video, is supported")
    if index.get("expand_timesteps"):
        raise CheckpointError(f"{file}: expand_timesteps is set, a TI2V-5B model; only T2V models are supported")


def _has_second_expert(index: Mapping[str, Any]) -> bool:
    return index.get("transformer_2") not in (None, [None, None])


def _boundary_ratio(file: Path, index: Mapping[str, Any]) -> float | None:
    """None where the file has none: the task decides then, if there are two experts."""
    ratio = index.get("boundary_ratio")
    if ratio is None:
        return None
    if not _has_second_expert(index):
        raise CheckpointError(f"{file}: boundary_ratio is {ratio!r}, but there is no transformer_2 to change to")
    if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 0 <= ratio <= 1:
        raise CheckpointError(f"{file}: boundary_ratio is {ratio!r}; two experts need a number between 0 and 1")
    return float(ratio)


def _scheduler_config(file: Path) -> dict[str, Any]:
    config = read_json(file)
    if config.get("_class_name") != "UniPCMultistepScheduler":
        raise CheckpointError(f"{file}: a {config.get('_class_name')}; only UniPCMultistepScheduler is supported")
    return config


def _check_experts_agree(checkpoint: Checkpoint) -> None:
    if checkpoint.low is None:
        return
    high, low = checkpoint.high, checkpoint.low
    for field in fields(high.config):
        values = getattr(high.config, field.name), getattr(low.config, field.name)
        if values[0] != values[1]:
            raise CheckpointError(
                f"{checkpoint.root}: {field.name} is {values[0]} in {high.name} and {values[1]} in {low.name}; "
                "the experts of one checkpoint have equal sizes"
            )
