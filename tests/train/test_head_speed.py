"""Measured speedup of a trained drafter over plain decoding."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from secondguess.heads.files import Provenance
from secondguess.train import head_speed
from secondguess.train.head_card import NOT_DRAFTED, card_text, displayed_figures
from secondguess.train.head_speed import measure_speed
from secondguess.train.training_data import TrainingText

TEXT = TrainingText(list(range(20, 60)), [False] * 8 + [True] * 32)


def test_a_drafter_that_drafts_has_a_speedup_over_the_same_target(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = []

    def load(model: str, drafter: str, **settings: str) -> object:
        loaded.append(drafter)
        return _load(model, drafter, controller="fixed:2", **settings)

    _load = head_speed.load
    monkeypatch.setattr(head_speed, "load", load)
    drafter = f"model:{tiny_checkpoint}"
    found = measure_speed(str(tiny_checkpoint), drafter, [TEXT], "float32", "cpu")
    assert loaded == [drafter], "the target was loaded more than once"
    assert found["acceptance_length"] > 1.5
    assert found["cost_ratio"] > 0
    ratio = found["tokens_per_second"] / found["plain_tokens_per_second"]
    assert found["speedup"] == pytest.approx(ratio, rel=0.05)


def test_a_drafter_whose_drafts_are_rejected_has_no_speedup(
    tiny_checkpoint: Path, tiny_draft_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head_speed, "load", partial(head_speed.load, controller="fixed:2"))
    drafter = f"model:{tiny_draft_checkpoint}"
    found = measure_speed(str(tiny_checkpoint), drafter, [TEXT], "float32", "cpu")
    assert (found["acceptance_length"], found["speedup"]) == (1.0, None)
    assert found["cost_ratio"] > 0


def test_a_drafter_in_backoff_has_no_speedup(tiny_checkpoint: Path) -> None:
    found = measure_speed(str(tiny_checkpoint), "none", [TEXT], "float32", "cpu")
    assert (found["acceptance_length"], found["cost_ratio"], found["speedup"]) == (1.0, None, None)
    card = card_text(Provenance("mtp", "tiny", "0" * 64, figures=found), "secondguess ...")
    assert f"| speedup | {NOT_DRAFTED} |" in card
    assert "draft step relative to" not in card


def test_a_card_names_the_temperature_of_generated_texts() -> None:
    answers = {"temperatures": [0.0, 0.7]}
    card = card_text(Provenance("mtp", "tiny", "0" * 64, {"as_is": False, "answers": answers}), "use")
    assert "on held-out text that the target wrote at temperatures 0, 0.7." in card
    card = card_text(Provenance("mtp", "tiny", "0" * 64, {"as_is": True, "answers": answers}), "use")
    assert "on held-out text." in card


def test_figures_of_a_drafter_that_cannot_draft_have_no_speed() -> None:
    found = {"held_out_acceptance": [0.5], "predicted_nodes": 1, "predicted_acceptance_length": 1.5}
    assert displayed_figures(found) == {
        "acceptance rate on held-out texts at temperature 1, by position in the draft": [0.5],
        "predicted tokens per target pass (tau) at temperature 1, draft length 1": 1.5,
    }
