"""The trained parts as a Diffusers folder in 16 bits: what the package ships and both loaders read.

Weights are fp16: none of them is large, and it keeps three bits more than bf16.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from scripts.train_small.settings import LATENT_CHANNELS, RECORD, SamplingSettings, Settings
from scripts.train_small.text import trained_text
from scripts.train_small.tokens import write_small_tokenizer
from scripts.train_small.vae import trained_vae
from scripts.train_small.world import FRAMES, SIDE

MODEL_CARD = Path(__file__).parents[2] / "docs" / "model-card.md"
LIMIT_BYTES = 25_000_000
EXPERTS = {"high": "transformer", "low": "transformer_2"}
TIED_EMBEDDING = "encoder.embed_tokens.weight"  # another name of shared.weight
FPS = 8


def pack(folder: Path, settings: Settings, report: Mapping[str, Any]) -> Path:
    """Write `<folder>/model` from the stages' weights and return it. Raises ValueError if it is too large."""
    out = folder / "model"
    for name, part in EXPERTS.items():
        _write_expert(out / part, torch.load(folder / f"{name}_weights.pt", map_location="cpu"), settings)
    _write_vae(out / "vae", folder, settings)
    _write_text_encoder(out, folder, settings)
    _write_scheduler(out / "scheduler", settings.sampling)
    _write_json(out / "model_index.json", _index(settings.sampling))
    _write_json(out / "usp_defaults.json", _defaults(settings.sampling))
    shutil.copy(MODEL_CARD, out / "README.md")
    _write_json(out / RECORD, dict(report))
    nbytes = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
    if nbytes > LIMIT_BYTES:
        raise ValueError(f"{out} holds {nbytes} bytes; the package takes at most {LIMIT_BYTES}")
    print(f"{out}: {nbytes / 1e6:.1f} MB")
    return out


def _write_expert(folder: Path, weights: Mapping[str, torch.Tensor], settings: Settings) -> None:
    from diffusers import WanTransformer3DModel

    config = settings.transformer
    with torch.device("meta"):
        theirs = WanTransformer3DModel(
            num_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            attention_head_dim=config.head_dim,
            in_channels=LATENT_CHANNELS,
            out_channels=LATENT_CHANNELS,
            ffn_dim=config.ffn_dim,
            text_dim=config.text_dim,
        )
    theirs.save_config(folder)
    _write_weights(folder / "diffusion_pytorch_model.safetensors", weights)


def _write_vae(out: Path, folder: Path, settings: Settings) -> None:
    vae, mean, deviation = trained_vae(folder, settings.vae, torch.device("cpu"))
    for name, values in (("latents_mean", mean), ("latents_std", deviation)):
        vae.register_to_config(**{name: [round(value, 6) for value in values.tolist()]})
    vae.save_config(out)
    _write_weights(out / "diffusion_pytorch_model.safetensors", vae.state_dict())


def _write_text_encoder(out: Path, folder: Path, settings: Settings) -> None:
    _, encoder = trained_text(folder, settings.text, torch.device("cpu"))
    encoder.config.save_pretrained(out / "text_encoder")
    weights = {name: one for name, one in encoder.state_dict().items() if name != TIED_EMBEDDING}
    _write_weights(out / "text_encoder" / "model.safetensors", weights)
    write_small_tokenizer(out / "tokenizer")


def _write_scheduler(folder: Path, sampling: SamplingSettings) -> None:
    from diffusers import UniPCMultistepScheduler

    UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=sampling.shift, num_train_timesteps=1000
    ).save_pretrained(folder)


def _index(sampling: SamplingSettings) -> dict[str, Any]:
    import diffusers

    expert = ["diffusers", "WanTransformer3DModel"]
    return {
        "_class_name": "WanPipeline",
        "_diffusers_version": diffusers.__version__,
        "boundary_ratio": sampling.boundary,
        "expand_timesteps": False,
        "scheduler": ["diffusers", "UniPCMultistepScheduler"],
        "text_encoder": ["transformers", "UMT5EncoderModel"],
        "tokenizer": ["transformers", "PreTrainedTokenizerFast"],
        "transformer": expert,
        "transformer_2": expert,
        "vae": ["diffusers", "AutoencoderKLWan"],
    }


def _defaults(sampling: SamplingSettings) -> dict[str, Any]:
    clip = {"size": f"{SIDE}*{SIDE}", "frames": FRAMES, "fps": FPS, "steps": sampling.steps, "shift": sampling.shift}
    guidance = {"guidance_high": sampling.guidance_high, "guidance_low": sampling.guidance_low}
    return clip | guidance | {"negative_prompt": ""}


def _write_weights(file: Path, weights: Mapping[str, torch.Tensor]) -> None:
    """fp16. Raises ValueError for a value that fp16 does not hold."""
    halves = {name: one.half().contiguous() for name, one in weights.items()}
    lost = [name for name, one in halves.items() if not one.isfinite().all()]
    if lost:
        raise ValueError(f"{file}: values that are not finite in fp16 in {lost}")
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file(halves, file, metadata={"format": "pt"})


def _write_json(file: Path, value: Any) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n")
