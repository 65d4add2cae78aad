"""Grown models compute the function of the small ones."""

import pytest
import torch
from growth import GrownShape, grow
from transformers import LlamaConfig, LlamaForCausalLM


def small_model(num_heads: int, num_kv_heads: int, is_tied: bool) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=8,
        max_position_embeddings=64,
        tie_word_embeddings=is_tied,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).double().eval()
    for name, weight in model.named_parameters():
        weight.data.normal_(std=1.0 if "norm" in name else 0.3)  # norms that differ between channels
    return model


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize(
    ("heads", "shape"),
    [
        ((2, 1), GrownShape(32, 48, 2, 4, 2)),
        ((4, 2), GrownShape(48, 24, 4, 12, 4)),  # three heads of a group of two, identity layers
        ((2, 2), GrownShape(16, 100, 3, 2, 2)),  # units without an original
    ],
)
def test_logits_equal_those_of_the_small_model(
    heads: tuple[int, int], shape: GrownShape, is_tied: bool
) -> None:
    small = small_model(*heads, is_tied)
    grown = grow(small, shape)
    tokens = torch.randint(40, (3, 20))
    with torch.inference_mode():
        expected, got = small(tokens).logits, grown(tokens).logits
    assert (expected - got).abs().max() < 1e-5 * expected.abs().max()  # the norms compute in float32
    sizes = (
        grown.config.hidden_size,
        grown.config.intermediate_size,
        grown.config.num_hidden_layers,
        grown.config.num_attention_heads,
        grown.config.num_key_value_heads,
    )
    assert GrownShape(*sizes) == shape


@pytest.mark.parametrize(
    "shape",
    [
        GrownShape(40, 24, 2, 4, 2),
        GrownShape(32, 16, 2, 4, 2),
        GrownShape(32, 24, 1, 4, 2),
        GrownShape(32, 24, 2, 2, 2),
        GrownShape(32, 24, 2, 6, 3),
    ],
)
def test_impossible_shapes_are_refused(shape: GrownShape) -> None:
    with pytest.raises(ValueError, match="expected multiples of hidden size 16"):
        grow(small_model(4, 2, is_tied=True), shape)
