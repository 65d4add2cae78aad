"""Write the logits of block drafters that their publishers' own code computes.

Run it in an environment of its own with `speculators`, and with checkouts of DeepSpec, z-lab/dflash
and SpecForge on the path, and the files `modeling_*.py` of Model-Optimizer's plugins as a package:

    PYTHONPATH=tools:deepspec:dflash:specforge:plugins python -m drafter_oracles.blocks tests/heads/block_oracles.json

Each case has the `config.json` and the names and shapes of the tensors, as the library writes them;
the weights are those of `drafter_oracles.values`. What all cases share is stored once. Expected are
the logits of the draft positions of the block at `ANCHOR`, each after the text's own tokens.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from drafter_oracles.values import (
    ANCHOR,
    BLOCK_SIZE,
    MASK_TOKEN,
    NUM_LAYERS,
    TARGET_LAYERS,
    TEXT,
    VOCAB_SIZE,
    WIDTH,
    head_weights,
    target_embeddings,
    target_lm_head,
    target_states,
)

LAYERS = {
    "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
    "intermediate_size": 24, "vocab_size": VOCAB_SIZE, "rope_theta": 300.0, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
}  # fmt: skip
WINDOW = {
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 3,
    "use_sliding_window": True,
}
LARGER_WINDOW = {**WINDOW, "sliding_window": 5}
"""Window of at least a block, as formats need whose windows count from each position."""
DROPPED = (
    "_name_or_path", "auto_map", "dtype", "torch_dtype", "transformers_version", "speculators_version", "initializer_range",
    "attention_dropout", "bos_token_id", "eos_token_id", "pad_token_id", "use_cache", "tie_word_embeddings",
    "max_window_layers", "speculators_config",
)  # fmt: skip
Case = dict[str, Any]


def layer_config(**more: Any) -> Qwen3Config:
    config = Qwen3Config(**LAYERS, **more)
    config._attn_implementation = "eager"
    return config


class Exported:
    """Model of Model-Optimizer, whose exporter writes the configuration of z-lab."""

    def __init__(self, model: torch.nn.Module, config: dict[str, Any]) -> None:
        self.model, self.config = model, config

    def save_pretrained(self, folder: str) -> None:
        (Path(folder) / "config.json").write_text(json.dumps(self.config))
        save_file(self.model.state_dict(), Path(folder) / "model.safetensors")

    def load_state_dict(self, weights: dict[str, Tensor], strict: bool) -> Any:
        return self.model.load_state_dict(weights, strict=strict)


def written(model: Any) -> tuple[dict[str, Any], dict[str, list[int]]]:
    """Return the `config.json` and the shapes of the tensors that a model writes."""
    with tempfile.TemporaryDirectory() as name:
        model.save_pretrained(name)
        config = json.loads((Path(name) / "config.json").read_text())
        with safe_open(Path(name) / "model.safetensors", "pt") as file:
            names = file.keys()
            shapes = {tensor: list(file.get_slice(tensor).get_shape()) for tensor in names}
    return config, shapes


def essential(config: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration without fields that no reader needs."""
    return {
        key: essential(value) if isinstance(value, dict) else value
        for key, value in sorted(config.items())
        if key not in DROPPED and value is not None
    }


def case(publisher: str, model: Any, logits: Tensor, confidence: Tensor | None = None) -> Case:
    config, shapes = written(model)
    by_pattern = {re.sub(r"^layers\.\d+\.", "layers.*.", name): shape for name, shape in shapes.items()}
    found = {
        "publisher": publisher,
        "config": essential(config),
        "tensors": by_pattern,
        "logits": rounded(logits),
    }
    return found if confidence is None else {**found, "confidence": rounded(confidence)}


def rounded(values: Tensor) -> Any:
    return json.loads(
        json.dumps(values.detach().double().tolist()), parse_float=lambda text: round(float(text), 6)
    )


def load_weights(model: Any) -> None:
    """Set the weights of a drafter, and the target's where it shares them."""
    shapes = written(model)[1]
    missing, unknown = model.load_state_dict(head_weights(shapes), strict=False)
    assert not unknown, unknown
    with torch.no_grad():
        for name in missing:
            if name.endswith("embed_tokens.weight"):
                model.embed_tokens.weight.copy_(target_embeddings())
            elif name == "lm_head.weight":
                model.lm_head.weight.copy_(target_lm_head())


def joined_states() -> Tensor:
    states = target_states()
    return torch.cat([states[layer] for layer in TARGET_LAYERS], -1)[None]


def block_tokens(first: int) -> Tensor:
    """Return the tokens of the text from `first` positions after the anchor on, one per position of the block."""
    return torch.tensor([TEXT[ANCHOR + first : ANCHOR + first + BLOCK_SIZE]])


def speculators_case(kind: str, more: dict[str, Any], layers: dict[str, Any] | None = None) -> Case:
    import speculators

    configs = {"dflash": "DFlash", "dspark": "DSpark", "dflash2": "DFlash2", "xpress": "XPress"}
    config = getattr(speculators, f"{configs[kind]}SpeculatorConfig")(
        transformer_layer_config=layer_config(**(layers or {})),
        draft_vocab_size=more.pop("draft_vocab_size", VOCAB_SIZE),
        block_size=BLOCK_SIZE,
        aux_hidden_state_layer_ids=list(TARGET_LAYERS),
        mask_token_id=MASK_TOKEN,
        **more,
    )
    model = getattr(speculators, f"{configs[kind]}DraftModel")(config).eval()
    load_weights(model)
    length = len(TEXT)
    with torch.no_grad():
        hidden, logits, *_ = model._backbone_forward(
            joined_states(),
            torch.tensor([TEXT]),
            torch.nn.functional.one_hot(torch.tensor([ANCHOR]), length),
            torch.zeros(1, length, WIDTH),
            torch.zeros(1, length, dtype=torch.long),
            max_anchors=1,
        )
        first = int(not config.sample_from_anchor)
        confidence = None
        if kind == "xpress":
            previous = block_tokens(-first)
            logits = logits + model.refiner_head.block_bias(previous, hidden)
        else:
            text = block_tokens(0)
            previous = torch.cat((text[:, :first], text[:, : BLOCK_SIZE - first]), 1)
        if kind == "dflash2":
            candidates, scores = model.candidate_selector.select(logits, hidden, previous)
            logits = torch.full_like(logits, -1e9).scatter(-1, candidates, scores)
        if kind == "dspark" and model.markov_head is not None:
            logits = logits + model.markov_head.block_bias(prev_token_ids=previous, hidden_states=hidden)
            if model.confidence_head is not None:
                features = [hidden, model.markov_head.prev_embeddings(previous)]
                confidence = model.confidence_head(
                    torch.cat(features[: 1 + config.confidence_head_with_markov], -1)
                )[0, first:]
    return case("speculators", model, logits[0, first:], confidence)


def deepspec_case(**more: Any) -> Case:
    from deepspec.modeling.dspark.qwen3.modeling import Qwen3DSparkModel

    config = layer_config(layer_types=["full_attention"] * 2)
    fields = {
        "architectures": ["Qwen3DSparkModel"], "num_target_layers": NUM_LAYERS, "block_size": BLOCK_SIZE,
        "mask_token_id": MASK_TOKEN, "target_layer_ids": [layer - 1 for layer in TARGET_LAYERS], "num_anchors": 8,
        "enable_confidence_head": True, "confidence_head_with_markov": True,
    }  # fmt: skip
    for name, value in {**fields, **more}.items():
        setattr(config, name, value)
    model = Qwen3DSparkModel(config).eval()
    load_weights(model)
    tokens = torch.full((1, BLOCK_SIZE), MASK_TOKEN)
    tokens[:, 0] = TEXT[ANCHOR]
    with torch.no_grad():
        hidden = model._forward_backbone(
            position_ids=torch.arange(ANCHOR + BLOCK_SIZE)[None],
            noise_embedding=model.embed_tokens(tokens),
            target_hidden_states=joined_states()[:, :ANCHOR],
        )
        logits = model.compute_logits(hidden)[:, None]
        if model.markov_head is not None:
            logits = model.markov_head.apply_block_logits(
                logits, token_ids=block_tokens(0)[:, None], hidden_states=hidden[:, None]
            )
        confidence = model.predict_confidence_step(hidden, prev_token_ids=block_tokens(0))
    return case("DeepSpec", model, logits[0, 0], None if confidence is None else confidence[0])


def nested_config(architecture: str, more: dict[str, Any], layers: dict[str, Any]) -> Qwen3Config:
    config = layer_config(**{"layer_types": ["full_attention"] * 2, **layers})
    config.architectures, config.block_size, config.num_target_layers = [architecture], BLOCK_SIZE, NUM_LAYERS
    config.dflash_config = {
        "mask_token_id": MASK_TOKEN,
        "target_layer_ids": [layer - 1 for layer in TARGET_LAYERS],
        **more,
    }
    return config


def dflash_states(model: Any, mask: Any = None) -> Tensor:
    """Return the states of the block by the model of z-lab or SpecForge, which uses the target's embeddings."""
    tokens = torch.full((BLOCK_SIZE,), MASK_TOKEN)
    tokens[0] = TEXT[ANCHOR]
    states: Tensor = model(
        position_ids=torch.arange(ANCHOR + BLOCK_SIZE)[None],
        noise_embedding=target_embeddings()[tokens][None],
        target_hidden=joined_states()[:, :ANCHOR],
        attention_mask=mask,
    )
    return states


def zlab_case(**layers: Any) -> Case:
    from dflash.model import DFlashDraftModel

    model = DFlashDraftModel(nested_config("DFlashDraftModel", {}, layers)).eval()
    load_weights(model)
    with torch.no_grad():
        logits = dflash_states(model) @ target_lm_head().T
    return case("z-lab", model, logits[0, 1:])


def specforge_case(architecture: str, more: dict[str, Any], layers: dict[str, Any]) -> Case:
    from specforge.algorithms.common.dflash_family_model import create_dflash_sdpa_mask
    from specforge.modeling.draft import dflash, domino, dspark

    modules = {"DFlashDraftModel": dflash, "DSparkDraftModel": dspark, "DominoDraftModel": domino}
    model = getattr(modules[architecture], architecture)(nested_config(architecture, more, layers)).eval()
    load_weights(model)

    def mask(window: int | None) -> Tensor:
        anchors, keep = torch.tensor([[ANCHOR]]), torch.ones(1, 1, dtype=torch.bool)
        allowed: Tensor = create_dflash_sdpa_mask(
            anchors, keep, ANCHOR, BLOCK_SIZE, torch.device("cpu"), window
        )
        return allowed

    masks = {"full_attention": mask(None), "sliding_attention": mask(layers.get("sliding_window"))}
    with torch.no_grad():
        hidden = dflash_states(model, masks)
        logits, confidence, first = hidden @ target_lm_head().T, None, 1
        if architecture == "DSparkDraftModel":
            first, previous = 0, block_tokens(0)
            logits = model.apply_markov_logits(logits, prev_token_ids=previous, hidden_states=hidden)
            confidence = model.predict_confidence(hidden, prev_token_ids=previous)
        elif architecture == "DominoDraftModel":
            first = int(not more["shift_label"])
            embedded = target_embeddings()[block_tokens(0)][:, None]
            logits = model.apply_logits_head(
                logits[:, None], prev_token_embeddings=embedded, hidden_states=hidden[:, None]
            )[:, 0]
    return case("SpecForge", model, logits[0, first:], None if confidence is None else confidence[0])


def model_optimizer_case(more: dict[str, Any], window: int | None = None) -> Case:
    """Return a case with the fields that the exporter writes, and the mask of the model's generation."""
    from modelopt_plugins.modeling_dflash import DFlashModule
    from modelopt_plugins.modeling_dspark import DSparkModule

    config = nested_config("DFlashDraftModel", more, {})
    for name, value in config.dflash_config.items():
        setattr(config, name, value)
    exported = essential(config.to_diff_dict())
    nested = exported["dflash_config"]
    exported = {key: value for key, value in exported.items() if key not in nested or key == "block_size"}
    if window is not None:
        exported["sliding_window"] = window
        nested.update({"use_swa": True, "swa_window_size": window, "causal": False})
    module = (DSparkModule if "markov_rank" in more else DFlashModule)(config).eval()
    module.rotary_emb = Qwen3RotaryEmbedding(config)
    model = Exported(module, exported)
    load_weights(model)
    queries = ANCHOR + torch.arange(BLOCK_SIZE)[:, None]
    keys = torch.arange(ANCHOR + BLOCK_SIZE)
    hidden_keys = (keys < ANCHOR) & (keys <= queries - (window or len(TEXT)))
    mask = torch.zeros(hidden_keys.shape).masked_fill(hidden_keys, torch.finfo(torch.float32).min)
    tokens = torch.full((BLOCK_SIZE,), MASK_TOKEN)
    tokens[0] = TEXT[ANCHOR]
    with torch.no_grad():
        hidden = module(
            target_embeddings()[tokens][None],
            joined_states()[:, :ANCHOR],
            torch.arange(ANCHOR + BLOCK_SIZE)[None],
            mask[None, None],
        )
        logits, confidence, first = hidden @ target_lm_head().T, None, 1
        if "markov_rank" in more:
            logits, first = logits + module.compute_markov_bias(block_tokens(0), hidden), 0
            confidence = module.compute_confidence_logits(block_tokens(0), hidden)
    return case("Model-Optimizer", model, logits[0, first:], None if confidence is None else confidence[0])


MARKOV = {"markov_rank": 3, "confidence_head_with_markov": True}
DSPARK = {"projector_type": "dspark", "attention_mode": "gqa", "enable_confidence_head": True, **MARKOV}
EXPORTED = {"projector_type": "dspark", "shift_label": True, "markov_rank": 3, "use_confidence_head": True}
DOMINO = {"projector_type": "domino", "emb_dim": 5, "gru_hidden_dim": 6, "pure_draft_prefix_len": 1}
SELECTOR = {"conv_group_size": 4, "selector_rank": 3, "selector_top_k": 5}
CASES: dict[str, Callable[[], Case]] = {
    "z-lab dflash": zlab_case,
    "z-lab dflash with biases": lambda: zlab_case(attention_bias=True),
    "specforge dflash with windows": lambda: specforge_case("DFlashDraftModel", {}, LARGER_WINDOW),
    "specforge dspark": lambda: specforge_case("DSparkDraftModel", DSPARK, {}),
    "specforge gated dspark": lambda: specforge_case(
        "DSparkDraftModel", {**DSPARK, "markov_head_type": "gated"}, LARGER_WINDOW
    ),
    "specforge domino": lambda: specforge_case("DominoDraftModel", {**DOMINO, "shift_label": True}, {}),
    "specforge domino after the anchor": lambda: specforge_case(
        "DominoDraftModel", {**DOMINO, "pure_draft_prefix_len": 0, "shift_label": False}, LARGER_WINDOW
    ),
    "model-optimizer dflash with windows": lambda: model_optimizer_case({}, window=5),
    "model-optimizer gated dspark": lambda: model_optimizer_case({**EXPORTED, "markov_head_type": "gated"}),
    "model-optimizer recurrent dspark": lambda: model_optimizer_case({**EXPORTED, "markov_head_type": "rnn"}),
    "deepspec dspark": lambda: deepspec_case(markov_rank=3, markov_head_type="vanilla"),
    "deepspec gated dspark": lambda: deepspec_case(markov_rank=3, markov_head_type="gated"),
    "deepspec recurrent dspark": lambda: deepspec_case(markov_rank=3, markov_head_type="rnn"),
    "deepspec dflash": lambda: deepspec_case(
        markov_rank=0, enable_confidence_head=False, confidence_head_with_markov=False
    ),
    "speculators dflash": lambda: speculators_case("dflash", {}),
    "speculators dflash with windows": lambda: speculators_case("dflash", {}, WINDOW),
    "speculators dflash with bidirectional windows": lambda: speculators_case(
        "dflash", {"sliding_window_non_causal": True}, WINDOW
    ),
    "speculators dflash with biases": lambda: speculators_case("dflash", {}, {"attention_bias": True}),
    "speculators dspark with windows": lambda: speculators_case("dspark", {**MARKOV}, WINDOW),
    "speculators gated dspark": lambda: speculators_case("dspark", {**MARKOV, "markov_head_type": "gated"}),
    "speculators recurrent dspark after the anchor": lambda: speculators_case(
        "dspark", {**MARKOV, "markov_head_type": "rnn", "sample_from_anchor": False}
    ),
    "speculators dspark of a reduced vocabulary": lambda: speculators_case(
        "dspark", {**MARKOV, "draft_vocab_size": 6}
    ),
    "speculators dflash2": lambda: speculators_case("dflash2", {**SELECTOR}, WINDOW),
    "speculators dflash2 of three taps": lambda: speculators_case(
        "dflash2", {**SELECTOR, "conv_kernel_size": 3, "sample_from_anchor": True}
    ),
    "speculators xpress": lambda: speculators_case("xpress", {"xpress_rank": 3}, WINDOW),
    "speculators xpress from the anchor": lambda: speculators_case(
        "xpress", {"xpress_rank": 3, "xpress_mlp_ratio": 3, "sample_from_anchor": True}
    ),
}


def common_items(every: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the items that all dictionaries have."""
    first, *others = every
    return {key: value for key, value in first.items() if all(other.get(key) == value for other in others)}


def main() -> None:
    cases = {name: make() for name, make in CASES.items()}
    layers = [found["config"].get("transformer_layer_config", found["config"]) for found in cases.values()]
    tensors = [found["tensors"] for found in cases.values()]
    shared = {"layers": common_items(layers), "tensors": common_items(tensors)}
    for described in layers:
        for key in shared["layers"]:
            del described[key]
    for shapes in tensors:
        for key in shared["tensors"]:
            del shapes[key]
    versions = {name: version(name) for name in ("speculators", "torch", "transformers")}
    blocks = {"versions": versions, "shared": shared, **cases}
    lines = [
        f"{json.dumps(name)}: {json.dumps(block, separators=(',', ':'))}" for name, block in blocks.items()
    ]
    Path(sys.argv[1]).write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
