"""Training of the target: exact resumption, learning, and checkpoints that are refused."""

from __future__ import annotations

from dataclasses import replace
from math import log
from pathlib import Path

import pytest
import torch

from builtin_pair import target
from builtin_pair.target import TargetShape, TargetTrainer, bits_per_byte, fresh_target, rate_at
from builtin_pair.tokens import TokenStore
from secondguess.errors import BadInputError, CheckpointError
from secondguess.train.run_folder import Budget
from secondguess.train.training_data import shuffled_index

SHAPE = TargetShape(2, 32, 2, 1, 64, 512)


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"WINDOW": 16, "LAST_WINDOW": 32, "STEP_TOKENS": 128, "MICRO_TOKENS": 64, "WARMUP_STEPS": 2}
    for name, value in sizes.items():
        monkeypatch.setattr(target, name, value)


def trainer(store: TokenStore, checkpoint: Path, steps: int = 8, shape: TargetShape = SHAPE) -> TargetTrainer:
    model, budget = fresh_target(shape, 0, seed=1), Budget(steps=steps)
    return TargetTrainer(model, store, budget, checkpoint, seed=1, report=lambda line: None, compiled=False)


def test_an_interrupted_run_ends_with_the_weights_of_an_uninterrupted_one(
    store: TokenStore, tmp_path: Path
) -> None:
    whole = trainer(store, tmp_path / "whole.pt")
    whole.run()
    cut = trainer(store, tmp_path / "cut.pt")
    for _ in range(5):
        cut._take_step()
    cut.save()
    cut._take_step()  # lost: its checkpoint was never written
    again = trainer(store, tmp_path / "cut.pt")
    assert again.step == 5
    again.run()
    assert (again.step, again.tokens) == (whole.step, whole.tokens)
    pairs = zip(whole.model.state_dict().values(), again.model.state_dict().values(), strict=True)
    assert all(torch.equal(first, second) for first, second in pairs)


def test_training_lowers_bits_per_byte(
    store: TokenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target, "STEP_TOKENS", 512)
    run = trainer(store, tmp_path / "run.pt", steps=25)
    before = bits_per_byte(run.model, store, rows=8, length=64)
    run.run()
    after = bits_per_byte(run.model, store, rows=8, length=64)
    assert after < before - 1.0 / log(2) / store.bytes_per_token


def test_the_learning_rate_warms_up_stays_and_decays_to_zero() -> None:
    assert [rate_at(0.0, 0), rate_at(0.3, 100), rate_at(0.65, 100)] == [0.5, 1.0, 1.0]
    assert rate_at(0.825, 100) == pytest.approx(0.5)
    assert rate_at(1.0, 100) == 0.0


def test_layers_of_a_fresh_target_are_the_identity() -> None:
    tokens = torch.arange(12)[None]
    deep, flat = (fresh_target(replace(SHAPE, num_hidden_layers=count), 0, 3) for count in (4, 1))
    flat.model.embed_tokens.load_state_dict(deep.model.embed_tokens.state_dict())
    assert torch.equal(deep(tokens).logits, flat(tokens).logits)


@pytest.mark.parametrize("content", [b"", b"not a checkpoint"], ids=["empty", "foreign"])
def test_a_broken_checkpoint_is_refused(store: TokenStore, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "run.pt").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"run\.pt"):
        trainer(store, tmp_path / "run.pt")


def test_a_checkpoint_of_another_shape_is_refused(store: TokenStore, tmp_path: Path) -> None:
    trainer(store, tmp_path / "run.pt").save()
    with pytest.raises(CheckpointError, match="a checkpoint of this model"):
        trainer(store, tmp_path / "run.pt", shape=replace(SHAPE, intermediate_size=32))


def test_a_budget_of_minutes_or_steps_ends_with_the_first_that_is_spent() -> None:
    budget = Budget(minutes=1, steps=100)
    assert budget.progress(30, 10) == 0.5
    assert budget.progress(6, 70) == 0.7
    assert budget.progress(90, 10) == 1.0
    with pytest.raises(BadInputError, match="minutes or steps"):
        Budget()
    with pytest.raises(BadInputError, match="positive"):
        Budget(minutes=-1)


def test_rows_depend_only_on_the_step_and_an_epoch_visits_every_row(store: TokenStore) -> None:
    assert torch.equal(store.batch(1, 5, 4, 32), store.batch(1, 5, 4, 32))
    assert not torch.equal(store.batch(1, 5, 4, 32), store.batch(1, 6, 4, 32))
    for size in (1, 2, 12, 97):
        assert sorted(shuffled_index(3, 1, index, size) for index in range(size)) == list(range(size))
        assert sorted(shuffled_index(3, 1, index + size, size) for index in range(size)) == list(range(size))
