"""Drafter by an autoregression that learns to imitate the target."""

from __future__ import annotations

import torch
from torch import Tensor

from secondguess.continuous.drafters import Problem, StandardisedDrafter

NUM_WAVES = 128
"""Number of random Fourier features of the lagged values (Rahimi and Recht 2007)."""
RIDGE = 0.01
"""Weight of the penalty on squared coefficients."""


class AutoregressionDrafter(StandardisedDrafter):
    """Drafter with a linear autoregression, corrected by what the target predicted in earlier rounds.

    The autoregression over the target's lags is fitted to the past by least squares. After each round,
    a ridge regression is fitted to the deviations of the target's locations and log scales from it. Its
    inputs are the lagged values, random Fourier features of them, and the step. Many samples of a
    series give it thousands of exact values of the target's function, and no pass of their own.
    """

    def fit(self, past: Tensor, problem: Problem) -> None:
        self._past, self._lags, self._horizon = past, torch.tensor(problem.lags), problem.horizon
        steps = torch.arange(int(self._lags.max()), past.shape[1])
        places = steps[:, None] - self._lags
        known = (problem.observed[:, steps] & problem.observed[:, places].all(2)).all(-1, keepdim=True)
        design = with_constant(past[:, places].flatten(2)) * known
        values = past[:, steps] * known
        gram = design.mT @ design + RIDGE * torch.eye(design.shape[-1], dtype=torch.float64)
        self._coefficients = torch.linalg.solve(gram, design.mT @ values)
        errors = values - design @ self._coefficients
        variance = errors.square().sum(1) / known.sum(1).clamp(min=1)
        self._log_scale = variance.clamp(min=1e-12).log() / 2
        self._low, self._high = self._log_scale, self._log_scale
        num_inputs, generator = design.shape[-1] - 1, torch.Generator().manual_seed(0)
        frequencies = torch.randn(num_inputs, NUM_WAVES, generator=generator, dtype=torch.float64)
        self._frequencies = frequencies * 1.5 / num_inputs**0.5
        self._phases = 2 * torch.pi * torch.rand(NUM_WAVES, generator=generator, dtype=torch.float64)
        num_features = num_inputs + 1 + NUM_WAVES + problem.horizon
        gram = RIDGE * torch.eye(num_features, dtype=torch.float64)
        self._gram = gram.repeat(len(past), 1, 1)
        self._moments = torch.zeros(len(past), num_features, 2 * past.shape[-1], dtype=torch.float64)
        self._correction = torch.zeros_like(self._moments)

    def _lagged(self, series: Tensor, values: Tensor, steps: Tensor) -> Tensor:
        """Return the lagged values `[n, lag * dim]` at `steps` `[n]` of rows with these values."""
        places = steps[:, None] - self._lags
        past = self._past[series[:, None], places.clamp(max=-1)]
        forecast = values[torch.arange(len(series))[:, None], places.clamp(min=0)]
        return torch.where(places[..., None] < 0, past, forecast).flatten(1)

    def _features(self, lagged: Tensor, steps: Tensor) -> Tensor:
        waves = (lagged @ self._frequencies + self._phases).cos()
        return torch.cat((with_constant(lagged), waves, torch.eye(self._horizon)[steps]), -1)

    def _means(self, series: Tensor, lagged: Tensor) -> Tensor:
        return torch.einsum("ni,nid->nd", with_constant(lagged), self._coefficients[series])

    def steps(self, series: Tensor, values: Tensor, starts: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        correction, low, high = self._correction[series], self._low[series], self._high[series]
        rows, means, scales = torch.arange(len(series)), [], []
        for step in range(noise.shape[1]):
            place = (starts + step).clamp(max=self._horizon - 1)
            lagged = self._lagged(series, values, starts + step)
            change = torch.einsum("ni,nic->nc", self._features(lagged, place), correction)
            shift, stretch = change.chunk(2, -1)
            means.append(self._means(series, lagged) + shift)
            log_scale = self._log_scale[series] + stretch
            scales.append(torch.minimum(torch.maximum(log_scale, low), high).exp())
            values[rows, starts + step] = means[-1] + scales[-1] * noise[:, step]
        return torch.stack(means, 1), torch.stack(scales, 1)

    def learn(self, series: Tensor, values: Tensor, steps: Tensor, locs: Tensor, scales: Tensor) -> None:
        lagged, logs = self._lagged(series, values, steps), scales.log()
        features = self._features(lagged, steps)
        wanted = torch.cat((locs - self._means(series, lagged), logs - self._log_scale[series]), -1)
        for each in set(series.tolist()):
            own = features[series == each]
            self._gram[each] += own.T @ own
            self._moments[each] += own.T @ wanted[series == each]
        self._correction = torch.linalg.solve(self._gram, self._moments)
        groups = series[:, None].expand_as(logs)
        self._low = self._low.scatter_reduce(0, groups, logs, "amin")
        self._high = self._high.scatter_reduce(0, groups, logs, "amax")


def with_constant(inputs: Tensor) -> Tensor:
    """Return inputs `[..., i]` with a one behind them."""
    return torch.nn.functional.pad(inputs, (0, 1), value=1.0)
