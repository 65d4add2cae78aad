"""Texts on disk and the order in which they are read."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path

import pytest

from secondguess.errors import BadInputError, CheckpointError
from secondguess.train.training_data import (
    Batch,
    TextSplit,
    TrainingText,
    read_texts,
    training_batches,
    windows,
    write_texts,
)

TEXTS = [TrainingText([5, 6, 7], [False, False, True]), TrainingText([8, 9], [False, True])]


def test_stored_texts_are_read_unchanged(tmp_path: Path) -> None:
    write_texts(tmp_path / "deep" / "texts.npz", TEXTS)
    assert read_texts(tmp_path / "deep" / "texts.npz") == TEXTS


def test_a_broken_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "texts.npz").write_bytes(b"PK\x03\x04 half a file")
    with pytest.raises(CheckpointError, match=r"texts\.npz"):
        read_texts(tmp_path / "texts.npz")


def test_long_texts_are_split_and_texts_without_counted_tokens_left_out() -> None:
    counts = [True, True, False, False, False, True, False]
    pieces = [piece.tokens for piece in windows(list(range(7)), counts, 2)]
    # 2,3 has no counted token, 4,5 has; the first token of a piece has no context.
    assert pieces == [[0, 1], [4, 5]]


def test_padding_and_first_tokens_do_not_count() -> None:
    batch = Batch.from_texts([(0, TEXTS[0]), (1, TrainingText([8, 9], [True, True]))])
    assert batch.tokens.tolist() == [[5, 6, 7], [8, 9, 0]]
    assert batch.counts.tolist() == [[False, False, True], [False, True, False]]
    assert batch.num_counted == 2


def drawn(num_texts: int, batch_size: int, seed: int, first_step: int = 0) -> Iterator[int]:
    texts = [TrainingText([number, number], [False, True]) for number in range(num_texts)]
    batches = training_batches(texts, batch_size, seed, first_step)
    return chain.from_iterable(batch.indices for batch in batches)


def test_every_epoch_has_every_text_once_in_another_order() -> None:
    first = list(islice(drawn(12, 4, seed=3), 24))
    assert sorted(first[:12]) == sorted(first[12:]) == list(range(12))
    assert first[:12] != first[12:]
    assert first != list(islice(drawn(12, 4, seed=4), 24))


def test_batches_depend_only_on_the_step() -> None:
    whole, later = drawn(10, 3, seed=1), drawn(10, 3, seed=1, first_step=4)
    assert list(islice(whole, 27))[12:] == list(islice(later, 15))


@pytest.mark.parametrize(("num_texts", "num_held_out"), [(2, 1), (10, 1), (100, 10), (10_000, 64)])
def test_some_texts_are_held_out(num_texts: int, num_held_out: int) -> None:
    texts = TextSplit.split([TrainingText([number, 1], [False, True]) for number in range(num_texts)])
    assert abs(len(texts.held_out) - num_held_out) <= 1
    assert len(texts.training) + len(texts.held_out) == num_texts
    assert not {text.tokens[0] for text in texts.training} & {text.tokens[0] for text in texts.held_out}


def test_texts_of_every_temperature_are_held_out() -> None:
    """With temperatures in turn, texts at distances of a multiple of 3 would have the same."""
    texts = [TrainingText([number % 3, 1], [False, True]) for number in range(3840)]
    held_out = [text.tokens[0] for text in TextSplit.split(texts).held_out]
    assert all(held_out.count(temperature) > 10 for temperature in range(3))


def test_a_single_text_is_refused() -> None:
    with pytest.raises(BadInputError, match="at least 2 texts"):
        TextSplit.split(TEXTS[:1])


def test_counted_tokens_are_reported() -> None:
    assert TextSplit(TEXTS, TEXTS).token_counts(10).tolist() == [0, 0, 0, 0, 0, 0, 0, 1, 0, 1]
