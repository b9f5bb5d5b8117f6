"""The transformer's parts against the reference model, and its shapes for every legal clip (D08, D16)."""

import gc
from types import SimpleNamespace

import pytest
import torch
from diffusers import WanTransformer3DModel

from tests.tiny import reference_transformer, tiny_checkpoint
from usp.attention import sdpa
from usp.exchange import CollectiveExchange
from usp.layout import split_counts
from usp.models.wan.checkpoint.folder import open_checkpoint
from usp.models.wan.checkpoint.loader import load_transformer
from usp.models.wan.clip import Clip
from usp.models.wan.config import TransformerConfig
from usp.models.wan.rope import rope_table
from usp.models.wan.transformer import (
    PROJECTED_ROWS,
    FeedForward,
    WanTransformer,
    patchify,
    project_rows,
    unpatchify,
)
from usp.ulysses import UlyssesAttention

CPU = torch.device("cpu")


def _predict(model: WanTransformer, clip: Clip, latent: torch.Tensor, timestep: torch.Tensor, text: torch.Tensor):
    rope = rope_table(clip.token_grid, model.config.head_dim)
    with torch.inference_mode():
        tokens = patchify(latent)
        kv = model.project_text(text)
        out = model(tokens, timestep=timestep, text=kv, rope=rope, self_attention=sdpa, cross_attention=sdpa)
        return unpatchify(out, token_grid=clip.token_grid)


def test_parameter_names_and_shapes_are_the_configs() -> None:
    config = TransformerConfig(num_layers=2, num_heads=3, head_dim=10, ffn_dim=17, text_dim=8, cross_attn_norm=False)
    with torch.device("meta"):
        model = WanTransformer(config)
    assert {name: tuple(p.shape) for name, p in model.state_dict().items()} == config.parameter_shapes()


def test_a_real_size_expert_has_14_29_billion_parameters() -> None:
    with torch.device("meta"):
        model = WanTransformer(TransformerConfig())
    assert round(sum(p.numel() for p in model.parameters()) / 1e9, 2) == 14.29


@pytest.mark.parametrize("frames", [1, 5, 9, 17, 33, 81, 85])
def test_every_shape_follows_from_the_frames(frames: int) -> None:
    """D08."""
    clip = Clip(frames, 16, 32)
    latent = torch.randn(1, 16, *clip.latent_size)
    table = rope_table(clip.token_grid, 12)
    assert latent.shape[2] == (frames - 1) // 4 + 1
    assert patchify(latent).shape == (1, clip.num_tokens, 64) and table.cos.shape == (clip.num_tokens, 6)
    model = load_transformer(open_checkpoint(tiny_checkpoint()).high, device=CPU, dtype=torch.float32)
    assert _predict(model, clip, latent, torch.tensor([500]), torch.randn(1, 7, 32)).shape == latent.shape


def test_batches_of_two_equal_two_batches_of_one_in_the_reference() -> None:
    """Each sample its own timestep and text (D02)."""
    folder, clip = tiny_checkpoint(), Clip(5, 48, 80)
    model = load_transformer(open_checkpoint(folder).high, device=CPU, dtype=torch.float32)
    reference = reference_transformer(folder / "transformer")
    latent, text, timestep = torch.randn(2, 16, *clip.latent_size), torch.randn(2, 17, 32), torch.tensor([3, 977])
    found = _predict(model, clip, latent, timestep, text)
    for i in range(2):
        with torch.no_grad():
            expected = reference(latent[i : i + 1], timestep[i : i + 1], text[i : i + 1], return_dict=False)[0]
        assert (found[i] - expected[0]).abs().max() <= 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_16_bits_the_error_is_that_of_the_reference(dtype: torch.dtype) -> None:
    """D16: at most twice what the reference model in the same dtype loses against itself in fp64."""
    folder, clip = tiny_checkpoint(), Clip(9, 48, 80)
    model = load_transformer(open_checkpoint(folder).high, device=CPU, dtype=dtype)
    exact, rounded = (reference_transformer(folder / "transformer") for _ in range(2))
    exact.double()
    for name, parameter in rounded.named_parameters():
        keep = any(part in exact._keep_in_fp32_modules for part in name.split("."))
        parameter.data = parameter.data if keep else parameter.data.to(dtype)
    latent, text, timestep = torch.randn(1, 16, *clip.latent_size), torch.randn(1, 17, 32), torch.tensor([640])
    latent, text = latent.to(dtype), text.to(dtype)
    with torch.no_grad():
        truth = exact(latent.double(), timestep, text.double(), return_dict=False)[0]
        theirs = rounded(latent, timestep, text, return_dict=False)[0]
    ours = _predict(model, clip, latent, timestep, text)
    assert ours.dtype == dtype
    assert (ours - truth).abs().max() <= 2 * (theirs - truth).abs().max()
    assert (ours - truth).norm() <= 1.2 * (theirs - truth).norm()


def test_patches_are_the_convolution_of_the_checkpoint() -> None:
    latent, weight = torch.randn(2, 16, 3, 6, 10, dtype=torch.float64), torch.randn(5, 16, 1, 2, 2, dtype=torch.float64)
    expected = torch.nn.functional.conv3d(latent, weight, stride=(1, 2, 2)).flatten(2).transpose(1, 2)
    assert torch.allclose(patchify(latent) @ weight.flatten(1).T, expected)


def test_unpatchify_puts_each_value_where_its_token_says() -> None:
    frames, rows, columns, channels = 2, 3, 5, 4
    tokens = torch.arange(frames * rows * columns * 4 * channels).view(1, -1, 4 * channels)
    out = unpatchify(tokens, token_grid=(frames, rows, columns))
    for f, y, x in ((0, 0, 0), (1, 5, 9), (0, 3, 4), (1, 2, 7)):
        token, place = (f * rows + y // 2) * columns + x // 2, (y % 2) * 2 + x % 2
        assert torch.equal(out[0, :, f, y, x], tokens[0, token].view(4, channels)[place])


def test_rows_of_the_rope_table_are_those_of_the_reference() -> None:
    from diffusers.models.transformers.transformer_wan import WanRotaryPosEmbed

    for head_dim, clip in ((128, Clip(81, 480, 832)), (12, Clip(9, 48, 80)), (10, Clip(1, 16, 16))):
        cos, sin = WanRotaryPosEmbed(head_dim, (1, 2, 2), 1024)(torch.empty(1, 16, *clip.latent_size))
        table = rope_table(clip.token_grid, head_dim)
        assert torch.equal(table.cos, cos[0, :, 0, 0::2]) and torch.equal(table.sin, sin[0, :, 0, 1::2])


def test_projecting_rows_equals_projecting_all_whatever_their_number() -> None:
    layer = torch.nn.Linear(8, 3, dtype=torch.float64)
    for batch, tokens in ((1, 0), (1, 1), (2, 3000), (1, PROJECTED_ROWS), (1, PROJECTED_ROWS + 1)):
        x = torch.randn(batch, tokens, 8, dtype=torch.float64)
        assert torch.allclose(project_rows(layer, x), layer(x)) and project_rows(layer, x).shape == (batch, tokens, 3)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1560, 7800, 32_760])
def test_the_final_projection_has_the_same_bits_on_any_number_of_ranks(rows: int) -> None:
    """At 1,560 and 7,800 rows cuBLAS gives whole and cut products of this width other bits."""
    config = TransformerConfig()
    for dtype in (torch.bfloat16, torch.float32):
        layer = torch.nn.Linear(config.dim, config.out_patch_dim, dtype=dtype, device="cuda")
        x = torch.randn(1, rows, config.dim, dtype=dtype, device="cuda")
        whole = project_rows(layer, x)
        for parts in (2, 3, 4, 8):
            cut = torch.cat([project_rows(layer, part) for part in x.split(split_counts(rows, parts), dim=1)], dim=1)
            assert torch.equal(whole, cut), f"{parts} parts, {dtype}"


@pytest.mark.parametrize("scale", [1e-3, 1.0, 300.0])
def test_norms_in_bf16_lose_no_more_than_rounding(scale: float) -> None:
    """D16: over all heads together, whatever the size of the activations; on the GPU where there is one."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = WanTransformer(TransformerConfig(num_layers=1, num_heads=4, head_dim=128, ffn_dim=64, text_dim=8))
    norm = model.blocks[0].attn1.norm_q.to(device, torch.bfloat16)
    x = (torch.randn(2, 50, 512, device=device) * scale).bfloat16()
    exact = x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-6).rsqrt() * norm.weight.double()
    # once for the normed value, once for its product with the weight: half a unit in the last place of 8 bits each
    assert ((norm(x).double() - exact).abs() <= 2 * 2**-8 * exact.abs()).all()


def _pair(cross_attn_norm: bool) -> tuple[WanTransformer, WanTransformer3DModel, Clip]:
    """Ours and the reference, with the same random weights."""
    torch.manual_seed(0)
    config = TransformerConfig(
        num_layers=2, num_heads=3, head_dim=12, ffn_dim=40, text_dim=16, cross_attn_norm=cross_attn_norm
    )
    theirs = WanTransformer3DModel(
        num_attention_heads=3,
        attention_head_dim=12,
        ffn_dim=40,
        text_dim=16,
        num_layers=2,
        freq_dim=config.freq_dim,
        in_channels=config.in_channels,
        out_channels=config.out_channels,
        cross_attn_norm=cross_attn_norm,
    )
    ours = WanTransformer(config)
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs, Clip(9, 48, 80)


@pytest.mark.parametrize("cross_attn_norm", [True, False])
@pytest.mark.parametrize("fused", [True, False])
def test_gradients_are_those_of_the_reference(
    cross_attn_norm: bool, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under autograd the kernels' twins run, whatever the device's own kernels are."""
    ours, theirs, clip = _pair(cross_attn_norm)
    monkeypatch.setattr("usp.models.wan.transformer.kernels_for", lambda device: pytest.fail("these have no gradients"))
    if fused:
        ours.fuse()
    latent = torch.randn(2, ours.config.in_channels, *clip.latent_size)
    text, time = torch.randn(2, 7, 16), torch.tensor([900.0, 30.0])
    target = torch.randn(latent.shape)
    expected = theirs(latent, time, text, return_dict=False)[0]
    (expected - target).square().mean().backward()
    out = ours(
        patchify(latent),
        timestep=time,
        text=ours.project_text(text),
        rope=rope_table(clip.token_grid, 12),
        self_attention=sdpa,
        cross_attention=sdpa,
    )
    found = unpatchify(out, token_grid=clip.token_grid)
    assert (found - expected).abs().max() < 1e-5
    (found - target).square().mean().backward()
    wanted = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        scale = wanted[name].grad.abs().max()
        assert parameter.grad is not None and (parameter.grad - wanted[name].grad).abs().max() <= 1e-4 * scale, name


def test_three_tensors_of_the_streams_size_live_while_the_widest_layer_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream, what the feed-forward is given, and what the last block left to be added."""
    model = load_transformer(open_checkpoint(tiny_checkpoint()).high, device=CPU, dtype=torch.float32)
    clip, counts, plain = Clip(5, 48, 80), [], FeedForward.forward

    def counting(self: FeedForward, x: torch.Tensor) -> torch.Tensor:
        tensors = (one for one in gc.get_objects() if issubclass(type(one), torch.Tensor))
        alive = [one for one in tensors if one.numel() == x.numel()]
        counts.append(len({one.untyped_storage().data_ptr() for one in alive}))
        return plain(self, x)

    monkeypatch.setattr(FeedForward, "forward", counting)
    latent, text = torch.randn(1, 16, *clip.latent_size), torch.randn(1, 7, 32)
    _predict(model, clip, latent, torch.tensor([500]), text)
    assert len(counts) == model.config.num_layers and max(counts) <= 3


def test_one_rank_attends_to_the_projection_itself() -> None:
    """Nothing is copied on the way to attention where there is nobody to exchange with."""
    model = load_transformer(open_checkpoint(tiny_checkpoint()).high, device=CPU, dtype=torch.float32)
    model.fuse()
    seen, clip = [], Clip(5, 48, 80)

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        seen.append((k.is_contiguous(), v.is_contiguous(), v.untyped_storage().nbytes() // v.element_size()))
        return sdpa(q, k, v)

    alone = CollectiveExchange(clip.num_tokens, axis=SimpleNamespace(size=1, index=0))
    rope = rope_table(clip.token_grid, model.config.head_dim)
    with torch.inference_mode():
        model(
            patchify(torch.randn(1, 16, *clip.latent_size)),
            timestep=torch.tensor([500]),
            text=model.project_text(torch.randn(1, 7, 32)),
            rope=rope,
            self_attention=UlyssesAttention(alone, attention=attention),
            cross_attention=sdpa,
        )
    product = 3 * clip.num_tokens * model.config.dim
    assert [size for _, _, size in seen] == [product] * model.config.num_layers
    assert not any(is_dense for _, is_dense, _ in seen)
