"""A Kalman tracker drafts the steps of moving targets; a network that sees noisy detections verifies them.

The targets turn once. The constant-velocity tracker does not see the turn, the network does: drafts
are rejected there, and nowhere else. The sampled tracks follow the network's distribution throughout:
they are compared with those of its own `generate` by an energy-distance permutation test.

    python examples/tracking.py --picture docs/tracking.png
"""

from __future__ import annotations

import argparse

import numpy
import torch
from torch import Tensor
from transformers import TimeSeriesTransformerConfig, TimeSeriesTransformerForPrediction

import secondguess
from secondguess.beyond.forecasting.kalman import KalmanDrafter

PAST, STEPS, TURN, NUM_SAMPLES = 15, 16, 6, 50
"""Steps seen, steps to be tracked, the first one of the turn, and tracks sampled per target."""


def simulate(angles: Tensor, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    """Return the inputs of the network, and the true steps, of targets that turn by `angles` within two steps."""
    noise = torch.randn(5, len(angles), PAST + STEPS, generator=generator)
    turned = (torch.arange(PAST + STEPS) - PAST - TURN + 1).clamp(0, 2) / 2 * angles[:, None]
    start = 2 * torch.pi * torch.rand(len(angles), 1, generator=generator)
    heading = start + turned + 0.03 * noise[0].cumsum(1)
    steps = torch.stack((heading.cos() + 0.05 * noise[1], heading.sin() + 0.05 * noise[2]), -1)
    detected = steps + 0.2 * noise[3:].permute(1, 2, 0)
    inputs = {
        "past_values": steps[:, :PAST],
        "past_observed_mask": torch.ones_like(steps[:, :PAST]),
        "past_time_features": detected[:, :PAST],
        "future_time_features": detected[:, PAST:],
    }
    return inputs, steps[:, PAST:]


def train(num_batches: int, generator: torch.Generator) -> TimeSeriesTransformerForPrediction:
    """Train a network that predicts the next step from earlier ones and the detections."""
    torch.manual_seed(0)
    config = TimeSeriesTransformerConfig(
        prediction_length=STEPS,
        context_length=PAST - 3,
        lags_sequence=[1, 2, 3],
        input_size=2,
        num_time_features=2,
        scaling=None,
        distribution_output="normal",
        d_model=32,
        num_parallel_samples=NUM_SAMPLES,
    )
    model = TimeSeriesTransformerForPrediction(config)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=num_batches)
    for _ in range(num_batches):
        inputs, future = simulate(torch.pi * torch.rand(64, generator=generator), generator)
        optimizer.zero_grad()
        model(**inputs, future_values=future).loss.backward()
        optimizer.step()
        schedule.step()
    return model.eval()


def permutation_p_value(ours: Tensor, theirs: Tensor, num_permutations: int = 199) -> float:
    """Return the p-value of the energy distance between two samples `[n, values]` of equal size."""
    both = torch.cat((ours, theirs)).double()
    distances = torch.cdist(both, both).numpy()
    signs = numpy.repeat([1.0, -1.0], len(ours))
    generator = numpy.random.default_rng(0)
    permuted = [generator.permutation(signs) for _ in range(num_permutations)]
    # The energy distance is a constant times this form, which a permutation does not change otherwise.
    observed, *others = [-float(each @ distances @ each) for each in (signs, *permuted)]
    return (1 + sum(other >= observed for other in others)) / (1 + num_permutations)


def draw(
    path: str, model: TimeSeriesTransformerForPrediction, table: list[tuple[float, float, float]]
) -> None:
    """Draw sampled tracks of a target that turns, and the passes saved by the angle of the turn."""
    from matplotlib import pyplot

    inputs, future = simulate(torch.tensor([torch.pi / 2]), torch.Generator().manual_seed(5))
    out = secondguess.forecast(model, **inputs, drafter=KalmanDrafter(trend=False), seed=1)
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(8, 3.2), layout="constrained")
    for track in out.sequences[0].cumsum(1):
        left.plot(*track.T, color="tab:blue", alpha=0.15, linewidth=0.8)
    left.plot(*future[0].cumsum(0).T, color="black", linewidth=1.5)
    left.set(title="sampled tracks (blue) and the true one", aspect="equal")
    right.plot([row[0] for row in table], [100 * row[1] for row in table], "o-", color="tab:blue")
    right.set(
        title="target passes saved per track",
        xlabel="angle of the turn in degrees",
        ylabel="%",
        ylim=(0, 100),
    )
    figure.savefig(path, dpi=80)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batches", type=int, default=1500, help="training steps")
    parser.add_argument("--targets", type=int, default=8, help="targets per angle")
    parser.add_argument("--angles", type=float, nargs="+", default=[0, 15, 30, 60, 90, 135, 180])
    parser.add_argument("--picture", default=None, help="a file for the picture; needs matplotlib")
    options = parser.parse_args(arguments)
    generator = torch.Generator().manual_seed(0)
    model = train(options.batches, generator)
    table = []
    for degrees in options.angles:
        inputs, _ = simulate(torch.full((options.targets,), degrees).deg2rad(), generator)
        out = secondguess.forecast(model, **inputs, drafter=KalmanDrafter(trend=False), seed=1)
        theirs = model.generate(**inputs).sequences
        p_values = [
            permutation_p_value(mine.flatten(1), other.flatten(1))
            for mine, other in zip(out.sequences, theirs, strict=True)
        ]
        saved = 1 - 1 / out.stats.acceptance_length
        table.append((degrees, saved, min(p_values)))
        print(
            f"turn of {degrees:3.0f} degrees: {saved:.0%} of the target passes saved, {out.stats.acceptance_length:.2f}"
            f" steps per pass; least p-value of {len(p_values)} targets {min(p_values):.3f}"
        )
    if options.picture is not None:
        draw(options.picture, model, table)


if __name__ == "__main__":
    main()
