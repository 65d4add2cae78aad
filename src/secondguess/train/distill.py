"""From a drafter that models text to a drafter that models its target.

The drafter first learns the corpus by itself, which costs no pass of the target. Then it learns the target's law with
the loss that maximises their overlap, half on corpus text and half on text that the target wrote, because the
target's own text is what a drafter has to guess when it works.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from secondguess.errors import BadInputError
from secondguess.train.files import write_atomically
from secondguess.train.generate import RowGenerator
from secondguess.train.losses import hybrid_overlap_loss
from secondguess.train.model import Decoder, ModelShape
from secondguess.train.tokens import TokenStore, epoch_draw
from secondguess.train.trainer import LossFunction, Report

OWN_LENGTH = 256
TEMPERATURES = (0.0, 1.0, 0.7, 1.0)


def initial_drafter(shape: ModelShape, target: Decoder, seed: int) -> Decoder:
    """A fresh drafter whose tied embedding is the closest one of its width to the target's (by singular values).

    Inner products between tokens survive best, so both the input and the output side start from what the target knows.
    """
    drafter = Decoder(shape)
    drafter.initialise(seed)
    embedding = target.model.embed_tokens.weight.detach()
    if embedding.shape[0] != shape.vocab_size:
        raise BadInputError(
            f"the target has {embedding.shape[0]} tokens and the drafter {shape.vocab_size}; use one tokenizer"
        )
    left, values, _ = torch.linalg.svd(embedding, full_matrices=False)
    width = min(shape.hidden_size, len(values))
    with torch.no_grad():
        drafter.model.embed_tokens.weight[:, :width] = left[:, :width] * values[:width]
        # Rows of norm 1 on average: logits then start with the spread of a fresh model instead of a trained one.
        drafter.model.embed_tokens.weight /= drafter.model.embed_tokens.weight.norm(dim=1).mean()
    return drafter


def overlap_loss(target: Decoder) -> LossFunction:
    """The training loss against a frozen ``target``."""
    target.requires_grad_(False)

    def loss(drafter: Decoder, rows: Tensor) -> Tensor:
        with torch.no_grad():
            target_logits = target(rows[:, :-1])
        return hybrid_overlap_loss(target_logits, drafter(rows[:, :-1]))

    return loss


def write_own_text(
    target: Decoder, store: TokenStore, path: Path, num_rows: int, seed: int, report: Report
) -> None:
    """Let ``target`` continue the beginnings of training rows, at several temperatures, and store the rows."""
    rows_at_once = min(128, num_rows)
    generator = torch.Generator().manual_seed(seed)
    made: list[NDArray[numpy.uint16]] = []
    for turn in range(-(-num_rows // rows_at_once)):
        prompt_length = (12, 24, 48, 96)[turn // len(TEMPERATURES) % 4]
        temperature = TEMPERATURES[turn % len(TEMPERATURES)]
        prompts = store.batch(seed + 1, turn, rows_at_once, OWN_LENGTH, 0.7)[:, :prompt_length]
        new_tokens = OWN_LENGTH + 1 - prompt_length
        rows = RowGenerator(target, rows_at_once, OWN_LENGTH + 1).run(
            prompts, new_tokens, temperature, generator
        )
        made.append(rows.numpy().astype(numpy.uint16))
        if turn % 8 == 7:
            report(f"the target wrote {sum(len(rows) for rows in made)} of {num_rows} rows")
    path.parent.mkdir(parents=True, exist_ok=True)
    with write_atomically(path) as stream:
        numpy.save(stream, numpy.concatenate(made))


@dataclass(frozen=True)
class MixedStore:
    """A token store that gives a share of each batch from the target's own text."""

    corpus: TokenStore
    own: NDArray[numpy.uint16]
    own_share: float = 0.5

    @property
    def bytes_per_token(self) -> float:
        return self.corpus.bytes_per_token

    def batch(self, seed: int, step: int, rows: int, length: int, function_share: float = 0.5) -> Tensor:
        if length + 1 > self.own.shape[1]:
            raise BadInputError(
                f"the target's own text has rows of {self.own.shape[1]} tokens; use windows of at most one less"
            )
        num_own = round(rows * self.own_share)
        picks = [epoch_draw(seed, 3, step * num_own + row, len(self.own)) for row in range(num_own)]
        own = torch.from_numpy(self.own[picks, : length + 1].astype(numpy.int64))
        return torch.cat((self.corpus.batch(seed, step, rows - num_own, length, function_share), own))

    def held_out_batch(self, rows: int, length: int) -> Tensor:
        return self.corpus.held_out_batch(rows, length)
