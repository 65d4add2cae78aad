"""Grown models and drafter heads compute the function of the small ones."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from growth import GrownShape, grow, with_experts
from growth_heads import GROW, grown_layer, target_model
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from secondguess.heads.base import Head, TargetModel
from secondguess.heads.dspark import DsparkConfig, DsparkHead
from secondguess.heads.eagle import EagleConfig, EagleHead
from secondguess.heads.early_exit import EarlyExitHead
from secondguess.heads.layer import LayerConfig
from secondguess.heads.learning import LAST_HIDDEN, TrainingBatch
from secondguess.heads.medusa import MedusaConfig, MedusaHead
from secondguess.heads.mtp import MtpHead
from secondguess.runtime.fused import FusedRuntime, fuse


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


def test_a_mixture_of_equal_experts_has_the_logits_of_its_network() -> None:
    dense = small_model(4, 2, is_tied=True).float()
    mixture = with_experts(dense, num_experts=5, num_selected=3)
    tokens = torch.randint(40, (3, 20))
    with torch.inference_mode():
        expected, got = dense(tokens).logits, mixture(tokens).logits
    assert (expected - got).abs().max() < 1e-5 * expected.abs().max()
    selected = mixture.model.layers[0].mlp.gate(torch.randn(100, 16))[2]
    assert len(selected.unique()) == 5


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


LAYER = LayerConfig(16, 2, 1, 8, 24)
HEADS: dict[str, tuple[str, Callable[[TargetModel], Head]]] = {
    "eagle": ("eagle", lambda target: EagleHead(EagleConfig(LAYER, (0, 1), num_layers=2), target)),
    "eagle, normalised residual": (
        "eagle",
        lambda target: EagleHead(
            EagleConfig(replace(LAYER, num_kv_heads=2), (1, 0, 1), norm_before_residual=True),
            target,
            has_head=False,
        ),
    ),
    "mtp": ("mtp", lambda target: MtpHead(replace(LAYER, model_type="qwen3"), target)),
    "medusa": ("medusa", lambda target: MedusaHead.fresh(target, num_heads=2, num_layers=2)),
    "dspark": (
        "dspark",
        lambda target: DsparkHead.fresh(target, hidden_layers=(0, 1), block_size=3, markov_rank=4),
    ),
    "early exit": ("early-exit", lambda target: EarlyExitHead(1, target.width, 40)),
}


@pytest.mark.parametrize("shape", [GrownShape(32, 48, 2, 4, 2), GrownShape(48, 60, 3, 12, 4)])
@pytest.mark.parametrize("name", HEADS)
def test_heads_of_a_grown_target_have_the_logits_of_the_small_ones(name: str, shape: GrownShape) -> None:
    """Compared as a random projection of the logits at every depth."""
    kind, make = HEADS[name]
    small = small_model(4, 2, is_tied=False)
    grown = grow(small, shape)
    head = make(target_model(small)).double().eval()
    for parameter in head.parameters():
        parameter.data.normal_(std=1.0 if parameter.dim() == 1 else 0.3)
    with torch.no_grad():
        grown_head = GROW[kind][1](head, target_model(grown), shape).double().eval()
    tokens, weights = torch.randint(40, (2, 20)), torch.randn(40, dtype=torch.float64)

    def project(probs: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        return logits @ weights, torch.minimum(probs, logits.softmax(-1)).sum(-1)

    results = []
    for model, each in ((small, head), (grown, grown_head)):
        decoder = fuse(model, packed=False)
        assert decoder is not None
        runtime = FusedRuntime(decoder)
        runtime.request_hidden_states((*head.hidden_layers, LAST_HIDDEN))
        batch = TrainingBatch(tokens, torch.ones_like(tokens, dtype=torch.bool), runtime.probe(tokens).hidden)
        with torch.no_grad():
            found = each.learn(batch, TargetModel.from_runtime(runtime), project)
        extra = [] if found.extra is None else [found.extra]
        results.append(torch.stack([*found.losses, *found.accepted, *extra]))
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)
    assert results[0].abs().max() > 0.1


@pytest.mark.parametrize(
    ("layer", "expected"),
    [(replace(LAYER, num_heads=4), (12, 3)), (replace(LAYER, num_heads=4, num_kv_heads=2), (12, 4))],
)
def test_a_grown_head_keeps_the_size_of_its_groups(layer: LayerConfig, expected: tuple[int, int]) -> None:
    grown = grown_layer(layer, GrownShape(48, 60, 3, 12, 4))
    assert (grown.num_heads, grown.num_kv_heads) == expected


def test_heads_that_cannot_grow_are_refused() -> None:
    small = small_model(4, 2, is_tied=False)
    shape = GrownShape(32, 48, 2, 4, 2)
    target = target_model(small)
    grown = target_model(grow(small, shape))
    refused: dict[str, Head] = {
        "embeddings": EagleHead(EagleConfig(LAYER, (0, 1)), target, has_embeddings=True),
        "states below 2": EagleHead(EagleConfig(LAYER, (0, 2)), target),
        "LM head": MtpHead(LAYER, target, has_head=True),
        "without biases": MedusaHead(MedusaConfig(2, 1, has_bias=True), target),
        "output matrix": DsparkHead(DsparkConfig(LAYER, 1, (0, 1), 3, has_output=True), target),
    }
    kinds = {EagleHead: "eagle", MtpHead: "mtp", MedusaHead: "medusa", DsparkHead: "dspark"}
    for message, head in refused.items():
        with pytest.raises(ValueError, match=message):
            GROW[kinds[type(head)]][1](head, grown, shape)
