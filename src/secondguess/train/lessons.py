"""The texts that a drafter learns from, as tokens on disk, and the order in which they are read.

A text knows which of its tokens count: those that the target wrote and that a drafter would have had to guess. Which
texts make up a batch is a function of the seed and the step alone, so a resumed run reads what the unbroken one would have.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from zipfile import BadZipFile

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from secondguess.errors import BadInputError, CheckpointError
from secondguess.train.files import write_atomically
from secondguess.train.tokens import epoch_draw

_ORDER = 7
"""Purpose of the draws that order the texts."""


@dataclass(frozen=True)
class TaughtText:
    """One text.

    Args:
        tokens: ids, at least two: there is something to guess from and something to guess.
        counts: per token, whether it is to be guessed.
    """

    tokens: list[int]
    counts: list[bool]

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.counts) or len(self.tokens) < 2:
            raise BadInputError(
                f"expected a text of at least 2 tokens with as many flags, got {len(self.tokens)} and {len(self.counts)}"
            )


def windows(tokens: Sequence[int], counts: Sequence[bool], length: int) -> Iterator[TaughtText]:
    """A long text in pieces of at most `length` tokens; pieces without anything to guess are left out."""
    for start in range(0, len(tokens), length):
        piece, flags = list(tokens[start : start + length]), list(counts[start : start + length])
        if any(flags[1:]):
            yield TaughtText(piece, flags)


def write_texts(path: Path, texts: Sequence[TaughtText]) -> None:
    """Store texts in one file, which appears whole or not at all."""
    arrays = {
        "tokens": numpy.array([token for text in texts for token in text.tokens], numpy.int32),
        "counts": numpy.array([count for text in texts for count in text.counts], numpy.bool_),
        "lengths": numpy.array([len(text.tokens) for text in texts], numpy.int64),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    with write_atomically(path) as stream:
        numpy.savez(stream, **arrays)  # type: ignore[arg-type]


def read_texts(path: Path) -> list[TaughtText]:
    """What `write_texts` stored.

    Raises:
        CheckpointError: something else lies there.
    """
    try:
        with path.open("rb") as stream, numpy.load(stream) as arrays:
            tokens, counts, lengths = (arrays[name].tolist() for name in ("tokens", "counts", "lengths"))
    except (OSError, ValueError, KeyError, EOFError, BadZipFile) as error:
        raise CheckpointError(
            f"expected stored texts in {path}, got: {error}; delete the file to write it anew"
        ) from error
    ends = numpy.cumsum(lengths).tolist()
    return [
        TaughtText(tokens[end - length : end], counts[end - length : end])
        for length, end in zip(lengths, ends, strict=True)
    ]


@dataclass(frozen=True)
class Texts:
    """What is learnt, and what is held out to see how well.

    Args:
        training, held_out: at least one each.
    """

    training: Sequence[TaughtText]
    held_out: Sequence[TaughtText]

    @classmethod
    def split(cls, texts: Sequence[TaughtText], most_held_out: int = 64) -> Texts:
        """Hold out every tenth text, or every so-manieth where that would be more than `most_held_out`.

        Raises:
            BadInputError: fewer than two texts.
        """
        if len(texts) < 2:
            raise BadInputError(
                f"expected at least 2 texts, one of them held out, got {len(texts)}; give more data"
            )
        step = max(min(10, len(texts)), -(-len(texts) // most_held_out))
        held_out = [index % step == step - 1 for index in range(len(texts))]
        return cls(
            [text for text, out in zip(texts, held_out, strict=True) if not out],
            [text for text, out in zip(texts, held_out, strict=True) if out],
        )

    def token_counts(self, vocab_size: int) -> Tensor:
        """`[vocab]` int64: how often each token is to be guessed in the training texts."""
        counted = [
            token
            for text in self.training
            for token, counts in zip(text.tokens, text.counts, strict=True)
            if counts
        ]
        return torch.bincount(torch.tensor(counted, dtype=torch.long), minlength=vocab_size)


@dataclass(frozen=True)
class Batch:
    """Texts beside each other.

    Args:
        indices: `[row]`, which of the texts they are.
        tokens: `[row, position]` int64, padded with 0 at the end.
        counts: `[row, position]` bool; padding does not count, nor does a first token, which nothing precedes.
        lengths: `[row]`, without padding.
    """

    indices: list[int]
    tokens: Tensor
    counts: Tensor
    lengths: list[int]

    @classmethod
    def of(cls, members: Sequence[tuple[int, TaughtText]]) -> Batch:
        lengths = [len(text.tokens) for _, text in members]
        tokens: NDArray[numpy.int64] = numpy.zeros((len(members), max(lengths)), numpy.int64)
        counts = numpy.zeros(tokens.shape, numpy.bool_)
        for row, (_, text) in enumerate(members):
            tokens[row, : lengths[row]] = text.tokens
            counts[row, 1 : lengths[row]] = text.counts[1:]
        indices = [index for index, _ in members]
        return cls(indices, torch.from_numpy(tokens), torch.from_numpy(counts), lengths)

    @property
    def num_counted(self) -> int:
        return int(self.counts.sum())


class _Numbered(Dataset[tuple[int, TaughtText]]):
    def __init__(self, texts: Sequence[TaughtText]) -> None:
        self.texts = texts

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> tuple[int, TaughtText]:
        return index, self.texts[index]


class SeededBatches(Sampler[list[int]]):
    """Endless batches of indices, every text once per epoch, from any step on.

    Args:
        num_texts: to draw from.
        batch_size: texts per batch.
        seed: of the order.
        first_step: where to begin.
    """

    def __init__(self, num_texts: int, batch_size: int, seed: int, first_step: int = 0) -> None:
        self.num_texts, self.batch_size, self.seed, self.first_step = num_texts, batch_size, seed, first_step

    def __iter__(self) -> Iterator[list[int]]:
        step = self.first_step
        while True:
            places = range(step * self.batch_size, (step + 1) * self.batch_size)
            yield [epoch_draw(self.seed, _ORDER, place, self.num_texts) for place in places]
            step += 1


def training_batches(
    texts: Sequence[TaughtText], batch_size: int, seed: int, first_step: int = 0
) -> DataLoader[Batch]:
    """Batches without end, those that follow step `first_step`."""
    sampler = SeededBatches(len(texts), batch_size, seed, first_step)
    return DataLoader(_Numbered(texts), batch_sampler=sampler, collate_fn=Batch.of)  # type: ignore[arg-type]


def batches_in_order(texts: Sequence[TaughtText], batch_size: int) -> Iterator[Batch]:
    """All texts once."""
    numbered = list(enumerate(texts))
    return map(Batch.of, (numbered[at : at + batch_size] for at in range(0, len(texts), batch_size)))
