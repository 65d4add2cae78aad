"""Compare sampled forecasts with those of a model's own `generate`: passes, time, accuracy.

A TimeSeriesTransformerForPrediction is trained for each series bundled with statsmodels: yearly
sunspots, and monthly CO2 at Mauna Loa. Forecasts of 24 steps begin at several months or years of the
part that was not trained on, 100 samples each. All systems forecast in turn, with the same model.

    python benchmarks/forecasting.py --output benchmarks/results/DATE-forecasting-avx2.json
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, median, stdev

import numpy
import torch
from common import make_parser, store
from torch import Tensor
from transformers import TimeSeriesTransformerConfig, TimeSeriesTransformerForPrediction

import secondguess
from secondguess.controllers import make_controller
from secondguess.controllers.base import Controller

HORIZON, CONTEXT, NUM_SAMPLES = 24, 48, 100
LAGS = {"sunspots": [1, 2, 3, 4, 5, 9, 10, 11, 12, 22], "co2": [1, 2, 3, 6, 11, 12, 13, 24]}
PERIOD = {"sunspots": 11.0, "co2": 12.0}
LARGE = {"d_model": 64, "layers": 2}
SMALL = {"d_model": 8, "layers": 1}
DRAFTERS = ("autoregression", "trend", "level")


def load_series(name: str) -> Tensor:
    try:
        from statsmodels import datasets
    except ImportError as error:
        raise SystemExit(
            "expected statsmodels, which bundles the series, got no such package: install it with"
            " pip install '.[bench]'"
        ) from error
    data = datasets.sunspots.load_pandas().data if name == "sunspots" else datasets.co2.load_pandas().data
    values = data["SUNACTIVITY"] if name == "sunspots" else data["co2"].resample("MS").mean().interpolate()
    return torch.tensor(values.to_numpy(), dtype=torch.float32)


class Windows:
    """Windows of one series, with its time features: age and phase."""

    def __init__(self, name: str) -> None:
        self.values = load_series(name)
        times = torch.arange(len(self.values))
        phases = 2 * torch.pi * times / PERIOD[name]
        self.features = torch.stack((times / len(times), phases.sin(), phases.cos()), -1)
        self.past = CONTEXT + max(LAGS[name])
        self.last_trained = len(self.values) * 3 // 4

    def at(self, origins: Tensor) -> dict[str, Tensor]:
        """Return the arguments of `generate` for forecasts from `origins` on, and the true `future_values`."""
        past, future = (
            origins[:, None] + torch.arange(-self.past, 0),
            origins[:, None] + torch.arange(HORIZON),
        )
        values = self.values[past]
        return {
            "past_values": values,
            "past_time_features": self.features[past],
            "past_observed_mask": torch.ones_like(values),
            "future_time_features": self.features[future],
            "future_values": self.values[future],
        }

    def origins(self, count: int) -> Tensor:
        """Return the origins of the forecasts, in equal distances after the part that was trained on."""
        return torch.linspace(self.last_trained, len(self.values) - HORIZON, count).long()


def train(
    name: str, windows: Windows, size: dict[str, int], options: argparse.Namespace
) -> TimeSeriesTransformerForPrediction:
    """Train a forecaster, or load the one that an earlier run has stored."""
    folder = None if options.models is None else options.models / f"{name}-{size['d_model']}"
    if folder is not None and folder.exists():
        return TimeSeriesTransformerForPrediction.from_pretrained(folder).eval()
    begin, steps = time.perf_counter(), options.steps
    torch.manual_seed(0)
    config = TimeSeriesTransformerConfig(
        prediction_length=HORIZON,
        context_length=CONTEXT,
        lags_sequence=LAGS[name],
        num_time_features=3,
        scaling="std",
        d_model=size["d_model"],
        encoder_layers=size["layers"],
        decoder_layers=size["layers"],
        encoder_ffn_dim=2 * size["d_model"],
        decoder_ffn_dim=2 * size["d_model"],
        num_parallel_samples=NUM_SAMPLES,
    )
    model = TimeSeriesTransformerForPrediction(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    for _ in range(steps):
        origins = torch.randint(windows.past, windows.last_trained - HORIZON + 1, (32,))
        loss = model(**windows.at(origins)).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    print(
        f"{name}: {steps} training steps in {time.perf_counter() - begin:.0f} s, loss {loss:.3f}", flush=True
    )
    if folder is not None:
        model.save_pretrained(folder)
    return model.eval()


def crps(samples: Tensor, truth: Tensor) -> float:
    """Return the continuous ranked probability score, unbiased in the number of samples, averaged over steps."""
    ordered = samples.double().sort(0).values
    count = len(samples)
    weights = 2 * torch.arange(1, count + 1)[:, None] - count - 1
    spread = (weights * ordered).sum(0) / (count * (count - 1))
    return float(((ordered - truth).abs().mean(0) - spread).mean())


System = Callable[[dict[str, Tensor], int], tuple[Tensor, int, float | None]]
"""Forecast with a seed: samples `[sample, step]`, decoder passes, values per pass of a row."""


def make_systems(
    model: TimeSeriesTransformerForPrediction, small: TimeSeriesTransformerForPrediction
) -> dict[str, System]:
    def generate(inputs: dict[str, Tensor], seed: int) -> tuple[Tensor, int, float | None]:
        torch.manual_seed(seed)
        return model.generate(**inputs).sequences[0], HORIZON, None

    def ours(drafter: object, controller: str | Controller = "fixed:64") -> System:
        def run(inputs: dict[str, Tensor], seed: int) -> tuple[Tensor, int, float | None]:
            out = secondguess.forecast(model, **inputs, drafter=drafter, controller=controller, seed=seed)
            return out.sequences[0], out.num_passes, out.stats.acceptance_length

        return run

    systems = {"generate": generate, "no drafter": ours(None)}
    systems |= {drafter: ours(drafter) for drafter in DRAFTERS}
    for controller in ("fixed:6", "fixed:10"):
        systems[f"autoregression, controller {controller}"] = ours("autoregression", controller)
    systems["autoregression, controller cost"] = ours("autoregression", make_controller("cost:24"))
    return systems | {"smaller network": ours(small)}


def measure(name: str, options: argparse.Namespace) -> list[dict[str, object]]:
    windows = Windows(name)
    model = train(name, windows, LARGE, options)
    systems = make_systems(model, train(name, windows, SMALL, options))
    found: dict[str, list[tuple[float, int, float | None, float]]] = {system: [] for system in systems}
    origins = windows.origins(options.origins)
    for seed in range(-1, options.repeats):  # the first is a warm-up
        for index, origin in enumerate(origins if seed >= 0 else origins[:1]):
            inputs = windows.at(origin[None])
            truth = inputs.pop("future_values")[0]
            for system, run in systems.items():
                start = time.perf_counter()
                # Equal seeds would give equal noise, and errors that do not average out.
                samples, passes, length = run(inputs, (seed + 1) * options.origins + index)
                seconds = time.perf_counter() - start
                if seed >= 0:
                    found[system].append((seconds, passes, length, crps(samples, truth)))
    theirs = numpy.array([each[3] for each in found["generate"]])
    table: list[dict[str, object]] = []
    for system, runs in found.items():
        seconds, passes, lengths, scores = zip(*runs, strict=True)
        differences = numpy.array(scores) - theirs
        ratios = [each[0] / own for each, own in zip(found["generate"], seconds, strict=True)]
        row = {
            "series": name,
            "system": system,
            "passes": fmean(passes),
            "most_passes": max(passes),
            "values_per_row_pass": None if lengths[0] is None else fmean(lengths),
            "seconds": median(seconds),
            "speedup": median(each[0] for each in found["generate"]) / median(seconds),
            "least_speedup": min(ratios),
            "greatest_speedup": max(ratios),
            "crps": fmean(scores),
            "crps_difference": float(differences.mean()),
            "crps_standard_error": stdev(differences) / len(differences) ** 0.5,
        }
        table.append(row)
        print({key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()})
    return table


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--series", nargs="+", choices=list(LAGS), default=list(LAGS))
    parser.add_argument("--steps", type=int, default=800, help="training steps")
    parser.add_argument("--origins", type=int, default=8, help="forecasts per series")
    parser.add_argument("--repeats", type=int, default=3, help="seeds per forecast")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--models", type=Path, default=None, help="a folder to store trained models in, and to load them from"
    )
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    table = [row for name in options.series for row in measure(name, options)]
    store(options, {"table": table}, num_threads=options.threads, dtype="float32")


if __name__ == "__main__":
    main()
