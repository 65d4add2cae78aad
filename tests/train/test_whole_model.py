"""Early exits of a whole model: distributions, weights, and layers skipped in training."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from secondguess.checkpoint.checkpoint import Checkpoint
from secondguess.errors import UnsupportedModelError
from secondguess.train.capture import LiveCapture, frozen_float32_embedding_and_head
from secondguess.train.losses import objective
from secondguess.train.training_data import Batch, TrainingText
from secondguess.train.whole_model import WholeModel, decoder_layers, exit_weights, read_trainable, skip_rates

BATCH = Batch.of([(0, TrainingText([5, 6, 7, 8], [True] * 4)), (1, TrainingText([9, 3], [True] * 2))])


@pytest.fixture
def whole(tiny_checkpoint: Path) -> WholeModel:
    return WholeModel(read_trainable(tiny_checkpoint), 0.5, torch.float32)


def learn(whole: WholeModel, tiny_checkpoint: Path):
    target = Checkpoint.resolve(tiny_checkpoint, dtype="float32").load().runtime
    training_batch = LiveCapture(target, (1,)).training_batch(BATCH)
    return (
        training_batch,
        frozen_float32_embedding_and_head(target),
        whole.learn(training_batch, frozen_float32_embedding_and_head(target), objective("kl")),
    )


def test_an_exit_uses_the_models_norm_and_head(whole: WholeModel, tiny_checkpoint: Path) -> None:
    training_batch, embedding_and_head, marks = learn(whole.eval(), tiny_checkpoint)
    before = embedding_and_head.unembed(training_batch.hidden[-1])
    early = embedding_and_head.unembed(embedding_and_head.normalise(training_batch.hidden[1]))
    counted = training_batch.counts[:, 1:]
    expected = objective("kl")(before, early)[:, :-1][counted].mean()
    torch.testing.assert_close(marks.losses[0], expected)
    # Untouched, the whole model is what it was.
    assert marks.losses[-1].item() == pytest.approx(0.0, abs=1e-5)
    assert marks.accepted[-1].item() == pytest.approx(1.0, abs=1e-4)
    assert 0 < marks.accepted[0] < 1


def test_later_layers_are_skipped_more_often() -> None:
    assert skip_rates(5, 0.2) == sorted(skip_rates(5, 0.2))
    assert skip_rates(5, 0.2)[0] == 0.0
    assert skip_rates(5, 0.2)[-1] == pytest.approx(0.2)
    assert skip_rates(1, 0.2) == [0.0]


def test_layers_are_skipped_only_in_training(whole: WholeModel, tiny_checkpoint: Path) -> None:
    losses = {learn(whole.eval(), tiny_checkpoint)[2].losses[-1].item() for _ in range(3)}
    assert max(losses) < 1e-5
    torch.manual_seed(0)
    exits = []
    for _ in range(12):
        marks = learn(whole.train(), tiny_checkpoint)[2]
        exits.append(marks.losses[-1].item())
    # Skipped for both texts, for one, and for none.
    assert min(exits) < 1e-5
    assert len({round(each, 4) for each in exits}) >= 3


def test_exit_weights_are_those_of_the_paper() -> None:
    # e(l) = 0 + .. + l before the last, L - 1 + (0 + .. + (L - 2)) for the last; L = 4, normalised by 1 + 3 + 6.
    assert exit_weights(4, 1.0) == pytest.approx([0.0, 0.1, 0.3, 0.6])
    assert exit_weights(4, 0.0) == [0.0, 0.0, 0.0, 1.0]
    assert exit_weights(1, 1.0) == [1.0]


def test_gradients_reach_every_layer(whole: WholeModel, tiny_checkpoint: Path) -> None:
    marks = learn(whole.eval(), tiny_checkpoint)[2]
    marks.losses[0].backward()
    first, second = decoder_layers(whole.model)
    assert any(weight.grad is not None and weight.grad.any() for weight in first.parameters())
    assert all(weight.grad is None for weight in second.parameters())


def test_a_model_without_a_list_of_layers_is_refused(whole: WholeModel) -> None:
    whole.model.config.num_hidden_layers = 7
    with pytest.raises(UnsupportedModelError, match="list of 7 decoder layers"):
        decoder_layers(whole.model)
