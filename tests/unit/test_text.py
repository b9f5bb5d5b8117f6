"""Prompts: cleaned, cut and encoded as the reference does it, zeros after the last token (D05, D10, D12)."""

import logging
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel

from usp.errors import CheckpointError, UserError
from usp.models.wan import text

WIDTH = 32
PLAIN = [
    "a cat",
    "A paper boat drifts down a rainy street.",
    "",
    " x ",
    "tabs\tand\nlines\r\n  and   spaces",
    "100% <b> 3 > 2",
]
STRANGE = [
    "Tom &amp; Jerry",
    "Tom &amp;amp; Jerry &lt;3 &quot;quoted&quot; &#39;",
    "<i>Tom</i> &amp;amp; &amp;quot;Jerry&amp;quot; c&#28;d",  # beside tags, ftfy leaves entities alone
    "\u201ccurly\u201d \u2018quotes\u2019 \u2026 \u2014",
    "cat \U0001f408\u200d\u2b1b and flag \U0001f1eb\U0001f1f7",
    "一只猫在雨中的街道上奔跑，电影感",
    "قطة تركض في الشارع \u200fנסיעה",
    "Ã©tÃ© mis-decoded",
    "NUL \x00 and bell \x07 and escape \x1b[31m",
    "lone \ud800 surrogate \udfff, a pair \ud83d\ude00",
    "&#0; &#xD800; &#28; &nbsp;",
    "wide\u3000space no\u00a0break thin\u2009space line\u2028break",
    "separators a\x1cb c&#28;d e\x85f",
    "ｆｕｌｌ ｗｉｄｔｈ ﬁ ligature",
    "\ufeffmark at the start",
]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """T5's conventions in small: `</s>` ends a prompt, and bytes stand for what the vocabulary lacks."""
    special = ["<pad>", "</s>", "<unk>"]
    pieces = [f"<0x{byte:02X}>" for byte in range(256)] + [
        "\u2581",
        *map(chr, range(33, 127)),
        "\u2581a",
        "\u2581cat",
        "ing",
    ]
    unigram = models.Unigram(
        [*((s, 0.0) for s in special), *((p, -float(len(p))) for p in pieces)], 2, byte_fallback=True
    )
    tokens = Tokenizer(unigram)
    tokens.pre_tokenizer = pre_tokenizers.Metaspace()
    tokens.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    tokens.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokens, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=512
    )


@pytest.fixture(scope="module")
def encoder(tokenizer) -> UMT5EncoderModel:
    sizes = {"d_model": WIDTH, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    return UMT5EncoderModel(UMT5Config(vocab_size=len(tokenizer), **sizes)).eval()


@pytest.fixture(scope="module")
def reference(tokenizer, encoder):
    """The reference pipeline's own text path, without the rest of the pipeline."""
    from diffusers import WanPipeline

    parts = SimpleNamespace(tokenizer=tokenizer, text_encoder=encoder, _execution_device=torch.device("cpu"))

    def encode(prompts: list[str], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        with torch.no_grad():
            return WanPipeline._get_t5_prompt_embeds(parts, prompts, max_sequence_length=512, dtype=dtype)

    return encode


class OnesEncoder:
    """Writes ones everywhere, at padded places too, as UMT5 writes something there."""

    device = torch.device("cpu")

    def __call__(self, ids: torch.Tensor, mask: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(last_hidden_state=torch.ones(*ids.shape, WIDTH))


def words(count: int) -> str:
    """A prompt of exactly `count` tokens before the end token."""
    return " ".join(["a"] * count)


@pytest.mark.parametrize("count", [0, 1, 510, 511, 512, 600])
def test_rows_past_the_valid_length_are_zero(tokenizer, count):  # D05
    (embedding,) = text.encode_prompts(OnesEncoder(), tokenizer, [words(count)], dtype=torch.float32)
    num_valid = min(count + 1, 512)
    assert embedding.shape == (512, WIDTH)
    assert torch.equal(embedding[:num_valid], torch.ones(num_valid, WIDTH))
    assert torch.count_nonzero(embedding[num_valid:]) == 0


@pytest.mark.parametrize("prompt", [*PLAIN, words(511), words(600), words(0)])
def test_trailing_white_space_changes_no_bit(tokenizer, encoder, prompt):  # D05
    prompts = [prompt, prompt + "   ", "\n\t " + prompt + "\u3000\n"]
    first, *others = text.encode_prompts(encoder, tokenizer, prompts, dtype=torch.float32)
    assert all(torch.equal(other, first) for other in others)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("prompt", [*PLAIN, *STRANGE, words(510), words(511), words(512), words(2000)])
def test_embeddings_have_the_bits_of_the_reference(tokenizer, encoder, reference, prompt, dtype):  # D05, D10, D12
    ours = text.encode_prompts(encoder, tokenizer, [prompt], dtype=dtype)
    assert ours.dtype == dtype
    assert torch.equal(ours, reference([prompt], dtype))


def test_bits_of_a_prompt_do_not_depend_on_its_companions(tokenizer, encoder):
    prompts = [*PLAIN, *STRANGE, words(512)]
    together = text.encode_prompts(encoder, tokenizer, prompts, dtype=torch.float32)
    alone = [text.encode_prompts(encoder, tokenizer, [prompt], dtype=torch.float32)[0] for prompt in prompts]
    assert torch.equal(together, torch.stack(alone))


def test_embeddings_can_be_changed_in_place(tokenizer, encoder):
    embedding = text.encode_prompts(encoder, tokenizer, ["a cat"], dtype=torch.float32)
    assert not embedding.requires_grad
    embedding.zero_()  # a broadcast writes into it; an inference tensor would refuse


@pytest.mark.parametrize("prompt", [*PLAIN, *STRANGE])
def test_cleaning_matches_the_reference(prompt):  # D10
    from diffusers.pipelines.wan.pipeline_wan import prompt_clean

    assert text.clean_prompt(prompt) == prompt_clean(prompt)


@pytest.mark.parametrize("prompt", STRANGE)
def test_cleaned_prompts_can_be_encoded(tokenizer, prompt):  # D10
    cleaned = text.clean_prompt(prompt)
    cleaned.encode("utf-8")  # a lone surrogate would raise
    assert "\0" not in cleaned
    assert text.tokenize(tokenizer, cleaned).num_valid > 1


def test_cleaning_takes_any_string():
    ranges = [(0, 0x80), (0x80, 0x3000), (0xD800, 0xE000), (0x1F000, 0x1FFFF)]
    for start, stop in ranges * 50:
        prompt = "".join(map(chr, torch.randint(start, stop, (40,)).tolist())) + " &amp;&#0;&bogus; "
        cleaned = text.clean_prompt(prompt)
        cleaned.encode("utf-8")
        assert cleaned == cleaned.strip()


@pytest.mark.parametrize("prompt", PLAIN)
def test_plain_ascii_is_the_same_without_ftfy(tokenizer, prompt):  # D10
    by_hand = " ".join(prompt.split())
    assert text.tokenize(tokenizer, text.clean_prompt(prompt)).ids == text.tokenize(tokenizer, by_hand).ids


@pytest.mark.parametrize("package", ["ftfy", "transformers", "tokenizers"])
def test_a_missing_text_package_is_named_at_start(monkeypatch, package):  # D10
    text.check_text_packages()
    monkeypatch.setitem(sys.modules, package, None)  # the import system then finds none
    with pytest.raises(UserError, match=f"{package} is not installed.*pip install {package}"):
        text.check_text_packages()


def test_checking_text_packages_imports_nothing_heavy():  # D10
    program = (
        "import sys; from usp.models.wan import text; text.check_text_packages(); "
        "print([name for name in ('torch', 'transformers', 'tokenizers', 'numpy', 'ftfy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(("count", "num_cut"), [(510, 0), (511, 0), (512, 1), (513, 2), (2000, 1489)])
def test_a_long_prompt_is_cut_and_keeps_its_end_token(tokenizer, count, num_cut):  # D12
    tokens = text.tokenize(tokenizer, words(count))
    assert tokens.num_cut == num_cut
    assert tokens.num_valid == min(count + 1, 512)
    assert tokens.ids[-1] == tokenizer.eos_token_id
    assert tokens.ids.count(tokenizer.eos_token_id) == 1


@pytest.mark.parametrize("prompt", [*PLAIN, *STRANGE, words(511), words(512), words(2000), "b " * 700])
def test_tokens_are_those_of_the_tokenizers_own_truncation(tokenizer, prompt):  # D12
    cleaned = text.clean_prompt(prompt)
    assert list(text.tokenize(tokenizer, cleaned).ids) == tokenizer(cleaned, truncation=True, max_length=512).input_ids


@pytest.mark.parametrize(("total", "warns"), [(511, False), (512, False), (513, True), (2000, True)])
def test_prompt_and_negative_prompt_are_512_wide_and_warn_when_cut(tokenizer, caplog, total, warns):  # D12
    prompts = [words(total - 1), "cat" + words(total - 1)[1:]]  # of `total` tokens with the end token
    with caplog.at_level(logging.WARNING):
        embeddings = text.encode_prompts(OnesEncoder(), tokenizer, prompts, dtype=torch.float32)
    assert embeddings.shape == (2, 512, WIDTH)
    told = [record.getMessage() for record in caplog.records if record.name == text.__name__]
    assert len(told) == (2 if warns else 0)
    assert all(f"has {total} tokens" in line and f"the last {total - 512} " in line for line in told)


def test_a_tokenizer_without_end_token_is_refused():
    def endless(prompt: str, **_: object) -> SimpleNamespace:
        return SimpleNamespace(input_ids=[5, 6, 7])

    endless.eos_token_id, endless.name_or_path = 1, "somewhere/tokenizer"
    with pytest.raises(CheckpointError, match="somewhere/tokenizer"):
        text.tokenize(endless, "a cat")


def test_an_encoder_that_overflows_is_an_error_at_once(tokenizer):
    class Overflowing(OnesEncoder):
        def __call__(self, ids, mask):
            states = super().__call__(ids, mask)
            states.last_hidden_state[0, 1, :5] = float("inf")
            return states

    with pytest.raises(UserError, match=r"5 of 96 values.*'a cat'.*float16"):
        text.encode_prompts(Overflowing(), tokenizer, ["a cat"], dtype=torch.float16)


def test_values_at_padded_places_may_be_anything(tokenizer):
    class NanPadding(OnesEncoder):
        def __call__(self, ids, mask):
            states = super().__call__(ids, mask)
            states.last_hidden_state[mask == 0] = float("nan")
            return states

    embedding = text.encode_prompts(NanPadding(), tokenizer, ["a cat"], dtype=torch.float32)
    assert embedding.sum() == text.tokenize(tokenizer, "a cat").num_valid * WIDTH
