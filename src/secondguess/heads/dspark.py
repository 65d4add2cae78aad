"""DSpark block drafter (arXiv 2607.05147): a block of draft tokens in one forward pass.

The backbone is that of DFlash (arXiv 2602.06036). A block is the embedding of the pending token
followed by mask embeddings; its positions continue the text. They attend to each other in both
directions and to the preceding text through keys and values computed from the target's hidden
states. Each position has base logits; a low-rank Markov head adds `W2 W1[x]` for the preceding
token x, and a confidence head predicts the acceptance probability of each draft token.

Heads are read and written in the `speculators` format, `dspark` or `dflash`.
`aux_hidden_state_layer_ids` there uses this package's numbering: 0 is the embeddings, k the output
of layer k.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from secondguess.core import MAX_DRAFT_LENGTH
from secondguess.errors import BadInputError, UnsupportedModelError
from secondguess.heads.base import DraftVocabulary, Head, TargetModel
from secondguess.heads.feature import default_layer_config
from secondguess.heads.files import (
    config_errors,
    require_layers,
    require_same,
    whole_number,
    write_head,
)
from secondguess.heads.formats import (
    StoredHead,
    checkpoint_tensors,
    layer_fields,
    pop_vocabulary,
    speculators_fields,
)
from secondguess.heads.layer import (
    AttentionFunction,
    LayerConfig,
    keys_values,
    make_layers,
    run_layer,
    sequence_attention,
)
from secondguess.heads.learning import CountedTokens, DepthLosses, Objective, TrainingBatch, mean
from secondguess.names import check_range
from secondguess.runtime.base import EmbeddingAndHead, HiddenStates

NUM_ANCHORS = 64
"""Maximum number of training blocks per text; sampled at random if more would fit."""


@dataclass(frozen=True)
class DsparkConfig:
    """Sizes and options of a block drafter."""

    layer: LayerConfig
    num_layers: int
    hidden_layers: tuple[int, ...]  # target layers whose states are fused
    block_size: int
    mask_token: int = 0  # whose embedding is the input at positions to be predicted
    has_output: bool = False  # an output matrix of its own instead of the target's
    samples_from_anchor: bool = True  # the pending token predicts the next; in DFlash the first mask position
    markov_rank: int = 0  # of the Markov head, the logit bias by the preceding token; 0 for none
    has_confidence: bool = False  # a confidence head predicts acceptance probabilities
    confidence_reads_markov: bool = False  # that head also reads the preceding token's Markov embedding

    def __post_init__(self) -> None:
        check_range("layers of a block drafter", self.num_layers, 1, 64)
        check_range("draft tokens of a block drafter", self.num_drafted, 1, MAX_DRAFT_LENGTH)
        check_range("the rank of a Markov head", self.markov_rank, 0, 4096)
        if not self.hidden_layers or min(self.hidden_layers) < 0:
            raise BadInputError(
                f"expected layers of the target, numbered from 0 on, got {list(self.hidden_layers)}"
            )
        if self.confidence_reads_markov and not (self.markov_rank and self.has_confidence):
            raise BadInputError("expected a Markov head and a confidence head where the one reads the other")

    @property
    def num_drafted(self) -> int:
        """Number of draft tokens per block."""
        return self.block_size - (not self.samples_from_anchor)

    @classmethod
    def from_stored(cls, stored: StoredHead, has_output: bool = False) -> Self:
        """Build a configuration from that in a folder; call it inside `config_errors`."""
        rank, markov = stored.number("markov_rank", least=0), stored.get("markov_head_type", "vanilla")
        if rank and markov != "vanilla":
            raise UnsupportedModelError(
                f"expected a Markov head of the type vanilla in {stored.folder}, got {markov!r}; train one without the "
                "other's state"
            )
        layers = stored.layers
        if any(kind != "full_attention" for kind in layers.get("layer_types") or []):
            raise UnsupportedModelError(
                f"expected layers that attend to the whole text in {stored.folder}, got {layers['layer_types']}"
            )
        has_confidence, reads_markov = stored.flag("has_confidence"), stored.flag("confidence_reads_markov")
        return cls(
            layer=LayerConfig.from_config(layers),
            num_layers=whole_number(layers, "num_hidden_layers"),
            hidden_layers=tuple(int(layer) for layer in stored.get("hidden_layers", ())),
            block_size=stored.number("block_size"),
            mask_token=stored.number("mask_token", least=0),
            has_output=has_output,
            samples_from_anchor=stored.flag("samples_from_anchor"),
            markov_rank=rank,
            has_confidence=has_confidence,
            confidence_reads_markov=has_confidence and reads_markov,
        )


def count_drafted(folder: Path) -> int:
    """Return the number of draft tokens per block of the head in a folder."""
    with config_errors(folder):
        return DsparkConfig.from_stored(StoredHead(folder, "dspark")).num_drafted


class DsparkHead(Head):
    """DSpark or DFlash drafter head for one target, whose LM head it uses if it has none of its own."""

    markov_head: Any
    confidence_head: Any

    def __init__(
        self, config: DsparkConfig, target: TargetModel, vocabulary: DraftVocabulary | None = None
    ) -> None:
        super().__init__()
        check_range("the mask token", config.mask_token, 0, target.vocab_size - 1)
        width, norm_eps = config.layer.width, config.layer.norm_eps
        self.config, self.hidden_layers, self.target = config, config.hidden_layers, target
        self.vocabulary = vocabulary or DraftVocabulary(target.vocab_size)
        self.fc = nn.Linear(len(config.hidden_layers) * width, width, bias=False)
        self.hidden_norm = nn.RMSNorm(width, norm_eps)
        self.layers, self.rotary = make_layers(config.layer, config.num_layers)
        self.norm = nn.RMSNorm(width, norm_eps)
        self.lm_head = nn.Linear(width, len(self.vocabulary), bias=False) if config.has_output else None
        if config.markov_rank:
            self.markov_head = nn.ModuleDict(
                {
                    "markov_w1": nn.Embedding(target.vocab_size, config.markov_rank),
                    "markov_w2": nn.Linear(config.markov_rank, len(self.vocabulary), bias=False),
                }
            )
        if config.has_confidence:
            markov_width = config.markov_rank if config.confidence_reads_markov else 0
            self.confidence_head = nn.ModuleDict({"proj": nn.Linear(width + markov_width, 1)})

    @classmethod
    def fresh(
        cls,
        target: TargetModel,
        seed: int = 0,
        *,
        hidden_layers: Sequence[int] = (),
        block_size: int = 7,
        markov_rank: int = 64,
        num_layers: int = 2,
        mask_token: int = 0,
    ) -> Self:
        """Build an untrained drafter head with Qwen3 layers, a Markov and a confidence head.

        It uses the target's output matrix; its last norm starts with the weights of the target's.
        By default it reads four layers, evenly spread.
        """
        signs = torch.ones(target.width, dtype=target.dtype, device=target.device)
        signs[1::2] = -1
        with torch.no_grad():
            # A norm maps a vector of zero mean and unit RMS to that vector times its weights, plus
            # its bias; the difference cancels the bias.
            gains = (target.normalise(signs) - target.normalise(-signs)) / 2 * signs
        config = DsparkConfig(
            layer=replace(default_layer_config(target.width), model_type="qwen3"),
            num_layers=num_layers,
            hidden_layers=tuple(hidden_layers) or evenly_spaced_layers(target.num_layers, 4),
            block_size=block_size,
            mask_token=mask_token,
            markov_rank=markov_rank,
            has_confidence=True,
            confidence_reads_markov=markov_rank > 0,
        )
        head = cls(config, target)
        generator = torch.Generator().manual_seed(seed)
        for name, weight in head.named_parameters():
            if weight.dim() > 1:
                nn.init.normal_(weight, std=0.02, generator=generator)
            elif name.endswith("bias"):
                nn.init.zeros_(weight)
        with torch.no_grad():
            head.norm.weight.copy_(gains)
        return head

    @classmethod
    def load(cls, folder: Path, target: TargetModel) -> Self:
        stored = StoredHead(folder, "dspark")
        tensors = stored.read_tensors()
        with config_errors(folder):
            config = DsparkConfig.from_stored(stored, has_output="lm_head.weight" in tensors)
            require_same("width", config.layer.width, target.width, folder)
            require_layers(config.hidden_layers, target.num_layers, folder)
            vocabulary = pop_vocabulary(tensors, stored, target)
            head = cls(config, target, vocabulary)
        stored.fill(head, tensors | vocabulary.state_dict(prefix="vocabulary."))
        return head

    def save(self, folder: Path, target: str = "") -> None:
        config = self.config
        layers = {
            **layer_fields(config.layer, self.target.vocab_size, config.num_layers),
            "layer_types": ["full_attention"] * config.num_layers,
        }
        fields = {
            **speculators_fields("dspark", config.num_drafted, target),
            "architectures": ["DSparkDraftModel"],
            "block_size": config.block_size,
            "aux_hidden_state_layer_ids": list(config.hidden_layers),
            "mask_token_id": config.mask_token,
            "sample_from_anchor": config.samples_from_anchor,
            "sliding_window_non_causal": False,
            "draft_vocab_size": len(self.vocabulary),
            "markov_rank": config.markov_rank,
            "markov_head_type": "vanilla",
            "enable_confidence_head": config.has_confidence,
            "confidence_head_with_markov": config.confidence_reads_markov,
            "transformer_layer_config": layers,
        }
        write_head(folder, fields, checkpoint_tensors(self, self.vocabulary))

    def features(self, hidden: HiddenStates) -> Tensor:
        """Fuse the target's states `[..., width]` by layer into features `[..., width]`."""
        joined = torch.cat([hidden[layer] for layer in self.hidden_layers], -1)
        fused: Tensor = self.hidden_norm(self.fc(joined.to(self.fc.weight.dtype)))
        return fused

    def context(self, features: Tensor, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return each layer's keys and values of features at text positions, to be attended to by draft blocks."""
        cos_sin = self.rotary(positions, features.dtype)
        return [keys_values(layer, features, cos_sin) for layer in self.layers]

    def run_backbone(self, anchors: Tensor, positions: Tensor, attend: AttentionFunction) -> Tensor:
        """Run the backbone on draft blocks; return normalised states `[row, block, draft token, width]`.

        The pending tokens `anchors` `[row, block]` are at text positions `positions`. `attend` is the
        attention of the positions of all blocks, joined, to the preceding text and to their own block.
        """
        size = self.config.block_size
        tokens = anchors[..., None].expand(*anchors.shape, size).clone()
        tokens[..., 1:] = self.config.mask_token
        states = self.target.embed(tokens.flatten(1)).to(self.fc.weight.dtype)
        steps = torch.arange(size, device=positions.device)
        cos_sin = self.rotary((positions[..., None] + steps).flatten(1), states.dtype)
        for layer in self.layers:
            states = run_layer(layer, states, cos_sin, attend)
        outputs: Tensor = self.norm(states).unflatten(1, (-1, size))
        return outputs[:, :, -self.config.num_drafted :]

    def base_logits(self, outputs: Tensor) -> Tensor:
        """Return logits `[..., draft_vocab]` of `outputs`, without the Markov head's bias."""
        return self.unembed(outputs, self.lm_head)

    def add_markov_bias(self, base: Tensor, previous: Tensor) -> Tensor:
        """Return base logits plus the Markov head's bias for the tokens `previous` `[...]`."""
        if not self.config.markov_rank:
            return base
        biased: Tensor = base + self.markov_head.markov_w2(self.markov_head.markov_w1(previous))
        return biased

    def confidence(self, outputs: Tensor, previous: Tensor) -> Tensor:
        """Return the logits `[...]` of the acceptance probabilities of draft tokens, from the confidence head.

        They depend on outputs `[..., width]` of `run_backbone` and on the tokens before each draft token.
        """
        if self.config.confidence_reads_markov:
            outputs = torch.cat((outputs, self.markov_head.markov_w1(previous)), -1)
        logits: Tensor = self.confidence_head.proj(outputs)
        return logits[..., 0]

    def learn(
        self, training_batch: TrainingBatch, target: EmbeddingAndHead, objective: Objective
    ) -> DepthLosses:
        """Return the losses and acceptance rates of draft blocks at sampled anchor positions.

        The block at anchor p predicts tokens p + 1 + k, each given the true token p + k. The
        confidence head is trained on the overlap of both distributions; its loss is `extra`.
        Anchors are random in training mode and fixed in evaluation mode.
        """
        length = training_batch.tokens.shape[1]
        anchors, chosen = self._anchors(training_batch.counts)
        outputs = self._run_backbone_at(training_batch, anchors)
        counted = CountedTokens(training_batch, target, self.vocabulary.select)
        num_depths = min(self.config.num_drafted, training_batch.num_depths)
        drafted = anchors[..., None] + torch.arange(1, num_depths + 1, device=anchors.device)
        inside = drafted < length
        drafted = drafted.clamp(max=length - 1)
        every_row = torch.arange(len(anchors), device=anchors.device)[:, None, None].expand_as(drafted)
        chosen = counted.counts[every_row, drafted] & inside & chosen[..., None]
        depths = chosen.nonzero()[:, 2]
        rows, positions, outputs = every_row[chosen], drafted[chosen], outputs[:, :, :num_depths][chosen]
        previous = training_batch.tokens[rows, positions - 1]
        logits = self.add_markov_bias(self.base_logits(outputs), previous)
        losses, accepted = objective(counted.at(rows, positions), logits)
        at_depth = [depths == depth for depth in range(num_depths)]
        confidence_loss = None
        if self.config.has_confidence:
            acceptance_logits = self.confidence(outputs, previous)
            confidence_loss = mean(
                binary_cross_entropy_with_logits(
                    acceptance_logits, accepted.to(acceptance_logits.dtype), reduction="none"
                )
            )
        return DepthLosses(
            [mean(losses[is_at]) for is_at in at_depth],
            [mean(accepted[is_at]) for is_at in at_depth],
            confidence_loss,
        )

    def _run_backbone_at(self, training_batch: TrainingBatch, anchors: Tensor) -> Tensor:
        """Run the backbone on blocks at the anchor positions `[row, block]` of whole texts."""
        num_rows, length = training_batch.tokens.shape
        positions = torch.arange(length, device=anchors.device)
        context = self.context(self.features(training_batch.hidden), positions[None])
        num_blocks, size = anchors.shape[1], self.config.block_size
        owner = torch.arange(num_blocks, device=anchors.device).repeat_interleave(size)
        earlier = positions < anchors[:, owner, None]
        own = (owner == owner[:, None]).expand(num_rows, -1, -1)
        to_all = sequence_attention(torch.cat((earlier, own), -1)[:, None])

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            keys, values = context[layer]
            return to_all(layer, query, torch.cat((keys, key), 2), torch.cat((values, value), 2))

        return self.run_backbone(training_batch.tokens.gather(1, anchors), anchors, attend)

    def _anchors(self, counts: Tensor) -> tuple[Tensor, Tensor]:
        """Return anchor positions `[row, block]` and a bool mask of the valid ones.

        Rows may have fewer anchors than others. Position 0 is never an anchor, because no target
        state precedes it.
        """
        fits = torch.zeros_like(counts)
        fits[:, 1:-1] = counts[:, 2:]
        # Training uses torch's global generator, which the trainer seeds per step, so that a
        # resumed run draws the same anchors.
        generator = None if self.training else torch.Generator().manual_seed(0)
        random_keys = torch.rand(counts.shape, generator=generator).to(counts.device)
        random_keys = torch.where(fits, random_keys, -1.0)
        num_anchors = min(NUM_ANCHORS, max(int(fits.sum(1).max()), 1))
        best = random_keys.topk(num_anchors)
        return best.indices, best.values >= 0


def evenly_spaced_layers(num_layers: int, limit: int) -> tuple[int, ...]:
    """Return at most `limit` layers of a target, evenly spread.

    They are counted from 1, and lie between the second and the third from last, or in a target
    of fewer than `limit + 3` layers between the first and the last.

    >>> evenly_spaced_layers(16, 5), evenly_spaced_layers(2, 5)
    ((2, 5, 8, 11, 14), (1, 2))
    """
    first, last = (2, num_layers - 2) if num_layers >= limit + 3 else (1, num_layers)
    count = min(limit, last - first + 1)
    steps = [index / max(1, count - 1) for index in range(count)]
    return tuple(round(first + (last - first) * step) for step in steps)
