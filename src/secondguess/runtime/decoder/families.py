"""Descriptions of the decoder families that the fused decoder supports.

Each family is one entry of `FAMILIES`. `undescribed_reason` rejects configurations with features
that a description cannot express. Probes (`fused.fuse`, `cpu/check.py`) then check
that the description is correct.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from secondguess.runtime.decoder.stored import WeightSource
from secondguess.runtime.modules.support import LENGTH_DEPENDENT_ROPE
from secondguess.runtime.system.quiet import quiet

with quiet():
    from transformers.configuration_utils import PreTrainedConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS


def _gelu_new(x: Tensor) -> Tensor:
    """Return the approximation of GELU by a hyperbolic tangent, rounded after each operation as by GPT-2's modules."""
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x.pow(3.0))))


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_new": _gelu_new,
    "gelu_pytorch_tanh": partial(functional.gelu, approximate="tanh"),
}


class Norm:
    """Root-mean-square norm that rounds before it applies the weight, as Llama's modules do.

    Attributes:
        bias: added after the weight by a layer norm, which also subtracts the mean; else None.
    """

    rounds_first = True
    bias: Tensor | None = None

    def __init__(self, module: Any, eps: float) -> None:
        self.weight: Tensor = module.weight.detach()
        self.eps = eps

    def __call__(self, states: Tensor) -> Tensor:
        return functional.rms_norm(states, self.weight.shape, None, self.eps) * self.weight


class Float32Norm(Norm):
    """Root-mean-square norm that rounds after it has applied the weight, as OLMo's modules do."""

    rounds_first = False

    def __init__(self, module: Any, eps: float) -> None:
        self.weight = module.weight.detach().float()
        self.eps = eps

    def __call__(self, states: Tensor) -> Tensor:
        return functional.rms_norm(states.float(), self.weight.shape, self.weight, self.eps).to(states.dtype)


class GemmaNorm(Float32Norm):
    """Gemma's root-mean-square norm, which scales by 1 + weight."""

    def __init__(self, module: Any, eps: float) -> None:
        self.weight = 1.0 + module.weight.detach().float()
        self.eps = eps


class LayerNorm(Norm):
    """Layer norm with a weight and a bias."""

    rounds_first = False

    def __init__(self, module: Any, eps: float) -> None:
        self.weight, self.bias = module.weight.detach(), module.bias.detach()
        self.eps = eps

    def __call__(self, states: Tensor) -> Tensor:
        return functional.layer_norm(states, self.weight.shape, self.weight, self.bias, self.eps)


class GateClamp(NamedTuple):
    """Clamped SwiGLU of gpt-oss: `gate * sigmoid(alpha * gate) * (value + 1)`.

    Gates are clamped to at most `limit`, values to [-limit, limit].
    """

    alpha: float
    limit: float

    def __call__(self, gate: Tensor, value: Tensor) -> Tensor:
        gate, value = gate.clamp(max=self.limit), value.clamp(-self.limit, self.limit)
        return (value + 1) * (gate * torch.sigmoid(gate * self.alpha))


class NormNames(NamedTuple):
    """Names of a layer's norms before and after its two parts; None where there is no norm."""

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None


class LinearNames(NamedTuple):
    """Names of a layer's linear layers. Several inputs are joined, in this order."""

    attention_inputs: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    attention_output: str = "o_proj"
    mlp_inputs: tuple[str, ...] = ("gate_proj", "up_proj")
    mlp_output: str = "down_proj"


class ExpertNames(NamedTuple):
    """Names in a checkpoint of the linear layers of the expert `{}`, within its decoder layer."""

    gate: str = "mlp.experts.{}.gate_proj"
    up: str = "mlp.experts.{}.up_proj"
    down: str = "mlp.experts.{}.down_proj"


LLAMA_NORMS, LLAMA_LINEARS, QWEN_EXPERTS = NormNames(), LinearNames(), ExpertNames()
NO_ROTARY = "none"
"""Key of the rotary table of layers without rotary positions."""


def no_windows(config: Any) -> list[int | None]:
    return [None] * config.num_hidden_layers


def one_window(config: Any) -> list[int | None]:
    return [config.sliding_window] * config.num_hidden_layers


def window_by_layer(config: Any) -> list[int | None]:
    return [config.sliding_window if kind == "sliding_attention" else None for kind in config.layer_types]


def one_rotary(config: Any) -> list[str | None]:
    return [None] * config.num_hidden_layers


def rotary_by_layer_type(config: Any) -> list[str | None]:
    return list(config.layer_types)


def rotary_in_marked_layers(config: Any) -> list[str | None]:
    return [None if has_rotary else NO_ROTARY for has_rotary in config.no_rope_layers]


def all_layers(config: Any) -> list[bool]:
    return [True] * config.num_hidden_layers


def sparse_layers(config: Any) -> list[bool]:
    return [
        config.num_experts > 0
        and index not in config.mlp_only_layers
        and (index + 1) % config.decoder_sparse_step == 0
        for index in range(config.num_hidden_layers)
    ]


@dataclass(frozen=True)
class MixtureOfExperts:
    """Mixture of experts of a family, with weights that are softmax probabilities.

    Args:
        layers: function from the configuration to whether each layer has experts.
        normalises_routing_weights: function from the configuration to whether the weights of the selected
            experts are divided by their sum.
        rounds_routing_weights: whether these weights are rounded to the dtype of the states.
        names: names of the experts' linear layers in a checkpoint.
        router: name of the router in the feed-forward part.
        is_transposed: whether the module's joined weights are `[expert, input, output]`, with gates and values in
            turn and with biases (gpt-oss).
    """

    layers: Callable[[Any], list[bool]] = all_layers
    normalises_routing_weights: Callable[[Any], bool] = lambda config: bool(config.norm_topk_prob)
    rounds_routing_weights: bool = True
    names: ExpertNames = QWEN_EXPERTS
    router: str = "gate"
    is_transposed: bool = False

    @property
    def stored_router(self) -> str:
        """Name of the router in a checkpoint, within its decoder layer."""
        return f"{self.names.gate.partition('.experts')[0]}.{self.router}"


@dataclass(frozen=True)
class Family:
    """Differences of a model family from Llama.

    All families have rotary positions, and biases where the checkpoint has them. By default a
    layer has Llama's structure: pre-norm, and a gated feed-forward network.

    Args:
        windows: function from the configuration to each layer's sliding window in tokens, None for
            full attention. A configuration may name windows that the family's module does not use.
        own_fields: configuration fields that the description covers, in addition to `COMMON_FIELDS`.
        norm: class of the norms.
        norms: names of a layer's norms.
        has_qk_norm: whether queries and keys are normalised, per head (Qwen3) or all heads together
            (OLMo 2), as the size of the weight says.
        linears: names of a layer's linear layers.
        attention: name of the attention in a layer.
        body, head: names in a checkpoint of the module with the layers, and of the LM head.
        embedding, final_norm: names in the body of the input embeddings, and of the norm after the layers.
        epsilon: name of the configuration field with the epsilon of the norms.
        score_factor: function from the configuration and the size of a head to the factor on the scores.
        has_interleaved_heads: whether the joined projection lists query, key and value of each head
            in turn (GPT-NeoX), not all queries first.
        is_gated: whether the first half of the feed-forward inputs gates the second one.
        is_parallel: function from the configuration to whether attention and feed-forward read the
            same states and are added together (Phi).
        rotaries: function from the configuration to the key of each layer's rotary table: None for
            the module's only one, a layer type that has its own (Gemma 3), or `NO_ROTARY`.
        is_interleaved: whether the rotary layout is interleaved (GLM), not half-split.
        rotates_in_float32: whether cosines and sines are float32 in any dtype (OLMo 2).
        scales_embeddings: whether the embedding module scales its output (Gemma).
        activation: name of the configuration field that holds the activation.
        has_sinks: whether each head has an attention sink, a score without a value (gpt-oss).
        experts: description of the mixture of experts; None for a dense family.
    """

    windows: Callable[[Any], list[int | None]] = no_windows
    own_fields: frozenset[str] = frozenset()
    norm: type[Norm] = Norm
    norms: NormNames = LLAMA_NORMS
    has_qk_norm: bool = False
    linears: LinearNames = LLAMA_LINEARS
    attention: str = "self_attn"
    body: str = "model"
    head: str = "lm_head"
    embedding: str = "embed_tokens"
    final_norm: str = "norm"
    epsilon: str = "rms_norm_eps"
    score_factor: Callable[[Any, int], float] = lambda config, size: float(size**-0.5)
    has_interleaved_heads: bool = False
    is_gated: bool = True
    is_parallel: Callable[[Any], bool] = lambda config: False
    rotaries: Callable[[Any], list[str | None]] = one_rotary
    is_interleaved: bool = False
    rotates_in_float32: bool = False
    scales_embeddings: bool = False
    activation: str = "hidden_act"
    has_sinks: bool = False
    experts: MixtureOfExperts | None = None

    def number(self, config: Any, field: str) -> float | None:
        """Return the value of a configuration field, or None if the family's module does not use it."""
        return getattr(config, field) if field in self.own_fields else None

    def gate_clamp(self, config: Any) -> GateClamp | None:
        """Return the clamps of the gated feed-forward networks, if the family has them."""
        if "swiglu_limit" not in self.own_fields:
            return None
        # Before Transformers 5.19 the module has both numbers, and the configuration may have none.
        return GateClamp(getattr(config, "swiglu_alpha", 1.702), getattr(config, "swiglu_limit", 7.0))

    def has_experts(self, config: Any) -> list[bool]:
        """Return whether each layer has a mixture of experts."""
        return [False] * config.num_hidden_layers if self.experts is None else self.experts.layers(config)


GEMMA_NORMS = NormNames(
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
)
SOFT_CAPS = frozenset({"attn_logit_softcapping", "final_logit_softcapping"})
GEMMA2 = Family(
    window_by_layer,
    SOFT_CAPS,
    norm=GemmaNorm,
    norms=GEMMA_NORMS,
    scales_embeddings=True,
    activation="hidden_activation",
    score_factor=lambda config, size: float(config.query_pre_attn_scalar**-0.5),
)
OLMO2 = Family(
    norm=Float32Norm,
    norms=NormNames(None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
    has_qk_norm=True,
    rotates_in_float32=True,
)
EXPERT_FIELDS = frozenset(
    {"num_experts", "num_experts_per_tok", "norm_topk_prob", "router_aux_loss_coef", "output_router_logits"}
)
GLM = Family(linears=LinearNames(mlp_inputs=("gate_up_proj",)), is_interleaved=True)

FAMILIES = {
    "llama": Family(),
    "mistral": Family(one_window),
    "ministral": Family(window_by_layer),
    "qwen2": Family(window_by_layer),
    "qwen3": Family(window_by_layer, has_qk_norm=True),
    "qwen3_moe": Family(
        one_window,
        EXPERT_FIELDS | {"moe_intermediate_size", "decoder_sparse_step", "mlp_only_layers"},
        has_qk_norm=True,
        experts=MixtureOfExperts(sparse_layers),
    ),
    "mixtral": Family(
        one_window,
        EXPERT_FIELDS | {"num_local_experts", "router_jitter_noise"},
        experts=MixtureOfExperts(
            normalises_routing_weights=lambda config: True,
            rounds_routing_weights=False,
            names=ExpertNames(*(f"block_sparse_moe.experts.{{}}.{name}" for name in ("w1", "w3", "w2"))),
        ),
    ),
    "gpt_oss": Family(
        window_by_layer,
        EXPERT_FIELDS | {"num_local_experts", "swiglu_alpha", "swiglu_limit"},
        norm=Float32Norm,
        has_sinks=True,
        experts=MixtureOfExperts(
            normalises_routing_weights=lambda config: True, router="router", is_transposed=True
        ),
    ),
    "olmoe": Family(own_fields=EXPERT_FIELDS, has_qk_norm=True, experts=MixtureOfExperts()),
    "phi3": Family(one_window, linears=LinearNames(("qkv_proj",), mlp_inputs=("gate_up_proj",))),
    "gemma": Family(norm=GemmaNorm, scales_embeddings=True),
    "gemma2": GEMMA2,
    "gemma3_text": replace(GEMMA2, has_qk_norm=True, rotaries=rotary_by_layer_type),
    "olmo2": OLMO2,
    "olmo3": replace(OLMO2, windows=window_by_layer, rotaries=rotary_by_layer_type),
    "granite": Family(
        own_fields=frozenset(
            {"embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"}
        ),
        score_factor=lambda config, size: float(config.attention_multiplier),
    ),
    "smollm3": Family(
        window_by_layer,
        frozenset({"no_rope_layers", "no_rope_layer_interval"}),
        rotaries=rotary_in_marked_layers,
    ),
    "glm": GLM,
    "glm4": replace(
        GLM,
        norms=NormNames(after_attention="post_self_attn_layernorm", after_mlp="post_mlp_layernorm"),
    ),
    "stablelm": Family(norm=LayerNorm, epsilon="layer_norm_eps"),
    "phi": Family(
        norm=LayerNorm,
        norms=NormNames(before_mlp="input_layernorm"),
        linears=LinearNames(attention_output="dense", mlp_inputs=("fc1",), mlp_output="fc2"),
        final_norm="final_layernorm",
        epsilon="layer_norm_eps",
        is_gated=False,
        is_parallel=lambda config: True,
    ),
    "gpt_neox": Family(
        own_fields=frozenset({"use_parallel_residual"}),
        norm=LayerNorm,
        linears=LinearNames(("query_key_value",), "dense", ("dense_h_to_4h",), "dense_4h_to_h"),
        attention="attention",
        body="gpt_neox",
        head="embed_out",
        embedding="embed_in",
        final_norm="final_layer_norm",
        epsilon="layer_norm_eps",
        has_interleaved_heads=True,
        is_gated=False,
        is_parallel=lambda config: config.use_parallel_residual,
    ),
}

COMMON_FIELDS = frozenset({
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "hidden_act", "hidden_activation", "rms_norm_eps", "layer_norm_eps",
    "attention_bias", "mlp_bias", "use_qkv_bias", "tie_word_embeddings", "query_pre_attn_scalar",
    "max_position_embeddings", "original_max_position_embeddings", "rope_parameters", "layer_types",
    "sliding_window", "use_sliding_window", "max_window_layers", "attention_dropout", "hidden_dropout",
    "resid_pdrop", "embd_pdrop", "classifier_dropout", "initializer_range", "use_cache", "is_decoder",
    "pretraining_tp", "bos_token_id", "eos_token_id", "pad_token_id",
})  # fmt: skip
"""Configuration fields that every description covers, or that have no effect in a forward pass."""
IGNORED_FIELDS = frozenset(field.name for field in fields(PreTrainedConfig))


def undescribed_reason(config: Any, with_experts: bool = True) -> str | None:
    """Return why the descriptions of families do not cover this configuration, or mixtures without `with_experts`, else None."""
    if config.model_type not in FAMILIES:
        return f"{config.model_type} is not among the families described ({', '.join(FAMILIES)})"
    family = FAMILIES[config.model_type]
    if getattr(config, "is_heterogeneous", False):
        return "its layers have configurations of their own"
    if getattr(config, "quantization_config", None) is not None:
        return "the checkpoint is quantised"
    if getattr(config, family.activation) not in ACTIVATIONS:
        return f"activation {getattr(config, family.activation)} is none of {', '.join(ACTIVATIONS)}"
    if family.rotaries is rotary_by_layer_type and any(
        # Old configurations have the parameters of all layer types in addition to those of each.
        isinstance(rope, Mapping) and rope.get("rope_type") in LENGTH_DEPENDENT_ROPE
        for rope in config.rope_parameters.values()
    ):
        return "the rotary positions of a layer type depend on the length"
    if unknown := sorted(_rope_types(config) - ROPE_INIT_FUNCTIONS.keys() - {"default"}):
        return f"rotary positions of type {unknown[0]} are not known"
    if any(family.has_experts(config)) and not with_experts:
        return "it has mixtures of experts"
    if any(family.has_experts(config)) and not 0 < config.num_experts_per_tok <= config.num_experts:
        return f"{config.num_experts_per_tok} of {config.num_experts} experts are to be selected"
    if unknown := _unknown_fields(config, family):
        return f"the description of {config.model_type} does not cover {', '.join(unknown)}"
    return None


def _rope_types(config: Any) -> set[str]:
    """Return the types of rotary positions in a configuration."""
    ropes = [config.rope_parameters, *config.rope_parameters.values()]
    return {str(rope["rope_type"]) for rope in ropes if isinstance(rope, Mapping) and "rope_type" in rope}


def _unknown_fields(config: Any, family: Family) -> list[str]:
    """Return the fields that the model's own configuration class declares and no description covers.

    Only fields that are set count. A module may read them in a way that the probe cannot see: a soft
    cap, for one, hardly shows in small logits.
    """
    known = COMMON_FIELDS | IGNORED_FIELDS | family.own_fields
    declared = [field.name for field in fields(config) if field.name not in known]
    return [name for name in declared if getattr(config, name, None)]


def head_size_of(config: Any) -> int:
    """Return the size of a head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def num_key_heads(config: Any) -> int:
    """Return the number of key heads; joined heads have a key each."""
    number = getattr(config, "num_key_value_heads", None)
    if number is None or FAMILIES[config.model_type].has_interleaved_heads:
        return int(config.num_attention_heads)
    return int(number)


def weight_shapes(config: Any) -> dict[str, set[tuple[int, ...]]]:
    """Return the possible shapes of a decoder's weights by their names in a checkpoint, without biases.

    A tied head has none. Norms of queries and keys are over one head or all of them.
    """
    family, width, size = FAMILIES[config.model_type], config.hidden_size, head_size_of(config)
    num_queries = config.num_attention_heads
    num_keys = num_key_heads(config)
    linears, attention, experts = family.linears, family.attention, family.experts
    sizes = [num_queries * size, num_keys * size, num_keys * size]
    sizes = sizes if len(linears.attention_inputs) == 3 else [sum(sizes)]
    per_layer: dict[str, set[tuple[int, ...]]] = {
        name: {(width,)} for name in family.norms if name is not None
    }
    for name, outputs in zip(linears.attention_inputs, sizes, strict=True):
        per_layer[f"{attention}.{name}"] = {(outputs, width)}
    per_layer[f"{attention}.{linears.attention_output}"] = {(width, num_queries * size)}
    if family.has_qk_norm:
        per_layer[f"{attention}.q_norm"] = {(size,), (num_queries * size,)}
        per_layer[f"{attention}.k_norm"] = {(size,), (num_keys * size,)}
    embedded: set[tuple[int, ...]] = {(config.vocab_size, width)}
    found: dict[str, set[tuple[int, ...]]] = {
        f"{family.body}.{family.embedding}.weight": embedded,
        f"{family.body}.{family.final_norm}.weight": {(width,)},
    }
    if not config.tie_word_embeddings:
        found[f"{family.head}.weight"] = embedded
    for index, has_experts in enumerate(family.has_experts(config)):
        layer, inner = f"{family.body}.layers.{index}", dict(per_layer)
        if experts is not None and has_experts:
            inner[experts.stored_router] = {(config.num_experts, width)}
            expert_width = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
            for expert in range(config.num_experts):
                gate, up, down = (name.format(expert) for name in experts.names)
                inner |= {
                    gate: {(expert_width, width)},
                    up: {(expert_width, width)},
                    down: {(width, expert_width)},
                }
        else:
            num_parts = (2 if family.is_gated else 1) // len(linears.mlp_inputs)
            inner |= {
                f"mlp.{name}": {(num_parts * config.intermediate_size, width)} for name in linears.mlp_inputs
            }
            inner[f"mlp.{linears.mlp_output}"] = {(width, config.intermediate_size)}
        found |= {f"{layer}.{name}.weight": shapes for name, shapes in inner.items()}
        if family.has_sinks:
            found[f"{layer}.{attention}.sinks"] = {(num_queries,)}
    return found


def missing_weights(config: Any, weights: WeightSource) -> list[str]:
    """Return the names of a decoder's weights that a checkpoint lacks; in another one Transformers may rename some.

    A weight of another shape than the configuration says raises a `ValueError`.
    """
    missing = []
    for name, shapes in weight_shapes(config).items():
        if not weights.has(name):
            missing.append(name)
            continue
        shape = tuple(weights.shape(name))
        _require_shape(name, shape, shapes)
        bias = f"{name.removesuffix('weight')}bias"
        if bias != name and weights.has(bias):
            _require_shape(bias, tuple(weights.shape(bias)), {shape[:1]})
    return missing


def _require_shape(name: str, found: tuple[int, ...], expected: set[tuple[int, ...]]) -> None:
    if found not in expected:
        raise ValueError(f"{name} of shape {found}, not {min(expected)}, as the configuration says")


def attention_linears(layer: Any, family: Family) -> tuple[list[Any], Any]:
    """Return the linear layers of a layer's attention: those of its inputs, and its output."""
    names, attention = family.linears, getattr(layer, family.attention)
    return (
        [getattr(attention, name) for name in names.attention_inputs],
        getattr(attention, names.attention_output),
    )


def mlp_linears(layer: Any, family: Family) -> tuple[list[Any], Any]:
    """Return the linear layers of a layer's only feed-forward network: those of its inputs, and its output."""
    names = family.linears
    return [getattr(layer.mlp, name) for name in names.mlp_inputs], getattr(layer.mlp, names.mlp_output)
