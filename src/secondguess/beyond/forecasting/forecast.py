"""Sample forecasts from an autoregressive forecaster, in fewer passes than its own `generate`."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from secondguess.beyond.forecasting.autoregression import AutoregressionDrafter
from secondguess.beyond.forecasting.distributions import Gaussian
from secondguess.beyond.forecasting.drafters import (
    ForecasterDrafter,
    Histories,
    Problem,
    ValueDrafter,
    make_distribution,
)
from secondguess.beyond.forecasting.forecaster import ForecastModel, ForecastRuntime, check_model
from secondguess.beyond.forecasting.kalman import KalmanDrafter
from secondguess.beyond.forecasting.verification import ValueDraft, verify
from secondguess.controllers import make_controller
from secondguess.controllers.base import Controller
from secondguess.core import Candidate, Draft, Row, Verdict
from secondguess.errors import BadInputError
from secondguess.params import MAX_SAMPLES, SamplingParams
from secondguess.sampling.noise import KeyedNoise
from secondguess.stats import Stats, StatsRecorder

DRAFTERS: dict[str, Callable[[], ValueDrafter]] = {
    "autoregression": AutoregressionDrafter,
    "trend": KalmanDrafter,
    "level": lambda: KalmanDrafter(trend=False),
}
"""Name of a drafter -> its factory."""

REQUIRED = ("past_values", "past_time_features", "future_time_features")

VALUE = 0
"""Token that stands for one value in a row: rows, controllers and statistics count values by it."""


@dataclass(frozen=True)
class Forecast:
    """Sampled forecasts.

    Attributes:
        sequences: `[series, sample, step]`, or `[series, sample, step, dim]` for several values per
            step; the name and shape of the output of the model's `generate`.
        num_passes: number of decoder passes. Rows (a sample of a series each) take part until they
            are finished.
        stats: counters of all rows together: a round of a row, a value and a drafted value count as
            one each. Seconds are those of the batch.
    """

    sequences: Tensor
    num_passes: int
    stats: Stats


@torch.inference_mode()
def forecast(
    model: ForecastModel,
    past_values: Tensor,
    past_time_features: Tensor,
    future_time_features: Tensor,
    past_observed_mask: Tensor | None = None,
    static_categorical_features: Tensor | None = None,
    static_real_features: Tensor | None = None,
    *,
    num_samples: int | None = None,
    drafter: str | ValueDrafter | ForecastModel | None = "autoregression",
    controller: str | Controller = "fixed:10",
    seed: int | None = None,
) -> Forecast:
    """Sample forecasts with the distribution of the model's own `generate`.

    Args:
        model: TimeSeriesTransformerForPrediction or InformerForPrediction, in evaluation mode.
        past_values: as for the model's `generate`, like the five arguments after it.
        past_time_features: as for `generate`.
        future_time_features: as for `generate`.
        past_observed_mask: as for `generate`.
        static_categorical_features: as for `generate`.
        static_real_features: as for `generate`.
        num_samples: samples per series; None for the `num_parallel_samples` of the model's configuration.
        drafter: `autoregression`, `trend` (local linear trend), `level` (local level), a smaller
            forecaster with the same inputs, a drafter object, or None to draft nothing.
        controller: name of a controller of draft lengths, or a controller that has learned from
            earlier forecasts.
        seed: makes the forecast reproducible.

    Raises:
        UnsupportedModelError: a model that cannot be scored for several steps per pass.
        BadInputError: an invalid argument, or past values that are not finite.
    """
    given: dict[str, Any] = {
        "past_values": past_values,
        "past_time_features": past_time_features,
        "future_time_features": future_time_features,
        "past_observed_mask": past_observed_mask,
        "static_categorical_features": static_categorical_features,
        "static_real_features": static_real_features,
    }
    inputs = {name: values for name, values in given.items() if values is not None or name in REQUIRED}
    check_model(model)
    SamplingParams(seed=seed)  # refuses an invalid one
    chosen_controller = make_controller(controller) if isinstance(controller, str) else controller
    if not isinstance(chosen_controller, Controller) or chosen_controller.needs_probs:
        raise BadInputError(
            "expected a controller that needs no draft distributions, such as cost or fixed:10, got "
            f"{controller!r:.60}"
        )
    num_samples = model.config.num_parallel_samples if num_samples is None else num_samples
    _check(model, inputs, num_samples)
    if not model.config.num_static_categorical_features:
        inputs.pop("static_categorical_features", None)  # of no features; the model has no embedding for it
    as_they_are = {"static_categorical_features", "past_observed_mask"}
    inputs |= {name: inputs[name].to(model.dtype) for name in inputs.keys() - as_they_are}
    num_rows = len(past_values) * num_samples
    runtime = ForecastRuntime(model, inputs, num_rows)
    chosen_drafter = None if drafter is None else make_drafter(drafter)
    if isinstance(chosen_drafter, ForecasterDrafter):
        _check_forecaster(chosen_drafter.model, model, inputs, num_samples)
    if chosen_drafter is not None:
        chosen_drafter.begin(make_problem(model, inputs, num_rows))
    params = SamplingParams(max_tokens=runtime.horizon, temperature=1.0)
    seed = secrets.randbits(63) if seed is None else int(seed)
    num_series = len(past_values)
    rows = [
        Row([VALUE], params, seed, sample_index=series * MAX_SAMPLES + sample)
        for series in range(num_series)
        for sample in range(num_samples)
    ]
    sampler = _Sampler(runtime, chosen_drafter, chosen_controller, rows, num_samples)
    while sampler.active:
        sampler.run_round()
    sequences = sampler.values.reshape(num_series, num_samples, runtime.horizon, runtime.dim)
    if runtime.dim == 1:
        sequences = sequences[..., 0]
    dtype = past_values.dtype if past_values.is_floating_point() else model.dtype
    with torch.inference_mode(False):  # a copy that can be changed in place
        sequences = sequences.to(past_values.device, dtype, copy=True)
    return Forecast(sequences, sampler.num_passes, sampler.stats)


class _Sampler:
    """Rounds over the rows that are not finished: draft, score, verify, commit."""

    def __init__(
        self,
        runtime: ForecastRuntime,
        drafter: ValueDrafter | None,
        controller: Controller,
        rows: Sequence[Row],
        num_samples: int,
    ) -> None:
        self._runtime, self._drafter, self._controller = runtime, drafter, controller
        self._rows, self._num_samples = rows, num_samples
        self._recorder = StatsRecorder()
        self.active = list(range(len(rows)))
        self.num_passes = 0
        self.values = torch.zeros(len(rows), runtime.horizon, runtime.dim, dtype=torch.float64)

    @property
    def stats(self) -> Stats:
        return self._recorder.of(self._rows[0])

    def run_round(self) -> None:
        """Run one round over all rows that are not finished."""
        rows, recorder = [self._rows[index] for index in self.active], self._recorder
        members = torch.tensor(self.active)
        with recorder.round(self._rows[:1]):
            noise = KeyedNoise.from_rows(rows)
            starts = torch.tensor([row.num_output for row in rows])
            histories = Histories(members, members // self._num_samples, self.values[members], starts)
            with recorder.phase("plan"):
                lengths = torch.tensor(self._plan(rows))
            with recorder.phase("draft"):
                draft = self._draft(histories, lengths, noise)
                put(histories.values, starts, draft)
            with recorder.phase("score"):
                params = self._runtime.score(
                    members, histories.series, histories.values, starts, draft.lengths
                )
            with recorder.phase("verify"):
                target = make_distribution(params)
                accepted, following = verify(draft, target, noise)
            with recorder.phase("draft"):
                if self._drafter is not None:
                    self._drafter.observe(histories, draft.lengths, target)
            histories.values[torch.arange(len(rows)), starts + accepted] = following
            self.values[members] = histories.values
            self._commit(rows, draft.lengths.tolist(), accepted.tolist())
        self.num_passes += 1

    def _plan(self, rows: Sequence[Row]) -> list[int]:
        """Return the draft length of every row; the last step of a row is the target's."""
        if self._drafter is None or not self._controller.begin_round(rows):
            return [0] * len(rows)
        candidates = [[Candidate(kind="values", longest=row.room - 1, deterministic=True)] for row in rows]
        plans = self._controller.plan(rows, candidates)
        return [min(plan.length, row.room - 1) for plan, row in zip(plans, rows, strict=True)]

    def _draft(self, histories: Histories, lengths: Tensor, noise: KeyedNoise) -> ValueDraft:
        if self._drafter is None or not lengths.any():
            nothing = histories.values[:, :0]
            return ValueDraft(nothing, lengths, Gaussian(nothing, nothing))
        return self._drafter.propose(histories, lengths, noise)

    def _commit(self, rows: Sequence[Row], lengths: Sequence[int], accepted: Sequence[int]) -> None:
        """Extend the rows by one token per value, count the round and update the controller."""
        stats = self.stats
        for row, length, count in zip(rows, lengths, accepted, strict=True):
            stats.count(length, length, row.commit([VALUE] * count, VALUE))
        draft = Draft.chains([[VALUE] * length for length in lengths])
        verdict = Verdict.from_chain(accepted, [VALUE] * len(rows))
        with self._recorder.phase("plan"):
            self._controller.learn(rows, draft, verdict, self._recorder.round_time())
        for row in rows:
            if row.finished:
                self._controller.release(row)
        self.active = [index for index in self.active if not self._rows[index].finished]


def put(values: Tensor, starts: Tensor, draft: ValueDraft) -> None:
    """Write the drafted values into `values` `[row, horizon, dim]`, in place, from `starts` on."""
    rows, nodes = (torch.arange(draft.values.shape[1]) < draft.lengths[:, None]).nonzero(as_tuple=True)
    values[rows, starts[rows] + nodes] = draft.values[rows, nodes]


def make_drafter(drafter: str | ValueDrafter | ForecastModel) -> ValueDrafter:
    """Return the drafter with a name, or one that samples from a smaller forecaster."""
    if isinstance(drafter, ValueDrafter):
        return drafter
    if isinstance(drafter, str):
        if drafter not in DRAFTERS:
            raise BadInputError(f"expected a drafter among {', '.join(DRAFTERS)}, got {drafter!r}")
        return DRAFTERS[drafter]()
    return ForecasterDrafter(drafter)


def make_problem(model: ForecastModel, inputs: Mapping[str, Tensor], num_rows: int) -> Problem:
    """Return the series for the drafter; a missing value is replaced by the last observed one."""
    past, mask = inputs["past_values"], inputs.get("past_observed_mask")
    observed = torch.ones_like(past, dtype=torch.bool) if mask is None else mask.expand_as(past) > 0
    shape = (*past.shape[:2], model.config.input_size)
    past, observed = past.double().cpu().reshape(shape), observed.cpu().reshape(shape)
    latest = torch.where(observed, torch.arange(shape[1])[:, None], 0).cummax(1).values
    lags = sorted(model.config.lags_sequence)
    return Problem(inputs, past.gather(1, latest), observed, num_rows, lags, model.config.prediction_length)


def _check(model: ForecastModel, inputs: Mapping[str, Tensor], num_samples: int) -> None:
    """Refuse invalid arguments."""
    if type(num_samples) is not int or not 1 <= num_samples <= MAX_SAMPLES:
        raise BadInputError(f"expected num_samples from 1 to {MAX_SAMPLES}, got {num_samples!r}")
    past, horizon = inputs["past_values"], model.config.prediction_length
    for name, values in inputs.items():
        if not isinstance(values, Tensor):
            raise BadInputError(f"expected {name} as a tensor, got {type(values).__name__}")
        if not values.isfinite().all():
            raise BadInputError(
                f"expected finite numbers in {name}, got NaN or infinity: set missing past values to 0 and"
                " mark them by 0 in past_observed_mask"
            )
    least = model.config.context_length + max(model.config.lags_sequence)
    dim = past.shape[-1] if past.ndim == 3 else 1
    if past.ndim not in (2, 3) or past.shape[1] < least or not len(past) or dim != model.config.input_size:
        raise BadInputError(
            f"expected past_values [series, time] of at least {least} steps (context_length and the largest"
            f" lag) with {model.config.input_size} values each, got the shape {list(past.shape)}"
        )
    mask = inputs.get("past_observed_mask", past)
    if mask.ndim > past.ndim or any(
        width not in (1, size) for width, size in zip(mask.shape[::-1], past.shape[::-1], strict=False)
    ):
        raise BadInputError(
            f"expected past_observed_mask of the shape {list(past.shape)} of past_values, got {list(mask.shape)}"
        )
    _check_features(model.config, inputs)
    times = inputs["past_time_features"].shape[1]
    if times != least:
        raise BadInputError(
            f"expected past_time_features of {least} steps (context_length and the largest lag), got {times}"
        )
    steps = inputs["future_time_features"].shape[1]
    if steps < horizon:
        raise BadInputError(
            f"expected future_time_features of at least {horizon} steps (prediction_length), got {steps}"
        )


def _check_forecaster(
    forecaster: ForecastModel, target: ForecastModel, inputs: Mapping[str, Tensor], num_samples: int
) -> None:
    """Refuse a smaller forecaster that takes other inputs than the target, or forecasts more steps."""
    check_model(forecaster)
    try:
        _check(forecaster, inputs, num_samples)
    except BadInputError as error:
        raise BadInputError(f"the drafter takes other inputs than the model: {error}") from None
    longest, steps = target.config.prediction_length, forecaster.config.prediction_length
    if steps > longest:
        raise BadInputError(
            f"expected a forecaster of at most {longest} steps as drafter, got one of {steps}"
        )


def _check_features(config: Any, inputs: Mapping[str, Tensor]) -> None:
    """Refuse features of other series or of another number than the model has."""
    num_series = len(inputs["past_values"])
    num_features = config.num_time_features + config.num_dynamic_real_features
    widths = {
        "past_time_features": num_features,
        "future_time_features": num_features,
        "static_categorical_features": config.num_static_categorical_features,
        "static_real_features": config.num_static_real_features,
    }
    for name, width in widths.items():
        values = inputs.get(name)
        if values is None and not (name.startswith("static") and width):
            continue
        shape = None if values is None else list(values.shape)
        num_dims = 2 if name.startswith("static") else 3
        if shape is None or len(shape) != num_dims or (shape[0], shape[-1]) != (num_series, width):
            raise BadInputError(
                f"expected {name} of {num_series} series with {width} features each, got "
                + ("none" if shape is None else f"the shape {shape}")
            )
    categories = inputs.get("static_categorical_features")
    cardinality = config.cardinality[: config.num_static_categorical_features]
    if categories is not None and not all(
        type(value) is int and 0 <= value < size
        for row in categories.tolist()
        for value, size in zip(row, cardinality, strict=True)
    ):
        raise BadInputError(
            f"expected static_categorical_features as integers below {cardinality} (cardinality), got "
            f"{categories.tolist()!r:.80}"
        )
