"""The tokenizer of the small model, and captions as ids.

The same kind as the random checkpoint's, made by the same code; its words are those that captions use and some common
English. Whatever else is typed falls apart into letters and bytes, so any text has tokens.
"""

import json
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from scripts.tiny_tokenizer import SPACE, TEXT, write_tokenizer
from scripts.train_small.captions import vocabulary_text
from scripts.train_small.settings import TEXT_POSITIONS

LETTERS = 0.1  # a letter's count beside a word's: whole words come first


def write_small_tokenizer(folder: Path) -> int:
    """Write tokenizer.json and its settings; returns the size of the vocabulary."""
    write_tokenizer(folder)
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    known = {piece for piece, _ in content["model"]["vocab"]}
    score = math.log(LETTERS / len(known))
    words = Counter(SPACE + word for word in f"{vocabulary_text()} {TEXT}".replace(",", "").split())
    new = sorted(word for word in words if word not in known)
    content["model"]["vocab"] += [[word, score] for word in new]
    file.write_text(json.dumps(content, ensure_ascii=False))
    return len(content["model"]["vocab"])


def load_small_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)


def token_ids(tokenizer: Any, captions: Sequence[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask of captions, [N, TEXT_POSITIONS] each; what is longer is cut, the end token stays."""
    ids = torch.full((len(captions), TEXT_POSITIONS), tokenizer.pad_token_id)
    mask = torch.zeros_like(ids)
    for row, pieces in enumerate(tokenizer(list(captions), add_special_tokens=True).input_ids):
        kept = [*pieces[:-1][: TEXT_POSITIONS - 2], pieces[-1]]  # the last position stays empty
        ids[row, : len(kept)] = torch.tensor(kept)
        mask[row, : len(kept)] = 1
    return ids, mask
