"""Packed linear layers: bit-identical to the originals, or not used."""

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM

from checkpoints import random_llama
from secondguess.runtime.packing import PackableLinear, PackedLinear, can_pack, pack_linears

needs_packing = pytest.mark.skipif(
    not can_pack(torch.bfloat16, torch.device("cpu")),
    reason="this processor has no bfloat16 products in oneDNN",
)


def tiny_model(tied: bool = True) -> LlamaForCausalLM:
    model = random_llama(vocab_size=96, initializer_range=0.02, tie_word_embeddings=tied, attention_bias=True)
    return model.to(torch.bfloat16)


def logits(model, width=7):
    with torch.inference_mode():
        return model(input_ids=torch.arange(width)[None] + 5, use_cache=False).logits


@needs_packing
@pytest.mark.parametrize("tied", [True, False])
def test_a_packed_model_is_bit_identical(tied):
    model = tiny_model(tied)
    expected = logits(model)
    assert pack_linears(model)
    assert torch.equal(logits(model), expected)
    assert all(type(module) is not nn.Linear for module in model.modules())


@needs_packing
@pytest.mark.parametrize("width", [48, 3072])
def test_a_row_does_not_depend_on_the_number_of_rows(width):
    """Products of one row may add in another order, of many numbers with other results."""
    packed = PackedLinear(nn.Linear(width, 400).to(torch.bfloat16))
    values = torch.randn(20, 8, width, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    with torch.inference_mode():
        for rows in values:
            alone = packed(rows[:1])
            assert all(torch.equal(packed(rows[:count])[:1], alone) for count in range(2, 9))
            assert torch.equal(packed(rows[0]), alone[0])


@needs_packing
@pytest.mark.parametrize("num_outputs", [256, 1536])
@pytest.mark.parametrize("shape", [(33, 1), (8, 9), (5, 40), (1, 33), (1, 96)])
def test_a_row_of_many_equals_the_row_alone(shape, num_outputs):
    """Without splitting, products over more than 32 rows and 512 or more inputs sum in another order."""
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(num_outputs, 768, generator=generator).to(torch.bfloat16)
    values = torch.randn(*shape, 768, generator=generator).to(torch.bfloat16)
    product = PackableLinear(weight, None, packed=True)
    together = product(values)
    alone = torch.stack([product(row[None, None])[0, 0] for row in values.flatten(0, 1)])
    assert torch.equal(together.flatten(0, 1), alone)


class ReadsItsWeights(nn.Linear):
    pass


@needs_packing
def test_subclasses_are_left_alone():
    model = tiny_model()
    q_proj = model.model.layers[0].self_attn.q_proj
    q_proj.__class__ = ReadsItsWeights
    pack_linears(model)
    assert model.model.layers[0].self_attn.q_proj is q_proj


@needs_packing
@pytest.mark.parametrize("tied", [True, False])
def test_a_model_that_would_change_is_restored(tied, monkeypatch):
    model = tiny_model(tied)
    expected = logits(model)
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    # A layer that is off by one bit stands for any kernel that does not reproduce the original.
    monkeypatch.setattr(PackedLinear, "forward", lambda self, values: values.new_zeros(*values.shape[:-1], 1))
    assert not pack_linears(model)
    assert torch.equal(logits(model), expected)
    assert not any(isinstance(module, PackedLinear) for module in model.modules())
    assert weights.keys() == model.state_dict().keys()
    assert all(torch.equal(weights[name], weight) for name, weight in model.state_dict().items())
    assert not tied or model.lm_head.weight is model.model.embed_tokens.weight


def test_only_bfloat16_on_a_cpu_is_packed():
    assert not can_pack(torch.float32, torch.device("cpu"))
    assert not can_pack(torch.bfloat16, torch.device("cuda"))
