"""Drafters by linear Gaussian state-space models: a local level, or a local linear trend."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from secondguess.beyond.forecasting.drafters import Problem, StandardisedDrafter, mean_by

LEVEL_RATIOS = (0.0, *(10.0**power for power in range(-3, 4)))
SLOPE_RATIOS = (0.0, *(10.0**power for power in range(-5, 2)))
"""Variances of level and slope, over that of the observations, among which a series selects its own."""


class KalmanDrafter(StandardisedDrafter):
    """Drafter by a linear Gaussian state-space model: a local linear trend, or a local level without a slope.

        value_t = level_t + noise,  level_t = level_{t-1} + slope_{t-1} + noise,  slope_t = slope_{t-1} + noise

    The trend is the constant-velocity model of tracking. Variances have the highest likelihood among
    those of a grid. Drafts use the gains at the end of the past, which have converged by then.
    """

    def __init__(self, trend: bool = True) -> None:
        ratios = LEVEL_RATIOS, SLOPE_RATIOS if trend else (0.0,)
        grid = torch.cartesian_prod(*(torch.tensor(values, dtype=torch.float64) for values in ratios))
        self._trend, self._grid = trend, grid.reshape(-1, 2).T[:, :, None, None]

    def fit(self, past: Tensor, problem: Problem) -> None:
        best = filter_series(past, problem.observed, self._grid[0], self._grid[1], self._trend)
        chosen = best.log_likelihood.argmax(0, keepdim=True)
        self._level, self._slope, self._level_gain, self._slope_gain, self._scale = (
            value.expand_as(best.log_likelihood).gather(0, chosen)[0]
            for value in (best.level, best.slope, best.level_gain, best.slope_gain, best.scale)
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
        positions = starts[:, None] + torch.arange(longest)
        return torch.stack(means, 1)[rows[:, None], positions], scale[:, None].expand(-1, longest, -1)

    def learn(self, series: Tensor, values: Tensor, steps: Tensor, locs: Tensor, scales: Tensor) -> None:
        self._scale = mean_by(series, scales.log(), self._scale.log()).exp()


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
