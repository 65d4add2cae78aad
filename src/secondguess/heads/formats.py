"""Formats in which heads are published: a table of the names of their fields and tensors, its reader and writer.

A new format is a row of `FORMATS`. A head reads fields of `config.json` under the names of this
package, and its tensors under the names of its module; `StoredHead.fill` refuses what was not read.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count, takewhile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from secondguess.checkpoint.quantised import Encoding, StoredWeights
from secondguess.checkpoint.resolve import is_gguf
from secondguess.checkpoint.source import FolderSource
from secondguess.checkpoint.weight_files import TensorFiles
from secondguess.errors import CheckpointError, UnsupportedModelError
from secondguess.heads.base import DraftVocabulary, TargetModel
from secondguess.heads.fields import Fields, refuse_unread
from secondguess.heads.files import (
    CONFIG,
    config_file,
    find_tensors,
    load_into,
    read_config,
    read_named_tensors,
    read_tensors,
    require_same,
    whole_number,
)
from secondguess.heads.files import tensor_names as names_of_tensors
from secondguess.heads.layer import LayerConfig
from secondguess.names import check_range

ANY = object()
"""Mark for a field that has any value."""
SPECULATORS = "speculators_model_type"
QUANTIZATION_FIELDS = ("quantization_config", "compression_config")
"""Fields that describe the encoding of quantised weights."""
CODED = (".weight_scale_inv", ".weight_scale", ".qweight", ".weight_packed")
"""Ends of the names of tensors that only quantised weights have."""
VOCABULARY_MULTIPLE, MAX_PADDING = 64, 1024
"""Padded vocabularies have a multiple of this size, with fewer rows of padding than this."""


@dataclass(frozen=True)
class TensorNames:
    """Names of the tensors of a head in files."""

    parts: Mapping[str, str] = field(default_factory=dict)  # prefixes in the file to those in the module
    prefix: str = ""  # of all names in the file
    # Both may have {index} for the number of a module, and {last} for the number of the target's layers plus it.
    optional: str = ""  # prefix that some files have before some names, and that is left out

    def at(self, num_layers: int, index: int = 0) -> TensorNames:
        """Return the names of module `index` for a target of `num_layers` layers."""
        numbers = {"last": num_layers + index, "index": index}
        parts = {name.format(**numbers): part for name, part in self.parts.items()}
        return replace(self, parts=parts, prefix=self.prefix.format(**numbers))

    def in_module(self, name: str) -> str:
        """Return the name in the module for a name in the file."""
        name = name.removeprefix(self.prefix).removeprefix(self.optional)
        for in_file, in_module in self.parts.items():
            if name.startswith(in_file):
                return in_module + name.removeprefix(in_file)
        return name

    def in_file(self, name: str) -> str:
        """Return the name in the file for a name in the module; inverse of `in_module`."""
        for in_file, in_module in self.parts.items():
            if name.startswith(in_module):
                return self.prefix + in_file + name.removeprefix(in_module)
        return self.prefix + name


@dataclass(frozen=True)
class Format:
    """Format of a published head.

    Args:
        kind: kind of drafter that uses the head.
        name: name of the format; rows of one format differ in their marks.
        marks: fields of `config.json` that mark the format, and their values or `ANY`.
        mark: name of a tensor that marks the format too; empty for none. {last} and {index} as in `TensorNames`.
        layers: field that describes the decoder layers; empty if `config.json` itself does.
        nested: field whose own fields are read as if they were beside it; those that are there come first.
        fields: spellings of a field, by the name of this package, the preferred one first. Dots lead
            into nested fields. A field that is not listed is spelled as here.
        defaults: values of absent fields, where formats differ.
        tensors: names of the tensors.
        left_out: endings of the names of tensors that are not read: copies of the target's, and those
            that can be computed.
        fixed: values that fields, by their path, must have if they are there.
        harmless: paths of fields that change nothing, beside those of `fields.HARMLESS`.
    """

    kind: str
    name: str
    marks: Mapping[str, object]
    mark: str = ""
    layers: str = ""
    nested: str = ""
    fields: Mapping[str, Sequence[str]] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    tensors: TensorNames = TensorNames()
    left_out: tuple[str, ...] = ()
    fixed: Mapping[str, Any] = field(default_factory=dict)
    harmless: tuple[str, ...] = ()

    def matches(self, config: Mapping[str, Any], has_tensor: Callable[[str], bool]) -> bool:
        """Return whether a folder with this `config.json` is marked as of this format."""
        found = {
            name: ANY if value is ANY and name in config else config.get(name)
            for name, value in self.marks.items()
        }
        if SPECULATORS in config and SPECULATORS not in self.marks:
            return False  # of another kind, which it names
        mark = self.mark_of(text_config(config).get("num_hidden_layers", 0))
        names = {mark, self.tensors.optional + mark}
        return found == self.marks and (not mark or any(has_tensor(name) for name in names))

    def spelled(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return fields of `config.json` for values by the name of this package."""
        config: dict[str, Any] = {}
        for name, value in values.items():
            *outer, last = self.fields.get(name, (name,))[0].split(".")
            inner = config
            for key in outer:
                inner = inner.setdefault(key, {})
            inner[last] = value
        return config

    def mark_of(self, num_layers: int, index: int = 0) -> str:
        """Return the name of the tensor that marks module `index` for a target of `num_layers` layers."""
        return self.mark.format(last=num_layers + index, index=index)


_VERIFIER = ("verifier_lm_head.weight", "verifier_norm.weight")
_COPIES = ("rotary_emb.inv_freq", *_VERIFIER)
_EAGLE_LAYERS = "eagle_aux_hidden_state_layer_ids"
_NESTED = "eagle_config."
_EAGLE3 = Format(
    "eagle",
    "eagle3",
    {"draft_vocab_size": ANY},
    fields={
        "hidden_layers": (_EAGLE_LAYERS,),
        # numbers of layers whose outputs are read, which count from 0
        "layer_outputs": (f"{_NESTED}{_EAGLE_LAYERS}", "target_layer_ids"),
        "reads_layers": (f"{_NESTED}use_aux_hidden_state", "use_aux_hidden_state"),
        "norm_before_residual": ("norm_before_residual", f"{_NESTED}norm_before_residual"),
        "norm_before_fc": ("norm_before_fc", f"{_NESTED}norm_before_fc"),
        "fc_norm": ("fc_norm", f"{_NESTED}fc_norm"),
        "norm_output": ("norm_output", f"{_NESTED}norm_output", f"{_NESTED}return_hidden_post_norm"),
        "num_states": ("num_aux_hidden_states", f"{_NESTED}num_aux_hidden_states"),
        "has_fusion_bias": ("bias",),
        "num_steps": ("speculators_config.proposal_methods.0.speculative_tokens", "ttt_length"),
        "target_width": ("target_hidden_size",),
        "target_layers": ("num_target_layers",),
        "uses_window": (f"{_NESTED}use_swa", "use_swa"),
        "window": (f"{_NESTED}swa_window_size", "swa_window_size"),
        "tied": ("tie_word_embeddings",),
        "mask_token": ("mask_token_id", "ptd_token_id", "pard_token"),
    },
    tensors=TensorNames({"midlayer.": "layers.0."}, optional="model."),
    left_out=_COPIES,
    fixed={
        f"{_NESTED}use_input_layernorm_in_first_layer": True,
        f"{_NESTED}use_last_layernorm": True,
        f"{_NESTED}use_mtp_layernorm": False,
        f"{_NESTED}next_layer_regular": True,
        f"{_NESTED}eh_proj_before_attn": False,
        f"{_NESTED}parallel_draft_step": 1,
    },
    harmless=(f"{_NESTED}parallel_draft_heads_num_layers", "draft_num_hidden_layers"),
)
NESTED = "dflash_config"
"""Field of z-lab, SpecForge and Model-Optimizer with the fields of a block drafter."""


def _anywhere(*names: str) -> tuple[str, ...]:
    """Return the spellings of a field that is nested in `dflash_config`, or not."""
    return (*(f"{NESTED}.{name}" for name in names), *names)


_NEUTRAL = {
    "use_aux_hidden_state": True,
    "attention_sink_bias": False,
    "add_swa_attention_sink_bias": False,
    "attention_value_scale": 1,
    "logit_scale": 1,
    "output_multiplier": 1,
    "final_logit_softcapping": 0,
    "input_embedding_scale": 1,
    "is_neox_style": True,
}
_FIXED = {path: value for name, value in _NEUTRAL.items() for path in _anywhere(name)}
"""Values at which fields of block drafters that are not supported change nothing."""
_SELECTOR = {"projector": "dflash2", "markov_kind": "selector", "has_confidence": False}
_DSPARK = Format(
    "dspark",
    "dspark",
    {SPECULATORS: "dspark"},
    layers="transformer_layer_config",
    fields={
        "hidden_layers": ("aux_hidden_state_layer_ids",),
        "mask_token": ("mask_token_id",),
        "samples_from_anchor": ("sample_from_anchor",),
        "markov_kind": ("markov_head_type",),
        "has_confidence": ("enable_confidence_head",),
        "confidence_reads_markov": ("confidence_head_with_markov",),
        "window_is_bidirectional": ("sliding_window_non_causal",),
        "target_width": ("target_hidden_size",),
    },
    defaults={"samples_from_anchor": True, "window_from_anchor": True, "window_is_bidirectional": False},
    left_out=_VERIFIER,
    fixed=_FIXED,
    harmless=("max_window_layers", "num_anchors", "num_jacobi_passes"),
)
_DFLASH = replace(
    _DSPARK,
    name="dflash",
    marks={SPECULATORS: "dflash"},
    defaults={**_DSPARK.defaults, "samples_from_anchor": False, "markov_rank": 0},
)
_DFLASH2 = replace(
    _DFLASH,
    name="dflash2",
    marks={SPECULATORS: "dflash2"},
    fields={**_DSPARK.fields, "markov_rank": ("selector_rank",)},
    defaults={**_DFLASH.defaults, **_SELECTOR, "window_is_bidirectional": True},
    tensors=TensorNames({"candidate_selector.": "markov_head."}),
)
_XPRESS = replace(
    _DFLASH,
    name="xpress",
    marks={SPECULATORS: "xpress"},
    fields={
        **_DSPARK.fields,
        "markov_rank": ("xpress_rank",),
        "refiner_mlp_ratio": ("xpress_mlp_ratio",),
    },
    defaults={**_DFLASH.defaults, "markov_kind": "refiner"},
    tensors=TensorNames({"refiner_head.": "markov_head."}),
)
_ZLAB = Format(
    "dspark",
    "z-lab",
    {NESTED: ANY},
    fields={
        "hidden_layers": _anywhere("target_layer_ids"),
        "mask_token": _anywhere("mask_token_id"),
        "block_size": _anywhere("block_size"),
        "samples_from_anchor": _anywhere("sample_from_anchor", "shift_label"),
        "markov_rank": _anywhere("markov_rank"),
        "markov_kind": _anywhere("markov_head_type"),
        "has_confidence": _anywhere("enable_confidence_head", "use_confidence_head"),
        "confidence_reads_markov": _anywhere("confidence_head_with_markov"),
        "is_causal": ("is_causal", f"{NESTED}.causal"),
        "slides_everywhere": _anywhere("use_swa"),
        "window": _anywhere("swa_window_size"),
        "projector": _anywhere("projector_type"),
        "target_width": ("target_hidden_size",),
    },
    defaults={"first_layer": 1, "markov_rank": 0, "has_confidence": False},
    left_out=("rotary_emb.inv_freq",),
    fixed=_FIXED,
    harmless=("max_window_layers", *_anywhere("num_anchors", "confidence_head_alpha", "attention_mode")),
)
_SPECFORGE = replace(
    _ZLAB,
    name="specforge",
    marks={"architectures": ["DSparkDraftModel"]},
    defaults={**_ZLAB.defaults, "projector": "dspark"},
)
_ZLAB2 = replace(
    _ZLAB,
    name="z-lab-2",
    marks={"architectures": ["DFlash2DraftModel"]},
    fields={
        **_ZLAB.fields,
        "markov_rank": _anywhere("selector_rank"),
        "selector_top_k": _anywhere("selector_top_k"),
        "conv_kernel_size": _anywhere("conv_kernel_size"),
        "conv_group_size": _anywhere("conv_group_size"),
    },
    defaults={"first_layer": 1, **_SELECTOR},
    tensors=_DFLASH2.tensors,
)
_DOMINO = replace(
    _ZLAB,
    name="domino",
    marks={"architectures": ["DominoDraftModel"]},
    fields={
        **_ZLAB.fields,
        "markov_rank": _anywhere("emb_dim"),
        "gru_size": _anywhere("gru_hidden_dim"),
        "num_uncorrected": _anywhere("pure_draft_prefix_len"),
        "samples_from_anchor": _anywhere("shift_label"),
    },
    defaults={"first_layer": 1, "projector": "domino", "markov_kind": "gru", "has_confidence": False},
    tensors=TensorNames(
        {
            **{f"logit_head.{part}.": f"markov_head.{part}." for part in ("prefix_gru", "embed_proj")},
            **{f"{part}.": f"markov_head.{part}." for part in ("prefix_gru", "embed_proj")},
        }
    ),
)
_MODEL_OPTIMIZER = replace(
    _ZLAB,
    name="model-optimizer",
    mark="markov_w1.weight",
    defaults={**_ZLAB.defaults, "confidence_reads_markov": True},
    tensors=TensorNames(
        {
            **{
                f"{part}.": f"markov_head.{part}."
                for part in ("markov_w1", "markov_w2", "gate_proj", "joint_proj")
            },
            "confidence_proj.": "confidence_head.proj.",
        }
    ),
)
_DEEPSPEC = replace(
    _ZLAB,
    name="deepspec",
    marks={"architectures": ["Qwen3DSparkModel"]},
    defaults={**_ZLAB.defaults, "samples_from_anchor": True},
)
_BLOCK_FORMATS = (
    _DSPARK,
    _DFLASH,
    _DFLASH2,
    _XPRESS,
    _MODEL_OPTIMIZER,
    _SPECFORGE,
    _ZLAB2,
    _DOMINO,
    _DEEPSPEC,
    replace(_DEEPSPEC, marks={"architectures": ["Gemma4DSparkModel"]}),
    _ZLAB,
)
"""Formats of block drafters. Windows of speculators begin before the block, those of others before each position."""
SPECULATORS_BLOCKS = {"vanilla": _DSPARK, "selector": _DFLASH2, "refiner": _XPRESS}
ZLAB_BLOCKS = {"vanilla": _SPECFORGE, "selector": _ZLAB2, "gru": _DOMINO}
"""Formats in which block drafters are written, by the kind of their Markov head."""
EAGLE1 = Format(
    "eagle",
    "eagle1",
    {"num_hidden_layers": 1},
    mark="fc.weight",
    fields={
        "has_norms": ("add_para_norm",),
        "has_bias": ("bias", "eagle_fc_bias"),
        "draft_vocab_size": ("truncated_vocab_size",),
    },
    tensors=TensorNames(
        {
            "fc.": "eh_proj.",
            "layers.0.": "layer.",
            "embedding_layernorm.": "enorm.",
            "hidden_states_layernorm.": "hnorm.",
        },
        optional="model.",
    ),
    left_out=(*_COPIES, "embed_tokens.weight"),
)
FORMATS = (
    Format("early-exit", "early-exit", {"model_type": "secondguess-early-exit"}),
    Format("layer-skip", "layer-skip", {"model_type": "secondguess-layer-skip"}),
    Format("gemma4-assistant", "gemma4-assistant", {"model_type": "gemma4_assistant"}),
    Format("gemma4-assistant", "gemma4-unified-assistant", {"model_type": "gemma4_unified_assistant"}),
    Format(
        "medusa",
        "original",
        {"medusa_num_heads": ANY},
        fields={"num_heads": ("medusa_num_heads",), "num_layers": ("medusa_num_layers",)},
    ),
    Format(
        "medusa",
        "vllm",
        {"model_type": "medusa"},
        fields={
            "num_layers": ("num_hidden_layers",),
            "has_bias": ("medusa_fc_bias",),
            "shares_output": ("original_lm_head",),
            "draft_vocab_size": ("truncated_vocab_size",),
        },
        tensors=TensorNames({"medusa_heads.": ""}),
    ),
    *_BLOCK_FORMATS,
    replace(_EAGLE3, marks={SPECULATORS: "eagle3"}, layers="transformer_layer_config"),
    replace(_EAGLE3, marks={SPECULATORS: "peagle"}, layers="transformer_layer_config"),
    _EAGLE3,
    replace(_EAGLE3, marks={}, mark="midlayer.hidden_norm.weight"),
    replace(_EAGLE3, marks={}, mark="layers.0.hidden_norm.weight"),
    EAGLE1,
    replace(EAGLE1, marks={"model_type": "eagle", "model": ANY}, mark="", nested="model"),
    replace(EAGLE1, marks={"model_type": "eagle"}, mark=""),
)
"""Formats that are read; the first one that matches is used. Those with marks in `config.json` come first."""
DEEPSEEK_MTP = Format(
    "mtp",
    "deepseek",
    {},
    mark="model.layers.{last}.eh_proj.weight",
    tensors=TensorNames(
        {
            "enorm.": "enorm.",
            "hnorm.": "hnorm.",
            "eh_proj.": "eh_proj.",
            "shared_head.norm.": "norm.",
            "shared_head.head.": "lm_head.",
            "embed_tokens.": "embed_tokens.",
            "": "layer.",
        },
        prefix="model.layers.{last}.",
    ),
)
_QWEN_MTP = Format(
    "mtp",
    "qwen",
    {},
    mark="mtp.fc.weight",
    defaults={"norm_output": True, "centred_norms": True},
    tensors=TensorNames(
        {
            "pre_fc_norm_embedding.": "enorm.",
            "pre_fc_norm_hidden.": "hnorm.",
            "fc.": "eh_proj.",
            "norm.": "norm.",
            "layers.0.": "layer.",
        },
        prefix="mtp.",
    ),
)
_HY3_LAYER = {
    "final_layernorm.": "norm.",
    "mlp.router.gate.": "layer.mlp.gate.",
    "mlp.expert_bias": "layer.mlp.e_score_correction_bias",
    "mlp.shared_mlp.": "layer.mlp.shared_experts.",
}
MTP_FORMATS = (
    replace(
        DEEPSEEK_MTP,
        name="hy3",
        mark="model.layers.{last}.final_layernorm.weight",
        defaults={"norm_output": True, "masks_first": True},
        tensors=TensorNames({**_HY3_LAYER, **DEEPSEEK_MTP.tensors.parts}, DEEPSEEK_MTP.tensors.prefix),
        left_out=("shared_head.weight", "shared_head.head.weight", "embed_tokens.weight"),
    ),
    DEEPSEEK_MTP,
    Format(
        "mtp",
        "ernie",
        {},
        mark="model.mtp_linear_proj.{index}.weight",
        defaults={"has_norm": False, "masks_first": True},
        tensors=TensorNames(
            {
                "emb_norm.{index}.": "enorm.",
                "hidden_norm.{index}.": "hnorm.",
                "linear_proj.{index}.": "eh_proj.",
                "block.{index}.": "layer.",
            },
            prefix="model.mtp_",
        ),
    ),
    # As AngelSpec converts its modules for vLLM.
    replace(
        _QWEN_MTP,
        name="angelspec-served",
        marks={"model_type": "qwen3_mtp"},
        defaults={"norm_output": True, "masks_first": True},
    ),
    _QWEN_MTP,
    Format(
        "mtp",
        "mimo",
        {},
        mark="model.mtp_layers.{index}.input_proj.weight",
        defaults={"norm_output": True, "state_first": True},
        tensors=TensorNames(
            {
                "token_layernorm.": "enorm.",
                "hidden_layernorm.": "hnorm.",
                "input_proj.": "eh_proj.",
                "final_layernorm.": "norm.",
                "": "layer.",
            },
            prefix="model.mtp_layers.{index}.",
        ),
    ),
)
"""Formats of MTP modules in a target's checkpoint, which is no head."""
SEPARATE_MTP_FORMATS = (
    Format(
        "mtp",
        "speculators",
        {SPECULATORS: "mtp"},
        layers="transformer_layer_config",
        fields={"num_steps": ("speculators_config.proposal_methods.0.speculative_tokens",)},
        defaults={"norm_output": True, "centred_norms": True},
        tensors=TensorNames(
            {
                "token_layernorm.": "enorm.",
                "hidden_layernorm.": "hnorm.",
                "input_proj.": "eh_proj.",
                "final_layernorm.": "norm.",
                "": "layer.",
            },
            prefix="mtp_layers.0.",
        ),
    ),
    # MLX stores the weights of norms around 1.
    Format(
        "mtp",
        "mlx",
        {"model_type": "qwen3_5_mtp"},
        mark="fc.weight",
        defaults={"norm_output": True},
        tensors=replace(_QWEN_MTP.tensors, prefix=""),
        harmless=("block_size",),  # number of tokens that MLX drafts at a time
    ),
    Format(
        "mtp",
        "angelspec",
        {"model_type": "mtp"},
        mark="eh_proj.weight",
        defaults={"norm_output": True, "masks_first": True},
        tensors=TensorNames(
            {
                **{f"midlayer.{name}": part for name, part in _HY3_LAYER.items() if name.startswith("mlp.")},
                "midlayer.": "layer.",
                "final_layernorm.": "norm.",
            }
        ),
    ),
)
"""Formats of MTP modules in folders of their own."""
UNMARKED = {"eagle": EAGLE1}
"""Format of folders without marks, by the kind of drafter that the user has named."""


class StoredHead:
    """Head in a folder, which must be in one of the formats of a kind of drafter."""

    def __init__(self, folder: Path, kind: str) -> None:
        config = read_config(folder)
        self.folder, self.config = folder, Fields(config)
        found = find_format(config, lambda name: name in self.tensor_names, kind)
        if found is None and SPECULATORS not in config:
            found = UNMARKED.get(kind)
        published, rows = self.config.get(SPECULATORS), _rows(kind)
        readable = [row.marks[SPECULATORS] for row in rows if SPECULATORS in row.marks]
        is_other = published not in (None, *readable)
        if readable and (is_other or (found is None and len(readable) == len(rows))):
            raise UnsupportedModelError(
                f"expected a drafter of the {SPECULATORS} {' or '.join(map(str, readable))} in {folder}, got {published!r}"
            )
        num_layers = text_config(self.config).get("num_hidden_layers", 0)
        if found is None:
            marks = [
                field if value is ANY else f"the {field} {value}"
                for row in rows
                for field, value in (row.marks or {row.mark_of(num_layers): ANY}).items()
            ]
            raise CheckpointError(
                f"expected the {CONFIG} and the weights of a drafter of the kind {kind} in {folder} ({' or '.join(marks)}), "
                f"got the model_type {self.config.get('model_type')!r}; train one with `secondguess train {kind}`"
            )
        self.format, self.names, self._num_layers = found, found.tensors.at(num_layers), num_layers
        if found.nested:
            outer = {
                name: value for name, value in config.items() if name not in (found.nested, "model_type")
            }
            self.config = Fields({**config[found.nested], **outer})

    @property
    def num_modules(self) -> int:
        """Number of modules in the folder; those after the first one are marked alike."""
        if self.format.mark_of(0) == self.format.mark_of(0, 1):
            return 1
        marks = (self.format.mark_of(self._num_layers, index) for index in count(1))
        return 1 + sum(1 for _ in takewhile(self.tensor_names.__contains__, marks))

    def module(self, index: int) -> StoredHead:
        """Return the module with this number."""
        other = copy(self)
        other.__dict__.pop("files", None)
        other.names = self.format.tensors.at(self._num_layers, index)
        return other

    def get(self, name: str, default: Any = None) -> Any:
        """Return a field of `config.json`; None, or the default, if it is absent or null.

        Raises:
            ValueError: another value under another spelling.
        """
        found = {
            spelling: value for spelling in self._spellings(name) if (value := self._at(spelling)) is not None
        }
        if not found:
            return self.format.defaults.get(name, default)
        (spelling, first), *others = found.items()
        for other, value in others:
            if value != first:
                raise ValueError(f"{other} of {value!r} beside {spelling} of {first!r}")
        return first

    def number(self, name: str, default: int | None = None, *, least: int = 1) -> int:
        """Return an integer field of at least `least`; call it inside `config_errors`."""
        value, spelling = self.get(name, default), self._spellings(name)[0]
        return whole_number({} if value is None else {spelling: value}, spelling, least)

    def flag(self, name: str, default: bool = False) -> bool:
        """Return a boolean field; call it inside `config_errors`."""
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise ValueError(f"{self._spellings(name)[0]} of {value!r}, which should be true or false")
        return value

    @property
    def layers(self) -> Mapping[str, Any]:
        """Description of the decoder layers; read it inside `config_errors`."""
        described: Mapping[str, Any] = (
            self.config[self.format.layers] if self.format.layers else text_config(self.config)
        )
        return described

    def read_tensors(self) -> dict[str, Tensor]:
        """Return the tensors by name in the module; those that are quantised as in `config.json` are decoded."""
        self.require_readable_weights()
        if self.encoding is not None:
            weights = StoredWeights(TensorFiles(dict.fromkeys(self.files.values())), self.encoding)
            names = (name for name in weights.names if name.startswith(self.names.prefix))
            return self.in_module({name: weights.read(name) for name in names})
        return self.in_module(read_named_tensors(self.files) if self.names.prefix else self._tensors)

    def require_readable_weights(self) -> None:
        """Refuse quantised weights in an encoding that is not decoded here."""
        coded = next((name for name in self.tensor_names if name.endswith(CODED)), None)
        if coded is not None and coded.startswith(self.names.prefix) and self.encoding is None:
            described: Any = next(filter(None, map(self.config.get, QUANTIZATION_FIELDS)), {})
            found = " ".join(str(described[key]) for key in ("quant_method", "format") if key in described)
            raise UnsupportedModelError(
                f"expected a drafter with weights that can be read in {self.folder}, got {coded}, of an encoding that is "
                f"not decoded ({found or 'not described'}); train one with `secondguess train` or use another drafter"
            )

    @cached_property
    def encoding(self) -> Encoding | None:
        """Encoding of quantised weights; None without.

        Raises:
            UnsupportedModelError: an encoding that is not decoded.
        """
        return None if is_gguf(self.folder) else FolderSource(self.folder).encoding(torch.device("cpu"))

    def in_module(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors by name in the module, without those that are not read."""
        return {
            self.names.in_module(name): tensor
            for name, tensor in tensors.items()
            if not name.endswith(self.format.left_out)
        }

    @cached_property
    def files(self) -> dict[str, Path]:
        """Safetensors file of each tensor of the head."""
        return {name: path for name, path in self._all_files.items() if name.startswith(self.names.prefix)}

    @property
    def tensor_names(self) -> Collection[str]:
        """Names of all tensors in the folder."""
        return self._all_files.keys() or names_of_tensors(self.folder)

    @cached_property
    def _all_files(self) -> dict[str, Path]:
        return find_tensors(self.folder)

    @cached_property
    def _tensors(self) -> dict[str, Tensor]:
        return read_tensors(self.folder)

    def fill(
        self, head: nn.Module, tensors: Mapping[str, Tensor], name_in_file: Callable[[str], str] = str
    ) -> None:
        """Load tensors into the head that was built from this configuration; nothing may be left unread.

        Raises:
            UnsupportedModelError: a field of `config.json` that is not known.
            CheckpointError: a tensor that is missing, not known or of another shape; see `load_into`.
        """
        for path, value in self.format.fixed.items():
            found = self._at(path)
            if found is not None and found != value:
                raise UnsupportedModelError(
                    f"expected a drafter whose {path} is {value} in {config_file(self.folder)}, got {found!r}, which is not "
                    "supported; use another drafter"
                )
        decoded = QUANTIZATION_FIELDS if self.encoding is not None else ()
        refuse_unread(self.config, config_file(self.folder), (*self.format.harmless, *decoded))
        load_into(head, tensors, self.folder, name_in_file)

    def _at(self, path: str) -> Any:
        """Return the field at a path; None if it is absent."""
        return find_spelled(self.config, path)

    def _spellings(self, name: str) -> Sequence[str]:
        return self.format.fields.get(name, (name,))


def find_format(
    config: Mapping[str, Any], has_tensor: Callable[[str], bool], kind: str | None = None
) -> Format | None:
    """Return the format of a head, of one kind or of any; None if there is no mark of one."""
    return next((row for row in _rows(kind) if row.matches(config, has_tensor)), None)


def _rows(kind: str | None) -> Sequence[Format]:
    if kind == "mtp":
        return (*MTP_FORMATS, *SEPARATE_MTP_FORMATS)
    return [row for row in (*FORMATS, *SEPARATE_MTP_FORMATS) if kind in (None, row.kind)]


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the configuration of the language model; that of a multimodal model is nested."""
    inner = config.get("text_config")
    return inner if isinstance(inner, Mapping) else config


def find_spelled(config: Mapping[str, Any], spelling: str) -> Any:
    """Return the field of this spelling, in which dots lead into nested fields; None if it is absent."""
    value: Any = config
    for key in spelling.split("."):
        value = _child(value, key)
    return value


def _child(value: Any, key: str) -> Any:
    """Return a field of an object, or an entry of a list; None if there is none."""
    if isinstance(value, list):
        return value[int(key)] if key.isdecimal() and int(key) < len(value) else None
    return value.get(key) if isinstance(value, Mapping) else None


def pop_vocabulary(tensors: dict[str, Tensor], stored: StoredHead, target: TargetModel) -> DraftVocabulary:
    """Return the vocabulary of a head, and remove its maps from the tensors; call it inside `config_errors`.

    `d2t` holds, per draft token, the target id minus the draft id; `t2d`, which some formats leave out,
    marks the target tokens in the draft vocabulary. Embeddings and the LM head of a vocabulary that is
    padded to another size are cut or extended to the target's.
    """
    folder, vocab_size = stored.folder, whole_number(stored.layers, "vocab_size")
    if not differ_by_padding(vocab_size, target.vocab_size):
        require_same("vocabulary", vocab_size, target.vocab_size, folder)
    size = stored.number("draft_vocab_size", vocab_size)
    check_range("the draft vocabulary", size, 1, vocab_size)
    offsets, marks = tensors.pop("d2t", None), tensors.pop("t2d", None)
    if "embed_tokens.weight" in tensors:
        tensors["embed_tokens.weight"] = _resized(tensors["embed_tokens.weight"], target.vocab_size)
    if size == vocab_size and offsets is not None and offsets.any():
        raise CheckpointError(
            f"expected no d2t that renames tokens in {folder}, whose draft vocabulary is the target's, got one; download the "
            "head again"
        )
    if size == vocab_size:  # some checkpoints contain maps nevertheless
        if "lm_head.weight" not in tensors or vocab_size == target.vocab_size:
            return DraftVocabulary(target.vocab_size)
        num_common = min(vocab_size, target.vocab_size)
        tensors["lm_head.weight"] = tensors["lm_head.weight"][:num_common]
        return DraftVocabulary(
            target.vocab_size, None if num_common == target.vocab_size else torch.arange(num_common)
        )
    if offsets is None:
        raise CheckpointError(
            f"expected d2t and t2d in {folder}, whose draft vocabulary is smaller than the target's, got no d2t"
        )
    token_ids = offsets.long() + torch.arange(len(offsets))
    if marks is None:
        marked, num_marks = token_ids.sort().values, vocab_size
    else:
        marked, num_marks = marks.bool().nonzero()[:, 0], len(marks)
    is_consistent = len(token_ids) == size and num_marks == vocab_size and torch.equal(token_ids, marked)
    if not is_consistent or not 0 <= int(token_ids.min()) <= int(token_ids.max()) < target.vocab_size:
        raise CheckpointError(
            f"expected d2t of {folder} to hold, per draft token, how much larger the target's id is, and t2d to mark "
            f"the same {size} tokens of {vocab_size}, got an inconsistent map"
        )
    if "lm_head.weight" not in tensors:
        raise missing_lm_head(folder)
    return DraftVocabulary(target.vocab_size, token_ids)


def differ_by_padding(one: int, other: int) -> bool:
    """Return whether two sizes may be of the same vocabulary, with and without rows that pad a matrix."""
    smaller, larger = sorted((one, other))
    return larger % VOCABULARY_MULTIPLE == 0 and larger - smaller < MAX_PADDING


def _resized(table: Tensor, num_rows: int) -> Tensor:
    """Return the first rows of a table; rows that it does not have are zeros."""
    missing = num_rows - len(table)
    return table[:num_rows] if missing <= 0 else torch.cat((table, table.new_zeros(missing, table.shape[1])))


def missing_lm_head(folder: Path) -> CheckpointError:
    """Return the error for a reduced draft vocabulary without an LM head for it."""
    return CheckpointError(
        f"expected an lm_head.weight for the reduced draft vocabulary in {folder}, got none; download the head again"
    )


def speculators_fields(
    kind: str, num_tokens: int, target: str, architectures: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the fields of `speculators` that name the kind of head, its draft length and its target."""
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": num_tokens,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        SPECULATORS: kind,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": target, "architectures": list(architectures)},
        },
    }


def layer_fields(layer: LayerConfig, vocab_size: int, num_layers: int) -> dict[str, Any]:
    """Return the configuration of a stack of decoder layers."""
    return {**layer.to_config(), "vocab_size": vocab_size, "num_hidden_layers": num_layers}


def checkpoint_tensors(head: nn.Module, vocabulary: DraftVocabulary) -> dict[str, Tensor]:
    """Return the tensors of a head with its vocabulary as `d2t` and `t2d`, if it is not whole."""
    tensors: dict[str, Tensor] = head.state_dict()
    token_ids = tensors.pop("vocabulary.token_ids", None)
    if token_ids is None:
        return tensors
    token_ids = token_ids.cpu()
    marks = torch.zeros(vocabulary.vocab_size, dtype=torch.bool).index_fill(0, token_ids, True)
    return {**tensors, "d2t": token_ids - torch.arange(len(token_ids)), "t2d": marks}
