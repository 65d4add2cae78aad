"""EAGLE heads as their publishers write them, tiny and random, and what they compute, in plain tensors.

A dialect is a `config.json`, tensors, and a `Meaning`, which is written by hand from the publisher's
equations; the reference reads the meaning and the tensors, but no field.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from plain_layers import Tensors, plain_norm, plain_turn
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaForCausalLM

from checkpoints import random_llama

VOCAB_SIZE, WIDTH, NUM_LAYERS = 31, 32, 8
HEADS, KV_HEADS, SIZE, INNER = 4, 2, 8, 40
WORDS = [1, 2, 3, 5, 8, 9, 13, 21, 30]
LAST = -1
"""The target's last state, after its last norm."""
TEXT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4]


@cache
def target_model(dtype: torch.dtype = torch.float64) -> LlamaForCausalLM:
    sizes = {"hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": NUM_LAYERS}
    model = random_llama(vocab_size=VOCAB_SIZE, bos_token_id=None, eos_token_id=None, **sizes)
    return model.to(dtype).requires_grad_(False)


@dataclass(frozen=True)
class Meaning:
    """Description of what a head computes.

    Args:
        states: states of the target that are joined; 0 is the embeddings, k the output of layer k.
        prefixes: prefixes of the tensors of each decoder layer.
        windows: sliding window of each layer.
        names: names in the file by those used here.
        words: target ids of the draft vocabulary; None for all that both have.
        scale: of the logits.
        norms_residual, norms_output: whether the residual of the first layer, and what later steps read, are normalised.
        is_first: whether it is EAGLE-1, which projects token and feature.
        mask: token that a parallel head reads at draft positions, beside the states `mask_hidden`.
    """

    states: tuple[int, ...] = (2, 4, 5)  # which the authors choose for eight layers
    prefixes: tuple[str, ...] = ("midlayer.",)
    windows: tuple[int | None, ...] = (None,)
    outer: str = ""
    words: list[int] | None = None
    scale: float = 1.0
    norms_residual: bool = False
    norms_output: bool = False
    is_first: bool = False
    mask: int | None = None


@dataclass(frozen=True)
class Dialect:
    layouts: tuple[int, ...]  # numbers in the table of published layouts; empty for further variants
    config: dict[str, Any]
    tensors: Tensors
    meaning: Meaning = field(default_factory=Meaning)
    file: str = "model.safetensors"

    def write(self, folder: Path, changes: Mapping[str, Any] | None = None) -> Path:
        """Write a head, with changed fields by their path; None takes a field out."""
        folder.mkdir(parents=True, exist_ok=True)
        config = json.loads(json.dumps(self.config))
        for path, value in (changes or {}).items():
            *outer, name = path.split(".")
            place = config
            for part in outer:
                place = place[int(part) if isinstance(place, list) else part]
            place[name] = value
        (folder / "config.json").write_text(json.dumps(config))
        tensors = {
            name: tensor.float().contiguous() if tensor.is_floating_point() else tensor
            for name, tensor in self.tensors.items()
        }
        if self.file.endswith(".bin"):
            torch.save(tensors, folder / self.file)
        else:
            save_file(tensors, folder / self.file)
        return folder


def plain_logits(dialect: Dialect, tokens: list[int], length: int, depth: int) -> Tensor:
    """Return logits `[target vocab]` after `length + depth` tokens, of which `depth` were drafted."""
    meaning, model = dialect.meaning, target_model()
    weights = {
        name.removeprefix(meaning.outer): tensor.float().double() for name, tensor in dialect.tensors.items()
    }
    out = model(torch.tensor([tokens[:length]]), output_hidden_states=True).hidden_states
    joined = torch.cat([out[state][0, : length - 1] for state in meaning.states], -1)
    if meaning.mask is not None:
        joined = torch.cat([joined, *[weights["mask_hidden"].view(1, -1)] * depth])
        tokens, length, depth = [*tokens[:length], *[meaning.mask] * depth], length + depth, 0
    features = _fuse(weights, joined, len(meaning.states)) if not meaning.is_first else joined
    table = weights.get("embed_tokens.weight", model.model.embed_tokens.weight)
    for step in range(depth + 1):
        embedded = table[tokens[1 : length + step]]
        states = (_first if meaning.is_first else _third)(weights, meaning, embedded, features)
        last = states[-1]
        normed = last if meaning.is_first else plain_norm(last, weights["norm.weight"])
        features = torch.cat([features, (normed if meaning.norms_output else last)[None]])
    own = weights.get("lm_head.weight", model.lm_head.weight)
    logits = own @ normed * meaning.scale
    everywhere = torch.full((VOCAB_SIZE,), -torch.inf, dtype=torch.float64)
    words = meaning.words if meaning.words is not None else list(range(min(VOCAB_SIZE, len(own))))
    everywhere[words] = logits[: len(words)]
    return everywhere


def _fuse(weights: Tensors, joined: Tensor, num_states: int) -> Tensor:
    if "input_norm.weight" in weights:
        joined = plain_norm(joined, weights["input_norm.weight"])
    if "fc_norm.0.weight" in weights:
        parts = joined.chunk(num_states, -1)
        joined = torch.cat(
            [plain_norm(part, weights[f"fc_norm.{index}.weight"]) for index, part in enumerate(parts)], -1
        )
    return _linear(weights, "fc", joined) if "fc.weight" in weights else joined


def _third(weights: Tensors, meaning: Meaning, embedded: Tensor, features: Tensor) -> Tensor:
    first, *rest = meaning.prefixes
    normed = plain_norm(features, weights[f"{first}hidden_norm.weight"])
    both = torch.cat([plain_norm(embedded, weights[f"{first}input_layernorm.weight"]), normed], -1)
    states = normed if meaning.norms_residual else features
    states = _layer(weights, first, states, both, meaning.windows[0])
    for prefix, window in zip(rest, meaning.windows[1:], strict=True):
        read = plain_norm(states, weights[f"{prefix}input_layernorm.weight"])
        states = _layer(weights, prefix, states, read, window)
    return states


def _first(weights: Tensors, meaning: Meaning, embedded: Tensor, features: Tensor) -> Tensor:
    for names in (("embedding_layernorm.weight", "hidden_states_layernorm.weight"),):
        if names[0] in weights:
            embedded, features = (
                plain_norm(part, weights[name])
                for part, name in zip((embedded, features), names, strict=True)
            )
    joined = _linear(weights, "fc", torch.cat([embedded, features], -1))
    return _layer(weights, meaning.prefixes[0], joined, joined, meaning.windows[0])


def _linear(weights: Tensors, name: str, states: Tensor) -> Tensor:
    projected = states @ weights[f"{name}.weight"].T
    return projected + weights[f"{name}.bias"] if f"{name}.bias" in weights else projected


def _layer(weights: Tensors, prefix: str, states: Tensor, read: Tensor, window: int | None) -> Tensor:
    states = states + _attention(weights, f"{prefix}self_attn.", read, window)
    normed = plain_norm(states, weights[f"{prefix}post_attention_layernorm.weight"])
    gate = _linear(weights, f"{prefix}mlp.gate_proj", normed)
    opened = gate * gate.sigmoid() * _linear(weights, f"{prefix}mlp.up_proj", normed)
    return states + _linear(weights, f"{prefix}mlp.down_proj", opened)


def _attention(weights: Tensors, prefix: str, read: Tensor, window: int | None) -> Tensor:
    """Attend place by place and head by head; a window counts the query's own place."""
    if f"{prefix}kv_b_proj.weight" in weights:
        return _latent_attention(weights, prefix, read)

    def heads(name: str, norm: str) -> Tensor:
        projected = _linear(weights, f"{prefix}{name}_proj", read).view(len(read), -1, SIZE)
        norm = f"{prefix}{norm}.weight"
        return plain_norm(projected, weights[norm]) if norm in weights else projected

    queries, keys, values = (
        plain_turn(heads("q", "q_norm")),
        plain_turn(heads("k", "k_norm")),
        heads("v", ""),
    )
    gathered = []
    for place in range(len(read)):
        seen = slice(0 if window is None else max(0, place + 1 - window), place + 1)
        group = queries.shape[1] // keys.shape[1]
        gathered.append(
            torch.cat(
                [
                    (keys[seen, head // group] @ queries[place, head] / SIZE**0.5).softmax(0)
                    @ values[seen, head // group]
                    for head in range(queries.shape[1])
                ]
            )
        )
    return _linear(weights, f"{prefix}o_proj", torch.stack(gathered))


NOPE, ROPE, VALUE, Q_RANK, KV_RANK = 6, 4, 5, 12, 10
"""Sizes of latent attention: parts of a head without and with positions, values, and ranks of queries and keys."""


def _latent_attention(weights: Tensors, prefix: str, read: Tensor) -> Tensor:
    """Attend with keys and values that are projected from one vector; neighbouring numbers turn as pairs."""

    def norm(states: Tensor, name: str) -> Tensor:
        return (
            weights[f"{prefix}{name}.weight"]
            * states
            / (states.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        )

    def turn(part: Tensor) -> Tensor:
        return plain_turn(torch.cat((part[..., ::2], part[..., 1::2]), -1))

    queries = _linear(weights, f"{prefix}q_a_proj", read)
    queries = _linear(weights, f"{prefix}q_b_proj", norm(queries, "q_a_layernorm")).view(len(read), HEADS, -1)
    low, shared = _linear(weights, f"{prefix}kv_a_proj_with_mqa", read).split([KV_RANK, ROPE], -1)
    both = _linear(weights, f"{prefix}kv_b_proj", norm(low, "kv_a_layernorm")).view(len(read), HEADS, -1)
    turned, shared = turn(queries[..., NOPE:]), turn(shared[:, None])[:, 0]
    gathered = []
    for place in range(len(read)):
        for head in range(HEADS):
            scores = both[: place + 1, head, :NOPE] @ queries[place, head, :NOPE]
            scores = scores + shared[: place + 1] @ turned[place, head]
            gathered.append((scores / (NOPE + ROPE) ** 0.5).softmax(0) @ both[: place + 1, head, NOPE:])
    return _linear(weights, f"{prefix}o_proj", torch.cat(gathered).view(len(read), -1))


# Parts of which the dialects are made.


def random_tensors(shapes: Mapping[str, tuple[int, ...]]) -> Tensors:
    generator = torch.Generator().manual_seed(len(shapes))
    return {
        name: 0.6
        * torch.randn(shape, generator=generator, dtype=torch.float64)
        / (shape[-1] if len(shape) > 1 else 10) ** 0.5
        + float("norm" in name)
        for name, shape in shapes.items()
    }


def layer(prefix: str, width: int, read_width: int, *, is_first: bool = True, options: str = "") -> Tensors:
    inner, of_keys = HEADS * SIZE, KV_HEADS * SIZE
    shapes: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj.weight": (inner, read_width),
        "self_attn.k_proj.weight": (of_keys, read_width),
        "self_attn.v_proj.weight": (of_keys, read_width),
        "self_attn.o_proj.weight": (width, inner),
        "mlp.gate_proj.weight": (INNER, width),
        "mlp.up_proj.weight": (INNER, width),
        "mlp.down_proj.weight": (width, INNER),
        "post_attention_layernorm.weight": (width,),
    }
    if "latent" in options:
        shapes = {name: shape for name, shape in shapes.items() if "self_attn" not in name} | {
            "self_attn.q_a_proj.weight": (Q_RANK, read_width),
            "self_attn.q_a_layernorm.weight": (Q_RANK,),
            "self_attn.q_b_proj.weight": (HEADS * (NOPE + ROPE), Q_RANK),
            "self_attn.kv_a_proj_with_mqa.weight": (KV_RANK + ROPE, read_width),
            "self_attn.kv_a_layernorm.weight": (KV_RANK,),
            "self_attn.kv_b_proj.weight": (HEADS * (NOPE + VALUE), KV_RANK),
            "self_attn.o_proj.weight": (width, HEADS * VALUE),
        }
    if read_width != width or not is_first:
        shapes["input_layernorm.weight"] = (width,)
    if read_width != width and is_first:
        shapes["hidden_norm.weight"] = (width,)
    if "qkv bias" in options:
        shapes |= {
            "self_attn.q_proj.bias": (inner,),
            "self_attn.k_proj.bias": (of_keys,),
            "self_attn.v_proj.bias": (of_keys,),
        }
    if "o bias" in options:
        shapes["self_attn.o_proj.bias"] = (width,)
    if "mlp bias" in options:
        shapes |= {
            "mlp.gate_proj.bias": (INNER,),
            "mlp.up_proj.bias": (INNER,),
            "mlp.down_proj.bias": (width,),
        }
    if "qk norm" in options:
        shapes |= {"self_attn.q_norm.weight": (SIZE,), "self_attn.k_norm.weight": (SIZE,)}
    return random_tensors({prefix + name: shape for name, shape in shapes.items()})


def third(
    prefix: str = "layers.0.",
    *,
    width: int = WIDTH,
    num_states: int = 3,
    num_words: int = len(WORDS),
    has_fusion: bool = True,
    options: str = "",
    **more: tuple[int, ...],
) -> Tensors:
    """Return the tensors of an EAGLE-3 head of one layer; `__` in further names stands for a dot."""
    shapes = {"norm.weight": (width,), "lm_head.weight": (num_words, width)}
    if has_fusion:
        shapes["fc.weight"] = (width, num_states * WIDTH)
    shapes |= {name.replace("__", "."): shape for name, shape in more.items()}
    return layer(prefix, width, 2 * width, options=options) | random_tensors(shapes)


def trained_for(num_steps: int) -> dict[str, Any]:
    proposal = {"proposal_type": "greedy", "speculative_tokens": num_steps, "accept_tolerance": 0.0}
    return {
        "algorithm": "eagle3",
        "default_proposal_method": "greedy",
        "proposal_methods": [proposal],
        "verifier": {"name_or_path": "tiny", "architectures": ["LlamaForCausalLM"]},
    }


OFFSETS = {"d2t": torch.tensor(WORDS) - torch.arange(len(WORDS))}
MARKS = {"t2d": torch.zeros(VOCAB_SIZE, dtype=torch.bool).index_fill(0, torch.tensor(WORDS), True)}
MAPS = OFFSETS | MARKS
SIZES: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": SIZE,
    "num_hidden_layers": 1,
    "vocab_size": VOCAB_SIZE,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "hidden_act": "silu",
    "max_position_embeddings": 96,
}
DEFAULTS: dict[str, Any] = {
    "transformers_version": "4.52.3",
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
    "pad_token_id": 0,
    "initializer_range": 0.02,
    "attention_dropout": 0.0,
    "pretraining_tp": 1,
    "sep_token_id": None,
    "do_sample": False,
    "id2label": {"0": "LABEL_0"},
}
"""Fields that Transformers writes, which change nothing."""
AUTHORS = SIZES | DEFAULTS | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": len(WORDS)}
WHOLE = AUTHORS | {"draft_vocab_size": VOCAB_SIZE}
SPECULATORS = {
    "architectures": ["Eagle3Speculator"],
    "speculators_model_type": "eagle3",
    "speculators_version": "0.9.0",
    "speculators_config": trained_for(3),
    "draft_vocab_size": len(WORDS),
    "norm_before_residual": False,
    "norm_before_fc": False,
    "fc_norm": False,
    "norm_output": False,
    "embed_requires_grad": False,
    "target_hidden_size": None,
    "eagle_aux_hidden_state_layer_ids": [1, 3, 5],
    "transformer_layer_config": SIZES,
}
NESTED = {
    "eagle_aux_hidden_state_layer_ids": [0, 2, 4],
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "next_layer_regular": True,
    "parallel_draft_step": 1,
    "parallel_draft_heads_num_layers": 1,
}
MODEL_OPTIMIZER = AUTHORS | {"eagle_config": NESTED, "mlp_bias": False, "attention_bias": False}
DEEPSPEC = {
    **SIZES,
    **DEFAULTS,
    "architectures": ["Qwen3Eagle3Model"],
    "model_type": "qwen3",
    "attention_bias": False,
    "layer_types": ["full_attention"],
    "sliding_window": None,
    "use_sliding_window": False,
    "max_window_layers": 36,
    "num_target_layers": NUM_LAYERS,
    "target_layer_ids": [0, 1, 2, 3, 5],
    "target_model_name_or_path": "tiny",
    "ttt_length": 7,
    "step_loss_decay": 0.8,
    "draft_num_hidden_layers": 1,
    "tie_word_embeddings": False,
}
PUBLISHED = Meaning(words=WORDS)
OWN = replace(PUBLISHED, prefixes=("layers.0.",), states=(1, 3, 5))
OF_ALL = replace(OWN, words=None)


def with_windows(types: list[str], window: int, **fields: object) -> dict[str, Any]:
    layers = SIZES | {
        "num_hidden_layers": len(types),
        "layer_types": types,
        "sliding_window": window,
        **fields,
    }
    return SPECULATORS | {"transformer_layer_config": layers}


def own(num_words: int = VOCAB_SIZE, width: int = WIDTH) -> dict[str, tuple[int, ...]]:
    return {"embed_tokens__weight": (num_words, width)}


FIRST = {
    **layer("layers.0.", WIDTH, WIDTH),
    **random_tensors({"fc.weight": (WIDTH, 2 * WIDTH), "fc.bias": (WIDTH,)}),
}
FIRST_MEANING = Meaning(states=(LAST,), prefixes=("layers.0.",), is_first=True)


def prefixed(tensors: Tensors, prefix: str = "model.") -> Tensors:
    return {prefix + name: tensor for name, tensor in tensors.items()}


DIALECTS: dict[str, Dialect] = {
    "authors": Dialect((1,), AUTHORS, third("midlayer.") | MAPS, PUBLISHED, "pytorch_model.bin"),
    "authors, prefix": Dialect(
        (), AUTHORS, prefixed(third("midlayer.") | MAPS), replace(PUBLISHED, outer="model.")
    ),
    "SpecForge, normalised states": Dialect(
        (),
        AUTHORS | {"fc_norm": True, "norm_output": True, "rope_scaling": None, "use_sliding_window": False},
        third("midlayer.", **{f"fc_norm__{index}__weight": (WIDTH,) for index in range(3)}) | MAPS,
        replace(PUBLISHED, norms_output=True),
    ),
    "SpecForge, nested layers": Dialect(
        (),
        AUTHORS | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 4]}},
        third("midlayer.") | MAPS,
        replace(PUBLISHED, states=(1, 3, 5)),
    ),
    "SpecForge, a window of the target that is not used": Dialect(
        (), AUTHORS | {"sliding_window": 4, "use_sliding_window": False}, third("midlayer.") | MAPS, PUBLISHED
    ),
    "SpecForge, for Phi 4": Dialect(
        (), AUTHORS | {"model_type": "phi3"}, third("midlayer.") | MAPS, PUBLISHED
    ),
    "Model-Optimizer": Dialect((2,), MODEL_OPTIMIZER, third() | OFFSETS, OWN),
    "Model-Optimizer, whole vocabulary": Dialect(
        (3,), MODEL_OPTIMIZER | {"draft_vocab_size": VOCAB_SIZE}, third(num_words=VOCAB_SIZE), OF_ALL
    ),
    "Model-Optimizer, last state": Dialect(
        (4,),
        MODEL_OPTIMIZER
        | {"eagle_config": NESTED | {"use_aux_hidden_state": False, "eagle_aux_hidden_state_layer_ids": []}},
        third(has_fusion=False) | OFFSETS,
        replace(OWN, states=(LAST,)),
    ),
    "Model-Optimizer, default layers": Dialect(
        (),
        MODEL_OPTIMIZER | {"eagle_config": NESTED | {"eagle_aux_hidden_state_layer_ids": []}},
        third() | OFFSETS,
        replace(OWN, states=(2, 4, 5)),
    ),
    "window by use_swa": Dialect(
        (),
        MODEL_OPTIMIZER | {"eagle_config": NESTED | {"use_swa": True, "swa_window_size": 4}},
        third() | OFFSETS,
        replace(OWN, windows=(4,)),
    ),
    "DeepSpec": Dialect(
        (5,),
        DEEPSPEC,
        third(num_states=5, num_words=VOCAB_SIZE, options="qk norm", **own()),
        replace(OF_ALL, states=(1, 2, 3, 4, 6)),
    ),
    "DeepSpec, three layers": Dialect(
        (6,),
        DEEPSPEC | {"target_layer_ids": [0, 3, 5]},
        third(num_words=VOCAB_SIZE, options="qk norm", **own()),
        replace(OF_ALL, states=(1, 4, 6)),
    ),
    "nested norm_before_fc": Dialect(
        (7,),
        MODEL_OPTIMIZER | {"eagle_config": NESTED | {"norm_before_fc": True}},
        third(input_norm__weight=(3 * WIDTH,)) | OFFSETS,
        OWN,
    ),
    "nested norms of residual and output": Dialect(
        (),
        MODEL_OPTIMIZER
        | {"eagle_config": NESTED | {"norm_before_residual": True, "return_hidden_post_norm": True}},
        third() | OFFSETS,
        replace(OWN, norms_residual=True, norms_output=True),
    ),
    "speculators": Dialect((), SPECULATORS, third() | MAPS, OWN),
    "speculators, sliding": Dialect(
        (10,), with_windows(["sliding_attention"], 4), third() | MAPS, replace(OWN, windows=(4,))
    ),
    "speculators, two layers, one sliding": Dialect(
        (),
        with_windows(["full_attention", "sliding_attention"], 3, use_sliding_window=True),
        third() | layer("layers.1.", WIDTH, WIDTH, is_first=False) | MAPS,
        replace(OWN, prefixes=("layers.0.", "layers.1."), windows=(None, 3)),
    ),
    "attention_bias": Dialect(
        (11,), MODEL_OPTIMIZER | {"attention_bias": True}, third(options="qkv bias, o bias") | OFFSETS, OWN
    ),
    "attention_bias without that of the output": Dialect(
        (), MODEL_OPTIMIZER | {"attention_bias": True}, third(options="qkv bias") | OFFSETS, OWN
    ),
    "mlp_bias": Dialect(
        (11,), MODEL_OPTIMIZER | {"mlp_bias": True}, third(options="mlp bias") | OFFSETS, OWN
    ),
    "fusion with bias": Dialect(
        (), AUTHORS | {"bias": True}, third("midlayer.", fc__bias=(WIDTH,)) | MAPS, PUBLISHED
    ),
    "narrower": Dialect(
        (13,),
        AUTHORS | {"hidden_size": 24, "target_hidden_size": WIDTH, "num_aux_hidden_states": 3},
        third("midlayer.", width=24, **own(width=24)) | MAPS,
        PUBLISHED,
    ),
    "padded": Dialect(
        (14,),
        WHOLE | {"vocab_size": 64, "draft_vocab_size": 64},
        third("midlayer.", num_words=64, **own(64)),
        Meaning(),
    ),
    "padded, smaller vocabulary": Dialect(
        (14,),
        AUTHORS | {"vocab_size": 64},
        third("midlayer.", **own(64))
        | OFFSETS
        | {"t2d": torch.zeros(64, dtype=torch.bool).index_fill(0, torch.tensor(WORDS), True)},
        PUBLISHED,
    ),
    "logit_scale": Dialect(
        (), AUTHORS | {"logit_scale": 0.5}, third("midlayer.") | MAPS, replace(PUBLISHED, scale=0.5)
    ),
    "layers of the target": Dialect(
        (30,), AUTHORS | {"num_hidden_layers": NUM_LAYERS}, third("midlayer.") | MAPS, PUBLISHED
    ),
    "latent attention": Dialect(
        (12,),
        {name: value for name, value in MODEL_OPTIMIZER.items() if name not in ("head_dim", "mlp_bias")}
        | {"architectures": ["Eagle3DeepseekV2ForCausalLM"], "model_type": "kimi_k2"}
        | {"num_key_value_heads": HEADS, "q_lora_rank": Q_RANK, "kv_lora_rank": KV_RANK}
        | {"qk_nope_head_dim": NOPE, "qk_rope_head_dim": ROPE, "v_head_dim": VALUE}
        | {"n_routed_experts": 384, "first_k_dense_replace": 1, "moe_layer_freq": 1, "seq_aux": True}
        | {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "num_nextn_predict_layers": 0},
        third(options="latent") | OFFSETS,
        OWN,
    ),
    "P-EAGLE": Dialect(
        (8,),
        AUTHORS
        | {"architectures": ["PEagleDraftModel"], "num_hidden_layers": 2}
        | {"mask_token_id": 6, "pard_token": 6, "norm_before_residual": True},
        third(mask_hidden=(1, 3 * WIDTH), **own()) | layer("layers.1.", WIDTH, WIDTH, is_first=False) | MAPS,
        replace(
            PUBLISHED,
            prefixes=("layers.0.", "layers.1."),
            windows=(None, None),
            mask=6,
            norms_residual=True,
        ),
    ),
    "P-EAGLE of speculators": Dialect(
        (9,),
        with_windows(["full_attention", "sliding_attention"], 3)
        | {"speculators_model_type": "peagle", "architectures": ["PEagleSpeculator"], "mask_token_id": 6}
        | {"norm_before_fc": True, "speculators_config": trained_for(5)},
        third(mask_hidden=(1, 1, 3 * WIDTH), input_norm__weight=(3 * WIDTH,))
        | layer("layers.1.", WIDTH, WIDTH, is_first=False)
        | MAPS,
        replace(OWN, prefixes=("layers.0.", "layers.1."), windows=(None, 3), mask=6),
    ),
    "EAGLE-1": Dialect((27,), SIZES | DEFAULTS | {"bias": True}, FIRST, FIRST_MEANING, "pytorch_model.bin"),
    "EAGLE-1, prefix": Dialect(
        (), SIZES | DEFAULTS | {"bias": True}, prefixed(FIRST), replace(FIRST_MEANING, outer="model.")
    ),
    "EAGLE-1 for vLLM": Dialect(
        (28,),
        {
            "model_type": "eagle",
            "architectures": ["EAGLEModel"],
            "eagle_fc_bias": True,
            "truncated_vocab_size": VOCAB_SIZE,
            "model": SIZES | DEFAULTS | {"architectures": ["LlamaForCausalLM"]},
        },
        {(name if name.startswith("fc") else f"model.{name}"): tensor for name, tensor in FIRST.items()}
        | random_tensors({"lm_head.weight": (VOCAB_SIZE, WIDTH)}),
        replace(FIRST_MEANING, outer="model."),
    ),
    "EAGLE-1, smaller vocabulary": Dialect(
        (),
        SIZES | {"truncated_vocab_size": len(WORDS)},
        FIRST | random_tensors({"lm_head.weight": (len(WORDS), WIDTH)}) | {"token_map": torch.tensor(WORDS)},
        replace(FIRST_MEANING, words=WORDS),
    ),
    "EAGLE-1 of Qwen2": Dialect(
        (),
        SIZES | {"qkv_bias": True},
        layer("layers.0.", WIDTH, WIDTH, options="qkv bias")
        | random_tensors({"fc.weight": (WIDTH, 2 * WIDTH)}),
        FIRST_MEANING,
    ),
    "HASS": Dialect(
        (29,),
        SIZES | {"add_para_norm": True},
        FIRST
        | random_tensors(
            {"embedding_layernorm.weight": (WIDTH,), "hidden_states_layernorm.weight": (WIDTH,)}
        ),
        FIRST_MEANING,
    ),
}
"""Dialects by name; EAGLE-1 heads have the target's embeddings and LM head."""


def leaves(config: Mapping[str, Any], path: str = "") -> list[tuple[str, Any]]:
    """Return the paths and values of all fields that are neither null nor objects; of lists of objects, those within."""
    found: list[tuple[str, Any]] = []
    for name, value in config.items():
        if isinstance(value, dict):
            found += leaves(value, f"{path}{name}.")
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            found += leaves({f"{name}.0": value[0]}, path)
        elif value is not None:
            found.append((path + name, value))
    return found


def changed(value: Any) -> Any:
    """Return another value of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, float):
        return 3 * value + 0.5
    if isinstance(value, str):
        return "another"
    if not value:
        return [1, 2, 5]
    if isinstance(value[0], str):
        others = {"full_attention": "sliding_attention", "sliding_attention": "full_attention"}
        return [*value[:-1], others.get(value[-1], "another")]
    return [value[0] + 1, *value[1:]]
