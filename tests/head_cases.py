"""One tiny head of every kind for a tiny target, made on the fly: a line here is a row of test_every_head.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import LlamaForCausalLM

from checkpoints import random_llama
from secondguess.drafters.base import Drafter
from secondguess.drafters.dspark import DsparkDrafter
from secondguess.drafters.eagle import EagleDrafter
from secondguess.drafters.early_exit import EarlyExitDrafter
from secondguess.drafters.feature_drafter import FeatureDrafter
from secondguess.drafters.layer_skip import LayerSkipDrafter
from secondguess.drafters.medusa import MedusaDrafter
from secondguess.drafters.mtp import MtpDrafter
from secondguess.drafters.self import SelfDrafter
from secondguess.drafters.trees import TreeShape
from secondguess.heads.base import DraftVocabulary, TargetModel
from secondguess.heads.block_layers import BlockAttention, ConvolutionConfig
from secondguess.heads.dspark import DsparkHead
from secondguess.heads.eagle import Eagle1Head, EagleConfig, EagleHead
from secondguess.heads.early_exit import EarlyExitHead
from secondguess.heads.feature import FeatureHead, default_layer_config
from secondguess.heads.medusa import MedusaConfig, MedusaHead
from secondguess.heads.mtp import MtpHead
from secondguess.runtime.base import Runtime


def tiny_target(vocab_size: int = 31, num_layers: int = 2, seed: int = 0) -> LlamaForCausalLM:
    """Return a target whose distributions are neither flat nor one-hot."""
    sizes = {"hidden_size": 64, "num_hidden_layers": num_layers, "initializer_range": 0.2}
    return random_llama(seed, vocab_size=vocab_size, **sizes).double()


def seeded(make: Callable[[], nn.Module], target: Runtime, seed: int = 1) -> Any:
    """A module with random weights in the target's dtype, the same at every call."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return make().to(target.embedding_and_head().dtype)


def feature_drafter(
    kind: type[FeatureDrafter], head: FeatureHead, target: Runtime, shape: TreeShape | None
) -> Drafter:
    return kind(head.to(target.embedding_and_head().dtype), target, "feature", shape)


def early_exit_drafter(target: Runtime, shape: TreeShape | None) -> Drafter:
    head = seeded(lambda: EarlyExitHead(1, target.embedding_and_head().width, 32), target)
    return EarlyExitDrafter(target, head.exit_layer, "early-exit", shape, head)


def layer_skip_drafter(target: Runtime, shape: TreeShape | None) -> Drafter:
    return LayerSkipDrafter(target.skip_layers([1]), "layer-skip:1", target.vocab_size, shape)


def self_drafter(target: Runtime, shape: TreeShape | None) -> Drafter:
    return SelfDrafter(target, "self:int4", shape)


def eagle3_drafter(target: Runtime, shape: TreeShape | None) -> Drafter:
    """Return a drafter whose vocabulary lacks a quarter of the target's tokens."""
    counts = torch.arange(target.vocab_size) % 11
    vocabulary = DraftVocabulary.most_frequent(counts, max(target.vocab_size * 3 // 4, 2))
    head = EagleHead.fresh(TargetModel.from_runtime(target), seed=2, vocabulary=vocabulary)
    return feature_drafter(EagleDrafter, head, target, shape)


def eagle3_window_drafter(target: Runtime, shape: TreeShape | None) -> Drafter:
    """Return a drafter with a window, which is shorter than the texts, in one of two layers, and biases."""

    def make() -> EagleHead:
        model = TargetModel.from_runtime(target)
        layer = replace(default_layer_config(model.width), more={"attention_bias": True, "mlp_bias": True})
        config = EagleConfig(layer, (0, 1, 2), num_layers=2, windows=(3, None), norm_output=True)
        head = EagleHead(config, model, has_head=False)
        for weight in head.parameters():
            nn.init.normal_(weight, std=0.1)
        return head

    return feature_drafter(EagleDrafter, seeded(make, target), target, shape)


def eagle3_narrow_drafter(target: Runtime, shape: TreeShape | None) -> Drafter:
    """Return a drafter of another width than the target, with a context of its own that is short."""

    def make() -> EagleHead:
        model = TargetModel.from_runtime(target)
        layer = replace(default_layer_config(model.width // 2), more={"max_position_embeddings": 12})
        config = EagleConfig(layer, (0, 2), target_width=model.width, windows=(5,), norm_before_fc=True)
        return EagleHead(config, model, has_embeddings=True)

    return feature_drafter(EagleDrafter, seeded(make, target), target, shape)


def peagle_drafter(target: Runtime, shape: TreeShape | None) -> Drafter:
    """Return a drafter that drafts all of three tokens in one pass."""

    def make() -> EagleHead:
        model = TargetModel.from_runtime(target)
        layer = default_layer_config(model.width)
        config = EagleConfig(layer, (0, 1), num_layers=2, windows=(None, 4), num_steps=3, mask_token=1)
        return EagleHead(config, model, has_embeddings=True)

    return feature_drafter(EagleDrafter, seeded(make, target), target, shape)


def eagle1_drafter(target: Runtime, shape: TreeShape | None) -> Drafter:
    return feature_drafter(
        EagleDrafter, Eagle1Head.fresh(TargetModel.from_runtime(target), seed=3), target, shape
    )


def medusa_drafter(target: Runtime, shape: TreeShape | None) -> Drafter:
    config = MedusaConfig(num_heads=4, num_layers=1)
    head = seeded(lambda: MedusaHead(config, TargetModel.from_runtime(target)), target)
    return MedusaDrafter(head, target, "medusa", shape)


def mtp_drafter(target: Runtime, shape: TreeShape | None) -> Drafter:
    return feature_drafter(MtpDrafter, MtpHead.fresh(TargetModel.from_runtime(target), seed=4), target, shape)


def dspark_drafter(target: Runtime, shape: TreeShape | None) -> Drafter:
    """Of two layers, and with a Markov head that matters."""
    return block_drafter(target, shape, markov_rank=2)


def windowed_drafter(target: Runtime, shape: TreeShape | None) -> Drafter:
    """Return a drafter with windows that are shorter than the texts, and a gated Markov head."""
    attention = (BlockAttention(window=5, is_causal=True), BlockAttention(window=3, from_anchor=True))
    return block_drafter(target, shape, attention=attention, markov_rank=2, markov_kind="gated")


def recurrent_drafter(target: Runtime, shape: TreeShape | None) -> Drafter:
    return block_drafter(target, shape, markov_rank=2, markov_kind="rnn", samples_from_anchor=False)


def dflash2_drafter(target: Runtime, shape: TreeShape | None) -> Drafter:
    """Return a drafter that draws among few candidates."""
    top_k = min(5, target.vocab_size)
    kind = {
        "markov_rank": 2,
        "markov_kind": "selector",
        "selector_top_k": top_k,
        "samples_from_anchor": False,
    }
    return block_drafter(target, shape, convolutions=ConvolutionConfig(2, 4), **kind)


def xpress_drafter(target: Runtime, shape: TreeShape | None) -> Drafter:
    kind = {"markov_rank": 2, "markov_kind": "refiner", "refiner_mlp_size": 4, "samples_from_anchor": False}
    return block_drafter(target, shape, **kind)


def domino_drafter(target: Runtime, shape: TreeShape | None) -> Drafter:
    kind = {"markov_rank": 2, "markov_kind": "gru", "gru_size": 3, "num_uncorrected": 1}
    return block_drafter(target, shape, **kind)


def block_drafter(target: Runtime, shape: TreeShape | None, **options: Any) -> Drafter:
    model = TargetModel.from_runtime(target)

    def make() -> DsparkHead:
        config = DsparkHead.fresh(model, hidden_layers=(0, 1, 2), block_size=4).config
        config = replace(config, **{"markov_rank": 0, "confidence_reads_markov": False, **options})
        if config.markov_kind == "vanilla" and config.markov_rank:
            config = replace(config, confidence_reads_markov=True)
        head = DsparkHead(config, model)
        for weight in head.parameters():
            nn.init.normal_(weight, std=0.5)
        return head

    return DsparkDrafter(seeded(make, target), target, "dspark", shape)


HEADS: dict[str, Callable[[Runtime, TreeShape | None], Drafter]] = {
    "early-exit": early_exit_drafter,
    "layer-skip": layer_skip_drafter,
    "self": self_drafter,
    "eagle3": eagle3_drafter,
    "eagle3-window": eagle3_window_drafter,
    "eagle3-narrow": eagle3_narrow_drafter,
    "peagle": peagle_drafter,
    "eagle1": eagle1_drafter,
    "medusa": medusa_drafter,
    "mtp": mtp_drafter,
    "dspark": dspark_drafter,
    "dspark-windows": windowed_drafter,
    "dspark-rnn": recurrent_drafter,
    "dflash2": dflash2_drafter,
    "xpress": xpress_drafter,
    "domino": domino_drafter,
}
"""Kind -> a drafter with a random head for a target, in chains (None) or trees of a shape."""

NEEDS_FUSED = ("early-exit", "layer-skip")
"""Kinds that run the target's layers one by one."""
NEEDS_NATIVE = ("self",)
"""Kinds that run on the compiled kernels alone."""
