"""What the loader gives back: both layouts, all dtypes, nothing left unfilled, no foreign code run."""

import gc
import math
import os
import pickle
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.tiny import tiny_checkpoint, tiny_copy
from usp.errors import CheckpointError
from usp.models.wan.checkpoint.fill import fill
from usp.models.wan.checkpoint.folder import Checkpoint, open_checkpoint
from usp.models.wan.checkpoint.loader import load_text_encoder, load_tokenizer, load_transformer, load_vae
from usp.models.wan.fused import fused_rows

CPU = torch.device("cpu")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
LAYOUTS = ("diffusers", "original")
TEXT_FILE, VAE_FILE = "models_t5_umt5-xxl-enc-bf16.pth", "Wan2.1_VAE.pth"


def opened(**sizes: Any) -> Checkpoint:
    return open_checkpoint(tiny_checkpoint(**sizes))


def assert_equal_bits(ours: nn.Module, theirs: nn.Module) -> None:
    ours_state, theirs_state = ours.state_dict(), theirs.state_dict()
    assert ours_state.keys() == theirs_state.keys()
    for name, tensor in ours_state.items():
        assert tensor.dtype == theirs_state[name].dtype, name
        assert torch.equal(tensor, theirs_state[name]), name


# Transformer


def test_a_loaded_model_takes_q_k_and_v_in_one_product() -> None:
    for layout in LAYOUTS:
        checkpoint = opened(layout=layout) if layout != "diffusers" else opened()
        model = load_transformer(checkpoint.high, device=CPU, dtype=torch.float32)
        for block in model.blocks:
            assert fused_rows(block.attn1.to_q, block.attn1.to_k, block.attn1.to_v) is not None


KEPT_IN_FP32 = {  # written out, for a model of one layer
    "condition_embedder.time_embedder.linear_1.weight",
    "condition_embedder.time_embedder.linear_1.bias",
    "condition_embedder.time_embedder.linear_2.weight",
    "condition_embedder.time_embedder.linear_2.bias",
    "blocks.0.scale_shift_table",
    "blocks.0.norm2.weight",
    "blocks.0.norm2.bias",
    "scale_shift_table",
}
CAST = {
    *(f"patch_embedding.{kind}" for kind in ("weight", "bias")),
    *(f"proj_out.{kind}" for kind in ("weight", "bias")),
    *(f"condition_embedder.time_proj.{kind}" for kind in ("weight", "bias")),
    *(f"condition_embedder.text_embedder.linear_{n}.{kind}" for n in (1, 2) for kind in ("weight", "bias")),
    *(f"blocks.0.attn{n}.to_{p}.{kind}" for n in (1, 2) for p in "qkv" for kind in ("weight", "bias")),
    *(f"blocks.0.attn{n}.to_out.0.{kind}" for n in (1, 2) for kind in ("weight", "bias")),
    *(f"blocks.0.attn{n}.norm_{p}.weight" for n in (1, 2) for p in "qk"),
    *(f"blocks.0.ffn.net.{place}.{kind}" for place in ("0.proj", "2") for kind in ("weight", "bias")),
}


@pytest.mark.parametrize("stored", DTYPES)
@pytest.mark.parametrize("asked", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_parameter_has_the_dtype_that_the_reference_keeps_it_in(layout: str, asked: str, stored: str) -> None:
    """D16: whatever the files hold, the same parameters stay fp32 and all others are cast."""
    checkpoint = opened(layout=layout, layers=1, experts=1, dtype=stored)
    module = load_transformer(checkpoint.high, device=CPU, dtype=DTYPES[asked])
    found = {name: parameter.dtype for name, parameter in module.named_parameters()}
    assert found == dict.fromkeys(KEPT_IN_FP32, torch.float32) | dict.fromkeys(CAST, DTYPES[asked])


def test_the_parameters_kept_in_fp32_are_those_of_the_reference() -> None:
    """D16: the written list agrees with what the reference says about itself."""
    from diffusers import WanTransformer3DModel

    marks = WanTransformer3DModel._keep_in_fp32_modules
    assert {name for name in KEPT_IN_FP32 | CAST if any(mark in name.split(".") for mark in marks)} == KEPT_IN_FP32


@pytest.mark.parametrize("stored", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_transformer_holds_the_values_of_its_files(layout: str, stored: str) -> None:
    from safetensors.torch import load_file

    checkpoint = opened(layout="diffusers", dtype=stored)
    values = {k: v for f in (checkpoint.root / "transformer_2").glob("*.safetensors") for k, v in load_file(f).items()}
    low = opened(layout=layout, dtype=stored).low
    assert low is not None
    module = load_transformer(low, device=CPU, dtype=torch.bfloat16)
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter, values[name].to(parameter.dtype)), name


def test_experts_of_both_layouts_have_equal_bits_and_differ_from_each_other() -> None:
    first, second = (opened(layout=layout) for layout in LAYOUTS)
    assert first.low is not None and second.low is not None
    high, low = (load_transformer(files, device=CPU, dtype=torch.float32) for files in (first.high, first.low))
    assert_equal_bits(high, load_transformer(second.high, device=CPU, dtype=torch.float32))
    assert_equal_bits(low, load_transformer(second.low, device=CPU, dtype=torch.float32))
    assert not torch.equal(high.proj_out.weight, low.proj_out.weight)


@pytest.mark.parametrize("shards", [1, 2, 7])
def test_the_number_of_shards_does_not_matter(shards: int) -> None:
    loaded = load_transformer(opened(shards=shards).high, device=CPU, dtype=torch.float32)
    assert_equal_bits(loaded, load_transformer(opened(shards=3).high, device=CPU, dtype=torch.float32))


def test_a_loaded_transformer_is_ready_to_infer() -> None:
    module = load_transformer(opened().high, device=CPU, dtype=torch.float32)
    assert not module.training
    assert not any(parameter.requires_grad or parameter.is_meta for parameter in module.parameters())


def test_a_file_changed_after_it_was_opened_is_named(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(tiny_copy(tmp_path))
    shard = checkpoint.root / "transformer" / "diffusion_pytorch_model-00003-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[:-64])
    with pytest.raises(CheckpointError, match=shard.name):
        load_transformer(checkpoint.high, device=CPU, dtype=torch.float32)


# VAE


def test_vaes_of_both_layouts_have_equal_bits_and_configs() -> None:
    ours, theirs = (load_vae(opened(layout=layout), device=CPU, dtype=torch.float32) for layout in LAYOUTS)
    assert_equal_bits(ours, theirs)
    for key in ("base_dim", "z_dim", "dim_mult", "latents_mean", "latents_std", "temperal_downsample"):
        assert ours.config[key] == theirs.config[key], key
    latent = torch.randn(1, 16, 3, 4, 6, generator=torch.Generator().manual_seed(5))
    assert torch.equal(ours.decode(latent).sample, theirs.decode(latent).sample)


def test_a_vae_decodes_as_the_one_that_the_reference_loads() -> None:
    from diffusers import AutoencoderKLWan

    checkpoint = opened()
    ours = load_vae(checkpoint, device=CPU, dtype=torch.float32)
    theirs = AutoencoderKLWan.from_pretrained(checkpoint.root / "vae")
    latent = torch.randn(1, 16, 2, 4, 4, generator=torch.Generator().manual_seed(6))
    assert torch.equal(ours.decode(latent).sample, theirs.decode(latent).sample)


def test_the_large_vae_of_another_model_is_refused_by_its_channels(tmp_path: Path) -> None:
    root = tiny_copy(tmp_path, layout="original")
    stored = torch.load(root / VAE_FILE, weights_only=True)
    stored["conv2.weight"] = torch.zeros(48, 48, 1, 1, 1)
    torch.save(stored, root / VAE_FILE)
    with pytest.raises(CheckpointError, match=r"Wan2\.1_VAE\.pth.*48 latent channels.*16"):
        load_vae(open_checkpoint(root), device=CPU, dtype=torch.float32)


# Text encoder and tokenizer


@pytest.mark.parametrize("asked", DTYPES)
def test_text_encoders_of_both_layouts_equal_the_one_that_the_reference_loads(asked: str) -> None:
    """Same dtype of each parameter, same bits, same output."""
    from transformers import UMT5EncoderModel

    theirs = UMT5EncoderModel.from_pretrained(opened().root / "text_encoder", dtype=DTYPES[asked])
    tokens = torch.randint(3, theirs.config.vocab_size, (2, 9), generator=torch.Generator().manual_seed(7))
    mask = torch.tensor([[1] * 9, [1] * 5 + [0] * 4])
    for layout in LAYOUTS:
        ours = load_text_encoder(opened(layout=layout), device=CPU, dtype=DTYPES[asked])
        assert_equal_bits(ours, theirs)
        with torch.no_grad():
            output, wanted = (m(tokens, attention_mask=mask).last_hidden_state for m in (ours, theirs))
        assert torch.equal(output, wanted)


def test_the_original_names_of_the_text_encoder_play_their_original_roles() -> None:
    """The encoder written out in plain torch over the original names gives what the loaded module gives."""
    checkpoint = opened(layout="original")
    stored = torch.load(checkpoint.root / TEXT_FILE, weights_only=True)
    tokens = torch.arange(3, 23)
    module = load_text_encoder(checkpoint, device=CPU, dtype=torch.float32)
    with torch.no_grad():
        loaded = module(tokens[None]).last_hidden_state[0]
    assert (loaded - _original_text_encoder(stored, tokens, num_layers=2, num_heads=4)).abs().max() < 1e-4


def _original_text_encoder(w: dict[str, torch.Tensor], tokens: torch.Tensor, *, num_layers: int, num_heads: int) -> Any:
    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w[f"{name}.weight"]

    x = w["token_embedding.weight"][tokens]
    for block in (f"blocks.{layer}" for layer in range(num_layers)):
        h = norm(x, f"{block}.norm1")
        q, k, v = ((h @ w[f"{block}.attn.{p}.weight"].T).unflatten(-1, (num_heads, -1)) for p in "qkv")
        bias = w[f"{block}.pos_embedding.embedding.weight"][_buckets(len(tokens))]  # [S, S, H]
        weights = (torch.einsum("shd,thd->sth", q, k) + bias).softmax(dim=1)  # T5 scales no scores
        x = x + torch.einsum("sth,thd->shd", weights, v).flatten(1) @ w[f"{block}.attn.o.weight"].T
        h = norm(x, f"{block}.norm2")
        gate = nn.functional.gelu(h @ w[f"{block}.ffn.gate.0.weight"].T, approximate="tanh")
        x = x + (h @ w[f"{block}.ffn.fc1.weight"].T * gate) @ w[f"{block}.ffn.fc2.weight"].T
    return norm(x, "norm")


def _buckets(length: int) -> torch.Tensor:
    """T5's relative positions: 16 buckets a direction, one each for 0 to 7, then logarithmic up to 128."""

    def bucket(distance: int) -> int:
        far, size = 16 * (distance > 0), abs(distance)
        return far + (size if size < 8 else min(15, 8 + int(math.log(size / 8) / math.log(128 / 8) * 8)))

    return torch.tensor([[bucket(key - query) for key in range(length)] for query in range(length)])


@pytest.mark.parametrize(("file", "load"), [(VAE_FILE, load_vae), (TEXT_FILE, load_text_encoder)])
def test_a_pth_file_with_one_weight_more_or_misshapen_is_refused_by_key(file: str, load: Any, tmp_path: Path) -> None:
    """D15, for what can be known only at load time."""
    root = tiny_copy(tmp_path, layout="original")
    stored = torch.load(root / file, weights_only=True)
    key = "decoder.middle.0.residual.2.weight" if file == VAE_FILE else "blocks.1.ffn.fc2.weight"
    for change, message in (({"extra": torch.zeros(2)}, "unexpected.*'extra'"), ({key: stored[key][1:]}, "has shape")):
        torch.save(stored | change, root / file)
        with pytest.raises(CheckpointError, match=f"{file}.*{message}"):
            load(open_checkpoint(root), device=CPU, dtype=torch.float32)


def test_the_embedding_may_be_stored_under_its_tied_name(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    root = tiny_copy(tmp_path, shards=1)
    file = root / "text_encoder" / "model.safetensors"
    tensors = load_file(file)
    tensors["encoder.embed_tokens.weight"] = tensors.pop("shared.weight")
    save_file(tensors, file)
    ours = load_text_encoder(open_checkpoint(root), device=CPU, dtype=torch.float32)
    assert_equal_bits(ours, load_text_encoder(opened(), device=CPU, dtype=torch.float32))


def test_tokenizers_of_both_layouts_agree_and_follow_t5() -> None:
    first, second = (load_tokenizer(opened(layout=layout)) for layout in LAYOUTS)
    for text in ("", "a small red boat", "naïve café", "猫と🚀", "مرحبا", "\x00\u200d", "x" * 600):
        ids = first(text)["input_ids"]
        assert ids == second(text)["input_ids"]
        assert ids[-1] == 1 and 1 not in ids[:-1]
    assert (first.pad_token_id, first.eos_token_id, first.unk_token_id) == (0, 1, 2)


def test_a_damaged_tokenizer_is_named(tmp_path: Path) -> None:
    root = tiny_copy(tmp_path)
    (root / "tokenizer" / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="checkpoint/tokenizer"):
        load_tokenizer(open_checkpoint(root))


# Files that bring more than weights


class _RunsCode:
    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.trace),)


@pytest.mark.parametrize(("file", "load"), [(VAE_FILE, load_vae), (TEXT_FILE, load_text_encoder)])
def test_code_in_a_pth_file_is_not_run(file: str, load: Any, tmp_path: Path) -> None:
    root, trace = tiny_copy(tmp_path, layout="original"), tmp_path / "was_run"
    torch.save(torch.load(root / file, weights_only=True) | {"extra": _RunsCode(trace)}, root / file)
    with pytest.raises(CheckpointError, match=file):
        load(open_checkpoint(root), device=CPU, dtype=torch.float32)
    assert not trace.exists()
    pickle.loads(pickle.dumps(_RunsCode(trace)))
    assert trace.exists()  # the payload works where it is let through


@pytest.mark.parametrize("value", [3, None, torch.arange(3), torch.zeros(3, dtype=torch.float64)])
def test_a_pth_file_of_other_values_is_refused_by_key(value: Any, tmp_path: Path) -> None:
    root = tiny_copy(tmp_path, layout="original")
    torch.save(torch.load(root / VAE_FILE, weights_only=True) | {"conv1.weight": value}, root / VAE_FILE)
    with pytest.raises(CheckpointError, match=rf"{VAE_FILE}.*'conv1\.weight'"):
        load_vae(open_checkpoint(root), device=CPU, dtype=torch.float32)


def test_a_pth_file_that_is_no_table_is_refused(tmp_path: Path) -> None:
    root = tiny_copy(tmp_path, layout="original")
    torch.save(list(torch.load(root / VAE_FILE, weights_only=True).items()), root / VAE_FILE)
    with pytest.raises(CheckpointError, match=f"{VAE_FILE}.*holds a list"):
        load_vae(open_checkpoint(root), device=CPU, dtype=torch.float32)


# Filling


def _linear_on_meta() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2, bias=False))


def _filled(tensors: Any) -> nn.Module:
    module = _linear_on_meta()
    fill(module, tensors, source=Path("w"), device=CPU, dtype_of=lambda _: torch.float32)
    return module


WHOLE = {"0.weight": torch.randn(2, 3), "0.bias": torch.randn(2), "1.weight": torch.randn(2, 2)}


def test_filling_is_strict_both_ways() -> None:
    assert torch.equal(_filled(WHOLE.items()).get_parameter("0.bias"), WHOLE["0.bias"])
    with pytest.raises(CheckpointError, match=r"w: 2 missing parameters: '0\.bias', '1\.weight'"):
        _filled([("0.weight", WHOLE["0.weight"])])
    with pytest.raises(CheckpointError, match=r"w: unexpected parameter '1\.bias'"):
        _filled([*WHOLE.items(), ("1.bias", torch.zeros(2))])
    with pytest.raises(CheckpointError, match=r"w: '0\.bias' has shape \(3,\).*\(2,\)"):
        _filled([("0.bias", torch.zeros(3))])


def test_a_filled_module_shares_no_memory_with_its_source() -> None:
    module = _filled(WHOLE.items())
    assert all(module.get_parameter(name).data_ptr() != tensor.data_ptr() for name, tensor in WHOLE.items())


def test_at_most_one_source_tensor_is_alive_at_a_time() -> None:
    alive: list[weakref.ref[torch.Tensor]] = []

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in WHOLE.items():
            gc.collect()
            assert sum(ref() is not None for ref in alive) <= 1
            copy = tensor.double()
            alive.append(weakref.ref(copy))
            yield name, copy

    _filled(stream())
    assert len(alive) == len(WHOLE)
