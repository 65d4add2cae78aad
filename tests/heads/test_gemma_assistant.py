"""Assistants of Gemma 4 targets: logits of Transformers' own code, every field of the configuration, and refusals."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from head_formats import Named, edit, named
from safetensors.torch import load_file, save_file

from gemma_cases import (
    TEXT,
    VOCAB_SIZE,
    WINDOW,
    assistant_drafts_as_published,
    assistant_logits,
    gemma_runtime,
    oracle_logits,
    write_assistant,
)
from secondguess.errors import CheckpointError, SecondGuessError, UnsupportedModelError
from secondguess.heads.gemma_assistant import FULL, SLIDING
from secondguess.runtime.decoder.fused import FusedRuntime, fuse
from unrolled_cases import target_model

CHAIN = [7, 2, 20]


@pytest.mark.parametrize("kind", ["gemma4", "unified"])
@pytest.mark.parametrize("length", [2, WINDOW, WINDOW + 1, WINDOW + 2, WINDOW + 3, 24])
def test_an_assistant_has_the_logits_of_transformers(kind: str, length: int, tmp_path: Path) -> None:
    """Texts shorter than the window, as long and longer."""
    assistant = write_assistant(tmp_path, kind)
    found = assistant_logits(tmp_path, TEXT[:length], CHAIN)
    torch.testing.assert_close(found, oracle_logits(assistant, TEXT[:length], CHAIN), atol=1e-5, rtol=0)


def test_logits_after_rounds_are_those_of_transformers(tmp_path: Path) -> None:
    assert assistant_drafts_as_published(tmp_path)


ROPE = {
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 50.0, "factor": 2.0},
    SLIDING: {"rope_type": "default", "rope_theta": 20.0},
}
CLUSTERS = {"use_ordered_embeddings": True, "num_centroids": VOCAB_SIZE, "centroid_intermediate_top_k": 3}
TEXT_FIELDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "hidden_activation": ({"hidden_activation": "silu"}, {"hidden_activation": "gelu_pytorch_tanh"}),
    "rms_norm_eps": ({"rms_norm_eps": 0.1}, {"rms_norm_eps": 1e-6}),
    "sliding_window": ({"sliding_window": 3}, {"sliding_window": 8}),
    "rope_parameters": ({"rope_parameters": ROPE}, {"rope_parameters": None}),
}
"""Fields of the text model that are read: values, and others with the same shapes."""


def differs(folder: Path, expected: torch.Tensor) -> bool:
    return not torch.allclose(assistant_logits(folder, TEXT, CHAIN), expected, atol=1e-3)


@pytest.mark.parametrize("name", TEXT_FIELDS)
def test_each_field_of_the_layers_is_read(name: str, tmp_path: Path) -> None:
    values, others = TEXT_FIELDS[name]
    expected = oracle_logits(write_assistant(tmp_path, text=values), TEXT, CHAIN)
    assert not differs(tmp_path, expected)
    config = json.loads((tmp_path / "config.json").read_text())
    edit(tmp_path, text_config=config["text_config"] | others)
    assert differs(tmp_path, expected)


@pytest.mark.parametrize(
    "sizes", [{"num_attention_heads": 2}, {"attention_bias": True}, {"intermediate_size": 20}]
)
def test_sizes_and_biases_are_read(sizes: dict[str, Any], tmp_path: Path) -> None:
    expected = oracle_logits(write_assistant(tmp_path, text=sizes), TEXT, CHAIN)
    assert not differs(tmp_path, expected)


def test_the_order_of_layers_is_read(tmp_path: Path) -> None:
    expected = oracle_logits(
        write_assistant(tmp_path, text={"layer_types": [SLIDING, FULL, FULL]}), TEXT, CHAIN
    )
    assert not differs(tmp_path, expected)


def test_the_size_of_heads_of_full_attention_has_two_spellings(tmp_path: Path) -> None:
    """Earlier releases of Transformers write `global_head_dim`."""
    expected = oracle_logits(write_assistant(tmp_path), TEXT, CHAIN)
    text = json.loads((tmp_path / "config.json").read_text())["text_config"]
    assert text.pop("per_layer_config") == {"2": {"head_dim": 16}}
    edit(tmp_path, text_config=text | {"global_head_dim": 16})
    assert not differs(tmp_path, expected)


def test_an_output_matrix_of_its_own_is_read(tmp_path: Path) -> None:
    expected = oracle_logits(write_assistant(tmp_path, tie_word_embeddings=False), TEXT, CHAIN)
    assert not differs(tmp_path, expected)
    edit(tmp_path, tie_word_embeddings=True)
    assert differs(tmp_path, expected)


@pytest.mark.parametrize("others", [{"centroid_intermediate_top_k": 5}, {"num_centroids": 1}])
def test_clusters_of_tokens_are_read(others: dict[str, int], tmp_path: Path) -> None:
    expected = oracle_logits(write_assistant(tmp_path, **CLUSTERS), TEXT, CHAIN)
    assert not differs(tmp_path, expected)
    assert expected[0].unique().numel() == 4  # three tokens, and all others
    edit(tmp_path, **others)
    if "num_centroids" not in others:
        assert differs(tmp_path, expected)
    else:
        with pytest.raises(CheckpointError):
            assistant_logits(tmp_path, TEXT, CHAIN)


def text_field(**changes: object) -> Any:
    def change(folder: Path) -> None:
        text = json.loads((folder / "config.json").read_text())["text_config"] | changes
        edit(folder, text_config={name: value for name, value in text.items() if value != "absent"})

    return change


def tensors(change: Any) -> Any:
    def apply(folder: Path) -> None:
        found = load_file(folder / "model.safetensors")
        change(found)
        save_file(found, folder / "model.safetensors")

    return apply


FAULTS: dict[str, tuple[Any, str]] = {
    "an unknown field": (lambda at: edit(at, extra=1), "got extra"),
    "an unknown field of the text": (text_field(novel=True), "got novel"),
    "quantised": (lambda at: edit(at, quantization_config={"quant_method": "x"}), "got quantization_config"),
    "another backbone": (lambda at: edit(at, backbone_hidden_size=48), "a width of 32, got one for 48"),
    "another vocabulary": (text_field(vocab_size=62), "a vocabulary of 31, got one for 62"),
    "layers with their own keys": (text_field(num_kv_shared_layers=2), "num_kv_shared_layers of 2"),
    "inputs per layer": (text_field(hidden_size_per_layer_input=8), "hidden_size_per_layer_input of 0, got 8"),
    "experts": (text_field(enable_moe_block=True), "enable_moe_block"),
    "wide networks": (text_field(use_double_wide_mlp=True), "use_double_wide_mlp"),
    "attention in both directions": (text_field(use_bidirectional_attention="all"), "use_bidirectional_attention"),
    "another activation": (text_field(hidden_activation="relu"), "activations"),
    "another kind of attention": (text_field(layer_types=["x", "y", "z"]), "layer_types"),
    "a scaling": (text_field(rope_parameters={FULL: {"rope_type": "yarn"}, SLIDING: {"rope_type": "yarn"}}), "yarn"),
    "no size": (text_field(intermediate_size="absent"), "the field 'intermediate_size'"),
    "layers that differ": (text_field(per_layer_config={"2": {"head_dim": 16, "sliding_window": 3}}), "sliding_window"),
    "missing": (tensors(lambda each: each.pop("post_projection.weight")), "missing post_projection.weight"),
    "unknown": (
        tensors(lambda each: each.update({"model.layers.0.self_attn.k_proj.weight": torch.ones(1)})),
        "unknown model.layers.0.self_attn.k_proj.weight",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("change", "message"), FAULTS.values(), ids=FAULTS)
def test_unusable_folders_are_refused_in_one_line(change: Any, message: str, tmp_path: Path) -> None:
    write_assistant(tmp_path)
    change(tmp_path)
    with pytest.raises(SecondGuessError, match=message) as caught:
        assistant_logits(tmp_path, TEXT, CHAIN)
    assert "\n" not in str(caught.value)


def test_an_order_that_lists_tokens_twice_is_refused(tmp_path: Path) -> None:
    write_assistant(tmp_path, **CLUSTERS)
    tensors(lambda each: each["masked_embedding.token_ordering"].zero_())(tmp_path)
    with pytest.raises(CheckpointError, match="hold every token once"):
        assistant_logits(tmp_path, TEXT, CHAIN)


def test_an_assistant_is_named_by_its_path(tmp_path: Path) -> None:
    write_assistant(tmp_path)
    drafter = named(f"gemma4-assistant:{tmp_path},tree=2x1", Named(gemma_runtime()))
    assert drafter.name == f"gemma4-assistant:{tmp_path},tree=2x1"


def test_a_target_without_such_keys_is_refused(tmp_path: Path) -> None:
    write_assistant(tmp_path)
    with pytest.raises(
        UnsupportedModelError, match="keys and values of the kind sliding_attention, got a Llama"
    ):
        named(f"gemma4-assistant:{tmp_path}")


def test_a_target_in_another_runtime_is_refused(tmp_path: Path) -> None:
    write_assistant(tmp_path)
    target = Named(FusedRuntime(fuse(deepcopy(target_model()), packed=False)))
    with pytest.raises(UnsupportedModelError, match="provides its keys and values, got a FusedRuntime"):
        named(f"gemma4-assistant:{tmp_path}", target)


def test_heads_of_another_size_than_the_targets_are_refused(tmp_path: Path) -> None:
    write_assistant(tmp_path, text={"head_dim": 16})
    with pytest.raises(
        CheckpointError, match="heads of size 8 in its sliding_attention, got one for heads of size 16"
    ):
        named(f"gemma4-assistant:{tmp_path}", Named(gemma_runtime()))
