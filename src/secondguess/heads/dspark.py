"""DSpark block drafter (arXiv 2607.05147): a block of draft tokens in one forward pass.

The backbone is that of DFlash (arXiv 2602.06036). A block is the embedding of the pending token
followed by mask embeddings; its positions continue the text. They attend to each other in both
directions and to the preceding text through keys and values computed from the target's hidden
states. Each position has base logits; a low-rank Markov head adds `W2 W1[x]` for the preceding
token x, and a confidence head predicts the acceptance probability of each draft token.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from secondguess.errors import CheckpointError
from secondguess.heads.dspark_format import DsparkConfig
from secondguess.heads.fields import require_same
from secondguess.heads.files import load_into, read_config, read_tensors
from secondguess.heads.layer import (
    AttentionFunction,
    DecoderLayer,
    LayerConfig,
    Norm,
    cos_sin_at,
    sequence_attention,
)
from secondguess.heads.learning import (
    DepthLosses,
    Objective,
    TrainableHead,
    TrainingBatch,
    masked_mean,
    overlap,
)
from secondguess.runtime.base import EmbeddingAndHead, HiddenStates

LAST_HIDDEN = -1
"""Target layer from which its distributions are computed: the last, normalised one."""

NUM_ANCHORS = 64
"""Maximum number of training blocks per text; sampled at random if more would fit."""


class MarkovHead(nn.Module):
    """Low-rank logit bias that depends on the preceding token."""

    def __init__(self, shape: DsparkConfig) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(shape.vocab_size, shape.markov_rank)
        self.markov_w2 = nn.Linear(shape.markov_rank, shape.num_words, bias=False)


class ConfidenceHead(nn.Module):
    """Linear layer that gives the logit of a draft token's acceptance probability."""

    def __init__(self, shape: DsparkConfig) -> None:
        super().__init__()
        width = shape.layer.width + (shape.markov_rank if shape.confidence_reads_markov else 0)
        self.proj = nn.Linear(width, 1)


class DsparkHead(TrainableHead):
    """DSpark or DFlash drafter head for one target.

    Args:
        shape: sizes and options.
        embedding_and_head: embeddings of the target, and its LM head, used if the drafter head has none.
    """

    def __init__(self, shape: DsparkConfig, embedding_and_head: EmbeddingAndHead) -> None:
        super().__init__()
        layer = shape.layer
        self.shape = shape
        self.hidden_layers = shape.hidden_layers
        self.fc = nn.Linear(len(shape.hidden_layers) * layer.width, layer.width, bias=False)
        self.hidden_norm = Norm(layer.width, layer.norm_eps)
        self.layers = nn.ModuleList(DecoderLayer(layer) for _ in range(shape.num_layers))
        self.norm = Norm(layer.width, layer.norm_eps)
        if shape.has_output:
            self.lm_head = nn.Linear(layer.width, shape.num_words, bias=False)
        if shape.markov_rank:
            self.markov_head = MarkovHead(shape)
        if shape.has_confidence:
            self.confidence_head = ConfidenceHead(shape)
        if shape.has_vocab_map:
            self.register_buffer("d2t", torch.zeros(shape.num_words, dtype=torch.long))
            self.register_buffer("t2d", torch.zeros(shape.vocab_size, dtype=torch.bool))
        self._embedding_and_head = embedding_and_head

    @classmethod
    def fresh(
        cls,
        embedding_and_head: EmbeddingAndHead,
        hidden_layers: Sequence[int],
        block_size: int = 7,
        markov_rank: int = 64,
        num_layers: int = 2,
        seed: int = 0,
        mask_token: int = 0,
        device: torch.device | str = "cpu",
    ) -> Self:
        """Build an untrained drafter head with Qwen3 layers, a Markov and a confidence head.

        It uses the target's output matrix; its last norm starts with the weights of the target's.

        Args:
            embedding_and_head: embeddings, last norm and LM head of the target.
            hidden_layers: target layers whose states are fused; 0 is the embeddings, k the output
                of layer k.
            block_size: positions in a block, each of which drafts a token.
            markov_rank: rank of the Markov head; 0 for none.
            num_layers: number of decoder layers.
            seed: seed of the weights.
            mask_token: token whose embedding is the input at positions to be predicted.
            device: device of the target.

        Raises:
            BadInputError: a number out of range.
        """
        signs = torch.ones(embedding_and_head.width, dtype=embedding_and_head.dtype, device=device)
        signs[1::2] = -1
        with torch.no_grad():
            # A norm maps a vector of zero mean and unit RMS to that vector times its weights, plus
            # its bias; the difference cancels the bias.
            gains = (embedding_and_head.normalise(signs) - embedding_and_head.normalise(-signs)) / 2 * signs
            vocab_size = embedding_and_head.unembed(signs).shape[-1]
        shape = DsparkConfig(
            layer=_default_layer_config(embedding_and_head.width),
            num_layers=num_layers,
            hidden_layers=tuple(hidden_layers),
            block_size=block_size,
            mask_token=mask_token,
            vocab_size=vocab_size,
            num_words=vocab_size,
            markov_rank=markov_rank,
            has_confidence=True,
            confidence_reads_markov=markov_rank > 0,
        )
        head = cls(shape, embedding_and_head)
        generator = torch.Generator().manual_seed(seed)
        for name, weight in head.named_parameters():
            if weight.dim() > 1:
                nn.init.normal_(weight, std=0.02, generator=generator)
            elif name.endswith("bias"):
                nn.init.zeros_(weight)
        with torch.no_grad():
            head.norm.weight.copy_(gains)
        return head.to(device)

    @classmethod
    def load(cls, folder: Path, embedding_and_head: EmbeddingAndHead, vocab_size: int) -> Self:
        """Read a drafter head in the `speculators` format, `dspark` or `dflash`.

        Args:
            folder: folder with `config.json` and weights.
            embedding_and_head: embeddings, LM head, width and dtype of the target.
            vocab_size: vocabulary size of the target.

        Raises:
            CheckpointError: a field or tensor is missing, unknown or of another shape, or the
                drafter head was trained for another target.
            UnsupportedModelError: an unsupported kind of drafter, layer or Markov head.
        """
        config, tensors = read_config(folder), read_tensors(folder)
        shape = DsparkConfig.from_config(config, folder, has_output="lm_head.weight" in tensors)
        require_same("width", shape.layer.width, embedding_and_head.width, folder)
        require_same("vocabulary", shape.vocab_size, vocab_size, folder)
        # Some files contain a copy of the target's embeddings, which are frozen in training.
        tensors.pop("embed_tokens.weight", None)
        head = cls(shape, embedding_and_head)
        load_into(head, tensors, folder)
        if shape.has_vocab_map:
            _check_words(head._words(), head.get_buffer("t2d"), folder)
        return head.to(embedding_and_head.dtype)

    def save(self, folder: Path, target: str = "") -> None:
        """Write the drafter head in the `speculators` format.

        Args:
            folder: output folder; created if missing.
            target: name of the target model, which vLLM loads together with the drafter head.
        """
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.shape.to_config(target), indent=2) + "\n")
        tensors = {name: tensor.contiguous() for name, tensor in self.state_dict().items()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    def features(self, hidden: HiddenStates) -> Tensor:
        """Fuse the target's states `[..., width]` by layer into features `[..., width]`."""
        joined = torch.cat([hidden[layer] for layer in self.hidden_layers], -1)
        fused: Tensor = self.hidden_norm(self.fc(joined.to(self.fc.weight.dtype)))
        return fused

    def context(self, features: Tensor, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return each layer's keys and values of the features, to be attended to by draft blocks.

        Args:
            features: `[row, position, width]`.
            positions: `[row or 1, position]`, text positions of the features.

        Returns:
            Keys and values `[row, kv_head, position, size]` per layer.
        """
        cos_sin = cos_sin_at(self.shape.layer, positions, features.dtype)
        return [layer.self_attn.keys_values(features, cos_sin) for layer in self._decoder_layers()]

    def run_backbone(self, anchors: Tensor, positions: Tensor, attend: AttentionFunction) -> Tensor:
        """Run the backbone on draft blocks.

        Args:
            anchors: `[row, block]`, the pending token of each block.
            positions: `[row, block]`, text positions of these tokens.
            attend: attention of the positions of all blocks, concatenated, to the preceding text
                and to their own block.

        Returns:
            Normalised hidden states `[row, block, draft token, width]`.
        """
        size = self.shape.block_size
        tokens = anchors[..., None].expand(*anchors.shape, size).clone()
        tokens[..., 1:] = self.shape.mask_token
        states = self._embedding_and_head.embed(tokens.flatten(1)).to(self.fc.weight.dtype)
        steps = torch.arange(size, device=positions.device)
        cos_sin = cos_sin_at(self.shape.layer, (positions[..., None] + steps).flatten(1), states.dtype)
        for index, layer in enumerate(self._decoder_layers()):
            states = layer(states, cos_sin, attend, index)
        outputs: Tensor = self.norm(states).unflatten(1, (-1, size))
        return outputs[:, :, -self.shape.num_guesses :]

    def base_logits(self, outputs: Tensor) -> Tensor:
        """Return logits `[..., draft_vocab]` of `outputs`, without the Markov head's bias."""
        if not self.shape.has_output:
            return self._embedding_and_head.unembed(outputs.to(self._embedding_and_head.dtype))
        logits: Tensor = self.lm_head(outputs)
        return logits

    def add_markov_bias(self, base: Tensor, previous: Tensor) -> Tensor:
        """Return base logits plus the Markov head's bias for the tokens `previous` `[...]`."""
        if not self.shape.markov_rank:
            return base
        biased: Tensor = base + self.markov_head.markov_w2(self.markov_head.markov_w1(previous))
        return biased

    def confidence(self, outputs: Tensor, previous: Tensor) -> Tensor:
        """Return the logits `[...]` of the acceptance probabilities of draft tokens.

        Requires a confidence head.

        Args:
            outputs: `[..., width]`, outputs of `run_backbone`.
            previous: `[...]`, the token before each draft token.
        """
        if self.shape.confidence_reads_markov:
            outputs = torch.cat((outputs, self.markov_head.markov_w1(previous)), -1)
        said: Tensor = self.confidence_head.proj(outputs)
        return said[..., 0]

    def to_target_vocab(self, logits: Tensor) -> Tensor:
        """Map logits over the draft vocabulary to logits `[..., vocab]` over the target's.

        Tokens outside the draft vocabulary get -inf.
        """
        if not self.shape.has_vocab_map:
            return logits
        everything = logits.new_full((*logits.shape[:-1], self.shape.vocab_size), -torch.inf)
        everything[..., self._words()] = logits
        return everything

    def learn(
        self, training_batch: TrainingBatch, embedding_and_head: EmbeddingAndHead, objective: Objective
    ) -> DepthLosses:
        """Return the losses and acceptance rates of draft blocks at sampled anchor positions.

        The block at anchor p predicts tokens p + 1 + k, each given the true token p + k. The
        confidence head is trained on the overlap of both distributions; its loss is `extra`.
        Anchors are random in training mode and fixed in evaluation mode.
        """
        length = training_batch.tokens.shape[1]
        anchors, chosen = self._anchors(training_batch.counts)
        outputs = self._run_backbone_at(training_batch, anchors)
        before = anchors[..., None] + torch.arange(self.shape.num_guesses, device=anchors.device)
        inside = before < length - 1
        before = before.clamp(max=length - 2)
        rows = torch.arange(len(anchors), device=anchors.device)[:, None, None]
        previous = training_batch.tokens[rows, before]
        counts = training_batch.counts[rows, before + 1] & inside & chosen[..., None]
        with torch.no_grad():
            meant = embedding_and_head.unembed(training_batch.hidden[LAST_HIDDEN][rows, before])
            meant = meant[..., self._words()] if self.shape.has_vocab_map else meant
        said = self.add_markov_bias(self.base_logits(outputs), previous)
        agreed = overlap(meant, said)
        losses, accepted = [], []
        for depth in range(self.shape.num_guesses):
            counted = counts[..., depth]
            losses.append(masked_mean(objective(meant[..., depth, :], said[..., depth, :]), counted))
            accepted.append(masked_mean(agreed[..., depth], counted))
        if not self.shape.has_confidence:
            return DepthLosses(losses, accepted)
        acceptance_probs = self.confidence(outputs, previous)
        wrong = binary_cross_entropy_with_logits(
            acceptance_probs, agreed.to(acceptance_probs.dtype), reduction="none"
        )
        return DepthLosses(losses, accepted, masked_mean(wrong, counts))

    def _run_backbone_at(self, training_batch: TrainingBatch, anchors: Tensor) -> Tensor:
        """Run the backbone on blocks at the anchor positions `[row, block]` of whole texts.

        Returns:
            Hidden states `[row, block, draft token, width]`.
        """
        num_rows, length = training_batch.tokens.shape
        places = torch.arange(length, device=anchors.device)
        context = self.context(self.features(training_batch.hidden), places[None])
        owner = torch.arange(anchors.shape[1], device=anchors.device).repeat_interleave(self.shape.block_size)
        earlier = places < anchors[:, owner, None]
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
        lots = torch.rand(counts.shape, generator=generator).to(counts.device)
        lots = torch.where(fits, lots, -1.0)
        most = min(NUM_ANCHORS, max(int(fits.sum(1).max()), 1))
        best = lots.topk(most)
        return best.indices, best.values >= 0

    def _decoder_layers(self) -> list[DecoderLayer]:
        return [layer for layer in self.layers if isinstance(layer, DecoderLayer)]

    def _words(self) -> Tensor:
        """Return the target token ids `[draft_vocab]` of the draft vocabulary."""
        offsets = self.get_buffer("d2t")
        return offsets + torch.arange(len(offsets), device=offsets.device)


def _default_layer_config(width: int) -> LayerConfig:
    """Return the default shape of a Qwen3 layer for a hidden size."""
    head_size = next((size for size in (64, 32, 16, 8, 4) if width % size == 0 and width >= 2 * size), width)
    num_heads = width // head_size
    return LayerConfig(
        width=width,
        num_heads=num_heads,
        num_kv_heads=num_heads // 2 if num_heads % 2 == 0 else num_heads,
        head_size=head_size,
        mlp_size=3 * width,
        has_qk_norm=True,
    )


def _check_words(words: Tensor, known: Tensor, folder: Path) -> None:
    if words.tolist() != known.nonzero()[:, 0].tolist():
        raise CheckpointError(
            f"expected d2t and t2d of one set of tokens in {folder}, got two; both come from the same training"
        )
