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

from secondguess.beyond.forecasting.distributions import Distribution, Gaussian, StudentT
from secondguess.beyond.forecasting.forecaster import ForecastModel, ForecastRuntime
from secondguess.beyond.forecasting.verification import ValueDraft
from secondguess.runtime.hashes import Purpose
from secondguess.sampling.noise import KeyedNoise


@dataclass(frozen=True)
class Problem:
    """Series to be forecast."""

    inputs: Mapping[str, Tensor]  # arguments of the model's `generate`
    past: Tensor  # [series, time, dim] float64; the last observed value where one is missing
    observed: Tensor  # [series, time, dim] bool, False for missing values
    num_rows: int  # over all series
    lags: Sequence[int]  # of the values that the target takes as inputs, increasing
    horizon: int  # number of steps to forecast


@dataclass(frozen=True)
class Histories:
    """Values so far of a batch of rows, each of which continues a series.

    `values` from `starts` on have no meaning for `propose`, and are the drafted ones for `observe`.
    """

    rows: Tensor  # [row], index of each row in the forecast, increasing
    series: Tensor  # [row], index of the series, not decreasing
    values: Tensor  # [row, horizon, dim] float64
    starts: Tensor  # [row], number of values so far


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


class StandardisedDrafter(ValueDrafter):
    """Base class of drafters that are fitted to the past, in units of its standard deviation.

    Drafts are Gaussian until the target's distributions were seen, and then have their mean degrees of
    freedom.
    """

    def begin(self, problem: Problem) -> None:
        observed = problem.observed.double()
        count = observed.sum(1, keepdim=True).clamp(min=1)
        self._center = (problem.past * observed).sum(1, keepdim=True) / count
        deviations = (problem.past - self._center) * observed
        self._unit = (deviations.square().sum(1, keepdim=True) / count).sqrt().clamp(min=1e-9)
        self._df: Tensor | None = None
        self.fit((problem.past - self._center) / self._unit, problem)

    @abstractmethod
    def fit(self, past: Tensor, problem: Problem) -> None:
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
        indices = [range(shape[1] * standard.num_uniforms)] * shape[0]
        uniforms = torch.from_numpy(noise.uniforms(indices, Purpose.DRAFT)).reshape(*shape[:2], -1)
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
        series = histories.series
        rows, queries = (torch.arange(scores.loc.shape[1]) <= lengths[:, None]).nonzero(as_tuple=True)
        center, unit = self._center[series], self._unit[series]
        locs, scales = ((scores.loc - center) / unit)[rows, queries], (scores.scale / unit)[rows, queries]
        if isinstance(scores, StudentT):
            known = torch.full_like(self._unit[:, 0], 30.0) if self._df is None else self._df[:, 0]
            self._df = mean_by(series[rows], scores.df[rows, queries], known)[:, None]
        values = (histories.values - center) / unit
        self.learn(series[rows], values[rows], (histories.starts[rows] + queries), locs, scales)

    @abstractmethod
    def learn(self, series: Tensor, values: Tensor, steps: Tensor, locs: Tensor, scales: Tensor) -> None:
        """Learn from locations and scales `[n, dim]` of the target at `steps` `[n]` after `values`."""


class ForecasterDrafter(ValueDrafter):
    """Drafter that samples from a smaller forecaster with the target's inputs and horizon, one pass per step."""

    def __init__(self, model: ForecastModel) -> None:
        self.model = model

    def begin(self, problem: Problem) -> None:
        self._runtime = ForecastRuntime(self.model, problem.inputs, problem.num_rows)

    def propose(self, histories: Histories, lengths: Tensor, noise: KeyedNoise) -> ValueDraft:
        values, starts = histories.values.clone(), histories.starts
        rows, none = torch.arange(len(starts)), torch.zeros_like(starts)
        params, drawn = [], []
        for step in range(int(lengths.max())):
            position = (starts + step).clamp(max=self._runtime.horizon - 1)
            params.append(self._runtime.score(histories.rows, histories.series, values, position, none))
            dist = make_distribution(params[-1])
            indices = range(step * dist.num_uniforms, (step + 1) * dist.num_uniforms)
            uniforms = torch.from_numpy(noise.uniforms([indices] * len(rows), Purpose.DRAFT))
            values[rows, position] = dist.sample(uniforms[:, None])[:, 0]
            drawn.append(values[rows, position])
        dists = make_distribution([torch.cat(parts, 1) for parts in zip(*params, strict=True)])
        return ValueDraft(torch.stack(drawn, 1), lengths, dists)

    def observe(self, histories: Histories, lengths: Tensor, scores: Distribution) -> None:
        # In a round without drafts, steps drafted earlier and rejected since may be cached.
        self._runtime.rewind(histories.rows, histories.starts + lengths)


def make_distribution(params: Sequence[Tensor]) -> Gaussian | StudentT:
    """Return the distribution with the parameters of a forecaster's head: location and scale last."""
    return Gaussian(*params) if len(params) == 2 else StudentT(*params)


def mean_by(groups: Tensor, values: Tensor, default: Tensor) -> Tensor:
    """Return the mean values `[group, dim]` of `values` `[n, dim]`; `default` for empty groups."""
    totals = torch.zeros(len(default), values.shape[1], dtype=torch.float64).index_add_(0, groups, values)
    counts = torch.bincount(groups, minlength=len(default))[:, None]
    return torch.where(counts > 0, totals / counts.clamp(min=1), default)
