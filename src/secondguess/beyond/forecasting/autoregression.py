"""Drafter by an autoregression that learns to imitate the target."""

from __future__ import annotations

import torch
from torch import Tensor

from secondguess.beyond.forecasting.drafters import Problem, StandardisedDrafter

NUM_WAVES = 128
"""Number of random Fourier features of the lagged values (Rahimi and Recht 2007)."""
RIDGE = 0.01
"""Weight of the penalty on squared coefficients."""
MAX_LEARNED = 256
"""Maximum number of the target's predictions per series that are learned from after a round."""


class AutoregressionDrafter(StandardisedDrafter):
    """Drafter with a linear autoregression, corrected by what the target predicted in earlier rounds.

    The autoregression over the target's lags is fitted to the past by least squares. After each round,
    a ridge regression is fitted to the deviations of the target's locations and log scales from it. Its
    inputs are the lagged values, random Fourier features of them, and the step. Many samples of a
    series give it hundreds of exact values of the target's function per round, and no pass of their own.
    Features are computed in float32, in half the time.
    """

    def fit(self, past: Tensor, problem: Problem) -> None:
        self._past, self._lags, self._horizon = past, torch.tensor(problem.lags), problem.horizon
        steps = torch.arange(int(self._lags.max()), past.shape[1])
        positions = steps[:, None] - self._lags
        known = (problem.observed[:, steps] & problem.observed[:, positions].all(2)).all(-1, keepdim=True)
        design = torch.nn.functional.pad(past[:, positions].flatten(2), (0, 1), value=1.0) * known
        values = past[:, steps] * known
        gram = design.mT @ design + RIDGE * torch.eye(design.shape[-1], dtype=torch.float64)
        coefficients = torch.linalg.solve(gram, design.mT @ values)
        errors = values - design @ coefficients
        variance = errors.square().sum(1) / known.sum(1).clamp(min=1)
        log_scale = variance.clamp(min=1e-12).log() / 2
        self._low, self._high = log_scale, log_scale
        num_inputs, generator = design.shape[-1] - 1, torch.Generator().manual_seed(0)
        self._generator = generator
        frequencies = torch.randn(num_inputs, NUM_WAVES, generator=generator, dtype=torch.float64)
        self._frequencies = (frequencies * 1.5 / num_inputs**0.5).float()
        self._phases = (
            2 * torch.pi * torch.rand(NUM_WAVES, generator=generator, dtype=torch.float64)
        ).float()
        self._num_weights = num_inputs + NUM_WAVES
        num_features = self._num_weights + problem.horizon
        gram = RIDGE * torch.eye(num_features, dtype=torch.float64)
        self._gram = gram.repeat(len(past), 1, 1)
        self._moments = torch.zeros(len(past), num_features, 2 * past.shape[-1], dtype=torch.float64)
        # The autoregression as weights of the same features; it is the one that is corrected.
        self._base = torch.zeros_like(self._moments)
        self._base[:, :num_inputs, : past.shape[-1]] = coefficients[:, :-1]
        constants = torch.cat((coefficients[:, -1], log_scale), -1)
        self._base[:, -problem.horizon :] = constants[:, None]
        self._weights = self._base.float()

    def _features(self, lagged: Tensor) -> Tensor:
        """Return lagged values `[n, lag * dim]` and their random features, in float32."""
        return torch.cat((lagged, torch.addmm(self._phases, lagged, self._frequencies).cos_()), -1)

    def steps(self, series: Tensor, values: Tensor, starts: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        longest, reach = noise.shape[1], int(self._lags.max())
        known = starts[:, None] + torch.arange(-reach, 0)
        # A step is at the same position in all rows: the known values that it depends on, then the drafts.
        aligned = torch.cat((self._values_at(series, values, known), torch.zeros_like(noise)), 1).float()
        noise = noise.float()
        all_weights = self._weights[series]
        weights, constants = all_weights[:, : self._num_weights], all_weights[:, self._num_weights :]
        steps = (starts[:, None] + torch.arange(longest)).clamp(max=self._horizon - 1)
        constants = constants.take_along_dim(steps[..., None], 1)
        low, high = self._low[series].float(), self._high[series].float()
        positions = reach - self._lags
        means, scales = [], []
        for step in range(longest):
            features = self._features(aligned[:, positions + step].flatten(1))
            found = torch.baddbmm(constants[:, step, None], features[:, None], weights)[:, 0]
            mean, log_scale = found.chunk(2, -1)
            scale = log_scale.clamp(low, high).exp_()
            aligned[:, reach + step] = torch.addcmul(mean, scale, noise[:, step])
            means.append(mean)
            scales.append(scale)
        return torch.stack(means, 1).double(), torch.stack(scales, 1).double()

    def learn(self, series: Tensor, values: Tensor, steps: Tensor, locs: Tensor, scales: Tensor) -> None:
        logs = scales.log()
        groups = series[:, None].expand_as(logs)
        self._low = self._low.scatter_reduce(0, groups, logs, "amin")
        self._high = self._high.scatter_reduce(0, groups, logs, "amax")
        chosen = (
            torch.randperm(len(steps), generator=self._generator)[: MAX_LEARNED * len(self._gram)]
            .sort()
            .values
        )
        series, steps, values = series[chosen], steps[chosen], values[chosen]
        lagged = self._values_at(series, values, steps[:, None] - self._lags).flatten(1)
        phases = torch.eye(self._horizon)[steps]
        features = torch.cat((self._features(lagged.float()), phases), -1)
        wanted = torch.cat((locs, logs), -1)[chosen]
        counts = torch.bincount(series, minlength=len(self._gram)).tolist()
        for index, (own, target) in enumerate(
            zip(features.split_with_sizes(counts), wanted.split_with_sizes(counts), strict=True)
        ):
            self._gram[index] += own.T @ own
            self._moments[index] += own.T.double() @ (target - own.double() @ self._base[index])
        self._weights = (self._base + torch.linalg.solve(self._gram, self._moments)).float()

    def _values_at(self, series: Tensor, values: Tensor, positions: Tensor) -> Tensor:
        """Return values `[n, position, dim]` at `positions` `[n, position]`, of which negative ones are in the past."""
        rows = torch.arange(len(series))[:, None]
        forecast = values[rows, positions.clamp(min=0)]
        return torch.where(
            positions[..., None] < 0, self._past[series[:, None], positions.clamp(max=-1)], forecast
        )
