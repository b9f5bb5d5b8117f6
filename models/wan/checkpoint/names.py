"""The one map between parameter names: the Diffusers and transformers libraries' names <-> the original Wan names.

Three tables, for the transformer, the VAE and the text encoder; each gives {library name: original name} for every
parameter there is. Names alone change: shapes and values are the same in both layouts. Imports no torch.
"""

from usp.models.wan.config import TransformerConfig

TRANSFORMER_ENDS = {
    "patch_embedding": "patch_embedding",
    "condition_embedder.time_embedder.linear_1": "time_embedding.0",
    "condition_embedder.time_embedder.linear_2": "time_embedding.2",
    "condition_embedder.time_proj": "time_projection.1",
    "condition_embedder.text_embedder.linear_1": "text_embedding.0",
    "condition_embedder.text_embedder.linear_2": "text_embedding.2",
    "proj_out": "head.head",
}
# The reference counts norms in the order of use, the original in the order of declaration: 2 and 3 change places.
TRANSFORMER_BLOCK = {
    "attn1.to_q": "self_attn.q",
    "attn1.to_k": "self_attn.k",
    "attn1.to_v": "self_attn.v",
    "attn1.to_out.0": "self_attn.o",
    "attn1.norm_q": "self_attn.norm_q",
    "attn1.norm_k": "self_attn.norm_k",
    "norm2": "norm3",
    "attn2.to_q": "cross_attn.q",
    "attn2.to_k": "cross_attn.k",
    "attn2.to_v": "cross_attn.v",
    "attn2.to_out.0": "cross_attn.o",
    "attn2.norm_q": "cross_attn.norm_q",
    "attn2.norm_k": "cross_attn.norm_k",
    "ffn.net.0.proj": "ffn.0",
    "ffn.net.2": "ffn.2",
}
EMBEDDING, TIED_EMBEDDING = "shared.weight", "encoder.embed_tokens.weight"  # two names of one parameter
TEXT_ENDS = {EMBEDDING: "token_embedding.weight", "encoder.final_layer_norm.weight": "norm.weight"}
TEXT_BLOCK = {
    "layer.0.layer_norm": "norm1",
    "layer.0.SelfAttention.q": "attn.q",
    "layer.0.SelfAttention.k": "attn.k",
    "layer.0.SelfAttention.v": "attn.v",
    "layer.0.SelfAttention.o": "attn.o",
    "layer.0.SelfAttention.relative_attention_bias": "pos_embedding.embedding",
    "layer.1.layer_norm": "norm2",
    "layer.1.DenseReluDense.wi_0": "ffn.gate.0",
    "layer.1.DenseReluDense.wi_1": "ffn.fc1",
    "layer.1.DenseReluDense.wo": "ffn.fc2",
}
VAE_ENDS = {
    "quant_conv": "conv1",
    "post_quant_conv": "conv2",
    "encoder.conv_in": "encoder.conv1",
    "encoder.conv_out": "encoder.head.2",
    "decoder.conv_in": "decoder.conv1",
    "decoder.conv_out": "decoder.head.2",
}
VAE_RESNET = {
    "norm1.gamma": "residual.0.gamma",
    "conv1.weight": "residual.2.weight",
    "conv1.bias": "residual.2.bias",
    "norm2.gamma": "residual.3.gamma",
    "conv2.weight": "residual.6.weight",
    "conv2.bias": "residual.6.bias",
}
# Widths 1, 2, 4, 4: the encoder has two residual blocks a level, the decoder three; three levels change the size.
ENCODER_RESNETS = (0, 1, 3, 4, 6, 7, 9, 10)
ENCODER_WIDENS = (3, 6)
ENCODER_RESIZES = {2: False, 5: True, 8: True}  # place -> whether frames are halved too
DECODER_LEVELS = 4
DECODER_RESNETS_PER_LEVEL = 3
DECODER_WIDENS = ((1, 0),)  # (level, residual block)
DECODER_RESIZES = {0: True, 1: True, 2: False}


def transformer_names(config: TransformerConfig) -> dict[str, str]:
    """{Diffusers name: original name} of every parameter of one expert."""
    places = dict(TRANSFORMER_ENDS)
    names = {"scale_shift_table": "head.modulation"}
    for layer in range(config.num_layers):
        names[f"blocks.{layer}.scale_shift_table"] = f"blocks.{layer}.modulation"
        places |= {f"blocks.{layer}.{ours}": f"blocks.{layer}.{theirs}" for ours, theirs in TRANSFORMER_BLOCK.items()}
    names |= _with_kinds(places, "weight", "bias")
    return {name: names[name] for name in config.parameter_shapes()}


def text_encoder_names(num_layers: int) -> dict[str, str]:
    """{transformers UMT5EncoderModel name: original name}; TIED_EMBEDDING is left out."""
    names = dict(TEXT_ENDS)
    for layer in range(num_layers):
        block = {f"encoder.block.{layer}.{ours}": f"blocks.{layer}.{theirs}" for ours, theirs in TEXT_BLOCK.items()}
        names |= _with_kinds(block, "weight")
    return names


def vae_names() -> dict[str, str]:
    """{Diffusers AutoencoderKLWan name: original name} of the Wan2.1 VAE."""
    names = _with_kinds(VAE_ENDS, "weight", "bias")
    for side in ("encoder", "decoder"):
        names[f"{side}.norm_out.gamma"] = f"{side}.head.0.gamma"
        names |= _vae_middle(side)
    for place in ENCODER_RESNETS:
        ours, theirs = f"encoder.down_blocks.{place}", f"encoder.downsamples.{place}"
        names |= _vae_resnet(ours, theirs, widens=place in ENCODER_WIDENS)
    for place, in_time in ENCODER_RESIZES.items():
        names |= _vae_resize(f"encoder.down_blocks.{place}", f"encoder.downsamples.{place}", in_time=in_time)
    return names | _vae_upward()


def _with_kinds(places: dict[str, str], *kinds: str) -> dict[str, str]:
    return {f"{ours}.{kind}": f"{theirs}.{kind}" for ours, theirs in places.items() for kind in kinds}


def _vae_middle(side: str) -> dict[str, str]:
    ours, theirs = f"{side}.mid_block", f"{side}.middle"
    attention, place = f"{ours}.attentions.0", f"{theirs}.1"
    names = _with_kinds(
        {f"{attention}.to_qkv": f"{place}.to_qkv", f"{attention}.proj": f"{place}.proj"}, "weight", "bias"
    )
    names[f"{attention}.norm.gamma"] = f"{place}.norm.gamma"
    names |= _vae_resnet(f"{ours}.resnets.0", f"{theirs}.0", widens=False)
    return names | _vae_resnet(f"{ours}.resnets.1", f"{theirs}.2", widens=False)


def _vae_upward() -> dict[str, str]:
    names: dict[str, str] = {}
    for level in range(DECODER_LEVELS):
        first = level * (DECODER_RESNETS_PER_LEVEL + 1)  # the original counts residual blocks and resizes in one list
        for block in range(DECODER_RESNETS_PER_LEVEL):
            ours, theirs = f"decoder.up_blocks.{level}.resnets.{block}", f"decoder.upsamples.{first + block}"
            names |= _vae_resnet(ours, theirs, widens=(level, block) in DECODER_WIDENS)
        if level in DECODER_RESIZES:
            place = f"decoder.upsamples.{first + DECODER_RESNETS_PER_LEVEL}"
            names |= _vae_resize(f"decoder.up_blocks.{level}.upsamplers.0", place, in_time=DECODER_RESIZES[level])
    return names


def _vae_resnet(ours: str, theirs: str, *, widens: bool) -> dict[str, str]:
    names = {f"{ours}.{name}": f"{theirs}.{original}" for name, original in VAE_RESNET.items()}
    shortcut = _with_kinds({f"{ours}.conv_shortcut": f"{theirs}.shortcut"}, "weight", "bias")
    return names | shortcut if widens else names


def _vae_resize(ours: str, theirs: str, *, in_time: bool) -> dict[str, str]:
    kinds = ("resample.1", "time_conv") if in_time else ("resample.1",)
    return _with_kinds({f"{ours}.{kind}": f"{theirs}.{kind}" for kind in kinds}, "weight", "bias")
