"""Drafters of continuous values: state-space models, an autoregression, a smaller forecaster.

A drafter draws each value from a distribution that depends on earlier values alone, and passes it on
with the value. The distribution may also depend on what the drafter has learned, in earlier rounds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from secondguess.continuous.distributions import Distribution, Gaussian, StudentT
from secondguess.continuous.verification import ValueDraft
from secondguess.runtime.forecaster import ForecastModel, ForecastRuntime
from secondguess.sampling.noise import KeyedNoise, Purpose


@dataclass(frozen=True)
class Problem:
    """Series to be forecast.

    Args:
        inputs: arguments of the model's `generate`, by name.
        past: `[series, time, dim]` float64, past values; the last observed one where one is missing.
        observed: `[series, time, dim]` bool, False for missing values.
        lags: lags of the values that the target takes as inputs, increasing.
    """

    inputs: Mapping[str, Tensor]
    past: Tensor
    observed: Tensor
    lags: Sequence[int]


@dataclass(frozen=True)
class Histories:
    """Values so far of a batch of rows, each of which continues a series.

    Args:
        series: `[row]`, index of the series.
        values: `[row, horizon, dim]` float64, values so far; those from `starts` on have no meaning
            for `propose`, and are the drafted ones for `observe`.
        starts: `[row]`, number of values so far.
    """

    series: Tensor
    values: Tensor
    starts: Tensor


class ValueDrafter(ABC):
    """Base class of drafters of continuous values."""

    @abstractmethod
    def begin(self, problem: Problem) -> None:
        """Begin a forecast; forget earlier ones."""

    @abstractmethod
    def propose(self, histories: Histories, lengths: Tensor, noise: KeyedNoise) -> ValueDraft:
        """Draft `lengths` `[row]` values for each row, at least one for some row."""

    def observe(self, histories: Histories, lengths: Tensor, scores: Distribution) -> None:
        """Learn from the target's distributions: a batch `[row, query]`, of which `lengths + 1` queries count."""


class LinearDrafter(ValueDrafter):
    """Base class of drafters whose mean is a linear function of earlier values.

    Values are standardised per series and dimension. Noise has the target's shape: Gaussian until the
    target's distributions were seen, and then with their degrees of freedom.
    """

    def begin(self, problem: Problem) -> None:
        observed = problem.observed.double()
        count = observed.sum(1, keepdim=True).clamp(min=1)
        self._center = (problem.past * observed).sum(1, keepdim=True) / count
        deviations = (problem.past - self._center) * observed
        self._unit = (deviations.square().sum(1, keepdim=True) / count).sqrt().clamp(min=1e-9)
        self._df: Tensor | None = None
        self.fit((problem.past - self._center) / self._unit, problem.observed, problem.lags)

    @abstractmethod
    def fit(self, past: Tensor, observed: Tensor, lags: Sequence[int]) -> None:
        """Fit the model to the standardised past `[series, time, dim]`."""

    @abstractmethod
    def steps(self, series: Tensor, values: Tensor, starts: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Return means and scales `[row, step, dim]` of drafts with this standard noise.

        Args:
            series, starts: as in `Histories`.
            values: `[row, time, dim]`, standardised values so far, with room for the drafts.
            noise: `[row, step, dim]`; a drafted value is its mean plus scale times noise.
        """

    def propose(self, histories: Histories, lengths: Tensor, noise: KeyedNoise) -> ValueDraft:
        series, values, starts = histories.series, histories.values, histories.starts
        center, unit = self._center[series], self._unit[series]
        shape = (len(series), int(lengths.max()), values.shape[-1])
        zeros, ones = torch.zeros(shape, dtype=torch.float64), torch.ones(shape, dtype=torch.float64)
        standard = self._distribution(series, zeros, ones)
        places = [range(shape[1] * standard.num_uniforms)] * shape[0]
        uniforms = torch.from_numpy(noise.uniforms(places, Purpose.DRAFT)).reshape(*shape[:2], -1)
        drawn = standard.sample(uniforms)
        # Shorter drafts are padded beyond the horizon.
        padded = torch.cat(((values - center) / unit, zeros), 1)
        means, scales = self.steps(series, padded, starts, drawn)
        means, scales = means * unit + center, scales * unit
        return ValueDraft(means + scales * drawn, lengths, self._distribution(series, means, scales))

    def _distribution(self, series: Tensor, means: Tensor, scales: Tensor) -> Gaussian | StudentT:
        if self._df is None:
            return Gaussian(means, scales)
        return StudentT(self._df[series].expand_as(means), means, scales)

    def observe(self, histories: Histories, lengths: Tensor, scores: Distribution) -> None:
        if not isinstance(scores, Gaussian | StudentT):
            return
        num_series, series = len(self._center), histories.series
        rows, queries = (torch.arange(scores.loc.shape[1]) <= lengths[:, None]).nonzero(as_tuple=True)
        center, unit = self._center[series], self._unit[series]
        locs, scales = ((scores.loc - center) / unit)[rows, queries], (scores.scale / unit)[rows, queries]
        if isinstance(scores, StudentT):
            self._df = _mean_by(series[rows], scores.df[rows, queries], num_series)[:, None]
        values = (histories.values - center) / unit
        self.learn(series[rows], values[rows], (histories.starts[rows] + queries), locs, scales)

    @abstractmethod
    def learn(self, series: Tensor, values: Tensor, steps: Tensor, locs: Tensor, scales: Tensor) -> None:
        """Learn from locations and scales `[n, dim]` of the target at `steps` `[n]` after `values`."""


class AutoregressionDrafter(LinearDrafter):
    """Drafter whose mean and log scale are linear in lagged values, by least squares.

    It is fitted to the past, and after each round to the target's own locations and scales too: with
    many samples per series, it soon imitates the target.

    Args:
        ridge: weight of the penalty on coefficients.
    """

    def __init__(self, ridge: float = 0.01) -> None:
        self._ridge = ridge

    def fit(self, past: Tensor, observed: Tensor, lags: Sequence[int]) -> None:
        self._past, self._lags = past, torch.tensor(lags)
        steps = torch.arange(int(self._lags.max()), past.shape[1])
        known = observed[:, steps] & observed[:, steps[:, None] - self._lags].all(2)
        design = self._design(past[:, steps[:, None] - self._lags]) * known[..., None]
        values = past[:, steps] * known
        self._gram = torch.einsum("stdi,stdj->sdij", design, design)
        self._gram += self._ridge * torch.eye(design.shape[-1], dtype=torch.float64)
        moments = torch.einsum("stdi,std->sdi", design, values)
        coefficients = torch.linalg.solve(self._gram, moments)
        errors = values - (design * coefficients[:, None]).sum(-1)
        variance = errors.square().sum(1) / known.sum(1).clamp(min=1)
        self._bounds = (variance.clamp(min=1e-12).log() / 2,) * 2
        scales = self._gram[..., -1] * self._bounds[0][..., None]
        self._moments = torch.stack((moments, scales), -1)
        self._coefficients = torch.linalg.solve(self._gram, self._moments)

    def _design(self, lagged: Tensor) -> Tensor:
        """Return inputs `[..., dim, lag + 1]` from lagged values `[..., lag, dim]`: these, and a constant."""
        return torch.nn.functional.pad(lagged.transpose(-1, -2), (0, 1), value=1.0)

    def _lagged(self, series: Tensor, values: Tensor, steps: Tensor) -> Tensor:
        """Return the inputs `[n, dim, lag + 1]` at `steps` `[n]` of rows with these values."""
        places = steps[:, None] - self._lags
        past = self._past[series[:, None], places.clamp(max=-1)]
        forecast = values[torch.arange(len(series))[:, None], places.clamp(min=0)]
        return self._design(torch.where(places[..., None] < 0, past, forecast))

    def steps(self, series: Tensor, values: Tensor, starts: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        coefficients = self._coefficients[series]
        low, high = (bound[series] for bound in self._bounds)
        rows, means, scales = torch.arange(len(series)), [], []
        for step in range(noise.shape[1]):
            place = starts + step
            mean, scale = torch.einsum("ndi,ndic->cnd", self._lagged(series, values, place), coefficients)
            scale = torch.minimum(torch.maximum(scale, low), high).exp()
            values[rows, place] = mean + scale * noise[:, step]
            means.append(mean)
            scales.append(scale)
        return torch.stack(means, 1), torch.stack(scales, 1)

    def learn(self, series: Tensor, values: Tensor, steps: Tensor, locs: Tensor, scales: Tensor) -> None:
        design, logs = self._lagged(series, values, steps), scales.log()
        wanted = torch.stack((locs, logs), -1)
        self._gram.index_add_(0, series, torch.einsum("ndi,ndj->ndij", design, design))
        self._moments.index_add_(0, series, torch.einsum("ndi,ndc->ndic", design, wanted))
        self._coefficients = torch.linalg.solve(self._gram, self._moments)
        low, high = self._bounds
        places = series[:, None].expand_as(logs)
        self._bounds = (
            low.scatter_reduce(0, places, logs, "amin"),
            high.scatter_reduce(0, places, logs, "amax"),
        )


LEVEL_RATIOS = (0.0, *(10.0**power for power in range(-3, 4)))
SLOPE_RATIOS = (0.0, *(10.0**power for power in range(-5, 2)))
"""Variances of level and slope, over that of the observations, among which a series selects its own."""


class KalmanDrafter(LinearDrafter):
    """Drafter by a linear Gaussian state-space model: a local level, or a local linear trend.

        value_t = level_t + noise,  level_t = level_{t-1} + slope_{t-1} + noise,  slope_t = slope_{t-1} + noise

    The trend is the constant-velocity model of tracking. Variances have the highest likelihood among
    those of a grid. Drafts use the gains at the end of the past, which have converged by then.

    Args:
        level_ratios, slope_ratios: the grid; variances relative to that of the observations.
        trend: False for a level without a slope.
    """

    def __init__(
        self,
        trend: bool = True,
        level_ratios: Sequence[float] = LEVEL_RATIOS,
        slope_ratios: Sequence[float] = SLOPE_RATIOS,
    ) -> None:
        grid = torch.cartesian_prod(
            torch.tensor(level_ratios, dtype=torch.float64),
            torch.tensor(slope_ratios if trend else (0.0,), dtype=torch.float64),
        )
        self._trend, self._grid = trend, grid.reshape(-1, 2).T[:, :, None, None]

    def fit(self, past: Tensor, observed: Tensor, lags: Sequence[int]) -> None:
        best = filter_series(past, observed, self._grid[0], self._grid[1], self._trend)
        chosen = best.log_likelihood.argmax(0, keepdim=True)
        self._level, self._slope, self._level_gain, self._slope_gain, self._scale = (
            each.expand_as(best.log_likelihood).gather(0, chosen)[0]
            for each in (best.level, best.slope, best.level_gain, best.slope_gain, best.scale)
        )

    def steps(self, series: Tensor, values: Tensor, starts: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        level, slope, scale = self._level[series], self._slope[series], self._scale[series]
        gains = self._level_gain[series], self._slope_gain[series]
        rows, means, longest = torch.arange(len(series)), [], noise.shape[1]
        for step in range(int(starts.max()) + longest):
            mean, drafted = level + slope, step - starts
            own = mean + scale * noise[rows, drafted.clamp(0, longest - 1)]
            value = torch.where(drafted[:, None] < 0, values[:, step], own)
            level, slope = mean + gains[0] * (value - mean), slope + gains[1] * (value - mean)
            means.append(mean)
        places = starts[:, None] + torch.arange(longest)
        return torch.stack(means, 1)[rows[:, None], places], scale[:, None].expand(-1, longest, -1)

    def learn(self, series: Tensor, values: Tensor, steps: Tensor, locs: Tensor, scales: Tensor) -> None:
        self._scale = _mean_by(series, scales.log(), len(self._scale), self._scale.log()).exp()


@dataclass(frozen=True)
class Filtered:
    """States after the past, for each pair of variances: tensors `[pair, series, dim]`."""

    level: Tensor
    slope: Tensor
    level_gain: Tensor
    slope_gain: Tensor
    scale: Tensor
    log_likelihood: Tensor


def filter_series(
    past: Tensor, observed: Tensor, level_ratio: Tensor, slope_ratio: Tensor, trend: bool
) -> Filtered:
    """Filter series `[series, time, dim]` for each pair of variances `[pair, 1, 1]`.

    The variance of the observations is estimated (concentrated likelihood); all others are relative to it.
    """
    shape = (len(level_ratio), *past[:, 0].shape)
    first = observed.long().argmax(1, keepdim=True)
    level, slope = past.gather(1, first)[:, 0].expand(shape), torch.zeros(shape, dtype=torch.float64)
    # Variances of level and slope, and their covariance; the slope's is diffuse.
    var_level, cov = torch.ones(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64)
    var_slope = torch.full(shape, 1e6 if trend else 0.0, dtype=torch.float64)
    errors, logs, count = torch.zeros(shape), torch.zeros(shape), torch.zeros(shape)
    for step in range(1, past.shape[1]):
        known = (observed[:, step] & (step > first[:, 0])).double()
        level, var_level = level + slope, var_level + 2 * cov + var_slope + level_ratio
        cov, var_slope = cov + var_slope, var_slope + slope_ratio
        total = var_level + 1
        level_gain, slope_gain = var_level / total, cov / total
        error = (past[:, step] - level) * known
        level, slope = level + level_gain * error, slope + slope_gain * error
        var_slope = var_slope - known * slope_gain * cov
        cov, var_level = cov - known * level_gain * cov, var_level - known * level_gain * var_level
        # The first error of a diffuse slope has no information.
        counted = known * (total < 1e5)
        errors = errors + counted * error.square() / total
        logs, count = logs + counted * total.log(), count + counted
    variance = (errors / count.clamp(min=1)).clamp(min=1e-12)
    log_likelihood = -(count * variance.log() + logs) / 2
    return Filtered(level, slope, level_gain, slope_gain, (variance * total).sqrt(), log_likelihood)


class ForecasterDrafter(ValueDrafter):
    """Drafter that samples from a smaller forecaster, one pass per step.

    Args:
        model: forecaster with the target's inputs and horizon.
    """

    def __init__(self, model: ForecastModel) -> None:
        self._model = model

    def begin(self, problem: Problem) -> None:
        self._runtime = ForecastRuntime(self._model, problem.inputs)

    def propose(self, histories: Histories, lengths: Tensor, noise: KeyedNoise) -> ValueDraft:
        values, starts = histories.values.clone(), histories.starts
        rows, none = torch.arange(len(starts)), torch.zeros_like(starts)
        params, drawn = [], []
        for step in range(int(lengths.max())):
            place = (starts + step).clamp(max=self._runtime.horizon - 1)
            params.append(self._runtime.score(histories.series, values, place, none))
            dist = make_distribution(params[-1])
            places = range(step * dist.num_uniforms, (step + 1) * dist.num_uniforms)
            uniforms = torch.from_numpy(noise.uniforms([places] * len(rows), Purpose.DRAFT))
            values[rows, place] = dist.sample(uniforms[:, None])[:, 0]
            drawn.append(values[rows, place])
        dists = make_distribution([torch.cat(each, 1) for each in zip(*params, strict=True)])
        return ValueDraft(torch.stack(drawn, 1), lengths, dists)


def make_distribution(params: Sequence[Tensor]) -> Gaussian | StudentT:
    """Return the distribution with the parameters of a forecaster's head: location and scale last."""
    return Gaussian(*params) if len(params) == 2 else StudentT(*params)


def _mean_by(groups: Tensor, values: Tensor, num_groups: int, default: Tensor | None = None) -> Tensor:
    """Return the mean values `[group, dim]` of `values` `[n, dim]`; `default` for empty groups."""
    totals = torch.zeros(num_groups, values.shape[1], dtype=torch.float64).index_add_(0, groups, values)
    counts = torch.bincount(groups, minlength=num_groups)[:, None]
    empty = torch.full_like(totals, 30.0) if default is None else default
    return torch.where(counts > 0, totals / counts.clamp(min=1), empty)
