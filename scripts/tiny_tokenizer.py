"""A small real tokenizer with the conventions of T5: pad 0, end 1, unknown 2; every text ends with the end token.

Words and characters of a built-in text are its pieces, and bytes stand in for all other characters, so any Unicode text
has tokens. The vocabulary is counted, not trained: the same on every machine.
"""

import json
import math
from collections import Counter
from pathlib import Path
from string import printable
from typing import Any

PAD, END, UNKNOWN = "<pad>", "</s>", "<unk>"
SPACE = "\u2581"  # stands for the space before a word, as in every sentencepiece vocabulary
TEXT = """
a small red boat crosses a quiet lake at dawn while mist rises from the water and the camera follows it slowly
two foxes play in fresh snow under tall pine trees, soft light, shallow focus, very detailed fur, smooth motion
an old man walks his dog along a rainy street at night; neon signs are reflected in the puddles, wide shot
waves break on black rocks below a lighthouse, seen from above, the sky is orange and blue after the storm
a child runs through a field of tall yellow flowers with a kite, warm summer evening, the wind moves the grass
close up of a cup of coffee on a wooden table, steam curls in the morning sun, a hand turns the page of a book
a train goes over a long bridge in the mountains in autumn, the leaves are gold and red, cinematic, slow and calm
blurry, static, low quality, bad hands, text, watermark, grey picture, worst quality, still image, many people
"""


def write_tokenizer(folder: Path) -> int:
    """Write tokenizer.json and its settings; returns the size of the vocabulary."""
    from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers, processors
    from tokenizers.models import Unigram

    pieces = _pieces()
    tokenizer: Any = Tokenizer(Unigram(pieces, unk_id=2, byte_fallback=True))
    tokenizer.add_special_tokens([PAD, END, UNKNOWN])
    tokenizer.normalizer = normalizers.NFKC()
    metaspace = {"replacement": SPACE, "prepend_scheme": "always"}
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(**metaspace)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(single=f"$A {END}", special_tokens=[(END, 1)])
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(**metaspace), decoders.Fuse()])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(_settings(), indent=2) + "\n")
    return len(pieces)


def _settings() -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": PAD,
        "eos_token": END,
        "unk_token": UNKNOWN,
        "model_max_length": 512,
        "padding_side": "right",
        "clean_up_tokenization_spaces": False,
    }


def _pieces() -> list[tuple[str, float]]:
    """(piece, log probability) in the order of their ids."""
    words = Counter(SPACE + word for word in TEXT.split())
    characters = Counter(TEXT.replace("\n", " ").replace(" ", SPACE))
    characters.update(character for character in printable if not character.isspace())
    total = words.total() + characters.total()
    counted = words | characters
    scored = [(piece, math.log(counted[piece] / total)) for piece in sorted(counted)]
    lowest = min(score for _, score in scored) - 10.0  # bytes only where no piece fits
    return [(PAD, 0.0), (END, 0.0), (UNKNOWN, 0.0), *((f"<0x{byte:02X}>", lowest) for byte in range(256)), *scored]
