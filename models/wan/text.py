"""Prompts to text embeddings: cleaning, tokens cut to 512 with a warning, UMT5, zeros past the valid length.

Cleaning and cutting follow the reference, `diffusers.WanPipeline`, token for token. Importing this module imports
neither torch nor transformers. Used by the rank that encodes text, once per request, before the transformer loads.
"""

import html
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

from usp.errors import CheckpointError, UserError
from usp.models.wan.config import TEXT_LEN

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase, UMT5EncoderModel

log = logging.getLogger(__name__)

TEXT_PACKAGES = {
    "ftfy": "cleans prompts, and without it the same prompt would give other tokens",
    "transformers": "holds the text encoder",
    "tokenizers": "turns prompts into tokens",
}


@dataclass(frozen=True)
class TokenizedPrompt:
    """Ids of one prompt, the end token last and no padding; `num_cut` tokens did not fit and are left out."""

    ids: tuple[int, ...]
    num_cut: int

    @property
    def num_valid(self) -> int:
        return len(self.ids)


def check_text_packages() -> None:
    """Raise UserError naming the first package that text needs and that is not installed. Imports none of them."""
    for package, purpose in TEXT_PACKAGES.items():
        if find_spec(package) is None:
            raise UserError(f"the package {package} is not installed; it {purpose}; run: pip install {package}")


def clean_prompt(prompt: str) -> str:
    """Repair mis-decoded text, resolve HTML entities (twice: `&amp;quot;`), make every run of white space one space.

    Any string will do: control characters go, a lone surrogate becomes U+FFFD.
    """
    import ftfy

    text = html.unescape(html.unescape(ftfy.fix_text(prompt)))
    return " ".join(text.split())


def tokenize(tokenizer: "PreTrainedTokenizerBase", prompt: str, max_len: int = TEXT_LEN) -> TokenizedPrompt:
    """Tokens of a cleaned prompt, at most `max_len` of them; the end token stays when others are cut.

    Raises CheckpointError for a tokenizer that ends no prompt with its end token, as the model expects.
    """
    ids = tokenizer(prompt, add_special_tokens=True, verbose=False).input_ids
    if not ids or ids[-1] != tokenizer.eos_token_id:
        raise CheckpointError(f"{tokenizer.name_or_path}: the tokenizer does not end a prompt with its end token")
    return TokenizedPrompt((*ids[:-1][: max_len - 1], ids[-1]), num_cut=max(0, len(ids) - max_len))


def encode_prompts(
    text_encoder: "UMT5EncoderModel",
    tokenizer: "PreTrainedTokenizerBase",
    prompts: Sequence[str],
    *,
    dtype: "torch.dtype",
) -> "torch.Tensor":
    """Embeddings [N, 512, text_dim] on the encoder's device, exactly 0 past each prompt's tokens.

    Prompts pass the encoder one by one, so that the bits of one do not depend on its companions. Warns about each
    prompt that is cut. Raises UserError where the encoder overflows.
    """
    import torch

    assert prompts
    return torch.stack([_encode(text_encoder, tokenizer, clean_prompt(prompt), dtype) for prompt in prompts])


def _encode(
    text_encoder: "UMT5EncoderModel", tokenizer: "PreTrainedTokenizerBase", prompt: str, dtype: "torch.dtype"
) -> "torch.Tensor":
    import torch

    tokens = tokenize(tokenizer, prompt)
    if tokens.num_cut:
        log.warning(cut_warning(prompt, tokens))
    num_valid, device = tokens.num_valid, text_encoder.device
    # The encoder sees the padding too, masked: its sums then run over the same lengths as the reference's.
    ids = torch.full((1, TEXT_LEN), tokenizer.pad_token_id, device=device)
    ids[0, :num_valid] = torch.tensor(tokens.ids, device=device)
    mask = (torch.arange(TEXT_LEN, device=device) < num_valid).long()[None]
    with torch.no_grad():
        states = text_encoder(ids, mask).last_hidden_state[0].to(dtype)
    _check_finite(states[:num_valid], prompt)
    # UMT5 writes states at padded places as well, and the transformer attends to all 512.
    embedding = torch.zeros_like(states)
    embedding[:num_valid] = states[:num_valid]
    return embedding


def cut_warning(prompt: str, tokens: TokenizedPrompt) -> str:
    """One line that tells how much of a prompt the model does not see."""
    total = tokens.num_valid + tokens.num_cut
    return (
        f"the prompt {_shorten(prompt)} has {total} tokens with the end token and {tokens.num_valid} fit; "
        f"the last {tokens.num_cut} before the end token are cut"
    )


def _check_finite(states: "torch.Tensor", prompt: str) -> None:
    num_bad = int((~states.isfinite()).sum())
    if num_bad:
        raise UserError(
            f"the text encoder gave {num_bad} of {states.numel()} values that are NaN or infinite for the prompt "
            f"{_shorten(prompt)} in {str(states.dtype).removeprefix('torch.')}; use --dtype bf16 or fp32"
        )


def _shorten(prompt: str, limit: int = 40) -> str:
    return repr(prompt if len(prompt) <= limit else prompt[: limit - 3] + "...")
