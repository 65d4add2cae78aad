"""DSpark (arXiv 2607.05147): a block of guesses in one forward, each then bent by the token before it.

The backbone is DFlash's (2602.06036). A block is pending's embedding and then masks; its positions continue the text and see each
other in both directions, and all of the text before through keys and values made of the target's own states. Each position
has its base logits; a low-rank Markov head adds `W2 W1[x]` of the token x before, and a confidence head foretells whether the
guess will be accepted.
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
from secondguess.heads.dspark_format import DsparkShape
from secondguess.heads.fields import require_same
from secondguess.heads.files import load_into, read_config, read_tensors
from secondguess.heads.layer import Attend, DecoderLayer, LayerShape, Norm, attend_to_all, turns_at
from secondguess.heads.learning import Learner, Lesson, Marks, Objective, mean_where, overlap
from secondguess.runtime.base import Ends, Hidden

LAST = -1
"""The target's last, normalised state, which says its law."""

NUM_ANCHORS = 64
"""Blocks that are learnt from each text of a lesson; drawn, where there is room for more."""


class MarkovHead(nn.Module):
    """A bias on the logits by the token before, of low rank."""

    def __init__(self, shape: DsparkShape) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(shape.vocab_size, shape.markov_rank)
        self.markov_w2 = nn.Linear(shape.markov_rank, shape.num_words, bias=False)


class ConfidenceHead(nn.Module):
    """One number per guess: the logit of its chance to be accepted."""

    def __init__(self, shape: DsparkShape) -> None:
        super().__init__()
        width = shape.layer.width + (shape.markov_rank if shape.confidence_reads_markov else 0)
        self.proj = nn.Linear(width, 1)


class DsparkHead(Learner):
    """A block drafter for one target.

    Args:
        shape: its sizes.
        ends: of the target: its embeddings, and its output matrix where the drafter has none.
    """

    def __init__(self, shape: DsparkShape, ends: Ends) -> None:
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
        if shape.maps_words:
            self.register_buffer("d2t", torch.zeros(shape.num_words, dtype=torch.long))
            self.register_buffer("t2d", torch.zeros(shape.vocab_size, dtype=torch.bool))
        self._ends = ends

    @classmethod
    def fresh(
        cls,
        ends: Ends,
        hidden_layers: Sequence[int],
        block_size: int = 7,
        markov_rank: int = 64,
        num_layers: int = 2,
        seed: int = 0,
        mask_token: int = 0,
        device: torch.device | str = "cpu",
    ) -> Self:
        """An untrained drafter: Qwen3 layers, both heads, the target's output matrix and the gains of its last norm.

        Args:
            hidden_layers: of the target, to be fused; 0 is the embeddings, k the output of layer k.
            mask_token: which token's embedding stands for a token to be guessed.
            device: the target's.

        Raises:
            BadInputError: numbers out of range.
        """
        signs = torch.ones(ends.width, dtype=ends.dtype, device=device)
        signs[1::2] = -1
        with torch.no_grad():
            # Of a vector without mean and of length 1 a norm leaves its own gains; biases cancel out.
            gains = (ends.normalise(signs) - ends.normalise(-signs)) / 2 * signs
            vocab_size = ends.unembed(signs).shape[-1]
        shape = DsparkShape(
            layer=_layer_of_width(ends.width),
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
        head = cls(shape, ends)
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
    def load(cls, folder: Path, ends: Ends, vocab_size: int) -> Self:
        """Read a drafter in the speculators format, `dspark` or `dflash`.

        Args:
            folder: with `config.json` and weights.
            ends: of the target.
            vocab_size: the target's.

        Raises:
            CheckpointError: something is missing, unknown, of another shape, or was made for another target.
        """
        config, tensors = read_config(folder), read_tensors(folder)
        shape = DsparkShape.of_config(config, folder, has_output="lm_head.weight" in tensors)
        require_same("width", shape.layer.width, ends.width, folder)
        require_same("vocabulary", shape.vocab_size, vocab_size, folder)
        # Some files repeat the target's embeddings, which nobody trained.
        tensors.pop("embed_tokens.weight", None)
        head = cls(shape, ends)
        load_into(head, tensors, folder)
        if shape.maps_words:
            _check_words(head._words(), head.get_buffer("t2d"), folder)
        return head.to(ends.dtype)

    def save(self, folder: Path, target: str = "") -> None:
        """Write it as the speculators library has it.

        Args:
            folder: is made where it is missing.
            target: the name of the model that it drafts for; vLLM loads it beside the drafter.
        """
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.shape.to_config(target), indent=2) + "\n")
        tensors = {name: tensor.contiguous() for name, tensor in self.state_dict().items()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    def features(self, hidden: Hidden) -> Tensor:
        """The target's states `[..., width]` of `hidden_layers`, fused: `[..., width]`."""
        joined = torch.cat([hidden[layer] for layer in self.hidden_layers], -1)
        fused: Tensor = self.hidden_norm(self.fc(joined.to(self.fc.weight.dtype)))
        return fused

    def context(self, features: Tensor, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Each layer's keys and values `[row, kv_head, position, size]` of `features` `[row, position, width]`.

        Args:
            positions: `[row or 1, position]`, of the tokens behind which the features were.
        """
        turns = turns_at(self.shape.layer, positions, features.dtype)
        return [layer.self_attn.keys_values(features, turns) for layer in self._decoder_layers()]

    def think(self, anchors: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """What a block thinks at the places of its guesses.

        Args:
            anchors: `[row, block]` tokens that are pending.
            positions: `[row, block]` of these tokens.
            attend: attention of all blocks' positions, one block after another, to their contexts and to themselves.

        Returns:
            `[row, block, guess, width]`, normalised.
        """
        size = self.shape.block_size
        tokens = anchors[..., None].expand(*anchors.shape, size).clone()
        tokens[..., 1:] = self.shape.mask_token
        states = self._ends.embed(tokens.flatten(1)).to(self.fc.weight.dtype)
        steps = torch.arange(size, device=positions.device)
        turns = turns_at(self.shape.layer, (positions[..., None] + steps).flatten(1), states.dtype)
        for index, layer in enumerate(self._decoder_layers()):
            states = layer(states, turns, attend, index)
        thoughts: Tensor = self.norm(states).unflatten(1, (-1, size))
        return thoughts[:, :, -self.shape.num_guesses :]

    def base_logits(self, thoughts: Tensor) -> Tensor:
        """`[..., words]` of thoughts `[..., width]`, before the token before them is known."""
        if not self.shape.has_output:
            return self._ends.unembed(thoughts.to(self._ends.dtype))
        logits: Tensor = self.lm_head(thoughts)
        return logits

    def follow(self, base: Tensor, previous: Tensor) -> Tensor:
        """Logits `[..., words]` of guesses behind the tokens `previous` `[...]`."""
        if not self.shape.markov_rank:
            return base
        biased: Tensor = base + self.markov_head.markov_w2(self.markov_head.markov_w1(previous))
        return biased

    def confidence(self, thoughts: Tensor, previous: Tensor) -> Tensor:
        """Logits `[...]` of the chance that guesses behind `previous` are accepted; only where there is such a head."""
        if self.shape.confidence_reads_markov:
            thoughts = torch.cat((thoughts, self.markov_head.markov_w1(previous)), -1)
        said: Tensor = self.confidence_head.proj(thoughts)
        return said[..., 0]

    def over_vocabulary(self, logits: Tensor) -> Tensor:
        """Logits of its words as those of the target's tokens `[..., vocab]`; -inf for tokens that it does not guess."""
        if not self.shape.maps_words:
            return logits
        everything = logits.new_full((*logits.shape[:-1], self.shape.vocab_size), -torch.inf)
        everything[..., self._words()] = logits
        return everything

    def learn(self, lesson: Lesson, ends: Ends, objective: Objective) -> Marks:
        """A block at each of some places p guesses tokens p + 1 + k, each behind the true token p + k.

        The confidence learns the overlap of the two laws (its loss is `extra`). In training mode the places are drawn, in
        evaluation always the same.
        """
        length = lesson.tokens.shape[1]
        anchors, chosen = self._anchors(lesson.counts)
        thoughts = self._think_at(lesson, anchors)
        before = anchors[..., None] + torch.arange(self.shape.num_guesses, device=anchors.device)
        inside = before < length - 1
        before = before.clamp(max=length - 2)
        rows = torch.arange(len(anchors), device=anchors.device)[:, None, None]
        previous = lesson.tokens[rows, before]
        counts = lesson.counts[rows, before + 1] & inside & chosen[..., None]
        with torch.no_grad():
            meant = ends.unembed(lesson.hidden[LAST][rows, before])
            meant = meant[..., self._words()] if self.shape.maps_words else meant
        said = self.follow(self.base_logits(thoughts), previous)
        agreed = overlap(meant, said)
        losses, accepted = [], []
        for depth in range(self.shape.num_guesses):
            counted = counts[..., depth]
            losses.append(mean_where(objective(meant[..., depth, :], said[..., depth, :]), counted))
            accepted.append(mean_where(agreed[..., depth], counted))
        if not self.shape.has_confidence:
            return Marks(losses, accepted)
        foretold = self.confidence(thoughts, previous)
        wrong = binary_cross_entropy_with_logits(foretold, agreed.to(foretold.dtype), reduction="none")
        return Marks(losses, accepted, mean_where(wrong, counts))

    def _think_at(self, lesson: Lesson, anchors: Tensor) -> Tensor:
        """Thoughts `[row, block, guess, width]` of blocks at the places `anchors` `[row, block]` of whole texts."""
        num_rows, length = lesson.tokens.shape
        places = torch.arange(length, device=anchors.device)
        context = self.context(self.features(lesson.hidden), places[None])
        owner = torch.arange(anchors.shape[1], device=anchors.device).repeat_interleave(self.shape.block_size)
        earlier = places < anchors[:, owner, None]
        own = (owner == owner[:, None]).expand(num_rows, -1, -1)
        to_all = attend_to_all(torch.cat((earlier, own), -1)[:, None])

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            keys, values = context[layer]
            return to_all(layer, query, torch.cat((keys, key), 2), torch.cat((values, value), 2))

        return self.think(lesson.tokens.gather(1, anchors), anchors, attend)

    def _anchors(self, counts: Tensor) -> tuple[Tensor, Tensor]:
        """Places `[row, block]` of pending tokens to guess behind, and which of them are meant (rows may have fewer).

        The first token is none: nothing of the target's stands before it.
        """
        fits = torch.zeros_like(counts)
        fits[:, 1:-1] = counts[:, 2:]
        # In training torch's own generator, which the trainer seeds by the step: a resumed run draws the same.
        generator = None if self.training else torch.Generator().manual_seed(0)
        lots = torch.rand(counts.shape, generator=generator).to(counts.device)
        lots = torch.where(fits, lots, -1.0)
        most = min(NUM_ANCHORS, max(int(fits.sum(1).max()), 1))
        best = lots.topk(most)
        return best.indices, best.values >= 0

    def _decoder_layers(self) -> list[DecoderLayer]:
        return [layer for layer in self.layers if isinstance(layer, DecoderLayer)]

    def _words(self) -> Tensor:
        """`[word]`, which of the target's tokens each word is."""
        offsets = self.get_buffer("d2t")
        return offsets + torch.arange(len(offsets), device=offsets.device)


def _layer_of_width(width: int) -> LayerShape:
    """A Qwen3 layer for a target of this width."""
    head_size = next((size for size in (64, 32, 16, 8, 4) if width % size == 0 and width >= 2 * size), width)
    num_heads = width // head_size
    return LayerShape(
        width=width,
        num_heads=num_heads,
        num_kv_heads=num_heads // 2 if num_heads % 2 == 0 else num_heads,
        head_size=head_size,
        mlp_size=3 * width,
        normalises_heads=True,
    )


def _check_words(words: Tensor, known: Tensor, folder: Path) -> None:
    if words.tolist() != known.nonzero()[:, 0].tolist():
        raise CheckpointError(
            f"expected d2t and t2d of one set of tokens in {folder}, got two; both come from the same training"
        )
