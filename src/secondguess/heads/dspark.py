"""DSpark block drafter (arXiv 2607.05147): a block of draft tokens in one forward pass.

The backbone is that of DFlash (arXiv 2602.06036). A block is the embedding of the pending token
followed by mask embeddings; its positions continue the text. They attend to each other in both
directions and to the preceding text through keys and values computed from the target's hidden
states. Each position has base logits; a low-rank Markov head adds a bias by the preceding tokens
(`heads.markov`), and a confidence head predicts the acceptance probability of each draft token.
Layers may have sliding windows, and those of DFlash2 have convolutions (`heads.block_layers`).

Heads of speculators, z-lab, DeepSpec, SpecForge and Model-Optimizer are read (`heads.formats`).
They are written in the format of speculators, or in that of z-lab if their windows need it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from secondguess.errors import CheckpointError
from secondguess.heads.base import DraftVocabulary, Head, TargetModel
from secondguess.heads.block_config import DsparkConfig
from secondguess.heads.block_layers import BlockAttention, add_convolutions, run_block_layer
from secondguess.heads.feature import default_layer_config
from secondguess.heads.files import (
    MASK_EMBEDDING,
    config_errors,
    read_pickle,
    require_layers,
    require_same,
    whole_number,
    write_head,
)
from secondguess.heads.formats import (
    StoredHead,
    checkpoint_tensors,
    pop_vocabulary,
)
from secondguess.heads.layer import (
    AttentionFunction,
    keys_values,
    make_layers,
    sequence_attention,
)
from secondguess.heads.learning import CountedTokens, DepthLosses, Objective, TrainingBatch, mean
from secondguess.heads.markov import (
    BlockBias,
    CandidateSelector,
    GatedMarkovHead,
    MarkovHead,
    PrefixCorrection,
    RecurrentMarkovHead,
    Refiner,
)
from secondguess.names import check_range
from secondguess.runtime.base import EmbeddingAndHead, HiddenStates

NUM_ANCHORS = 64
"""Maximum number of training blocks per text; sampled at random if more would fit."""
CHUNK = 4096
"""Number of embeddings that are compared with the target's at once."""
MARKOV_TABLES = tuple(
    f"markov_head.{name}"
    for name in (
        "markov_w1.weight",
        "markov_w2.weight",
        "predecessor_codebook",
        "successor_codebook",
        "token_embed.weight",
        "readout.weight",
        "embed_proj.2.weight",
    )
)
"""Tensors of a Markov head with one row per token."""


def add_mask_embedding(tensors: dict[str, Tensor], stored: StoredHead) -> None:
    """Add the embedding of the mask token that is stored beside the tensors, or beyond the target's vocabulary."""
    path = stored.folder / MASK_EMBEDDING
    if not path.is_file():
        return
    found = read_pickle(path)
    if isinstance(found, dict):
        mask_token = stored.number("mask_token", least=0)
        if found.get("mask_token_id", mask_token) != mask_token:
            raise ValueError(
                f"{MASK_EMBEDDING} for the token {found['mask_token_id']}, which should be {mask_token}"
            )
        found = found.get("embedding")
    if not isinstance(found, Tensor):
        raise ValueError(f"{MASK_EMBEDDING} without a tensor `embedding`")
    tensors["mask_embedding"] = found.flatten()


def fit_vocabulary(tensors: dict[str, Tensor], stored: StoredHead, target: TargetModel) -> DraftVocabulary:
    """Return the vocabulary of a head; its maps, and tokens and embeddings that the target makes superfluous, are removed.

    A head with embeddings of its own may have more tokens than the target; one of them may be the mask token.
    """
    embeddings = tensors.get("embed_tokens.weight")
    if embeddings is None:
        return pop_vocabulary(tensors, stored, target)
    mask_token = stored.number("mask_token", least=0)
    vocab_size = whole_number(stored.layers, "vocab_size")
    if len(embeddings) != vocab_size:
        raise ValueError(
            f"vocab_size of {vocab_size}, which should be {len(embeddings)} as in embed_tokens.weight"
        )
    is_larger = target.vocab_size < vocab_size == stored.number("draft_vocab_size", vocab_size)
    if is_larger:
        if target.vocab_size <= mask_token < len(embeddings):
            tensors.setdefault("mask_embedding", embeddings[mask_token])
        for name in ("embed_tokens.weight", "lm_head.weight", *MARKOV_TABLES):
            if name in tensors and len(tensors[name]) == vocab_size:
                tensors[name] = tensors[name][: target.vocab_size]
    if _is_copy(tensors["embed_tokens.weight"], target):
        del tensors["embed_tokens.weight"]
    return DraftVocabulary(target.vocab_size) if is_larger else pop_vocabulary(tensors, stored, target)


def _is_copy(embeddings: Tensor, target: TargetModel) -> bool:
    """Return whether embeddings `[token, width]` are the target's, in its precision."""
    if embeddings.shape != (target.vocab_size, target.width):
        return False
    for tokens in torch.split(torch.arange(target.vocab_size, device=target.device), CHUNK):
        theirs = target.embed(tokens)
        if not torch.equal(theirs, embeddings[tokens.cpu()].to(theirs)):
            return False
    return True


def count_drafted(folder: Path) -> int:
    """Return the number of draft tokens per block of the head in a folder."""
    with config_errors(folder):
        return DsparkConfig.from_stored(StoredHead(folder, "dspark")).num_drafted


def make_markov_head(
    config: DsparkConfig, vocab_size: int, num_outputs: int, embed: Callable[[Tensor], Tensor]
) -> BlockBias:
    """Return the untrained head that corrects the logits of a block drafter."""
    rank, width = config.markov_rank, config.layer.width
    match config.markov_kind:
        case "gated":
            return GatedMarkovHead(vocab_size, num_outputs, rank, width)
        case "rnn":
            return RecurrentMarkovHead(vocab_size, num_outputs, rank, width)
        case "selector":
            check_range("candidates of a selector", config.selector_top_k, 1, num_outputs)
            return CandidateSelector(vocab_size, rank, width, config.selector_top_k)
        case "refiner":
            return Refiner(vocab_size, num_outputs, rank, width, config.block_size, config.refiner_mlp_size)
        case "gru":
            first = config.first_drafted
            check_range("positions without a correction", config.num_uncorrected, 0, config.num_drafted - 1)
            check_range("the state of a GRU", config.gru_size, 1, 65536)
            corrected = first + config.num_uncorrected
            return PrefixCorrection(num_outputs, rank, width, config.gru_size, first, corrected, embed)
        case _:
            return MarkovHead(vocab_size, num_outputs, rank)


class DsparkHead(Head):
    """DSpark or DFlash drafter head for one target, whose LM head it uses if it has none of its own."""

    confidence_head: Any

    def __init__(
        self, config: DsparkConfig, target: TargetModel, vocabulary: DraftVocabulary | None = None
    ) -> None:
        super().__init__()
        if not config.has_mask_embedding:
            check_range("the mask token", config.mask_token, 0, target.vocab_size - 1)
        width, norm_eps = config.layer.width, config.layer.norm_eps
        self.config, self.hidden_layers, self.target = config, config.hidden_layers, target
        self.vocabulary = vocabulary or DraftVocabulary(target.vocab_size)
        self.fc = nn.Linear(len(config.hidden_layers) * (config.target_width or width), width, bias=False)
        self.hidden_norm = nn.RMSNorm(width, norm_eps)
        self.layers, self.rotary = make_layers(config.layer, config.num_layers)
        if config.convolutions is not None:
            for layer in self.layers:
                add_convolutions(layer, width, config.convolutions)
        self.norm = nn.RMSNorm(width, norm_eps)
        self.lm_head = nn.Linear(width, len(self.vocabulary), bias=False) if config.has_output else None
        self.embed_tokens = nn.Embedding(target.vocab_size, width) if config.has_embeddings else None
        self.mask_embedding = nn.Parameter(torch.zeros(width)) if config.has_mask_embedding else None
        self.markov_head = (
            make_markov_head(config, target.vocab_size, len(self.vocabulary), self.embed)
            if config.markov_rank
            else None
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
            add_mask_embedding(tensors, stored)
            vocabulary = fit_vocabulary(tensors, stored, target)
            config = DsparkConfig.from_stored(stored, tensors)
            require_same("width", config.target_width or config.layer.width, target.width, folder)
            if config.layer.width != target.width and not (config.has_embeddings and config.has_output):
                raise CheckpointError(
                    f"expected embed_tokens.weight and lm_head.weight of the width {config.layer.width} in {folder}, whose "
                    f"target has the width {target.width}, got none; download the head again"
                )
            num_layers = stored.get("num_target_layers")
            if num_layers is not None:
                require_same("number of layers", num_layers, target.num_layers, folder)
            require_layers(config.hidden_layers, target.num_layers, folder)
            head = cls(config, target, vocabulary)
        if not config.has_confidence:
            tensors = {
                name: part for name, part in tensors.items() if not name.startswith("confidence_head.")
            }
        stored.fill(head, tensors | vocabulary.state_dict(prefix="vocabulary."), stored.names.in_file)
        return head

    def save(self, folder: Path, target: str = "") -> None:
        row, fields = self.config.to_stored(len(self.vocabulary), self.target, target)
        tensors = checkpoint_tensors(self, self.vocabulary)
        mask = tensors.pop("mask_embedding", None)
        write_head(folder, fields, {row.tensors.in_file(name): part for name, part in tensors.items()})
        if mask is not None:
            embedding = {"mask_token_id": self.config.mask_token, "embedding": mask.detach().cpu()}
            torch.save(embedding, folder / MASK_EMBEDDING)

    def packed_parts(self) -> nn.ModuleList:
        """Return the parts whose matrices the kernels pack: all but those that make latents of a Markov head."""
        parts: list[nn.Module] = [self.fc, self.layers]
        if self.markov_head is not None:
            parts.append(self.markov_head.output)
        if self.config.has_confidence:
            parts.append(self.confidence_head)
        parts += [part for part in (self.lm_head, self.embed_tokens) if part is not None]
        return nn.ModuleList(parts)

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
        """Run the backbone on draft blocks; return normalised states `[row, block, position, width]`.

        The pending tokens `anchors` `[row, block]` are at text positions `positions`. `attend` is the
        attention of the positions of all blocks, joined, to the preceding text and to their own block.
        """
        size = self.config.block_size
        pending = self.embed(anchors)[..., None, :]
        mask: Tensor | None = self.mask_embedding
        if mask is None:
            mask = self.embed(torch.tensor(self.config.mask_token, device=anchors.device))
        masks = mask.to(pending.dtype).expand(*anchors.shape, size - 1, -1)
        states = torch.cat((pending, masks), -2).flatten(1, 2).to(self.fc.weight.dtype)
        steps = torch.arange(size, device=positions.device)
        cos_sin = self.rotary((positions[..., None] + steps).flatten(1), states.dtype)
        has_convolutions = self.config.convolutions is not None
        for layer in self.layers:
            states = run_block_layer(layer, states, cos_sin, attend, size, has_convolutions)
        outputs: Tensor = self.norm(states).unflatten(1, (-1, size))
        return outputs

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the embeddings `[..., width]` of tokens `[...]`."""
        embedded: Tensor = (self.target.embed if self.embed_tokens is None else self.embed_tokens)(tokens)
        return embedded

    def base_logits(self, outputs: Tensor) -> Tensor:
        """Return logits `[..., draft_vocab]` of `outputs`, without the bias by the preceding tokens."""
        return self.unembed(outputs, self.lm_head)

    def confidence_inputs(self, outputs: Tensor, previous: Tensor) -> Tensor:
        """Return what the confidence head reads: outputs `[..., width]`, and perhaps the tokens before, `[...]`."""
        if not self.config.confidence_reads_markov:
            return outputs
        assert isinstance(self.markov_head, MarkovHead)
        return torch.cat((outputs, self.markov_head.markov_w1(previous)), -1)

    def confidence(self, outputs: Tensor, previous: Tensor) -> Tensor:
        """Return the logits `[...]` of the acceptance probabilities of draft tokens, from the confidence head.

        They depend on outputs `[..., width]` of `run_backbone` and on the tokens before each draft token.
        """
        logits: Tensor = self.confidence_head.proj(self.confidence_inputs(outputs, previous))
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
        first, size = self.config.first_drafted, self.config.block_size
        counted = CountedTokens(training_batch, target, self.vocabulary.select)
        num_depths = min(self.config.num_drafted, training_batch.num_depths)
        drafted = anchors[..., None] + torch.arange(1, num_depths + 1, device=anchors.device)
        inside = drafted < length
        drafted = drafted.clamp(max=length - 1)
        every_row = torch.arange(len(anchors), device=anchors.device)[:, None, None].expand_as(drafted)
        chosen = counted.counts[every_row, drafted] & inside & chosen[..., None]
        depths = chosen.nonzero()[:, 2]
        rows, positions = every_row[chosen], drafted[chosen]
        latents = None
        if self.markov_head is not None:
            before = anchors[..., None] + torch.arange(size, device=anchors.device) - first
            if not self.markov_head.precedes_anchor:
                before = before.maximum(anchors[..., None])
            every_block = torch.arange(len(anchors), device=anchors.device)[:, None, None]
            tokens = training_batch.tokens[every_block, before.clamp(max=length - 1)]
            latents = self.markov_head.latents(outputs, tokens)[:, :, first : first + num_depths][chosen]
        outputs = outputs[:, :, first : first + num_depths][chosen]
        previous = training_batch.tokens[rows, positions - 1]
        logits = self.base_logits(outputs)
        if self.markov_head is not None and latents is not None:
            logits = self.markov_head.biased(logits, latents)
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
        own_anchors = anchors[:, owner, None]
        own = (owner == owner[:, None]).expand(num_rows, -1, -1)
        visible = torch.cat((positions < own_anchors, own), -1)
        queries = own_anchors + torch.arange(size, device=anchors.device).repeat(num_blocks)[:, None]
        keys = torch.cat((positions.expand(num_rows, 1, -1), queries.transpose(1, 2)), -1)
        to_all: dict[BlockAttention, AttentionFunction] = {}
        for kind in set(self.config.layer_attention):
            near = kind.mask(own_anchors, queries, keys)
            to_all[kind] = sequence_attention((visible if near is None else visible & near)[:, None])

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            keys, values = context[layer]
            to_kind = to_all[self.config.layer_attention[layer]]
            return to_kind(layer, query, torch.cat((keys, key), 2), torch.cat((values, value), 2))

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
