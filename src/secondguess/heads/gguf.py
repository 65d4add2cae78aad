"""Drafters in GGUF files, as llama.cpp writes them, in the fields and names of tensors of published folders.

A layout is a row of `LAYOUTS`, by the architecture of the file. Fields and tensors that it does not
list keep their names in the file, by which they are refused as those of `config.json` are.

EAGLE-3 and DFlash number the states of the target as this package does: k is what enters layer k,
from 0. Rows of queries and keys of EAGLE-3 are reordered as those of Llama. `d2t` holds target ids.
A multi-token-prediction module is one of the last blocks of a target, or of a file of its own.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from secondguess.checkpoint.gguf.config import (
    DRAFTERS,
    NUM_MODULES,
    ROPE_TENSORS,
    count_layers,
    read_rope_parameters,
)
from secondguess.checkpoint.gguf.file import GgufFile, GgufTensor
from secondguess.checkpoint.gguf.weights import LAYER_NAMES, ROTATED, decode_tensor, rotary_order
from secondguess.errors import CheckpointError, UnsupportedModelError

SIZES = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
"""Fields of all layouts about the decoder layers."""
OPTIONAL = {"attention.head_count_kv", "attention.key_length"}
EXPERTS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
SIGMOID_EXPERTS = {
    "expert_count": "n_routed_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_count": "n_shared_experts",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_weights_norm": "norm_topk_prob",
}
"""Fields about experts, and their names in `config.json`, for two ways to choose them."""
CHOICE, SOFTMAX, SIGMOID = "expert_gating_func", 1, 2
"""Field about the function by which experts are chosen, and its values."""
READ_ELSEWHERE = {"block_count", "vocab_size", "attention.value_length"}
ROPE_FIELDS = re.compile(r"rope\.(freq_base|dimension_count|dimension_sections|scale_linear|scaling\..+)")
"""Fields about rotary positions; those of all sections are equal in text."""
MARKOV, CONFIDENCE = "markov_w1.weight", "conf_proj.weight"
SELECTOR = "selector_hidden.weight"
FROM_ANCHOR = "sample_from_anchor"
VECTORS = ("ffn_gate_inp_shexp.weight", CONFIDENCE)
"""Endings of the names of matrices of one row, of which files have vectors."""
BLOCK = re.compile(r"blk\.(?P<layer>\d+)\.(?P<part>.+?)(?P<suffix>\.(weight|bias))?")
STATES = "target_layers"
WINDOW, WINDOWED = "attention.sliding_window", "attention.sliding_window_pattern"
CAUSAL = "attention.causal"
MAP = "d2t"
MASK_TOKEN = "tokenizer.ggml.mask_token_id"


@dataclass(frozen=True)
class Layout:
    """Layout of drafters in GGUF files.

    Args:
        kind: kind of drafter, as in `--drafter`.
        model_type: type of the decoder layers in Transformers; empty if the layout is not read.
        fields: fields of the architecture, and their names in `config.json`.
        required: those that must be there.
        constants: further fields of `config.json`.
        tensors: names outside the layers, and those in a folder.
        parts: names of parts of a layer, and those in a folder, beside those of all models.
        neutral: the values that fields must have if they are there.
        is_block: whether it is a block drafter, in z-lab's fields, which count layers from the first output; it has a
            mask token and may have sliding windows.
        is_rotated: whether rows of queries and keys are in llama.cpp's order.
        is_module: whether it is a multi-token-prediction module among the blocks of a model.
    """

    kind: str
    model_type: str = ""
    fields: Mapping[str, str] = field(default_factory=dict)
    required: tuple[str, ...] = ()
    constants: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, str] = field(default_factory=dict)
    parts: Mapping[str, str] = field(default_factory=dict)
    neutral: Mapping[str, Any] = field(default_factory=dict)
    is_block: bool = False
    is_rotated: bool = False
    is_module: bool = False


_MODULE_PARTS = {
    "nextn.eh_proj": "eh_proj",
    "nextn.enorm": "enorm",
    "nextn.hnorm": "hnorm",
    "nextn.embed_tokens": "embed_tokens",
    "nextn.shared_head_norm": "shared_head.norm",
    "nextn.shared_head_head": "shared_head.head",
    "post_attention_norm": "post_attention_layernorm",
    # of all experts, gates before values
    "ffn_gate_up_exps": "mlp.experts.gate_up_proj",
    "ffn_gate_exps": "mlp.experts.gate_up_proj",
    "ffn_up_exps": "mlp.experts.gate_up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}
_SELECTOR = "candidate_selector."
WITHOUT_SUFFIX = (
    "mlp.experts.gate_up_proj",
    "mlp.experts.down_proj",
    "mlp.gate.e_score_correction_bias",
    f"{_SELECTOR}predecessor_codebook",
    f"{_SELECTOR}successor_codebook",
)
"""Parts whose names in a folder do not end with `weight` or `bias`."""
_SHARED = {f"ffn_{part}_shexp": f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")}


def _module(model_type: str, parts: Mapping[str, str] | None = None, **options: Any) -> Layout:
    return Layout("mtp", model_type, parts={**_MODULE_PARTS, **(parts or {})}, is_module=True, **options)


LAYOUTS = {
    "eagle3": Layout(
        DRAFTERS["eagle3"],
        "llama",
        fields={
            STATES: "eagle_aux_hidden_state_layer_ids",
            "extract_layers": "eagle_aux_hidden_state_layer_ids",  # of earlier files
            "target_hidden_size": "target_hidden_size",
            "norm_before_residual": "norm_before_residual",
            "norm_before_fc": "norm_before_fc",
        },
        required=(STATES, "target_hidden_size"),
        tensors={
            "fc": "fc",
            "enc.output_norm": "input_norm",
            "output_norm": "norm",
            "output": "lm_head",
            "token_embd": "embed_tokens",
        },
        parts={"attn_norm_2": "hidden_norm"},
        is_rotated=True,
    ),
    "dflash": Layout(
        DRAFTERS["dflash"],
        "qwen3",
        fields={
            STATES: "target_layer_ids",
            "block_size": "block_size",
            FROM_ANCHOR: "sample_from_anchor",
            CAUSAL: "is_causal",
            "conv_kernel_size": "conv_kernel_size",
            "conv_group_size": "conv_group_size",
            "selector_rank": "selector_rank",
            "selector_top_k": "selector_top_k",
        },
        required=(STATES, "block_size"),
        is_block=True,
        constants={"dflash_config": {}},
        tensors={
            "fc": "fc",
            "enc.output_norm": "hidden_norm",
            "output_norm": "norm",
            "output": "lm_head",
            "token_embd": "embed_tokens",
            "markov_w1": "markov_head.markov_w1",
            "markov_w2": "markov_head.markov_w2",
            "conf_proj": "confidence_head.proj",
            "selector_predecessor": f"{_SELECTOR}predecessor_codebook",
            "selector_successor": f"{_SELECTOR}successor_codebook",
            "selector_hidden": f"{_SELECTOR}hidden_projection",
        },
        parts={
            "attn_conv_base": "attention_conv.base_kernel",
            "attn_conv_proj": "attention_conv.kernel_projection",
            "ffn_conv_base": "mlp_conv.base_kernel",
            "ffn_conv_proj": "mlp_conv.kernel_projection",
        },
    ),
    "gemma4-assistant": Layout(DRAFTERS["gemma4-assistant"]),
    "llama": _module("llama", is_rotated=True),
    "qwen2": _module("qwen2"),
    "qwen3": _module("qwen3"),
    # the file has the norms' weights around 1, not 0
    "qwen35": _module("qwen3_5_text", constants={"norm_output": True}),
    "qwen35moe": _module(
        "qwen3_5_moe_text",
        {**_SHARED, "ffn_gate_inp_shexp": "mlp.shared_expert_gate"},
        fields=EXPERTS,
        neutral={CHOICE: SOFTMAX},
        constants={"norm_output": True},
    ),
    "glm4moe": _module(
        "glm4_moe",
        {
            **{name: part.replace("shared_expert", "shared_experts") for name, part in _SHARED.items()},
            "exp_probs_b": "mlp.gate.e_score_correction_bias",
        },
        fields=SIGMOID_EXPERTS,
        neutral={CHOICE: SIGMOID},
    ),
}
"""Layouts by `general.architecture`."""


def kind_in(path: Path) -> str | None:
    """Return the kind of the drafter that a GGUF file holds, also one that is not read; None for a model without one.

    Raises:
        CheckpointError: a broken file.
    """
    file = GgufFile(path)
    layout = LAYOUTS.get(file.architecture)
    if layout is not None and not layout.is_module:
        return layout.kind
    return "mtp" if file.values.get(NUM_MODULES) else None


def holds_module(path: Path) -> bool:
    """Return whether a GGUF file holds a multi-token-prediction module that can be read."""
    file = GgufFile(path)
    layout = LAYOUTS.get(file.architecture)
    if layout is None or not layout.is_module or not file.values.get(NUM_MODULES):
        return False
    return f"blk.{count_layers(file)}.nextn.eh_proj.weight" in file.tensors


class GgufDrafter:
    """Drafter in a GGUF file.

    Raises:
        CheckpointError: a broken file, or one without a drafter.
        UnsupportedModelError: a layout that is not read.
    """

    def __init__(self, path: Path) -> None:
        self.path, self._file = path, GgufFile(path)
        architecture = self._file.architecture
        layout = LAYOUTS.get(architecture)
        if layout is None or not layout.model_type:
            readable = [name for name, row in LAYOUTS.items() if row.model_type]
            raise UnsupportedModelError(
                f"expected a drafter in GGUF of the architecture {', '.join(readable)}, got {architecture} in {path}, "
                "which is not read in GGUF; use its folder in safetensors"
            )
        self._layout = layout

    @cached_property
    def config(self) -> dict[str, Any]:
        """Fields as in the `config.json` of a folder; read-only."""
        layers = self._layer_fields()
        self._require_neutral()
        if self._layout.is_module:
            return layers | self._module_fields()
        draft_vocab_size = self._draft_vocab_size(layers["vocab_size"])
        return self._outer_fields() | layers | {"draft_vocab_size": draft_vocab_size}

    def _module_fields(self) -> dict[str, Any]:
        """Return the fields of a module's layer; others are those of the target."""
        values, prefix = self._file.values, f"blk.{count_layers(self._file)}."
        return {
            **self._layout.constants,
            **{name: values[key] for key, name in self._layout.fields.items() if key in values},
            "attention_bias": f"{prefix}attn_q.bias" in self._file.tensors,
            "use_qk_norm": f"{prefix}attn_q_norm.weight" in self._file.tensors,
        }

    def _outer_fields(self) -> dict[str, Any]:
        """Return the fields that are not about the layers; those that are not known with their names in the file."""
        layout, values = self._layout, self._file.values
        fields = {**layout.constants, **self._markov_fields()}
        if layout.is_block:
            fields |= self._window_fields()
            if MASK_TOKEN in self._file.fields:
                fields["mask_token_id"] = self._file.fields[MASK_TOKEN]
        read = {*SIZES, *READ_ELSEWHERE, *layout.neutral, *((WINDOW, WINDOWED) if layout.is_block else ())}
        for key, value in values.items():
            if key in read or ROPE_FIELDS.fullmatch(key):
                continue
            name = layout.fields.get(key, f"{self._file.architecture}.{key}")
            if name == layout.fields[STATES] and not (value and isinstance(value, list)):
                raise self._unfit(f"{key} of {value!r}, which should be a list of layers")
            if layout.is_block and key == STATES:
                value = [layer - 1 for layer in value]
            if fields.get(name, value) != value:
                raise self._unfit(f"{key} of {value} beside {name} of {fields[name]}")
            fields[name] = value
        required = layout.required if MARKOV not in self._file.tensors else (*layout.required, FROM_ANCHOR)
        missing = next((key for key in required if layout.fields[key] not in fields), None)
        if missing is not None:
            raise self._missing(missing)
        return fields

    def _require_neutral(self) -> None:
        """Refuse other values of fields that must have one."""
        for key, value in self._layout.neutral.items():
            found = self._file.values.get(key, value)
            if found != value:
                raise UnsupportedModelError(
                    f"expected {self._file.architecture}.{key} of {value} in {self.path}, got {found}, which is not supported; "
                    "use another drafter"
                )

    def _layer_fields(self) -> dict[str, Any]:
        """Return the description of the decoder layers."""
        file, values = self._file, self._file.values
        optional = OPTIONAL | ({"feed_forward_length"} if "expert_count" in self._layout.fields else set())
        missing = [key for key in ("block_count", *SIZES) if key not in values and key not in optional]
        if missing:
            raise self._missing(missing[0])
        found = {name: _of_last(values[key]) for key, name in SIZES.items() if key in values}
        for name, size in found.items():
            if name != "rms_norm_eps" and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
                raise self._unfit(f"{name} of {size!r}, which should be a whole number from 1 on")
        head_size = found.setdefault("head_dim", found["hidden_size"] // found["num_attention_heads"])
        if _of_last(values.get("attention.value_length", head_size)) != head_size:
            raise UnsupportedModelError(
                f"expected keys and values of one size in {self.path}, got {head_size} and "
                f"{values['attention.value_length']}; use its folder in safetensors"
            )
        rope = read_rope_parameters(file, head_size, found["max_position_embeddings"])
        return {
            **found,
            "model_type": self._layout.model_type,
            "num_hidden_layers": count_layers(file),
            "vocab_size": self._vocab_size(),
            "rope_parameters": rope,
        }

    def _markov_fields(self) -> dict[str, Any]:
        """Return the description of the Markov head or the selector (DFlash2) of a block drafter, if it has one."""
        if SELECTOR in self._file.tensors:
            return {"architectures": ["DFlash2DraftModel"]}
        table = self._file.tensors.get(MARKOV)
        if table is None:
            return {}
        has_confidence = CONFIDENCE in self._file.tensors
        return {
            "markov_rank": table.shape[-1],
            "enable_confidence_head": has_confidence,
            "confidence_head_with_markov": has_confidence,
        }

    def _window_fields(self) -> dict[str, Any]:
        """Return the description of sliding windows, as of z-lab; what their positions attend to must be in the file."""
        values = self._file.values
        if not values.get(WINDOW):
            return {}
        missing = next((key for key in (WINDOWED, CAUSAL) if key not in values), None)
        if missing is not None:
            raise self._missing(missing)
        types = ["sliding_attention" if windowed else "full_attention" for windowed in values[WINDOWED]]
        return {"sliding_window": values[WINDOW], "layer_types": types}

    def _vocab_size(self) -> int:
        tokens = self._file.fields.get("tokenizer.ggml.tokens") or []
        embedding = self._file.tensors.get("token_embd.weight")
        size: int = self._file.values.get(
            "vocab_size", len(tokens) if embedding is None else embedding.shape[0]
        )
        return size

    def _draft_vocab_size(self, vocab_size: int) -> int:
        token_ids = self._file.tensors.get(MAP)
        return vocab_size if token_ids is None else token_ids.num_elements

    @cached_property
    def _tensors(self) -> dict[str, list[GgufTensor]]:
        """Tensors that make up those of a folder, by their names there, in the order of their rows."""
        found: dict[str, list[GgufTensor]] = {}
        for name in sorted(self._file.tensors.keys() - set(ROPE_TENSORS)):
            found.setdefault(self._in_folder(name), []).append(self._file.tensors[name])
        return found

    @property
    def tensor_names(self) -> Collection[str]:
        """Names of the tensors as in a folder."""
        return self._tensors.keys()

    @property
    def num_weights(self) -> int:
        """Number of weights of the drafter, without those of a model around it."""
        prefix = f"model.layers.{count_layers(self._file)}." if self._layout.is_module else ""
        return sum(
            tensor.num_elements
            for name, tensors in self._tensors.items()
            for tensor in tensors
            if name.startswith(prefix)
        )

    def _in_folder(self, name: str) -> str:
        """Return the name of a tensor in a folder; that in the file if it is not known."""
        stem, _, suffix = name.rpartition(".")
        if stem in self._layout.tensors:
            outer = self._layout.tensors[stem]
            return outer if outer in WITHOUT_SUFFIX else f"{outer}.{suffix}"
        found = BLOCK.fullmatch(name)
        part = None if found is None else {**LAYER_NAMES, **self._layout.parts}.get(found["part"])
        if found is None or part is None:
            return name
        prefix = "model." if self._layout.is_module else ""
        suffix = "" if part in WITHOUT_SUFFIX else found["suffix"] or ""
        return f"{prefix}layers.{found['layer']}.{part}{suffix}"

    def read(self, names: Collection[str]) -> dict[str, Tensor]:
        """Return tensors by their names in a folder; matrices in blocks are decoded in float32."""
        read = {}
        for name in names:
            parts = [self._read(tensor) for tensor in self._tensors[name]]
            read[name] = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        return read

    def _read(self, tensor: GgufTensor) -> Tensor:
        found = self._decode(tensor)
        if tensor.name == MAP:
            if found.dtype != torch.int64:
                raise self._unfit(f"{MAP} of the type {tensor.type_name}, which should be I64")
            return found - torch.arange(len(found))  # as in a folder
        block = BLOCK.fullmatch(tensor.name)
        if self._layout.is_rotated and block is not None and block["part"] in ROTATED:
            try:
                return found[rotary_order(len(found), self._layer_fields()["head_dim"])]
            except ValueError as error:
                raise self._unfit(f"{tensor.name}: {error}") from error
        if tensor.name.endswith(VECTORS) and found.dim() == 1:
            found = found[None]
        return found.clone()  # of memory that is mapped from the file

    def _decode(self, tensor: GgufTensor) -> Tensor:
        if len(tensor.shape) < 3:
            return decode_tensor(self._file, tensor)
        matrices = [decode_tensor(self._file, tensor, expert=index) for index in range(tensor.shape[0])]
        return torch.stack(matrices)

    def _missing(self, key: str) -> CheckpointError:
        return CheckpointError(
            f"expected the field {self._file.architecture}.{key} in {self.path}, got none; convert the drafter again"
        )

    def _unfit(self, found: str) -> CheckpointError:
        return CheckpointError(f"expected a drafter that fits in {self.path}, got: {found}; convert it again")


def _of_last(value: Any) -> Any:
    """Return a field of the last block; some fields have a value for each."""
    return value[-1] if isinstance(value, list) else value
