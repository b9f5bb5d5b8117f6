"""Checkpoint files -> modules on a device, in the dtypes that the reference keeps them in.

Modules are built without memory and filled one tensor at a time, straight from file to device, so that a checkpoint is
never held twice, whatever its dtype. Nothing here uses the network. diffusers and transformers are imported by the
functions that need them, since most ranks need neither.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from usp.models.wan.checkpoint.components import ComponentFiles, ExpertFiles
from usp.models.wan.checkpoint.fill import NamedTensors, blamed_on, fill, read_stored
from usp.models.wan.checkpoint.folder import Checkpoint
from usp.models.wan.checkpoint.names import EMBEDDING, TIED_EMBEDDING
from usp.models.wan.checkpoint.original import open_text_encoder, open_vae
from usp.models.wan.checkpoint.weights import StoredTensor
from usp.models.wan.config import kept_in_fp32
from usp.models.wan.transformer import WanTransformer

if TYPE_CHECKING:
    from diffusers import AutoencoderKLWan
    from transformers import PreTrainedTokenizerBase, UMT5EncoderModel


def load_transformer(files: ExpertFiles, *, device: torch.device, dtype: torch.dtype) -> WanTransformer:
    """One expert in `dtype`, with norms, modulation tables and time embedder in fp32; in eval, without gradients."""

    def dtype_of(name: str) -> torch.dtype:
        return torch.float32 if kept_in_fp32(name) else dtype

    with torch.device("meta"):
        module = WanTransformer(files.config)
    fill(module, read_stored(files.tensors, device), source=files.folder, device=device, dtype_of=dtype_of)
    module.fuse()
    return module


def load_vae(checkpoint: Checkpoint, *, device: torch.device, dtype: torch.dtype) -> "AutoencoderKLWan":
    """The VAE, encoder and decoder, in `dtype`. In the original layout its sizes follow from the tensors."""
    from diffusers import AutoencoderKLWan

    source = checkpoint.vae.files[0]
    config, tensors = _open(checkpoint.vae, open_vae, device)
    with blamed_on(source, "building the VAE"), torch.device("meta"):
        module = AutoencoderKLWan.from_config(dict(config))
    fill(module, tensors, source=source, device=device, dtype_of=lambda _: dtype)
    return module


def load_text_encoder(checkpoint: Checkpoint, *, device: torch.device, dtype: torch.dtype) -> "UMT5EncoderModel":
    """The text encoder in `dtype`; under fp16 its `wo` weights stay fp32, as `from_pretrained` keeps them."""
    from transformers import UMT5Config, UMT5EncoderModel

    def dtype_of(name: str) -> torch.dtype:
        return torch.float32 if dtype == torch.float16 and ".wo." in name else dtype

    source = checkpoint.text_encoder.files[0]
    config, tensors = _open(checkpoint.text_encoder, open_text_encoder, device)
    with blamed_on(source, "building the text encoder"), torch.device("meta"):
        module = UMT5EncoderModel(UMT5Config.from_dict(dict(config)))
    module.encoder.embed_tokens = module.shared  # one module, so that filling one fills both
    fill(module, tensors, source=source, device=device, dtype_of=dtype_of)
    return module


def load_tokenizer(checkpoint: Checkpoint) -> "PreTrainedTokenizerBase":
    """The tokenizer that the folder holds; nothing is looked up elsewhere."""
    from transformers import AutoTokenizer

    with blamed_on(checkpoint.tokenizer, "loading the tokenizer"):
        return AutoTokenizer.from_pretrained(str(checkpoint.tokenizer), local_files_only=True)


def _open(
    files: ComponentFiles, open_original: Callable[[Path], tuple[dict[str, Any], NamedTensors]], device: torch.device
) -> tuple[Mapping[str, Any], NamedTensors]:
    """Config and tensors of a VAE or text encoder, in the library's terms, from either layout."""
    if not files.config:
        return open_original(files.files[0])
    return files.config, read_stored(_without_tied_copy(files.tensors), device)


def _without_tied_copy(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The embedding under its one name, whichever of the two the files use."""
    kept = dict(tensors)
    tied = kept.pop(TIED_EMBEDDING, None)
    return kept if tied is None else {EMBEDDING: tied} | kept
