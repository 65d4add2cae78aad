"""Block drafters as their publishers' own code writes and computes them (`tools/drafter_oracles/blocks.py`)."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from head_formats import write_folder
from torch import Tensor

from drafter_oracles.values import (
    ANCHOR,
    BLOCK_SIZE,
    NUM_LAYERS,
    TEXT,
    VOCAB_SIZE,
    WIDTH,
    head_weights,
    target_embeddings,
    target_lm_head,
    target_states,
)
from secondguess.core import Row
from secondguess.errors import CheckpointError
from secondguess.heads.base import TargetModel
from secondguess.heads.dspark import DsparkHead
from secondguess.heads.folders import refuse_head
from secondguess.heads.runtime import BlockRuntime
from secondguess.sampling import SamplingParams

ORACLES = json.loads(Path(__file__).with_name("block_oracles.json").read_text())
SHARED = ORACLES["shared"]
CASES = {name: case for name, case in ORACLES.items() if "logits" in case}
every_case = pytest.mark.parametrize("name", CASES)
TARGET = TargetModel(
    width=WIDTH,
    dtype=torch.float32,
    embed=lambda tokens: target_embeddings()[tokens],
    normalise=lambda states: states,
    unembed=lambda states: states @ target_lm_head().T,
    vocab_size=VOCAB_SIZE,
    num_layers=NUM_LAYERS,
    device=torch.device("cpu"),
)
Config = dict[str, Any]


def layers_of(config: Config) -> Config:
    described: Config = config.get("transformer_layer_config", config)
    return described


def config_of(name: str) -> Config:
    config: Config = copy.deepcopy(CASES[name]["config"])
    layers_of(config).update(SHARED["layers"])
    return config


def tensors_of(name: str) -> dict[str, Tensor]:
    shapes: dict[str, list[int]] = {}
    for pattern, shape in {**SHARED["tensors"], **CASES[name]["tensors"]}.items():
        for layer in range(SHARED["layers"]["num_hidden_layers"]):
            shapes[pattern.replace("*", str(layer))] = shape
    return head_weights(shapes)


def load(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> DsparkHead:
    head = DsparkHead.load(write_folder(folder, config, tensors), TARGET)
    return head.eval().requires_grad_(False)


def load_case(name: str, folder: Path) -> DsparkHead:
    return load(folder, config_of(name), tensors_of(name))


@torch.inference_mode()
def drafted(head: DsparkHead, others: int = 0) -> tuple[Tensor, Tensor | None]:
    """Return logits `[depth, vocab]` and confidences of the block at the anchor, after the text's own tokens.

    In the batch are `others` longer texts too. The states come in two parts.
    """
    runtime, states = BlockRuntime(head, torch.device("cpu")), target_states()
    rows = [
        Row(TEXT[: length + 1], SamplingParams())
        for length in (ANCHOR, *range(ANCHOR + 2, ANCHOR + 2 + others))
    ]
    for start, end in ((0, 3), (3, len(TEXT))):
        received = [
            {layer: states[layer][start : min(end, len(row.tokens) - 1)] for layer in head.hidden_layers}
            for row in rows
        ]
        runtime.append(rows, received)
    block = runtime.run(rows, head.config.num_drafted)
    first = head.config.first_drafted
    lead = [
        TEXT[ANCHOR - 1]
        if head.markov_head is not None and head.markov_head.precedes_anchor
        else TEXT[ANCHOR]
    ]
    tokens = (lead * first + TEXT[ANCHOR:])[:BLOCK_SIZE]
    logits, confidences = [], []
    for depth in range(first, BLOCK_SIZE):
        before = torch.tensor([tokens[: depth + 1]] * len(rows))
        logits.append(head.vocabulary.to_target(runtime.logits(block, before))[0])
        if head.config.has_confidence:
            confidences.append(runtime.confidence(block, before)[0])
    return torch.stack(logits), torch.stack(confidences) if confidences else None


def largest_difference(head: DsparkHead, name: str, others: int = 0) -> float:
    logits, confidences = drafted(head, others)
    expected = torch.tensor(CASES[name]["logits"])
    if expected.shape[-1] < logits.shape[-1]:
        expected = head.vocabulary.to_target(expected)
    difference = (logits.clamp_min(-1e9) - expected.clamp_min(-1e9)).abs().max()
    if "confidence" in CASES[name]:
        if confidences is None:
            return torch.inf
        difference = difference.maximum((confidences - torch.tensor(CASES[name]["confidence"])).abs().max())
    return float(difference)


@every_case
@pytest.mark.parametrize("others", [0, 2])
def test_the_logits_are_those_of_the_publishers_code(name: str, others: int, tmp_path: Path) -> None:
    assert largest_difference(load_case(name, tmp_path), name, others) < 1e-5


@every_case
def test_the_folder_is_known_as_that_of_a_block_drafter(name: str, tmp_path: Path) -> None:
    write_folder(tmp_path, config_of(name), tensors_of(name))
    with pytest.raises(CheckpointError, match=f"drafter of the kind dspark; write dspark:{tmp_path}"):
        refuse_head(str(tmp_path))


@every_case
def test_a_written_head_is_read_unchanged(name: str, tmp_path: Path) -> None:
    load_case(name, tmp_path / "published").save(tmp_path / "written", target="tiny")
    head = DsparkHead.load(tmp_path / "written", TARGET).eval().requires_grad_(False)
    assert largest_difference(head, name) < 1e-5


UNREAD = (
    "speculators_model_type", "architectures", "max_position_embeddings", "use_sliding_window", "num_jacobi_passes",
    "num_anchors", "attention_mode", "projector_type", "tie_word_embeddings", "model_type",
)  # fmt: skip
"""Fields that mark a format, or change nothing."""
ALTERED: dict[str, object] = {
    "aux_hidden_state_layer_ids": [1, 2, 3], "target_layer_ids": [0, 1, 2], "mask_token_id": 3, "block_size": 3,
    "attention_bias": True, "layer_types": ["full_attention", "sliding_attention"], "sliding_window": BLOCK_SIZE,
    "num_target_layers": 4, "head_dim": 4, "hidden_act": "gelu", "hidden_size": 8, "intermediate_size": 8,
    "num_attention_heads": 4, "num_hidden_layers": 1, "num_key_value_heads": 2, "rms_norm_eps": 0.5, "vocab_size": 14,
    "rope_parameters": {"rope_type": "default", "rope_theta": 9.0}, "draft_vocab_size": 5, "markov_rank": 2,
    "conv_kernel_size": 1, "conv_group_size": 8, "selector_rank": 2, "selector_top_k": 2, "xpress_rank": 2,
    "xpress_mlp_ratio": 1, "emb_dim": 4, "gru_hidden_dim": 3, "pure_draft_prefix_len": 2,
    "swa_window_size": 4, "markov_head_type": "other",
}  # fmt: skip
"""Another value of each field that is not boolean."""


def every_field() -> list[tuple[str, str]]:
    """Return the fields of each case, nested ones as paths."""
    fields: list[tuple[str, str]] = []
    for name in CASES:
        config = config_of(name)
        for outer in ("", "transformer_layer_config", "dflash_config"):
            for key in config.get(outer, {}) if outer else config:
                if not isinstance(config.get(key), dict) or key == "rope_parameters":
                    fields.append((name, f"{outer}.{key}" if outer else key))
    return [(name, field) for name, field in fields if field.rpartition(".")[2] not in UNREAD]


@pytest.mark.parametrize(("name", "field"), every_field())
def test_no_field_is_ignored(name: str, field: str, tmp_path: Path) -> None:
    """A head with another value is refused, or computes something else."""
    config = config_of(name)
    *outer, key = field.split(".")
    inner = config
    for part in outer:
        inner = inner[part]
    value = inner[key]
    inner[key] = not value if isinstance(value, bool) else ALTERED[key]
    if key in ("layer_types", "sliding_window") and "sliding_attention" not in str(value):
        inner["sliding_window"] = BLOCK_SIZE
    if "confidence" in key and "confidence" not in CASES[name]:
        pytest.skip("without a confidence head it changes nothing")
    if key == "sliding_window_non_causal" and "sliding_attention" not in str(config):
        pytest.skip("without windows it changes nothing")
    try:
        head = load(tmp_path, config, tensors_of(name))
    except CheckpointError:
        return
    if head.config.num_drafted != len(CASES[name]["logits"]):
        return
    assert largest_difference(head, name) > 1e-4
