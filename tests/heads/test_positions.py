"""Rotary positions of heads: the cosines and sines of Transformers' decoders."""

from typing import Any

import pytest
import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from secondguess.heads.layer import LayerConfig, make_layers

FIELDS: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
SCALINGS: list[dict[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 4.0},
    LLAMA3,
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    {"rope_type": "yarn", "factor": 4.0, "attention_factor": 0.9, "beta_fast": 20.0, "truncate": False},
    {
        "rope_type": "yarn",
        "factor": 40.0,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
        "original_max_position_embeddings": 8,
    },
]


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("is_old", [False, True])
def test_cosines_and_sines_are_those_of_a_decoder(scaling: dict[str, Any], is_old: bool) -> None:
    """With the fields of a `config.json` as Transformers writes it now, and as version 4 did."""
    rope = {**scaling, "rope_theta": 500.0}
    described = {**FIELDS, "rope_parameters": rope}
    if is_old:
        old = {**scaling, "type": scaling["rope_type"]}
        del old["rope_type"]
        described = {**FIELDS, "rope_theta": 500.0, "rope_scaling": old}
    layer = LayerConfig.from_config(described)
    positions = torch.arange(48)[None]
    cos, sin = LlamaRotaryEmbedding(transformers.LlamaConfig(**FIELDS, rope_parameters=rope))(
        torch.empty(0), positions
    )
    for each in (layer, LayerConfig.from_config(layer.to_config())):
        found_cos, found_sin = make_layers(each)[1](positions, torch.float32)
        torch.testing.assert_close(found_cos, cos)
        torch.testing.assert_close(found_sin, sin)
