"""Decoder layers of drafter heads: those of Transformers, with the attention function as a parameter.

Training attends over whole sequences, drafting over a KV cache. Weight names are those of the
published checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from secondguess.errors import BadInputError, UnsupportedModelError
from secondguess.runtime.system.quiet import quiet

AttentionFunction = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""Attention function: `(layer, query, key, value)` to the attention output, per query in the value's size.

Query, key and value are `[row, attention head, position, size]`.
"""
CosSin = tuple[Tensor, Tensor]
"""Rotary cos and sin of the positions, `[row or 1, position, size]` each."""

DENSE_TYPES = ("llama", "mistral", "qwen2", "qwen3")
GATED_TYPES = ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text")
"""Model types whose attention has gates on its output."""
LATENT_TYPES = ("deepseek_v3", "glm4_moe_lite")
"""Model types with latent attention."""
MTP_TYPES = (*DENSE_TYPES, "glm4_moe", *GATED_TYPES, *LATENT_TYPES)
"""Model types whose multi-token-prediction modules are supported."""
SCALINGS = ("default", "linear", "llama3", "yarn")
"""Scalings of rotary positions that do not depend on the length of the text."""

_SAME_TYPES = {"kimi_k2": "deepseek_v3", "phi3": "llama"}
"""Model type with the same layers, as drafters have them."""
_TEXT_TYPES = {"qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"}
"""Model type of the language model by that of a multimodal model."""
_COMMON_FIELDS = ("attention_bias", "mlp_bias", "max_position_embeddings")
_FURTHER_FIELDS = (
    "use_qk_norm",
    "kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "rope_interleave",
    "moe_intermediate_size", "num_experts_per_tok", "norm_topk_prob",
    "n_routed_experts", "n_shared_experts", "n_group", "topk_group", "routed_scaling_factor",
    "num_experts", "shared_expert_intermediate_size",
)  # fmt: skip
_COMMON_ROPE_FIELDS = ("rope_type", "rope_theta", "partial_rotary_factor")
_YARN_FIELDS = (
    "factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale",
    "mscale_all_dim", "truncate",
)  # fmt: skip
_ROPE_FIELDS: dict[str, tuple[str, ...]] = {
    "default": ("mrope_section", "mrope_interleaved"),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": _YARN_FIELDS,
}
"""Fields of each scaling of rotary positions."""
_ATTENTION = "secondguess-head"


@dataclass(frozen=True)
class LayerConfig:
    """Sizes and options of the decoder layers of a head."""

    width: int
    num_heads: int
    num_kv_heads: int
    head_size: int  # of the rotated part of a head with latent attention
    mlp_size: int  # of each expert, if there are some
    norm_eps: float = 1e-6
    model_type: str = "llama"  # in Transformers
    more: Mapping[str, Any] = field(default_factory=dict)  # further fields of its configuration
    has_experts: bool = False  # some layers of models with experts have none

    def __post_init__(self) -> None:
        for name in ("width", "num_heads", "num_kv_heads", "head_size", "mlp_size"):
            if getattr(self, name) < 1:
                raise BadInputError(f"expected {name} of at least 1, got {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads or self.head_size % 2:
            raise BadInputError(
                f"expected heads that share key heads evenly and an even head size, got {self.num_heads} heads, "
                f"{self.num_kv_heads} key heads of size {self.head_size}"
            )

    @property
    def is_like_llama(self) -> bool:
        """True if a layer has the parts of Llama's, perhaps with biases and query and key norms."""
        return self.model_type in DENSE_TYPES

    @property
    def has_qk_norm(self) -> bool:
        """True if each query and key head is RMS-normalised."""
        return self.model_type in ("qwen3", *GATED_TYPES) or bool(self.more.get("use_qk_norm"))

    @property
    def attention_bias(self) -> bool:
        """True if the query, key and value projections have biases."""
        return self.model_type == "qwen2" or bool(self.more.get("attention_bias"))

    @property
    def context_length(self) -> int | None:
        """Largest number of positions; None if there is no limit."""
        return self.more.get("max_position_embeddings")

    @classmethod
    def from_config(
        cls,
        config: Mapping[str, Any],
        kinds: Sequence[str] = DENSE_TYPES + GATED_TYPES,
        *,
        has_experts: bool = False,
        has_output_bias: bool = True,
    ) -> LayerConfig:
        """Build a configuration from that of a model, whose type must be one of `kinds`.

        Dense layers with `attention_bias` but without `has_output_bias` have biases like Qwen2's.
        """
        kind = config.get("model_type", "llama")
        kind = _SAME_TYPES.get(kind, kind)
        if kind not in kinds:
            raise UnsupportedModelError(
                f"expected a drafter with layers like those of {', '.join(kinds)}, got {kind}"
            )
        if config.get("hidden_act", "silu") != "silu":
            raise UnsupportedModelError(
                f"expected the activation silu, got {config['hidden_act']}; use another drafter, or train one with "
                "`secondguess train`"
            )
        width, num_heads, is_latent = (
            config["hidden_size"],
            config["num_attention_heads"],
            kind in LATENT_TYPES,
        )
        head_size = config["qk_rope_head_dim"] if is_latent else config.get("head_dim") or width // num_heads
        num_kv_heads = config.get("num_key_value_heads") or num_heads
        if is_latent:  # its keys are not shared, and their size is a sum
            num_kv_heads = num_heads
            config.get("head_dim")
        further = {name: config[name] for name in _COMMON_FIELDS if config.get(name) is not None}
        if kind in DENSE_TYPES:
            kind = _dense_kind(kind, config, has_output_bias)
        else:
            further |= {name: config[name] for name in _FURTHER_FIELDS if name in config}
        return cls(
            width=width,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_size=head_size,
            mlp_size=config["moe_intermediate_size" if has_experts else "intermediate_size"],
            norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            model_type=_TEXT_TYPES.get(kind, kind),
            more={**further, "rope_parameters": _rope_parameters(config, kind)},
            has_experts=has_experts,
        )

    def to_config(self) -> dict[str, Any]:
        """Return the equivalent fields of a model's configuration."""
        return {
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
            **self.more,
            "model_type": self.model_type,
            "hidden_size": self.width,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_size,
            "intermediate_size": self.mlp_size,
            "rms_norm_eps": self.norm_eps,
            "hidden_act": "silu",
        }


def _dense_kind(kind: str, config: Mapping[str, Any], has_output_bias: bool) -> str:
    """Return the type of dense layers with the biases of a configuration, or raise an error if there is none."""
    has_bias = config.get("attention_bias", kind == "qwen2")
    if config.get("mlp_bias") and kind != "llama":
        raise UnsupportedModelError(
            f"expected mlp_bias in layers like those of llama only, got it for {kind}"
        )
    if kind == "mistral" and has_bias:
        raise UnsupportedModelError("expected layers like those of mistral without attention_bias, got it")
    if kind == "qwen2":
        return "qwen2" if has_bias and config.get("qkv_bias", True) else "llama"
    only_inputs = config.get("qkv_bias") or (has_bias and not has_output_bias)
    return "qwen2" if kind == "llama" and only_inputs and not config.get("mlp_bias") else kind


def read_windows(config: Mapping[str, Any], num_layers: int) -> tuple[int | None, ...]:
    """Return the sliding window of each layer, in tokens; None for full attention.

    `layer_types` decides. Without it a window is used by all layers like those of Mistral, and, with
    `use_sliding_window`, by those from `max_window_layers` on; otherwise it is a field of the target that
    was copied, which readers and trainers ignore.
    """
    window, is_used = config.get("sliding_window"), config.get("use_sliding_window")
    first = config.get("max_window_layers", 0)
    if (types := config.get("layer_types")) is None:
        is_sliding = is_used or (is_used is None and config.get("model_type") == "mistral")
        types = [
            "sliding_attention" if is_sliding and window and layer >= first else "full_attention"
            for layer in range(num_layers)
        ]
    if len(types) != num_layers or not {"full_attention", "sliding_attention"}.issuperset(types):
        raise UnsupportedModelError(
            f"expected full_attention or sliding_attention for each of {num_layers} layers, got {types}"
        )
    if "sliding_attention" not in types:
        return (None,) * num_layers
    if is_used is False or not isinstance(window, int) or window < 1:
        raise UnsupportedModelError(
            f"expected the sliding_window of layers with sliding_attention, got {window!r} and use_sliding_window of {is_used}"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def window_fields(windows: Sequence[int | None]) -> dict[str, Any]:
    """Return the fields of a configuration that `read_windows` reads; layers with windows must have the same one."""
    types = ["full_attention" if window is None else "sliding_attention" for window in windows]
    sizes = {window for window in windows if window is not None}
    if not sizes:
        return {"layer_types": types}
    (size,) = sizes
    return {"layer_types": types, "sliding_window": size, "use_sliding_window": True}


def _rope_parameters(config: Mapping[str, Any], layer_type: str) -> dict[str, Any]:
    """Return the fields about rotary positions, which older configurations name otherwise."""
    found = config.get("rope_parameters") or config.get("rope_scaling") or {}
    older = found.get("type")
    kind = found.get("rope_type", older or "default")
    if older not in (None, kind):
        raise ValueError(f"rotary positions of the type {older} beside the rope_type {kind}")
    if kind not in SCALINGS:
        raise UnsupportedModelError(
            f"expected rotary positions without scaling or with one of {', '.join(SCALINGS[1:])}, got {dict(found)}; use "
            "another drafter, or train one with `secondguess train`"
        )
    names = (*_COMMON_ROPE_FIELDS, *_ROPE_FIELDS[kind])
    rope = {"rope_type": kind} | {name: found[name] for name in names if found.get(name) is not None}
    for name, default in (("rope_theta", 10_000.0), ("partial_rotary_factor", None)):
        outside = config.get(name)
        if outside is not None and rope.setdefault(name, outside) != outside:
            raise ValueError(f"{name} of {outside} beside one of {rope[name]}")
        if default is not None:
            rope.setdefault(name, default)
    if layer_type in DENSE_TYPES and rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModelError(
            "expected rotary positions over whole attention heads, got a partial_rotary_factor"
        )
    return rope


class RotaryPositions(nn.Module):
    """Rotary positions: angles between neighbouring positions `[size / 2]`, and a factor on cosines and sines."""

    frequencies: Tensor

    def __init__(self, frequencies: Tensor, factor: float) -> None:
        super().__init__()
        self.register_buffer("frequencies", frequencies, persistent=False)
        self.factor = factor

    def forward(self, positions: Tensor, dtype: torch.dtype) -> CosSin:
        """Return cos and sin of positions `[row or 1, position]`."""
        angles = positions[..., None] * self.frequencies
        both = torch.cat((angles, angles), -1)
        cos, sin = both.cos(), both.sin()
        if self.factor != 1.0:
            cos, sin = cos * self.factor, sin * self.factor
        return cos.to(dtype), sin.to(dtype)


def make_layers(config: LayerConfig, num_layers: int = 1) -> tuple[nn.ModuleList, RotaryPositions]:
    """Return untrained decoder layers, whose norms are those of torch, and their rotary positions."""
    is_sparse = config.has_experts
    fields = config.to_config() | {
        "num_hidden_layers": num_layers,
        "vocab_size": 1,
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
        # Each family has its own field for the layers that have experts.
        "first_k_dense_replace": 0 if is_sparse else num_layers,
        "mlp_layer_types": ["sparse" if is_sparse else "dense"] * num_layers,
        "mlp_only_layers": [] if is_sparse else list(range(num_layers)),
        "decoder_sparse_step": 1,
    }
    if config.model_type in GATED_TYPES:
        fields["layer_types"] = ["full_attention"] * num_layers
    with quiet():
        from transformers import AttentionInterface, AutoConfig, AutoModel

        AttentionInterface.register(_ATTENTION, _attend_by_argument)
        try:
            described = AutoConfig.for_model(fields.pop("model_type"), **fields)
            model = AutoModel.from_config(
                described, attn_implementation=_ATTENTION, experts_implementation="eager"
            )
        except Exception as error:  # Transformers raises errors of many kinds for such fields
            raise ValueError(f"fields that Transformers rejects: {str(error).splitlines()[0]}") from error
    frequencies, factor = model.rotary_emb.inv_freq, float(model.rotary_emb.attention_scaling)
    if not frequencies.isfinite().all():
        raise ValueError(
            f"a scaling of rotary positions with finite frequencies, got {described.rope_parameters}"
        )
    for module in list(model.layers.modules()):
        for name, part in module.named_children():
            if type(part).__name__.endswith("RMSNorm"):
                setattr(module, name, _torch_norm(part))
    return model.layers, RotaryPositions(frequencies, factor)


def _torch_norm(norm: Any) -> nn.RMSNorm:
    """Return the norm of torch, which is faster, for one of Transformers, with weights around 1."""
    settings = vars(norm)
    return nn.RMSNorm(norm.weight.shape, settings.get("variance_epsilon", settings.get("eps")))


def widen_attention(layer: Any, width: int) -> None:
    """Let the attention of a layer read an input of another width."""
    parts = dict(layer.self_attn.named_children())
    for name in ("q_proj", "k_proj", "v_proj", "q_a_proj", "kv_a_proj_with_mqa"):
        if name not in parts:
            continue
        linear = parts[name]
        setattr(layer.self_attn, name, nn.Linear(width, linear.out_features, bias=linear.bias is not None))


def run_layer(layer: Any, states: Tensor, cos_sin: CosSin, attend: AttentionFunction) -> Tensor:
    """Return the output of a layer, `[row, position, width]`."""
    return add_mlp(layer, states + run_attention(layer, layer.input_layernorm(states), cos_sin, attend))


def run_attention(layer: Any, states: Tensor, cos_sin: CosSin, attend: AttentionFunction) -> Tensor:
    """Return the output of the attention of a layer for its normalised input."""
    attended: Tensor = layer.self_attn(
        states, position_embeddings=cos_sin, attention_mask=None, attend=attend
    )[0]
    return attended


def add_mlp(layer: Any, states: Tensor) -> Tensor:
    """Return the states after the feed-forward network of a layer and its residual connection."""
    output: Tensor = states + layer.mlp(layer.post_attention_layernorm(states))
    return output


def keys_values(layer: Any, states: Tensor, cos_sin: CosSin) -> tuple[Tensor, Tensor]:
    """Return the rotated keys and the values of a layer without latent attention, `[row, kv_head, position, size]`."""
    parts, size = dict(layer.self_attn.named_children()), layer.self_attn.head_dim
    keys, values = (parts[name](states).unflatten(-1, (-1, size)) for name in ("k_proj", "v_proj"))
    if "k_norm" in parts:
        keys = parts["k_norm"](keys)
    cos, sin = (part[:, :, None] for part in cos_sin)
    num_rotated = cos.shape[-1]
    part, rest = keys.split([num_rotated, size - num_rotated], -1)
    first, second = part.chunk(2, -1)
    rotated = part * cos + torch.cat((-second, first), -1) * sin
    return torch.cat((rotated, rest), -1).transpose(1, 2), values.transpose(1, 2)


def _attend_by_argument(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: None,
    *,
    scaling: float,
    attend: AttentionFunction,
    **unused: object,
) -> tuple[Tensor, None]:
    """Attend with the function given to `run_attention`, whose scores have the usual factor."""
    usual: float = query.shape[-1] ** -0.5
    if scaling != usual:
        query = query * (scaling / usual)
    return attend(module.layer_idx, query, key, value).transpose(1, 2), None


def attention(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, is_causal: bool = False
) -> Tensor:
    """Return scaled dot-product attention, grouped if there are fewer key-value heads."""
    grouped = query.shape[1] != keys.shape[1]
    return functional.scaled_dot_product_attention(
        query, keys, values, attn_mask=mask, is_causal=is_causal, enable_gqa=grouped
    )


def sequence_attention(mask: Tensor | None) -> AttentionFunction:
    """Return an attention function over whole sequences, for training; causal without a mask `[row or 1, 1, query, key]`."""
    return lambda layer, query, key, value: attention(query, key, value, mask, is_causal=mask is None)
