"""The name map between the layouts, against the converters of the reference library."""

from collections.abc import Callable
from typing import Any

import pytest

from make_tiny_checkpoint import TinySpec, text_encoder_module, transformer_module, vae_module
from usp.models.wan.checkpoint.names import text_encoder_names, transformer_names, vae_names
from usp.models.wan.config import TransformerConfig

SPEC = TinySpec(layers=12)  # two digits, so that "1" and "11" can be confused


def reference_names(convert: Callable[[dict[str, Any]], dict[str, Any]], originals: list[str]) -> dict[str, str]:
    """{library name: original name}: the converter moves values, so each name is sent through as its own value."""
    return convert({name: name for name in originals})


def test_transformer_names_are_those_of_the_reference_converter() -> None:
    from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers

    names = transformer_names(SPEC.transformer)
    assert reference_names(convert_wan_transformer_to_diffusers, list(names.values())) == names


def test_vae_names_are_those_of_the_reference_converter() -> None:
    from diffusers.loaders.single_file_utils import convert_wan_vae_to_diffusers

    names = vae_names()
    assert reference_names(convert_wan_vae_to_diffusers, list(names.values())) == names


def test_transformer_names_cover_the_reference_module() -> None:
    assert set(transformer_names(SPEC.transformer)) == set(transformer_module(SPEC).state_dict())


def test_vae_names_cover_the_reference_module() -> None:
    assert set(vae_names()) == set(vae_module(SPEC).state_dict())


def test_text_encoder_names_cover_the_reference_module() -> None:
    tied = {"encoder.embed_tokens.weight"}
    assert set(text_encoder_names(2)) == set(text_encoder_module(SPEC, 400).state_dict()) - tied


def test_original_text_encoder_names_are_the_published_ones() -> None:
    block = ["attn.q", "attn.k", "attn.v", "attn.o", "ffn.fc1", "ffn.fc2", "ffn.gate.0", "norm1", "norm2"]
    block.append("pos_embedding.embedding")
    published = {f"blocks.{layer}.{name}.weight" for layer in range(3) for name in block}
    assert set(text_encoder_names(3).values()) == published | {"token_embedding.weight", "norm.weight"}


NAME_MAPS = {
    "transformer": transformer_names(TransformerConfig()),
    "transformer without a cross-attention norm": transformer_names(TransformerConfig(cross_attn_norm=False)),
    "text encoder": text_encoder_names(24),
    "vae": vae_names(),
}


@pytest.mark.parametrize("part", NAME_MAPS)
def test_no_two_names_share_an_original(part: str) -> None:
    names = NAME_MAPS[part]
    assert len(set(names.values())) == len(names)
