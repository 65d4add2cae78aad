"""Training of a draft model: initial embeddings, and counted positions."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from secondguess.checkpoint.loader import load_model
from secondguess.checkpoint.plan import Checkpoint
from secondguess.errors import BadInputError
from secondguess.heads.base import TargetModel
from secondguess.heads.medusa import MedusaHead
from secondguess.train.capture import LiveCapture, frozen_float32_embedding_and_head
from secondguess.train.draft_model import DraftModel, project_embeddings
from secondguess.train.losses import objective
from secondguess.train.training_data import Batch, TrainingText

BATCH = Batch.from_texts(
    [
        (0, TrainingText([5, 6, 7, 8], [False, False, True, True])),
        (1, TrainingText([9, 3], [False, True])),
    ]
)
CONFIG = {"max_position_embeddings": 256, "eos_token_id": 0, "dtype": "float32"}


@pytest.fixture(scope="module")
def runtime(tiny_checkpoint: Path):
    return load_model(Checkpoint.resolve(tiny_checkpoint, dtype="float32")).runtime


@pytest.fixture(scope="module")
def target(runtime):
    return TargetModel.from_runtime(runtime, frozen_float32_embedding_and_head(runtime))


def test_inner_products_survive_another_width() -> None:
    torch.manual_seed(0)
    # Rank 4 fits into 6 columns whole, and into 4.
    table = torch.randn(20, 4) @ torch.randn(4, 10)
    wanted = table @ table.T
    for width in (4, 6, 12):
        found = project_embeddings(table, width)
        assert found.shape == (20, width)
        assert found.norm(dim=1).mean() == pytest.approx(1.0)
        products = found @ found.T
        torch.testing.assert_close(products / products[0, 0], wanted / wanted[0, 0], rtol=1e-3, atol=1e-3)


def test_training_learns_the_targets_distribution_at_counted_positions(runtime, target) -> None:
    torch.manual_seed(0)
    model = DraftModel.fresh(CONFIG, target, num_layers=1, width=64)
    training_batch = LiveCapture(runtime, ()).training_batch(BATCH)
    depth_losses = model.learn(training_batch, target, objective("kl"))
    target_probs = target.unembed(training_batch.hidden[-1]).softmax(-1)
    draft_logits = model.model(training_batch.tokens).logits
    # The places before the tokens that count: 1 and 2 of the first text, 0 of the second.
    each, _ = objective("kl")(target_probs, draft_logits)
    torch.testing.assert_close(depth_losses.losses[0], (each[0, 1] + each[0, 2] + each[1, 0]) / 3)
    assert 0 < depth_losses.accepted[0] < 1
    assert not depth_losses.accepted[0].requires_grad


def test_later_tokens_do_not_affect_a_position(target) -> None:
    model = DraftModel.fresh(CONFIG, target, num_layers=2, width=64)
    first, second = (model.model(torch.tensor([[5, 6, last]])).logits for last in (7, 8))
    torch.testing.assert_close(first[:, :2], second[:, :2])


def test_the_same_seed_makes_the_same_model(target) -> None:
    first, second, other = (
        DraftModel.fresh(CONFIG, target, num_layers=1, width=0, seed=seed).state_dict() for seed in (4, 4, 5)
    )
    assert all(torch.equal(weight, second[name]) for name, weight in first.items())
    assert any(not torch.equal(weight, other[name]) for name, weight in first.items())


def test_a_width_that_heads_do_not_divide_is_refused(target) -> None:
    with pytest.raises(BadInputError, match="multiple of 64"):
        DraftModel.fresh(CONFIG, target, num_layers=1, width=100)


def test_saved_weights_have_the_permissions_of_other_files(target, tmp_path: Path) -> None:
    DraftModel.fresh(CONFIG, target, num_layers=1, width=64).save(tmp_path / "model")
    MedusaHead.fresh(target).save(tmp_path / "head")
    for folder in ("model", "head"):
        modes = {path.stat().st_mode for path in (tmp_path / folder).iterdir()}
        assert len(modes) == 1
