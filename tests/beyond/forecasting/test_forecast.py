"""Forecasts of Transformers' models: their own distribution, in fewer passes."""

import numpy
import pytest
import torch

import secondguess
from continuous_cases import HORIZON, CrudeDrafter, forecast_holds, series, tiny_forecaster
from secondguess.beyond.forecasting.forecaster import ForecastRuntime
from secondguess.beyond.forecasting.kalman import KalmanDrafter
from secondguess.errors import BadInputError, UnsupportedModelError

pytestmark = pytest.mark.transformers

DRAFTERS = [None, "autoregression", "trend", "level", "crude", "model"]


def make(drafter):
    made = {"crude": CrudeDrafter, "model": lambda: tiny_forecaster(seed=1)}
    return made[drafter]() if drafter in made else drafter


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_transforms_of_the_samples_are_uniform(drafter):
    assert forecast_holds(make(drafter))


@pytest.mark.parametrize(
    "settings",
    [
        {"distribution_output": "student_t"},
        {"kind": "informer"},
        {"kind": "informer", "attention_type": "full"},
        {"scaling": "mean"},
    ],
    ids=str,
)
def test_transforms_of_other_models_are_uniform(settings):
    assert forecast_holds(**settings)


def energy_distance(distances, first):
    """Energy distance of two halves, given all distances and the members of the first half."""
    one, other = distances[:, first], distances[:, ~first]
    return 2 * other[first].mean() - one[first].mean() - other[~first].mean()


def test_forecasts_and_those_of_generate_are_exchangeable():
    model, inputs = tiny_forecaster(), series()
    torch.manual_seed(1)
    theirs = model.generate(**inputs).sequences[0]
    out = secondguess.forecast(model, **inputs, drafter=CrudeDrafter(), seed=2)
    both = torch.cat((theirs, out.sequences[0])).double().numpy()
    distances = numpy.linalg.norm(both[:, None] - both, axis=-1)
    first, generator = numpy.arange(600) < 300, numpy.random.default_rng(0)
    observed = energy_distance(distances, first)
    permuted = [energy_distance(distances, generator.permutation(first)) for _ in range(99)]
    assert numpy.mean(numpy.array(permuted) >= observed) > 0.01
    assert out.stats.acceptance_rate < 0.9


@pytest.mark.parametrize("dim", [1, 2])
def test_shapes_passes_and_statistics(dim):
    model, inputs = tiny_forecaster(input_size=dim), series(2, dim)
    out = secondguess.forecast(model, **inputs, num_samples=5, seed=3)
    assert out.sequences.shape == (2, 5, HORIZON, *([dim] if dim > 1 else []))
    assert out.sequences.dtype == torch.float32
    assert out.stats.num_tokens == 2 * 5 * HORIZON
    assert out.stats.acceptance_length > 1
    again = secondguess.forecast(model, **inputs, num_samples=5, seed=3)
    assert torch.equal(out.sequences, again.sequences)
    plain = secondguess.forecast(model, **inputs, num_samples=5, seed=3, drafter=None)
    assert plain.num_passes == HORIZON
    assert plain.stats.acceptance_rate is None


def test_the_target_as_its_own_drafter_is_always_accepted():
    model = tiny_forecaster()
    out = secondguess.forecast(model, **series(), num_samples=20, seed=3, drafter=model)
    assert out.num_passes == 1
    assert out.stats.acceptance_rate == 1.0


def test_missing_values_are_skipped_by_every_drafter():
    model, inputs = tiny_forecaster(), series()
    inputs["past_observed_mask"][:, 5:8] = 0
    inputs["past_values"][:, 5:8] = 0
    for drafter in ("autoregression", KalmanDrafter()):
        assert secondguess.forecast(model, **inputs, drafter=drafter, seed=3).sequences.isfinite().all()


@pytest.mark.parametrize("drafter", ["autoregression", "trend", None])
def test_a_mask_may_be_that_of_all_series(drafter):
    model, inputs = tiny_forecaster(), series()
    inputs["past_values"] = inputs["past_values"].repeat(2, 1)
    for name in ("past_time_features", "future_time_features"):
        inputs[name] = inputs[name].repeat(2, *[1] * (inputs[name].ndim - 1))
    inputs["past_observed_mask"] = torch.ones(1, inputs["past_values"].shape[1])
    whole = inputs | {"past_observed_mask": torch.ones_like(inputs["past_values"])}
    found, expected = (
        secondguess.forecast(model, **each, drafter=drafter, seed=3) for each in (inputs, whole)
    )
    assert torch.equal(found.sequences, expected.sequences)


def forecaster_with_categories(count):
    settings = {"num_static_categorical_features": 1, "cardinality": [count], "embedding_dimension": [2]}
    return tiny_forecaster.__wrapped__(**settings)


def gap(inputs):
    inputs["past_values"][:, 3] = float("nan")


REFUSED = {
    "no distribution head": (lambda: torch.nn.Linear(1, 1), {}, None, UnsupportedModelError, "Linear"),
    "counts": (
        lambda: tiny_forecaster(distribution_output="negative_binomial"), {}, None,
        UnsupportedModelError, "negative_binomial",
    ),
    "sparse attention": (
        lambda: tiny_forecaster("informer", sampling_factor=1), {}, None, UnsupportedModelError, "'prob'",
    ),
    "gap": (tiny_forecaster, {}, gap, BadInputError, "past_observed_mask"),
    "no samples": (tiny_forecaster, {"num_samples": 0}, None, BadInputError, "num_samples"),
    "too many samples": (tiny_forecaster, {"num_samples": 10**9}, None, BadInputError, "num_samples"),
    "a flag as samples": (tiny_forecaster, {"num_samples": True}, None, BadInputError, "num_samples"),
    "a text as seed": (tiny_forecaster, {"seed": "a"}, None, BadInputError, "seed"),
    "a negative seed": (tiny_forecaster, {"seed": -1}, None, BadInputError, "seed"),
    "no controller": (tiny_forecaster, {"controller": None}, None, BadInputError, "controller"),
    "a controller without effect": (
        tiny_forecaster, {"controller": "confidence:8"}, None, BadInputError, "no draft distributions",
    ),
    "a mask of another length": (
        tiny_forecaster, {}, lambda inputs: inputs.update(past_observed_mask=torch.ones(1, 3)),
        BadInputError, "past_observed_mask of the shape",
    ),
    "an array": (
        tiny_forecaster, {}, lambda inputs: inputs.update(past_values=inputs["past_values"].numpy()),
        BadInputError, "past_values as a tensor",
    ),
    "unknown drafter": (tiny_forecaster, {"drafter": "oracle"}, None, BadInputError, "oracle"),
    "short past": (
        tiny_forecaster, {}, lambda inputs: inputs.update(past_values=inputs["past_values"][:, :5]),
        BadInputError, "14 steps",
    ),
    "time features of too many steps": (
        tiny_forecaster, {}, lambda inputs: inputs.update(past_time_features=torch.zeros(1, 20, 1)),
        BadInputError, "past_time_features of 14 steps",
    ),
    "time features of other series": (
        tiny_forecaster, {}, lambda inputs: inputs.update(future_time_features=torch.zeros(2, 6, 1)),
        BadInputError, "future_time_features of 1 series with 1 features each",
    ),
    "superfluous features": (
        tiny_forecaster, {}, lambda inputs: inputs.update(static_real_features=torch.zeros(1, 2)),
        BadInputError, "static_real_features of 1 series with 0 features each",
    ),
    "categories that are no integers": (
        lambda: forecaster_with_categories(4), {},
        lambda inputs: inputs.update(static_categorical_features=torch.zeros(1, 1)),
        BadInputError, "as integers below",
    ),
    "missing values": (
        tiny_forecaster, {}, lambda inputs: inputs.update(past_values=None), BadInputError, "past_values as a tensor",
    ),
    "a drafter with other lags": (
        tiny_forecaster, {"drafter": tiny_forecaster(lags_sequence=(1, 9))}, None,
        BadInputError, "the drafter takes other inputs",
    ),
    "a drafter of more steps": (
        tiny_forecaster, {"drafter": tiny_forecaster(prediction_length=9)},
        lambda inputs: inputs.update(future_time_features=torch.zeros(1, 9, 1)),
        BadInputError, "at most 6 steps as drafter, got one of 9",
    ),
    "no drafter": (tiny_forecaster, {"drafter": 5}, None, UnsupportedModelError, "int"),
    "short future": (
        tiny_forecaster, {}, lambda inputs: inputs.update(future_time_features=torch.zeros(1, 2, 1)),
        BadInputError, "future_time_features",
    ),
}  # fmt: skip
"""Name -> model, arguments, change of the inputs, error, and part of the message."""


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_gives_one_clear_error(name):
    model, arguments, change, error, part = REFUSED[name]
    inputs = {key: values.clone() for key, values in series().items()}
    if change is not None:
        change(inputs)
    with pytest.raises(error, match="expected") as caught:
        secondguess.forecast(model(), **inputs, **arguments)
    assert part in str(caught.value)


def test_dynamic_features_stand_beside_those_of_time():
    model, inputs = tiny_forecaster(num_dynamic_real_features=2), series()
    for name in ("past_time_features", "future_time_features"):
        inputs[name] = inputs[name].repeat(1, 1, 3)
    assert secondguess.forecast(model, **inputs, num_samples=3, seed=1).sequences.shape == (1, 3, 6)


def test_no_categories_are_those_of_a_model_without():
    model, inputs = tiny_forecaster(), series()
    expected = secondguess.forecast(model, **inputs, seed=3).sequences
    inputs["static_categorical_features"] = torch.zeros(1, 0, dtype=torch.int64)
    assert torch.equal(secondguess.forecast(model, **inputs, seed=3).sequences, expected)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64])
def test_past_values_of_another_type_give_the_forecast_of_the_models_own(dtype):
    inputs = series() | {"past_values": series()["past_values"].round()}
    expected = secondguess.forecast(tiny_forecaster(), **inputs, seed=3).sequences
    other = inputs | {"past_values": inputs["past_values"].to(dtype)}
    found = secondguess.forecast(tiny_forecaster(), **other, seed=3).sequences
    assert found.dtype == (dtype if dtype.is_floating_point else expected.dtype)
    torch.testing.assert_close(found.to(expected.dtype), expected)
    found.clamp_(min=0)  # not a tensor of inference mode


def test_a_model_in_training_mode_is_refused():
    model = tiny_forecaster(seed=2).train()
    with pytest.raises(BadInputError, match=r"Call model\.eval"):
        secondguess.forecast(model, **series())


@pytest.mark.parametrize(
    "settings",
    [{}, {"dim": 2}, {"kind": "informer"}, {"kind": "informer", "attention_type": "full"}],
    ids=str,
)
@torch.inference_mode()
def test_scores_beside_a_cached_prefix_equal_those_of_a_whole_pass(settings):
    """Rows of two series start at different steps, after drafts of which a part was accepted."""
    dim = settings.get("dim", 1)
    model = tiny_forecaster(
        **{"input_size": dim} | {key: value for key, value in settings.items() if key != "dim"}
    )
    inputs = series(num_series=2, dim=dim)
    runtime = ForecastRuntime(model, inputs, num_rows=4)
    members = torch.tensor([0, 0, 1, 1])
    values = torch.randn(4, HORIZON, dim, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    rounds = [
        (torch.arange(4), [0, 0, 0, 0], [2, 3, 0, 1]),
        (torch.arange(4), [1, 4, 1, 1], [3, 1, 2, 0]),
        (torch.tensor([0, 2, 3]), [5, 2, 2], [0, 3, 3]),
    ]
    for rows, starts, lengths in rounds:
        # Values from `starts` on are new drafts; those before were accepted or corrected.
        for row, start in zip(rows.tolist(), starts, strict=True):
            values[row, max(start - 1, 0) :] += 0.1
        found = runtime.score(rows, members[rows], values[rows], torch.tensor(starts), torch.tensor(lengths))
        whole = ForecastRuntime(model, inputs, num_rows=4)
        count = HORIZON - 1
        every = whole.score(
            rows,
            members[rows],
            values[rows],
            torch.zeros(len(rows), dtype=torch.long),
            torch.full((len(rows),), count),
        )
        for place, (start, length) in enumerate(zip(starts, lengths, strict=True)):
            for own, expected in zip(found, every, strict=True):
                torch.testing.assert_close(
                    own[place, : length + 1],
                    expected[place, start : start + length + 1],
                    atol=1e-5,
                    rtol=1e-4,
                )
