"""One tiny head of every kind for a tiny target, made on the fly: a line here is a row of test_every_head.py."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from secondguess.drafters.base import Drafter
from secondguess.drafters.dspark import DsparkDrafter
from secondguess.drafters.early_exit import EarlyExitDrafter
from secondguess.drafters.feature import FeatureDrafter
from secondguess.drafters.layer_skip import LayerSkipDrafter
from secondguess.drafters.medusa import MedusaDrafter
from secondguess.drafters.trees import TreeShape
from secondguess.heads.dspark import DsparkHead
from secondguess.heads.eagle import Eagle1Head, EagleHead
from secondguess.heads.early_exit import EarlyExitHead
from secondguess.heads.layer import AttentionFunction, CosSin, DecoderLayer, LayerConfig
from secondguess.heads.medusa import MedusaConfig, MedusaHead
from secondguess.heads.mtp import MtpHead
from secondguess.heads.runtime import FeatureHead
from secondguess.heads.unrolled import default_layer_config, initialise
from secondguess.runtime.base import EmbeddingAndHead, HiddenStates, Runtime


def tiny_target(vocab_size: int = 31, num_layers: int = 2, seed: int = 0) -> LlamaForCausalLM:
    """A target whose laws are neither flat nor certain."""
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.2,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).double().eval()


class PlainFeatureHead(FeatureHead):
    """The least that reads features: one layer over token and feature, the target's own ends."""

    def __init__(self, embedding_and_head: EmbeddingAndHead) -> None:
        super().__init__()
        self.hidden_layers = (-1,)
        self.shape = LayerConfig(
            embedding_and_head.width, num_heads=2, num_kv_heads=1, head_size=16, mlp_size=32
        )
        self.num_layers = 1
        self.joined = nn.Linear(2 * embedding_and_head.width, embedding_and_head.width)
        self.layer = DecoderLayer(self.shape)
        self._embedding_and_head = embedding_and_head

    def features(self, hidden: HiddenStates) -> Tensor:
        return hidden[-1]

    def forward(self, embedded: Tensor, features: Tensor, turns: CosSin, attend: AttentionFunction) -> Tensor:
        return self.layer(self.joined(torch.cat((embedded, features), -1)), turns, attend)

    def logits(self, thought: Tensor) -> Tensor:
        return self._embedding_and_head.unembed(self._embedding_and_head.normalise(thought))

    def embed(self, tokens: Tensor) -> Tensor:
        return self._embedding_and_head.embed(tokens)


def seeded(make: Callable[[], nn.Module], embedding_and_head: EmbeddingAndHead, seed: int = 1) -> nn.Module:
    """A module with random weights in the target's dtype, the same at every call."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return make().to(embedding_and_head.dtype).eval()


def plain_feature_drafter(target: Runtime, shape: TreeShape | None) -> Drafter:
    embedding_and_head = target.embedding_and_head()
    head = seeded(lambda: PlainFeatureHead(embedding_and_head), embedding_and_head)
    assert isinstance(head, PlainFeatureHead)
    return FeatureDrafter(head, target, "feature", shape)


def early_exit_drafter(target: Runtime, shape: TreeShape | None) -> Drafter:
    embedding_and_head = target.embedding_and_head()
    head = seeded(lambda: EarlyExitHead(1, embedding_and_head.width, 32), embedding_and_head)
    return EarlyExitDrafter(target, 1, head, "early-exit", shape)


def layer_skip_drafter(target: Runtime, shape: TreeShape | None) -> Drafter:
    return LayerSkipDrafter(target.skip_layers([1]), "layer-skip:1", target.vocab_size, shape)


def eagle3_drafter(target: Runtime, shape: TreeShape | None) -> Drafter:
    """It can say all words but a few; those that it lacks are the target's to say."""
    embedding_and_head = target.embedding_and_head()
    counts = torch.arange(target.vocab_size) % 11
    head = EagleHead.fresh(
        embedding_and_head, target.num_layers, max(target.vocab_size * 3 // 4, 2), counts, seed=2
    )
    return FeatureDrafter(head.to(embedding_and_head.dtype).eval(), target, "eagle", shape)


def eagle1_drafter(target: Runtime, shape: TreeShape | None) -> Drafter:
    embedding_and_head = target.embedding_and_head()
    head = Eagle1Head(default_layer_config(embedding_and_head.width), embedding_and_head, target.vocab_size)
    initialise(head, 3)
    return FeatureDrafter(head.to(embedding_and_head.dtype).eval(), target, "eagle", shape)


def medusa_drafter(target: Runtime, shape: TreeShape | None) -> Drafter:
    embedding_and_head = target.embedding_and_head()
    head = seeded(
        lambda: MedusaHead(
            MedusaConfig(embedding_and_head.width, num_heads=4, num_layers=1), embedding_and_head
        ),
        embedding_and_head,
    )
    assert isinstance(head, MedusaHead)
    return MedusaDrafter(head, target, "medusa", shape)


def mtp_drafter(target: Runtime, shape: TreeShape | None) -> Drafter:
    embedding_and_head = target.embedding_and_head()
    head = MtpHead.fresh(embedding_and_head, target.vocab_size, target.num_layers, seed=4)
    return FeatureDrafter(head.to(embedding_and_head.dtype).eval(), target, "mtp", shape)


def dspark_drafter(target: Runtime, shape: TreeShape | None) -> Drafter:
    """Of two layers, and with a Markov head that matters."""
    embedding_and_head = target.embedding_and_head()

    def make() -> DsparkHead:
        head = DsparkHead.fresh(embedding_and_head, (0, 1, 2), block_size=4, markov_rank=2)
        for weight in head.parameters():
            nn.init.normal_(weight, std=0.5)
        return head

    head = seeded(make, embedding_and_head)
    assert isinstance(head, DsparkHead)
    return DsparkDrafter(head, target, "dspark", shape)


HEADS: dict[str, Callable[[Runtime, TreeShape | None], Drafter]] = {
    "feature": plain_feature_drafter,
    "early-exit": early_exit_drafter,
    "layer-skip": layer_skip_drafter,
    "eagle3": eagle3_drafter,
    "eagle1": eagle1_drafter,
    "medusa": medusa_drafter,
    "mtp": mtp_drafter,
    "dspark": dspark_drafter,
}
"""Kind -> a drafter with a random head for a target, in chains (None) or trees of a shape."""

NEEDS_FUSED = ("early-exit", "layer-skip")
"""Kinds that run the target's layers one by one."""
