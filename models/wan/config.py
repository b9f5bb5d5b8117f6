"""What a Wan transformer looks like, from its `config.json`: sizes, parameter names and shapes.

Imports no torch: the checks of a checkpoint's headers need only this. Used by the transformer and the loader.
Source of names and defaults: the Diffusers `WanTransformer3DModel` and the original Wan `WanModel` config files.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from usp.errors import CheckpointError

TEXT_LEN = 512  # text positions that the model attends to, always
PATCH_SIZE = (1, 2, 2)  # frames, rows, columns of one token in the latent
KEPT_IN_FP32 = ("time_embedder", "scale_shift_table", "norm1", "norm2", "norm3")  # as the reference keeps them

# What an original config.json may say of these, if it says anything.
ORIGINAL_ONLY = {"patch_size": PATCH_SIZE, "qk_norm": True, "window_size": (-1, -1), "text_len": TEXT_LEN}
_KINDS = {"eps": (float, "a positive number"), "cross_attn_norm": (bool, "true or false")}


@dataclass(frozen=True)
class TransformerConfig:
    """Sizes of one expert. `dim = num_heads * head_dim`; channels are latent channels."""

    num_layers: int = 40
    num_heads: int = 40
    head_dim: int = 128
    in_channels: int = 16
    out_channels: int = 16
    text_dim: int = 4096
    freq_dim: int = 256
    ffn_dim: int = 13824
    cross_attn_norm: bool = True
    eps: float = 1e-6
    rope_max_seq_len: int = 1024

    @property
    def dim(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def patch_dim(self) -> int:
        """Width of one token before embedding."""
        return self.in_channels * PATCH_SIZE[0] * PATCH_SIZE[1] * PATCH_SIZE[2]

    @property
    def out_patch_dim(self) -> int:
        """Width of one token after the final projection."""
        return self.out_channels * PATCH_SIZE[0] * PATCH_SIZE[1] * PATCH_SIZE[2]

    @classmethod
    def from_diffusers(cls, config: Mapping[str, Any], *, source: str) -> "TransformerConfig":
        """From a Diffusers `transformer/config.json`. Raises CheckpointError for a model kind that is not supported."""
        if config.get("image_dim") is not None or config.get("added_kv_proj_dim") is not None:
            raise CheckpointError(f"{source}: an image-to-video transformer; only text-to-video is supported")
        _require(config, source, "patch_size", lambda v: tuple(v) == PATCH_SIZE, list(PATCH_SIZE), PATCH_SIZE)
        across_heads = "rms_norm_across_heads"
        _require(config, source, "qk_norm", lambda v: v == across_heads, across_heads, across_heads)
        default = cls()
        return cls._checked(
            source,
            num_layers=config.get("num_layers", default.num_layers),
            num_heads=config.get("num_attention_heads", default.num_heads),
            head_dim=config.get("attention_head_dim", default.head_dim),
            in_channels=config.get("in_channels", default.in_channels),
            out_channels=config.get("out_channels") or config.get("in_channels", default.in_channels),
            text_dim=config.get("text_dim", default.text_dim),
            freq_dim=config.get("freq_dim", default.freq_dim),
            ffn_dim=config.get("ffn_dim", default.ffn_dim),
            cross_attn_norm=config.get("cross_attn_norm", default.cross_attn_norm),
            eps=config.get("eps", default.eps),
            rope_max_seq_len=config.get("rope_max_seq_len", default.rope_max_seq_len),
        )

    @classmethod
    def from_original(cls, config: Mapping[str, Any], *, source: str) -> "TransformerConfig":
        """From an original Wan `config.json`. Raises CheckpointError for a model kind that is not supported."""
        if config.get("model_type", "t2v") != "t2v":
            raise CheckpointError(f"{source}: model_type {config['model_type']!r}; only 't2v' is supported")
        for key, wanted in ORIGINAL_ONLY.items():
            _require(
                config, source, key, lambda v, w=wanted: (tuple(v) if isinstance(v, list) else v) == w, wanted, wanted
            )
        default = cls()
        dim, num_heads = config.get("dim", default.dim), config.get("num_heads", default.num_heads)
        for name, value in (("dim", dim), ("num_heads", num_heads)):
            if not isinstance(value, int) or value < 1:
                raise CheckpointError(f"{source}: {name} is {value!r}; expected a positive whole number")
        if dim % num_heads:
            raise CheckpointError(f"{source}: dim {dim} is no multiple of num_heads {num_heads}")
        return cls._checked(
            source,
            num_layers=config.get("num_layers", default.num_layers),
            num_heads=num_heads,
            head_dim=dim // num_heads,
            in_channels=config.get("in_dim", default.in_channels),
            out_channels=config.get("out_dim", default.out_channels),
            text_dim=config.get("text_dim", default.text_dim),
            freq_dim=config.get("freq_dim", default.freq_dim),
            ffn_dim=config.get("ffn_dim", default.ffn_dim),
            cross_attn_norm=config.get("cross_attn_norm", default.cross_attn_norm),
            eps=config.get("eps", default.eps),
        )

    @classmethod
    def _checked(cls, source: str, **fields: Any) -> "TransformerConfig":
        for name, value in fields.items():
            kind, wanted = _KINDS.get(name, (int, "a positive whole number"))
            is_kind = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
            if not is_kind or (kind is not bool and value <= 0):
                raise CheckpointError(f"{source}: {name} is {value!r}; expected {wanted}")
        config = cls(**fields)
        if config.in_channels != config.out_channels:
            raise CheckpointError(
                f"{source}: {config.in_channels} channels in and {config.out_channels} out, "
                "an image-conditioned transformer; only text-to-video is supported"
            )
        if config.freq_dim % 2:
            raise CheckpointError(
                f"{source}: freq_dim {config.freq_dim}; half are cosines and half sines, so an even one"
            )
        if config.head_dim % 2 or config.head_dim < 6:
            raise CheckpointError(
                f"{source}: head_dim {config.head_dim}; rotary embedding needs an even size of at least 6"
            )
        return config

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of every parameter of one expert, under the Diffusers names."""
        dim, shapes = self.dim, dict[str, tuple[int, ...]]()

        def linear(name: str, out_features: int, in_features: int) -> None:
            shapes[f"{name}.weight"], shapes[f"{name}.bias"] = (out_features, in_features), (out_features,)

        shapes["patch_embedding.weight"] = (dim, self.in_channels, *PATCH_SIZE)
        shapes["patch_embedding.bias"] = (dim,)
        linear("condition_embedder.time_embedder.linear_1", dim, self.freq_dim)
        linear("condition_embedder.time_embedder.linear_2", dim, dim)
        linear("condition_embedder.time_proj", 6 * dim, dim)
        linear("condition_embedder.text_embedder.linear_1", dim, self.text_dim)
        linear("condition_embedder.text_embedder.linear_2", dim, dim)
        for layer in range(self.num_layers):
            block = f"blocks.{layer}"
            shapes[f"{block}.scale_shift_table"] = (1, 6, dim)
            for attention in ("attn1", "attn2"):
                for projection in ("to_q", "to_k", "to_v", "to_out.0"):
                    linear(f"{block}.{attention}.{projection}", dim, dim)
                shapes[f"{block}.{attention}.norm_q.weight"] = (dim,)
                shapes[f"{block}.{attention}.norm_k.weight"] = (dim,)
            if self.cross_attn_norm:
                shapes[f"{block}.norm2.weight"], shapes[f"{block}.norm2.bias"] = (dim,), (dim,)
            linear(f"{block}.ffn.net.0.proj", self.ffn_dim, dim)
            linear(f"{block}.ffn.net.2", dim, self.ffn_dim)
        linear("proj_out", self.out_patch_dim, dim)
        shapes["scale_shift_table"] = (1, 2, dim)
        return shapes


def kept_in_fp32(name: str) -> bool:
    """Whether a parameter stays fp32 whatever dtype the model runs in."""
    return any(part in KEPT_IN_FP32 for part in name.split("."))


def _require(config: Mapping[str, Any], source: str, key: str, test: Any, wanted: Any, default: Any) -> None:
    value = config.get(key, default)
    if not test(value):
        raise CheckpointError(f"{source}: {key} is {value!r}; only {wanted!r} is supported")
