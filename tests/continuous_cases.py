"""Proofs that continuous values follow the target's distribution, shared by the tests and the mutants."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Self

import numpy
import torch
from scipy import stats
from torch import Tensor
from transformers import (
    InformerConfig,
    InformerForPrediction,
    TimeSeriesTransformerConfig,
    TimeSeriesTransformerForPrediction,
)

from secondguess.beyond.forecasting import forecast as forecasting
from secondguess.beyond.forecasting import verification
from secondguess.beyond.forecasting.autoregression import AutoregressionDrafter
from secondguess.beyond.forecasting.distributions import Distribution, Gaussian, Index, StudentT
from secondguess.beyond.forecasting.drafters import ValueDrafter
from secondguess.beyond.forecasting.verification import ValueDraft
from secondguess.core import Row
from secondguess.sampling import SamplingParams
from secondguess.sampling.noise import KeyedNoise

Pair = tuple[Distribution, Distribution]
LEAST_P_VALUE = 1e-5


def vector(*values: float) -> Tensor:
    return torch.tensor([values], dtype=torch.float64)


def gaussian(locs: tuple[float, ...], scales: tuple[float, ...]) -> Gaussian:
    return Gaussian(vector(*locs), vector(*scales))


def student(df: float, loc: float, scale: float) -> StudentT:
    return StudentT(vector(df), vector(loc), vector(scale))


@dataclass(frozen=True)
class Mixture(Distribution):
    """Finite mixtures.

    Args:
        log_weights: `[..., component]`, log probabilities of the components.
        components: batch `[..., component]`.
    """

    log_weights: Tensor
    components: Distribution

    @property
    def num_uniforms(self) -> int:
        return 1 + self.components.num_uniforms

    def log_density(self, values: Tensor) -> Tensor:
        return (self.log_weights + self.components.log_density(values[..., None, :])).logsumexp(-1)

    def sample(self, uniforms: Tensor) -> Tensor:
        """Return draws: the first uniform selects the component, the others draw from it."""
        totals = self.log_weights.exp().cumsum(-1)
        chosen = (uniforms[..., :1] * totals[..., -1:] >= totals).sum(-1, keepdim=True)
        draws = self.components.sample(uniforms[..., None, 1:])
        return draws.take_along_dim(chosen[..., None], -2).squeeze(-2)

    def at(self, index: Index) -> Self:
        return type(self)(self.log_weights[index], self.components.at(index))


def mixture(weights: tuple[float, ...], locs: tuple[float, ...], scales: tuple[float, ...]) -> Mixture:
    components = Gaussian(vector(*locs)[..., None], vector(*scales)[..., None])
    return Mixture(vector(*weights).log(), components)


PAIRS: dict[str, Pair] = {
    "equal-scales": (gaussian((0.4,), (0.7,)), gaussian((-0.3,), (0.7,))),
    "unequal-scales": (gaussian((0.2,), (0.6,)), gaussian((0.0,), (1.1,))),
    "students": (student(3.0, 0.3, 0.8), student(5.0, 0.0, 0.9)),
    "student-gaussian": (student(4.0, 0.0, 1.0), gaussian((0.3,), (0.9,))),
    "mixtures": (
        mixture((0.3, 0.7), (-1.0, 0.8), (0.5, 0.7)),
        mixture((0.6, 0.4), (-0.8, 1.0), (0.6, 0.6)),
    ),
    "equal-scales-2d": (gaussian((0.4, -0.2), (0.7, 1.2)), gaussian((-0.1, 0.3), (0.7, 1.2))),
    "unequal-scales-2d": (gaussian((0.4, -0.2), (0.7, 1.2)), gaussian((0.0, 0.0), (0.9, 1.0))),
}
"""Target and draft distribution, each a batch of one."""


@cache
def nodes_and_weights(dim: int) -> tuple[Tensor, Tensor]:
    """Trapezoidal rule on x = sinh(t), which integrates smooth densities to rounding, heavy tails too."""
    points = torch.linspace(-16, 16, 3201 if dim == 1 else 801, dtype=torch.float64)
    line, weights = points.sinh(), points.cosh() * (points[1] - points[0])
    if dim == 1:
        return line[:, None], weights
    # Gaussians alone: the plane is cut where they vanish.
    inner = line.abs() < 60
    line, weights = line[inner], weights[inner]
    return torch.cartesian_prod(line, line), torch.outer(weights, weights).flatten()


def output_error(name: str) -> float:
    """Largest error of the density of a verified value, for one pair, by quadrature over the residual."""
    target, draft = PAIRS[name]
    values, weights = nodes_and_weights(target.sample(torch.full((1, target.num_uniforms), 0.5)).shape[-1])
    p, q = target.log_density(values).exp(), draft.log_density(values).exp()
    accepted = q * verification.acceptance_probs(target, draft, values)
    kept = p * verification.keep_probs(target, draft, values)
    rejected = 1 - (weights * accepted).sum()
    corrected = kept * rejected / (weights * kept).sum()
    normalisation = max(abs((weights * p).sum() - 1), abs((weights * q).sum() - 1))
    return max(float((accepted + corrected - p).abs().max()), float(normalisation))


def reflection_error(name: str) -> float:
    """Largest error of the density of a verified value under reflection, which preserves volumes."""
    target, draft = PAIRS[name]
    assert isinstance(target, Gaussian)
    assert isinstance(draft, Gaussian)
    values, _ = nodes_and_weights(target.loc.shape[-1])
    values = values[values.abs().amax(1) < 8]
    q = draft.log_density(values).exp()
    images = verification.reflected(target, draft, values)
    rejected = q * (1 - verification.acceptance_probs(target, draft, values))
    accepted = draft.log_density(images).exp() * verification.acceptance_probs(target, draft, images)
    return float((accepted + rejected - target.log_density(images).exp()).abs().max())


def noise_of(num_rows: int, num_output: int = 0, seed: int = 5) -> KeyedNoise:
    params = SamplingParams(max_tokens=99, temperature=1.0)
    return KeyedNoise.from_rows(
        [Row([0] * (1 + num_output), params, seed, sample_index=sample) for sample in range(num_rows)]
    )


def repeated(dist: Distribution, num_rows: int, num_places: int) -> Distribution:
    index = torch.zeros(num_rows, num_places, dtype=torch.int64)
    return dist.at(index)


def verified(name: str, num_rows: int) -> tuple[Tensor, Tensor]:
    """Numbers of accepted values, and the first two values `[row, 2, dim]`, of chains of one drafted value."""
    target, draft = PAIRS[name]
    noise = noise_of(num_rows)
    dists = repeated(draft, num_rows, 1)
    generator = torch.Generator().manual_seed(3)
    uniforms = torch.rand(num_rows, 1, draft.num_uniforms, generator=generator, dtype=torch.float64)
    drafted = dists.sample(uniforms)
    chain = ValueDraft(drafted, torch.ones(num_rows, dtype=torch.int64), dists)
    lengths, following = verification.verify(chain, repeated(target, num_rows, 2), noise)
    first = torch.where(lengths[:, None] > 0, drafted[:, 0], following)
    return lengths, torch.stack((first, following), 1)


def cdf(dist: Distribution, values: Tensor) -> Tensor:
    """Distribution function of one-dimensional values."""
    if isinstance(dist, Mixture):
        assert isinstance(dist.components, Gaussian)
        parts = cdf(dist.components, values[..., None, :])
        return (dist.log_weights.exp() * parts[..., 0]).sum(-1, keepdim=True)
    assert isinstance(dist, Gaussian | StudentT)
    standard = (values - dist.loc) / dist.scale
    if isinstance(dist, Gaussian):
        return torch.special.ndtr(standard)
    return torch.from_numpy(numpy.asarray(stats.t.cdf(standard.numpy(), dist.df.numpy())))


def uniformity(columns: Tensor, num_bins: int = 8) -> float:
    """P-value of the joint histogram of transforms `[n, k]` that are uniform and independent."""
    bins = (columns * num_bins).long().clamp(0, num_bins - 1)
    places = (bins * num_bins ** torch.arange(columns.shape[1])).sum(1)
    counts = torch.bincount(places, minlength=num_bins ** columns.shape[1])
    return float(stats.chisquare(counts.numpy()).pvalue)


def verification_holds(name: str, num_rows: int = 30_000) -> bool:
    """True if a verified value, and the one after an accepted chain, follow the target."""
    target, _ = PAIRS[name]
    lengths, values = verified(name, num_rows)
    first, second = cdf(target, values[:, 0]), cdf(target, values[lengths > 0, 1])
    return min(uniformity(first, 32), uniformity(second, 32)) > LEAST_P_VALUE


def rules_hold(name: str) -> bool:
    return output_error(name) < 1e-9


def reflection_holds(name: str) -> bool:
    return reflection_error(name) < 1e-9


HORIZON = 6


@cache
def tiny_forecaster(kind: str = "time-series", seed: int = 0, **settings: object) -> torch.nn.Module:
    config_class, model_class = {
        "time-series": (TimeSeriesTransformerConfig, TimeSeriesTransformerForPrediction),
        "informer": (InformerConfig, InformerForPrediction),
    }[kind]
    sizes = dict.fromkeys(("encoder_layers", "decoder_layers", "encoder_attention_heads"), 1)
    usual = {
        "prediction_length": HORIZON, "context_length": 10, "lags_sequence": [1, 2, 4], "num_time_features": 1,
        "d_model": 8, "decoder_attention_heads": 1, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8,
        "num_parallel_samples": 300, "distribution_output": "normal", "scaling": "std",
    }  # fmt: skip
    config = config_class(**{**usual, **sizes, **settings})
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = model_class(config).eval()
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if "parameter_projection" in name:
                    weight.mul_(8)  # locations and scales that differ clearly between histories
    return model


def series(num_series: int = 1, dim: int = 1, length: int = 14) -> dict[str, Tensor]:
    """Arguments of `generate` for the tiny forecasters."""
    times = torch.arange(length + HORIZON, dtype=torch.float32)
    waves = torch.sin(times / (2 + torch.arange(num_series)[:, None]))
    values = waves + 0.7 * torch.randn(waves.shape, generator=torch.Generator().manual_seed(4))
    values = values if dim == 1 else torch.stack([values * (1 + each) for each in range(dim)], -1)
    features = (times / 10)[None, :, None].repeat(num_series, 1, 1)
    return {
        "past_values": values[:, :length],
        "past_time_features": features[:, :length],
        "future_time_features": features[:, length:],
        "past_observed_mask": torch.ones_like(values[:, :length]),
    }


class CrudeDrafter(AutoregressionDrafter):
    """Autoregression that does not learn from the target, so that many of its drafts are rejected."""

    def observe(self, *_: object) -> None:
        pass


@torch.inference_mode()
def transforms(sequences: Tensor, model: torch.nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """Probability integral transforms `[sample, step]` of one series' samples, by the model's own `forward`."""
    num_samples = sequences.shape[1]
    inputs = {name: values.repeat_interleave(num_samples, 0) for name, values in inputs.items()}
    future = sequences[0].to(inputs["past_values"].dtype)
    outputs = model(**inputs, future_values=future)
    dist = forecasting.make_distribution([each[..., None].double() for each in outputs.params])
    values = ((future - outputs.loc) / outputs.scale)[..., None].double()
    return cdf(dist, values)[..., 0]


def forecast_holds(
    drafter: ValueDrafter | str = "crude", num_samples: int = 2500, **settings: object
) -> bool:
    """True if the transforms of sampled forecasts are uniform, and independent in successive steps."""
    model, inputs = tiny_forecaster(**settings), series()
    chosen = CrudeDrafter() if drafter == "crude" else drafter
    out = forecasting.forecast(model, **inputs, num_samples=num_samples, drafter=chosen, seed=11)
    found = transforms(out.sequences, model, inputs)
    p_values = [uniformity(found[:, step : step + 2], 6) for step in range(HORIZON - 1)]
    return min(p_values) > LEAST_P_VALUE / HORIZON
