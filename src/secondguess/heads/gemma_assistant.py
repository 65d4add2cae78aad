"""Assistant of a Gemma 4 model: a small decoder that reads the target's keys and values.

Its layers have queries alone. They attend to what the target has cached in its last layer of the
same kind, full attention or a sliding window. The input of a step is a token and a state of the
target's width: the target's last hidden state for the pending token, then the assistant's own
output. All steps of a draft have the position of the pending token.

Read is the format of Transformers, `gemma4_assistant` and `gemma4_unified_assistant`. The layers
are written here, because not every release of Transformers can build them (5.23 cannot).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from secondguess.errors import CheckpointError, UnsupportedModelError
from secondguess.heads.base import LoadedHead, TargetModel
from secondguess.heads.files import config_errors, load_into, require_same, whole_number
from secondguess.heads.formats import StoredHead
from secondguess.heads.layer import CosSin, RotaryPositions
from secondguess.heads.learning import LAST_HIDDEN

KIND = "gemma4-assistant"
FULL, SLIDING = "full_attention", "sliding_attention"
"""Kinds of attention, as in `layer_types` of Transformers."""
ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "gelu_pytorch_tanh": partial(functional.gelu, approximate="tanh"),
    "gelu": functional.gelu,
    "silu": functional.silu,
}
DEFAULT_ROPE: Mapping[str, Mapping[str, Any]] = {
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    FULL: {"rope_type": "proportional", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.25},
}

_READ = frozenset(
    (
        "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "head_dim", "global_head_dim", "per_layer_config", "num_kv_shared_layers", "layer_types", "sliding_window",
        "rope_parameters", "rms_norm_eps", "hidden_activation", "attention_bias", "max_position_embeddings",
        "hidden_size_per_layer_input", "enable_moe_block", "use_double_wide_mlp", "use_bidirectional_attention",
    )
)  # fmt: skip
_WITHOUT_EFFECT = frozenset(
    (
        # about keys and values, which the target computes
        "num_key_value_heads", "num_global_key_value_heads", "attention_k_eq_v",
        # about parts that an assistant does not have
        "vocab_size_per_layer_input", "num_experts", "top_k_experts", "moe_intermediate_size",
        # Transformers applies no cap to an assistant's logits
        "final_logit_softcapping",
        # about training, generation and the files
        "initializer_range", "attention_dropout", "use_cache", "dtype", "torch_dtype", "architectures",
        "transformers_version", "pad_token_id", "bos_token_id", "eos_token_id", "tie_word_embeddings",
        "output_hidden_states", "output_attentions", "return_dict", "_name_or_path", "is_encoder_decoder",
    )
)  # fmt: skip
_READ_OUTSIDE = frozenset(
    (
        "model_type", "text_config", "backbone_hidden_size", "tie_word_embeddings",
        "use_ordered_embeddings", "num_centroids", "centroid_intermediate_top_k",
    )
)  # fmt: skip
_EXPECTED: Mapping[str, Sequence[object]] = {
    "hidden_size_per_layer_input": (0,),
    "enable_moe_block": (False, None),
    "use_double_wide_mlp": (False,),
    "use_bidirectional_attention": (None, "vision"),
}
"""Values of fields for parts that assistants do not have; the first one is that of an absent field."""


@dataclass(frozen=True)
class AssistantConfig:
    """Sizes and options of an assistant."""

    width: int
    target_width: int
    vocab_size: int
    num_heads: int
    mlp_size: int
    kinds: tuple[str, ...]  # kind of attention of each layer
    head_sizes: tuple[int, ...]  # size of an attention head of each layer
    window: int
    context_length: int
    rope: Mapping[str, Mapping[str, Any]]  # rotary positions by kind of attention
    norm_eps: float = 1e-6
    activation: str = "gelu_pytorch_tanh"
    attention_bias: bool = False
    has_head: bool = False  # an output matrix that is not that of the embeddings
    num_centroids: int = 0  # clusters of tokens; 0 for none
    num_chosen: int = 0  # clusters that logits are computed for

    @classmethod
    def read(cls, stored: StoredHead) -> Self:
        """Read the configuration of an assistant; call it inside `config_errors`."""
        fields = stored.layers
        _require_known_fields(stored)
        kinds, head_sizes = _attention_of_layers(fields)
        is_ordered = stored.flag("use_ordered_embeddings")
        config = cls(
            width=whole_number(fields, "hidden_size"),
            target_width=stored.number("backbone_hidden_size"),
            vocab_size=whole_number(fields, "vocab_size"),
            num_heads=whole_number(fields, "num_attention_heads"),
            mlp_size=whole_number(fields, "intermediate_size"),
            kinds=kinds,
            head_sizes=head_sizes,
            window=whole_number(fields, "sliding_window"),
            context_length=whole_number(fields, "max_position_embeddings"),
            rope=fields.get("rope_parameters") or DEFAULT_ROPE,
            norm_eps=float(fields.get("rms_norm_eps", 1e-6)),
            activation=fields.get("hidden_activation", "gelu_pytorch_tanh"),
            attention_bias=bool(fields.get("attention_bias")),
            has_head=not stored.flag("tie_word_embeddings", default=True),
            num_centroids=stored.number("num_centroids", 2048) if is_ordered else 0,
            num_chosen=stored.number("centroid_intermediate_top_k", 32) if is_ordered else 0,
        )
        config._require_supported()
        return config

    def _require_supported(self) -> None:
        if self.activation not in ACTIVATIONS:
            raise UnsupportedModelError(
                f"expected an assistant with one of the activations {', '.join(ACTIVATIONS)}, got {self.activation}"
            )
        if self.num_centroids and (
            self.vocab_size % self.num_centroids or self.num_chosen > self.num_centroids
        ):
            raise ValueError(
                f"centroid_intermediate_top_k of {self.num_chosen} and num_centroids of {self.num_centroids} for "
                f"{self.vocab_size} tokens, which should be clusters of equal size"
            )


def _require_known_fields(stored: StoredHead) -> None:
    """Refuse fields whose effect is not known, and values for parts that assistants do not have."""
    fields = stored.layers
    unknown = sorted({*fields} - _READ - _WITHOUT_EFFECT | {*stored.config} - _READ_OUTSIDE - _WITHOUT_EFFECT)
    if unknown:
        raise UnsupportedModelError(
            f"expected an assistant with the fields that Transformers 5.24 writes, got {', '.join(unknown)}; use another "
            "drafter"
        )
    for name, values in _EXPECTED.items():
        found = fields.get(name, values[0])
        if found not in values:
            raise UnsupportedModelError(
                f"expected an assistant with {name} of {values[0]}, got {found!r}; use another drafter"
            )


def _attention_of_layers(fields: Mapping[str, Any]) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Return the kind of attention and the size of a head of each layer."""
    num_layers = whole_number(fields, "num_hidden_layers")
    num_shared = fields.get("num_kv_shared_layers") or num_layers
    kinds = fields.get("layer_types") or [
        SLIDING if (layer + 1) % 6 and layer + 1 < num_layers else FULL for layer in range(num_layers)
    ]
    if len(kinds) != num_layers or not {*kinds} <= {FULL, SLIDING} or kinds[-1] != FULL:
        raise ValueError(f"layer_types of {kinds}, which should be {num_layers}, the last one {FULL}")
    if num_shared != num_layers:
        raise ValueError(
            f"num_kv_shared_layers of {num_shared}, which should be {num_layers}, as many as layers"
        )
    default = whole_number(fields, "head_dim")
    full = fields.get("global_head_dim", 512)
    overrides = fields.get("per_layer_config", {str(layer): {"head_dim": full} for layer in range(num_layers)
                                                if kinds[layer] == FULL})  # fmt: skip
    further = {name for override in overrides.values() for name in override} - {
        "head_dim",
        "num_key_value_heads",
    }
    if further:
        raise UnsupportedModelError(
            f"expected layers that differ in head_dim alone, got per_layer_config with {', '.join(sorted(further))}"
        )
    sizes = [
        whole_number({"head_dim": default, **overrides.get(str(layer), {})}, "head_dim")
        for layer in range(num_layers)
    ]
    return tuple(kinds), tuple(sizes)


def _rotary_positions(config: AssistantConfig, kind: str, head_size: int) -> RotaryPositions:
    """Return the rotary positions of a kind of attention; those that turn a part of a head have frequencies of 0."""
    rope = config.rope[kind]
    rope_type = rope.get("rope_type", "default")
    known = {"rope_type", "rope_theta"} | (
        {"partial_rotary_factor", "factor"} if rope_type == "proportional" else set()
    )
    if rope_type not in ("default", "proportional") or not {*rope} <= known:
        raise UnsupportedModelError(
            f"expected rotary positions of the type default or proportional, got {dict(rope)}; use another drafter"
        )
    num_turned = int(rope.get("partial_rotary_factor", 1.0) * head_size // 2)
    exponents = 2 * torch.arange(num_turned).float() / head_size
    frequencies = torch.zeros(head_size // 2)
    frequencies[:num_turned] = float(rope["rope_theta"]) ** -exponents / float(rope.get("factor", 1.0))
    return RotaryPositions(frequencies, 1.0)


@dataclass(frozen=True)
class TargetContext:
    """Inputs of the layers of one kind of attention in a round.

    Args:
        keys, values: `[row, kv_head, position, size]`, the target's.
        mask: `[row, 1, 1, position]` bool, True at positions that are read; None for all.
        cos_sin: rotary cos and sin of the pending tokens.
    """

    keys: Tensor
    values: Tensor
    mask: Tensor | None
    cos_sin: CosSin


class QueryAttention(nn.Module):
    """Attention of the layer's queries to the keys and values of the target."""

    def __init__(self, config: AssistantConfig, head_size: int) -> None:
        super().__init__()
        inner = config.num_heads * head_size
        self.head_size = head_size
        self.q_proj = nn.Linear(config.width, inner, bias=config.attention_bias)
        self.q_norm = nn.RMSNorm(head_size, config.norm_eps)
        self.o_proj = nn.Linear(inner, config.width, bias=config.attention_bias)

    def forward(self, states: Tensor, context: TargetContext) -> Tensor:
        query = self.q_norm(self.q_proj(states).unflatten(-1, (-1, self.head_size)))
        cos, sin = (part[:, :, None] for part in context.cos_sin)
        first, second = query.chunk(2, -1)
        query = (query * cos + torch.cat((-second, first), -1) * sin).transpose(1, 2)
        is_grouped = query.shape[1] != context.keys.shape[1]
        attended = functional.scaled_dot_product_attention(
            query, context.keys, context.values, attn_mask=context.mask, scale=1.0, enable_gqa=is_grouped
        )
        output: Tensor = self.o_proj(attended.transpose(1, 2).flatten(2))
        return output


class FeedForward(nn.Module):
    """Gated feed-forward network."""

    def __init__(self, config: AssistantConfig) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[config.activation]
        self.gate_proj = nn.Linear(config.width, config.mlp_size, bias=False)
        self.up_proj = nn.Linear(config.width, config.mlp_size, bias=False)
        self.down_proj = nn.Linear(config.mlp_size, config.width, bias=False)

    def forward(self, states: Tensor) -> Tensor:
        output: Tensor = self.down_proj(self.activation(self.gate_proj(states)) * self.up_proj(states))
        return output


class AssistantLayer(nn.Module):
    """Decoder layer with norms before and after both parts, whose output is scaled."""

    layer_scalar: Tensor

    def __init__(self, config: AssistantConfig, head_size: int) -> None:
        super().__init__()
        self.self_attn = QueryAttention(config, head_size)
        self.mlp = FeedForward(config)
        self.input_layernorm = nn.RMSNorm(config.width, config.norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.width, config.norm_eps)
        self.pre_feedforward_layernorm = nn.RMSNorm(config.width, config.norm_eps)
        self.post_feedforward_layernorm = nn.RMSNorm(config.width, config.norm_eps)
        self.register_buffer("layer_scalar", torch.ones(1))

    def forward(self, states: Tensor, context: TargetContext) -> Tensor:
        attended = self.self_attn(self.input_layernorm(states), context)
        states = states + self.post_attention_layernorm(attended)
        added: Tensor = self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(states)))
        return (states + added) * self.layer_scalar.to(states.dtype)


class Decoder(nn.Module):
    """Embeddings, which are the output matrix of most assistants, layers and the last norm."""

    def __init__(self, config: AssistantConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.width)
        self.layers = nn.ModuleList(AssistantLayer(config, size) for size in config.head_sizes)
        self.norm = nn.RMSNorm(config.width, config.norm_eps)


class TokenClusters(nn.Module):
    """Clusters of tokens with similar embeddings; logits are computed for those of the likeliest clusters."""

    token_ordering: Tensor

    def __init__(self, config: AssistantConfig) -> None:
        super().__init__()
        self.num_chosen = config.num_chosen
        self.centroids = nn.Linear(config.width, config.num_centroids, bias=False)
        self.register_buffer("token_ordering", torch.arange(config.vocab_size))

    def forward(self, states: Tensor, matrix: Tensor) -> Tensor:
        """Return logits `[..., vocab]`; tokens of other clusters get 1 less than the smallest of those computed."""
        chosen = self.centroids(states).topk(self.num_chosen, -1).indices
        clusters = self.token_ordering.view(self.centroids.out_features, -1)
        tokens = clusters[chosen].flatten(-2)
        found = (matrix[tokens] @ states[..., None])[..., 0]
        lowest = found.amin(-1, keepdim=True) - 1
        return lowest.expand(*lowest.shape[:-1], len(matrix)).scatter(-1, tokens, found)


class GemmaAssistant(LoadedHead):
    """Assistant of a Gemma 4 target; it is read, not trained."""

    hidden_layers = (LAST_HIDDEN,)

    def __init__(self, config: AssistantConfig, target: TargetModel) -> None:
        super().__init__()
        self.config, self.target = config, target
        self.model = Decoder(config)
        self.pre_projection = nn.Linear(2 * config.target_width, config.width, bias=False)
        self.post_projection = nn.Linear(config.width, config.target_width, bias=False)
        self.masked_embedding = TokenClusters(config) if config.num_centroids else None
        self.lm_head = nn.Linear(config.width, config.vocab_size, bias=False) if config.has_head else None
        self.head_sizes = dict(zip(config.kinds, config.head_sizes, strict=True))
        """Size of an attention head by kind of attention."""
        if any(
            self.head_sizes[kind] != size for kind, size in zip(config.kinds, config.head_sizes, strict=True)
        ):
            raise ValueError(
                f"per_layer_config with heads of sizes {config.head_sizes}, which should be equal within a kind"
            )
        self.rotary = nn.ModuleDict(
            {kind: _rotary_positions(config, kind, size) for kind, size in self.head_sizes.items()}
        )

    @classmethod
    def load(cls, folder: Path, target: TargetModel) -> Self:
        stored = StoredHead(folder, KIND)
        with config_errors(folder):
            config = AssistantConfig.read(stored)
            require_same("vocabulary", config.vocab_size, target.vocab_size, folder)
            require_same("width", config.target_width, target.width, folder)
            head = cls(config, target)
            tensors = stored.read_tensors()
            if not config.has_head:
                tensors.pop("lm_head.weight", None)  # the embeddings once more
            load_into(head, tensors, folder)
            if head.masked_embedding is not None:
                ordering = head.masked_embedding.token_ordering
                if not torch.equal(ordering.sort().values, torch.arange(config.vocab_size)):
                    raise CheckpointError(
                        f"expected masked_embedding.token_ordering of {folder} to hold every token once, got another "
                        "list; download the assistant again"
                    )
        return head

    def read_target(
        self, keys_values: Mapping[str, tuple[Tensor, Tensor]], lengths: Sequence[int]
    ) -> dict[str, TargetContext]:
        """Return what the layers read, by kind of attention.

        Args:
            keys_values: the target's keys and values by kind of attention, padded.
            lengths: number of cached tokens per row, all but the pending one.
        """
        device, dtype = self.pre_projection.weight.device, self.pre_projection.weight.dtype
        ends = torch.tensor(lengths, device=device)[:, None]
        contexts = {}
        for kind, (keys, values) in keys_values.items():
            positions = torch.arange(keys.shape[2], device=device)
            # Of the window, one more position than the target itself reads, as in Transformers.
            longest = self.config.window + 1 if kind == SLIDING else max(lengths)
            mask = None
            if min(lengths) < keys.shape[2] or max(lengths) > longest:
                mask = ((positions < ends) & (positions >= ends - longest))[:, None, None]
            cos_sin = self.rotary[kind](ends, dtype)
            contexts[kind] = TargetContext(keys.to(dtype), values.to(dtype), mask, cos_sin)
        return contexts

    def forward(self, tokens: Tensor, states: Tensor, contexts: Mapping[str, TargetContext]) -> Tensor:
        """Return the outputs `[row, query, width]` for tokens `[row, query]` and states `[row, query, target_width]`."""
        embedded = self.target.embed(tokens).to(states.dtype)
        hidden: Tensor = self.pre_projection(torch.cat((embedded, states), -1))
        for kind, layer in zip(self.config.kinds, self.model.layers, strict=True):
            hidden = layer(hidden, contexts[kind])
        output: Tensor = self.model.norm(hidden)
        return output

    def logits(self, outputs: Tensor) -> Tensor:
        """Return the logits `[..., vocab]` of outputs of `forward`."""
        matrix = self.model.embed_tokens.weight if self.lm_head is None else self.lm_head.weight
        if self.masked_embedding is None:
            return functional.linear(outputs, matrix)
        logits: Tensor = self.masked_embedding(outputs, matrix)
        return logits
