"""The controller `learned`, and the file of its predictor."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from secondguess.controllers import make_controller
from secondguess.controllers.draft_probs import DraftProbs
from secondguess.controllers.learned import LearnedController, LearnedOptions
from secondguess.controllers.predictor import (
    FEATURES,
    HIGHEST_TEMPERATURE,
    KIND,
    MAX_FILE_BYTES,
    SCHEMA,
    PathFeatures,
    Predictor,
)
from secondguess.core import Candidate, Plan, Row
from secondguess.errors import BadInputError
from secondguess.sampling import SamplingParams

LOGIT = FEATURES.index("logit_confidence")


def trusting(scales: Sequence[float] = (1.0,), shifts: Sequence[float] = (0.0,)) -> dict[str, Any]:
    """A predictor whose logit is that of the confidence: silu(z) - silu(-z) = z, passed on by the second layer."""
    signs = [[sign * float(name == FEATURES[LOGIT]) for name in FEATURES] for sign in (1, -1)]
    return {
        "kind": KIND,
        "schema": SCHEMA,
        "provenance": {"made": "by hand"},
        "features": list(FEATURES),
        "calibration": {"scales": list(scales), "shifts": list(shifts)},
        "layers": [
            {"biases": [0.0, 0.0], "weights": signs},
            {"biases": [0.0, 0.0], "weights": [[0.0, 0.0], [0.0, 0.0]]},
            {"biases": [0.0], "weights": [[1.0, -1.0]]},
        ],
    }


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str | dict[str, Any]], Path]:
    def write(content: str | dict[str, Any]) -> Path:
        path = tmp_path / "predictor.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return path

    return write


def probs_with(*confidences: float) -> DraftProbs:
    """Return distributions over ten tokens with the given largest probability."""
    draft_probs = [[confidence, *[(1 - confidence) / 9] * 9] for confidence in confidences]
    return DraftProbs(torch.tensor(draft_probs, dtype=torch.float64).log())


def rows_of(num_rows: int, temperature: float = 0.0, coupled: bool = False) -> list[Row]:
    params = SamplingParams(max_tokens=20, temperature=temperature)
    return [Row([1], params, seed=index, coupled=coupled) for index in range(num_rows)]


def nodes_until_stop(controller: LearnedController, confidences: Sequence[float]) -> int:
    for depth, confidence in enumerate(confidences):
        if not controller.keep_drafting(rows_of(1), probs_with(confidence), depth)[0]:
            return depth + 1
    return len(confidences)


@pytest.mark.parametrize(
    ("confidences", "threshold", "expected"),
    [
        ([0.9] * 8, 0.5, 7),  # 1 - 0.9 ** 6 = 0.47, 1 - 0.9 ** 7 = 0.52
        ([0.9] * 8, 0.3, 4),  # 1 - 0.9 ** 3 = 0.27, 1 - 0.9 ** 4 = 0.34
        ([0.3] * 8, 0.3, 1),  # the node that was in doubt stays in the draft
        ([0.9, 0.9, 0.5, 0.9], 0.4, 3),
        ([0.3] * 8, 1.0, 8),
        ([0.9] * 8, 0.0, 1),
    ],
)
def test_learned_stops_after_the_node_that_makes_a_rejection_likely(
    write: Callable[[Any], Path], confidences: list[float], threshold: float, expected: int
) -> None:
    path = write(trusting())
    controller = LearnedController(LearnedOptions(threshold=threshold), str(path))
    # Twice: a round begins anew.
    assert [nodes_until_stop(controller, confidences) for _ in range(2)] == [expected, expected]


def test_learned_continues_at_exactly_the_threshold(write: Callable[[Any], Path]) -> None:
    deterministic = trusting((1.0,), (50.0,))
    controller = LearnedController(LearnedOptions(threshold=0.0), str(write(deterministic)))
    assert controller.keep_drafting(rows_of(1), probs_with(0.9), 0) == [True]


def test_each_row_has_its_own_product(write: Callable[[Any], Path]) -> None:
    controller = LearnedController(LearnedOptions(threshold=0.4), str(write(trusting())))
    rows = rows_of(3)
    assert controller.keep_drafting(rows, probs_with(0.9, 0.7, 0.4), 0) == [True, True, False]
    # The third row has stopped; what stands in its line must not matter to the others.
    assert controller.keep_drafting(rows, probs_with(0.9, 0.7, 1.0), 1)[:2] == [True, False]
    assert controller.keep_drafting(rows, probs_with(0.75, 1.0, 0.1), 2)[:1] == [True]


def test_the_calibration_is_that_of_the_depth(write: Callable[[Any], Path]) -> None:
    # From the second depth on every node counts as lost.
    doubting = trusting((1.0, 1.0), (0.0, -50.0))
    controller = LearnedController(LearnedOptions(threshold=0.9), str(write(doubting)))
    assert nodes_until_stop(controller, [0.9] * 8) == 2
    predictor = Predictor(doubting)
    features = PathFeatures().level_features(rows_of(1), probs_with(0.9), 0)
    assert predictor.acceptance_probs(features, 0) == pytest.approx([0.9])
    assert predictor.acceptance_probs(features, 1)[0] < 1e-12
    assert predictor.acceptance_probs(features, 5) == predictor.acceptance_probs(features, 1)


def test_the_length_is_the_budget(write: Callable[[Any], Path]) -> None:
    controller = LearnedController(LearnedOptions(length=6), str(write(trusting())))
    assert controller.plan(rows_of(2), [(Candidate(),)] * 2) == [Plan(0, 6)] * 2


def test_decisions_do_not_depend_on_token_ids() -> None:
    controller = LearnedController(LearnedOptions(length=6, threshold=0.5))
    draft_probs = torch.softmax(torch.randn(12, 3, 10, generator=torch.Generator().manual_seed(0)) * 2, -1)
    rows = rows_of(3, temperature=1.0)
    plain = [
        controller.keep_drafting(rows, DraftProbs(dist.log()), depth)
        for depth, dist in enumerate(draft_probs)
    ]
    renamed = [
        controller.keep_drafting(rows, DraftProbs(dist[:, torch.randperm(10)].log()), depth)
        for depth, dist in enumerate(draft_probs)
    ]
    assert plain == renamed


def test_features_describe_the_path() -> None:
    path, confidences = PathFeatures(), (0.9, 0.5, 1.0, 0.7)
    rows = rows_of(1, temperature=0.7, coupled=True)
    levels = [
        path.level_features(rows, probs_with(confidence), depth)
        for depth, confidence in enumerate(confidences)
    ]
    lines = [dict(zip(FEATURES, line, strict=True)) for (line,) in levels]
    assert numpy.isfinite(levels).all()
    assert [line["log_survival"] for line in lines[:3]] == pytest.approx(numpy.log([1, 0.9, 0.45]))
    assert [line["log_depth"] for line in lines] == pytest.approx(numpy.log([1, 2, 3, 4]))
    half = lines[1]
    assert half["log_confidence"] == pytest.approx(numpy.log(0.5))
    assert half["logit_confidence"] == pytest.approx(0, abs=1e-12)
    assert half["log_runner_up"] == pytest.approx(numpy.log(0.5 / 9))
    assert half["entropy"] == pytest.approx(0.5 * numpy.log(2) + 0.5 * numpy.log(18))
    assert (half["temperature"], half["coupled"]) == (0.7, 1.0)
    # Depth 0 begins a new draft.
    assert path.level_features(rows, probs_with(confidences[0]), 0) == levels[0]


def test_temperatures_above_those_of_training_are_alike() -> None:
    def features(temperature: float) -> list[list[float]]:
        return PathFeatures().level_features(rows_of(1, temperature), probs_with(0.5), 0)

    assert features(5.0) == features(HIGHEST_TEMPERATURE) != features(1.0)


def test_coupling_is_not_a_feature_at_temperature_0() -> None:
    def features(temperature: float, coupled: bool) -> list[list[float]]:
        return PathFeatures().level_features(rows_of(1, temperature, coupled), probs_with(0.5), 0)

    assert features(0.0, True) == features(0.0, False)
    assert features(1.0, True) != features(1.0, False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("width", [3, 16, 40])
def test_draft_distributions_summarise_the_softmax_of_logits(width: int, dtype: torch.dtype) -> None:
    logits = 5 * torch.randn(6, width, dtype=dtype, generator=torch.Generator().manual_seed(1))
    logits[4] = torch.nn.functional.one_hot(torch.tensor(1), width).log()
    logits[5] = -1000.0
    wider = torch.nn.functional.pad(logits, (0, 5), value=100.0)[
        :, :width
    ]  # rows that are not contiguous in memory
    draft_probs = logits.softmax(-1)
    largest = draft_probs.topk(2).values
    for summary in (DraftProbs(logits), DraftProbs(wider)):
        assert summary.confidences == pytest.approx(largest[:, 0].tolist(), rel=1e-5)
        assert summary.runners_up == pytest.approx(largest[:, 1].tolist(), rel=1e-5)
        assert summary.entropies == pytest.approx(torch.special.entr(draft_probs).sum(-1).tolist(), abs=1e-5)


def test_the_builtin_predictor_is_complete_and_names_its_source() -> None:
    controller = make_controller("learned")
    assert controller.name == "learned,length=8,threshold=0.3"
    assert make_controller(controller.name).name == controller.name
    from secondguess.builtin import acceptance_path

    predictor = Predictor.read(acceptance_path())
    provenance = predictor.provenance
    errors = provenance["held_out_calibration_error"]
    assert isinstance(errors, dict)
    assert errors["calibrated"] < errors["weight_undone"] < errors["as_trained"]
    assert provenance["workload"] == "stdlib"


def test_the_builtin_predictor_has_its_recorded_predictions() -> None:
    from secondguess.builtin import acceptance_path

    predictor = Predictor.read(acceptance_path())
    features = [[-0.1, 2.25, -3.0, 0.4, 0.0, 0.0, 0.0, 0.0], [-1.2, -0.84, -1.5, 2.5, 1.1, -0.7, 1.0, 1.0]]
    expected = {
        0: [0.9468724495374009, 0.5480883504491036],
        2: [0.9654966885064402, 0.5489717953430588],
        20: [0.9858840383780505, 0.5308600451981916],
    }
    for depth, acceptance_probs in expected.items():
        assert predictor.acceptance_probs(features, depth) == pytest.approx(acceptance_probs, abs=1e-12)


def test_the_builtin_predictor_belongs_to_the_builtin_pair() -> None:
    from secondguess.builtin import acceptance_path, builtin_paths
    from secondguess.workloads.provenance import hash_weights

    provenance, paths = Predictor.read(acceptance_path()).provenance, builtin_paths()
    assert provenance["model_sha256"] == hash_weights(paths.target)
    assert provenance["drafter_sha256"] == hash_weights(paths.drafter)


def test_a_saved_predictor_is_loaded_unchanged(write: Callable[[Any], Path]) -> None:
    record = trusting((1.5, 0.5), (0.25, -1.0))
    path = write(Predictor(record).to_json())
    assert Predictor.read(path).record == record
    name = f"learned:{path},length=5,threshold=0.45"
    assert make_controller(name).name == name


def changed(**entries: object) -> dict[str, Any]:
    return trusting() | entries


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "it is broken"),
        ("{", "it is broken"),
        ("[" * 100_000, "it is broken"),
        ("[]", "it is broken"),
        ('{"weights": [1, 2]}', "it is broken"),
        (changed(kind="a recipe"), "expected kind 'secondguess acceptance predictor', got 'a recipe'"),
        (changed(schema=2), "expected schema 1, got 2"),
        (changed(features=[*FEATURES, "token"]), r"expected features \['log_confidence'"),
        (changed(layers=[]), "it is broken"),
        (changed(layers=[{"biases": [0.0], "weights": [[1.0]]}] * 3), r"numbers of shape \(1, 8\)"),
        (changed(layers=[{"biases": [0.0, 1.0], "weights": [[1.0] * 8]}] * 3), r"shape \(2, 8\)"),
        (changed(layers=[{"biases": [0.0, 1.0], "weights": [[1.0], [1.0, 2.0]]}] * 3), "it is broken"),
        (changed(layers=[{"biases": ["x"], "weights": [[1.0] * 8]}] * 3), "finite numbers of shape"),
        (changed(layers=[{"biases": [float("nan")], "weights": [[1.0] * 8]}] * 3), "finite numbers of shape"),
        (changed(calibration={"scales": [1.0]}), "it is broken"),
        (changed(calibration={"scales": [], "shifts": []}), r"numbers of shape \(1,\)"),
        (changed(calibration={"scales": [1.0, 1.0], "shifts": [0.0]}), r"numbers of shape \(2,\)"),
        (changed(calibration={"scales": [0], "shifts": [0]}), "positive scales"),
        (changed(calibration={"scales": [True], "shifts": [0]}), "finite numbers of shape"),
        (changed(provenance=None), "it is broken"),
        (" " * (MAX_FILE_BYTES + 1), "at most"),
    ],
)
def test_broken_and_foreign_files_are_refused(
    write: Callable[[Any], Path], content: str | dict[str, Any], words: str
) -> None:
    path = write(content)
    with pytest.raises(BadInputError, match=words) as refusal:
        make_controller(f"learned:{path}")
    assert str(path) in str(refusal.value)
    assert "builtin_pair acceptance" in str(refusal.value)


def test_a_record_without_an_entry_is_refused(write: Callable[[Any], Path]) -> None:
    for entry in trusting():
        record = trusting()
        del record[entry]
        with pytest.raises(BadInputError, match=f"expected a predictor file, got .*{entry!r}"):
            make_controller(f"learned:{write(record)}")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("learned:nowhere.json", "got nowhere.json: No such file"),
        ("learned:12", "the option length=K"),
        ("learned:", "Is a directory"),
        ("learned,length=65", "between 0 and 64"),
        ("learned,length=2.5", "a whole number"),
        ("learned,threshold=1.5", "between 0 and 1, got 1.5"),
        ("learned,threshold=nan", "between 0 and 1"),
        ("learned,depth=3", "one of the options length, threshold"),
    ],
)
def test_invalid_names_of_learned_are_refused(text: str, words: str) -> None:
    with pytest.raises(BadInputError, match=words):
        make_controller(text)
