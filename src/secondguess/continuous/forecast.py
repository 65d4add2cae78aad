"""Sample forecasts from an autoregressive forecaster, in fewer passes than its own `generate`."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from secondguess.continuous.autoregression import AutoregressionDrafter
from secondguess.continuous.distributions import Gaussian
from secondguess.continuous.drafters import (
    ForecasterDrafter,
    Histories,
    Problem,
    ValueDrafter,
    make_distribution,
)
from secondguess.continuous.kalman import KalmanDrafter
from secondguess.continuous.verification import ValueDraft, verify
from secondguess.controllers import make_controller
from secondguess.controllers.base import Controller
from secondguess.core import Candidate, Draft, Row, Verdict
from secondguess.errors import BadInputError
from secondguess.runtime.forecaster import ForecastModel, ForecastRuntime, check_model
from secondguess.sampling.noise import KeyedNoise
from secondguess.sampling.params import MAX_SAMPLES, SamplingParams
from secondguess.stats import Stats, StatsRecorder

DRAFTERS: dict[str, Callable[[], ValueDrafter]] = {
    "autoregression": AutoregressionDrafter,
    "trend": KalmanDrafter,
    "level": lambda: KalmanDrafter(trend=False),
}
"""Name of a drafter -> its factory."""

VALUE = 0
"""Token that stands for one value in a row: rows, controllers and statistics count values by it."""


@dataclass(frozen=True)
class Forecast:
    """Sampled forecasts.

    Args:
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
        past_values, past_time_features, future_time_features, past_observed_mask,
            static_categorical_features, static_real_features: as for the model's `generate`.
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
    given = {
        "past_values": past_values,
        "past_time_features": past_time_features,
        "future_time_features": future_time_features,
        "past_observed_mask": past_observed_mask,
        "static_categorical_features": static_categorical_features,
        "static_real_features": static_real_features,
    }
    inputs = {name: values for name, values in given.items() if values is not None}
    check_model(model)
    SamplingParams(seed=seed)  # refuses an invalid one
    planner = make_controller(controller) if isinstance(controller, str) else controller
    if not isinstance(planner, Controller) or planner.needs_probs:
        raise BadInputError(
            "expected a controller that needs no draft distributions, such as cost or fixed:10, got "
            f"{controller!r:.60}"
        )
    num_samples = model.config.num_parallel_samples if num_samples is None else num_samples
    _check(model, inputs, num_samples)
    num_rows = len(past_values) * num_samples
    runtime = ForecastRuntime(model, inputs, num_rows)
    chosen = None if drafter is None else make_drafter(drafter)
    if chosen is not None:
        chosen.begin(make_problem(model, inputs, num_rows))
    params = SamplingParams(max_tokens=runtime.horizon, temperature=1.0)
    seed = secrets.randbits(63) if seed is None else int(seed)
    num_series = len(past_values)
    rows = [
        Row([VALUE], params, seed, sample_index=series * MAX_SAMPLES + sample)
        for series in range(num_series)
        for sample in range(num_samples)
    ]
    sampler = _Sampler(runtime, chosen, planner, rows, num_samples)
    while sampler.active:
        sampler.run_round()
    sequences = sampler.values.reshape(num_series, num_samples, runtime.horizon, runtime.dim)
    if runtime.dim == 1:
        sequences = sequences[..., 0]
    return Forecast(sequences.to(past_values), sampler.num_passes, sampler.stats)


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
    if past.ndim not in (2, 3) or past.shape[1] < least:
        raise BadInputError(
            f"expected past_values [series, time] of at least {least} steps (context_length and the largest"
            f" lag), got the shape {list(past.shape)}"
        )
    mask = inputs.get("past_observed_mask", past)
    if mask.ndim > past.ndim or any(
        own not in (1, size) for own, size in zip(mask.shape[::-1], past.shape[::-1], strict=False)
    ):
        raise BadInputError(
            f"expected past_observed_mask of the shape {list(past.shape)} of past_values, got {list(mask.shape)}"
        )
    steps = inputs["future_time_features"].shape[1]
    if steps < horizon:
        raise BadInputError(
            f"expected future_time_features of at least {horizon} steps (prediction_length), got {steps}"
        )
