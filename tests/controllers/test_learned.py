"""The controller that stops where a small network expects a rejection, and the file the network comes from."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path

import numpy
import pytest
import torch

from secondguess.bench.traces import NodeProbs
from secondguess.controllers import make_controller
from secondguess.controllers.acceptance_features import FEATURES, features_of_path, node_features
from secondguess.controllers.draft_probs import DraftProbs
from secondguess.controllers.learned import LearnedController, LearnedOptions
from secondguess.controllers.predictor import MAX_FILE_BYTES, Calibration, Layer, Predictor, PredictorNetwork
from secondguess.core import Candidate, Plan, Row
from secondguess.errors import BadInputError
from secondguess.sampling import SamplingParams

LOGIT = FEATURES.index("logit_confidence")


UNCALIBRATED = Calibration((1.0,), (0.0,))


def trusting(calibration: Calibration = UNCALIBRATED, width: int = 2) -> Predictor:
    """A predictor whose logit is that of the confidence: silu(z) - silu(-z) = z, passed on by the second layer."""
    first = numpy.zeros((width, len(FEATURES)))
    first[0, LOGIT], first[1, LOGIT] = 1.0, -1.0
    last = numpy.zeros((1, width))
    last[0, :2] = 1.0, -1.0
    nothing = numpy.zeros(width)
    layers = (
        Layer.of(first, nothing),
        Layer.of(numpy.zeros((width, width)), nothing),
        Layer.of(last, nothing[:1]),
    )
    return Predictor(layers, calibration, {"made": "by hand"})


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], Path]:
    def write(content: str) -> Path:
        path = tmp_path / "predictor.json"
        path.write_text(content)
        return path

    return write


def probs_with(*confidences: float) -> DraftProbs:
    """Laws over ten tokens whose largest probability is the one given."""
    draft_probs = [[confidence, *[(1 - confidence) / 9] * 9] for confidence in confidences]
    return DraftProbs(torch.tensor(draft_probs, dtype=torch.float64).log())


def rows_of(num_rows: int, temperature: float = 0.0, coupled: bool = False) -> list[Row]:
    params = SamplingParams(max_tokens=20, temperature=temperature)
    return [Row([1], params, seed=index, coupled=coupled) for index in range(num_rows)]


def nodes_until_stop(controller: LearnedController, confidences: Sequence[float]) -> int:
    for depth, confidence in enumerate(confidences):
        if not controller.go_on(rows_of(1), probs_with(confidence), depth)[0]:
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
def test_it_stops_after_the_node_that_makes_a_rejection_likely(
    write: Callable[[str], Path], confidences: list[float], threshold: float, expected: int
) -> None:
    path = write(trusting().to_json())
    controller = LearnedController(LearnedOptions(threshold=threshold), str(path))
    # Twice: a round begins anew.
    assert [nodes_until_stop(controller, confidences) for _ in range(2)] == [expected, expected]


def test_at_the_threshold_is_sure_enough(write: Callable[[str], Path]) -> None:
    deterministic = trusting(Calibration((1.0,), (50.0,)))
    controller = LearnedController(LearnedOptions(threshold=0.0), str(write(deterministic.to_json())))
    assert controller.go_on(rows_of(1), probs_with(0.9), 0) == [True]


def test_rows_have_their_own_products(write: Callable[[str], Path]) -> None:
    controller = LearnedController(LearnedOptions(threshold=0.4), str(write(trusting().to_json())))
    rows = rows_of(3)
    assert controller.go_on(rows, probs_with(0.9, 0.7, 0.4), 0) == [True, True, False]
    # The third row has stopped; what stands in its line must not matter to the others.
    assert controller.go_on(rows, probs_with(0.9, 0.7, 1.0), 1)[:2] == [True, False]
    assert controller.go_on(rows, probs_with(0.75, 1.0, 0.1), 2)[:1] == [True]


def test_the_calibration_is_that_of_the_depth(write: Callable[[str], Path]) -> None:
    # From the second depth on every node counts as lost.
    doubting = trusting(Calibration((1.0, 1.0), (0.0, -50.0)))
    controller = LearnedController(LearnedOptions(threshold=0.9), str(write(doubting.to_json())))
    assert nodes_until_stop(controller, [0.9] * 8) == 2
    network = PredictorNetwork(doubting)
    line = node_features(0.9, 0.05, 0.5, 5, -0.1, 0.0, False)
    assert network.chances([line], 0) == pytest.approx([0.9])
    assert network.chances([line], 1)[0] < 1e-12
    assert network.chances([line], 5) == network.chances([line], 1)


def test_the_length_is_the_budget(write: Callable[[str], Path]) -> None:
    controller = LearnedController(LearnedOptions(length=6), str(write(trusting().to_json())))
    assert controller.plan(rows_of(2), [(Candidate(),)] * 2) == [Plan(0, 6)] * 2


def test_no_feature_can_depend_on_a_token() -> None:
    """Everything that leads to a feature is a number about a law, a place or a request's settings."""
    numbers = inspect.signature(node_features, eval_str=True).parameters.values()
    assert {parameter.annotation for parameter in numbers} <= {float, int, bool}
    assert [each.name for each in numbers] == [
        "confidence", "runner_up", "entropy", "depth", "log_survival", "temperature", "coupled"
    ]  # fmt: skip
    assert {field.name for field in fields(NodeProbs)} == {"confidence", "entropy", "runner_up"}
    parameters = inspect.signature(LearnedController.go_on).parameters
    assert list(parameters) == ["self", "rows", "draft_probs", "depth"]


def test_answers_do_not_change_when_tokens_are_renamed() -> None:
    controller = LearnedController(LearnedOptions(length=6, threshold=0.5))
    draft_probs = torch.softmax(torch.randn(12, 3, 10, generator=torch.Generator().manual_seed(0)) * 2, -1)
    rows = rows_of(3, temperature=1.0)
    plain = [controller.go_on(rows, DraftProbs(dist.log()), depth) for depth, dist in enumerate(draft_probs)]
    renamed = [
        controller.go_on(rows, DraftProbs(dist[:, torch.randperm(10)].log()), depth)
        for depth, dist in enumerate(draft_probs)
    ]
    assert plain == renamed


def test_training_and_decoding_see_the_same_features(
    write: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    controller = LearnedController(path=str(write(trusting().to_json())))
    seen: list[list[float]] = []
    chances = controller._network.chances

    def note(features: list[list[float]], depth: int) -> list[float]:
        seen.extend(features)
        return chances(features, depth)

    monkeypatch.setattr(controller._network, "chances", note)
    path = []
    for depth, confidence in enumerate((0.9, 0.5, 1.0, 0.7)):
        draft_probs = probs_with(confidence)
        controller.go_on(rows_of(1, temperature=0.7, coupled=True), draft_probs, depth)
        path.append(
            NodeProbs(draft_probs.confidences[0], draft_probs.entropies[0], draft_probs.runners_up[0])
        )
    assert seen == features_of_path(path, 0.7, True)
    assert all(numpy.isfinite(seen).ravel())
    assert [line[FEATURES.index("log_survival")] for line in seen[:2]] == pytest.approx([0, numpy.log(0.9)])


def test_coupling_says_nothing_at_temperature_0() -> None:
    assert node_features(0.5, 0.2, 1.0, 0, 0.0, 0.0, True) == node_features(0.5, 0.2, 1.0, 0, 0.0, 0.0, False)
    assert node_features(0.5, 0.2, 1.0, 0, 0.0, 1.0, True) != node_features(0.5, 0.2, 1.0, 0, 0.0, 1.0, False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("width", [3, 16, 40])
def test_draft_distributions_summarise_the_softmax_of_logits(width: int, dtype: torch.dtype) -> None:
    logits = 5 * torch.randn(6, width, dtype=dtype, generator=torch.Generator().manual_seed(1))
    logits[4] = torch.nn.functional.one_hot(torch.tensor(1), width).log()
    logits[5] = -1000.0
    wider = torch.nn.functional.pad(logits, (0, 5), value=100.0)[
        :, :width
    ]  # rows that do not lie one behind the other
    draft_probs = logits.softmax(-1)
    largest = draft_probs.topk(2).values
    for summary in (DraftProbs(logits), DraftProbs(wider)):
        assert summary.confidences == pytest.approx(largest[:, 0].tolist(), rel=1e-5)
        assert summary.runners_up == pytest.approx(largest[:, 1].tolist(), rel=1e-5)
        assert summary.entropies == pytest.approx(torch.special.entr(draft_probs).sum(-1).tolist(), abs=1e-5)


def test_the_predictor_in_the_box_is_whole_and_names_its_source() -> None:
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


def test_the_predictor_in_the_box_belongs_to_the_pair_in_the_box() -> None:
    from secondguess.builtin import acceptance_path, builtin_paths
    from secondguess.workloads.provenance import hash_weights

    provenance, paths = Predictor.read(acceptance_path()).provenance, builtin_paths()
    assert provenance["model_sha256"] == hash_weights(paths.target)
    assert provenance["drafter_sha256"] == hash_weights(paths.drafter)


def test_a_file_comes_back_as_it_was_written(write: Callable[[str], Path]) -> None:
    predictor = trusting(Calibration((1.5, 0.5), (0.25, -1.0)))
    path = write(predictor.to_json())
    assert Predictor.read(path) == predictor
    name = f"learned:{path},length=5,threshold=0.45"
    assert make_controller(name).name == name


def changed(**entries: object) -> str:
    return json.dumps(json.loads(trusting().to_json()) | entries)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "it is broken"),
        ("{", "it is broken"),
        ("[" * 100_000, "it is broken"),
        ("[]", "an object of kind"),
        ('{"weights": [1, 2]}', "an object of kind"),
        (changed(kind="a recipe"), "an object of kind"),
        (changed(schema=2), "expected schema 1, got 2"),
        (changed(features=[*FEATURES, "token"]), "expected the features log_confidence"),
        (changed(layers=[]), "three layers, got 0"),
        (changed(layers=[{"biases": [0.0], "weights": [[1.0]]}] * 3), "three layers of 8 to n"),
        (changed(layers=[{"biases": [0.0, 1.0], "weights": [[1.0]]}] * 3), "as many rows of weights"),
        (changed(layers=[{"biases": [0.0, 1.0], "weights": [[1.0], [1.0, 2.0]]}] * 3), "all of one width"),
        (changed(layers=[{"biases": ["x"], "weights": [[1.0]]}] * 3), "a list of numbers"),
        (changed(layers=[{"biases": [float("nan")], "weights": [[1.0]]}] * 3), "finite weights"),
        (changed(calibration={"scales": [1.0]}), "it is broken"),
        (changed(calibration={"scales": [], "shifts": []}), "at least one"),
        (changed(calibration={"scales": [0], "shifts": [0]}), "positive scales"),
        (changed(calibration={"scales": [True], "shifts": [0]}), "a list of numbers"),
        (changed(provenance=None), "the provenance to be an object"),
        (" " * (MAX_FILE_BYTES + 1), "at most"),
    ],
)
def test_broken_and_foreign_files_are_refused(write: Callable[[str], Path], content: str, words: str) -> None:
    path = write(content)
    with pytest.raises(BadInputError, match=words) as refusal:
        make_controller(f"learned:{path}")
    assert str(path) in str(refusal.value)
    assert "secondguess train acceptance" in str(refusal.value)


def test_a_record_without_an_entry_is_refused(write: Callable[[str], Path]) -> None:
    for entry in ("kind", "schema", "provenance", "features", "calibration", "layers"):
        record = json.loads(trusting().to_json())
        del record[entry]
        with pytest.raises(BadInputError, match="expected a predictor file, got"):
            make_controller(f"learned:{write(json.dumps(record))}")


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
def test_names_that_are_refused(text: str, words: str) -> None:
    with pytest.raises(BadInputError, match=words):
        make_controller(text)


def test_a_predictor_of_the_wrong_shape_cannot_be_made() -> None:
    layers = trusting().layers
    with pytest.raises(BadInputError, match="three layers"):
        replace(trusting(), layers=(layers[0], layers[0], layers[2]))
