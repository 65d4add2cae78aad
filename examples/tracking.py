"""A Kalman tracker drafts the steps of moving targets; a network that sees noisy detections verifies them."""

import torch
from transformers import TimeSeriesTransformerConfig, TimeSeriesTransformerForPrediction

import secondguess
from secondguess.continuous.kalman import KalmanDrafter

PAST, STEPS, LAGS, TURN = 12, 16, [1, 2, 3], 6
SIZES = dict(d_model=16, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=32, decoder_ffn_dim=32)


def simulate(angles, generator):
    """Return inputs and future steps `[target, step, 2]` of targets that turn by `angles` (radians) in 2 steps."""
    count, length = len(angles), PAST + max(LAGS) + STEPS
    start = 2 * torch.pi * torch.rand(count, 1, generator=generator)
    turned = (torch.arange(length) - (length - STEPS + TURN)).clamp(0, 2) / 2 * angles[:, None]
    jitter = 0.03 * torch.randn(count, length, generator=generator).cumsum(1)
    heading = start + turned + jitter
    steps = torch.stack((heading.cos(), heading.sin()), -1)
    steps = steps + 0.05 * torch.randn(steps.shape, generator=generator)
    detected, past = steps + 0.2 * torch.randn(steps.shape, generator=generator), length - STEPS
    inputs = {"past_values": steps[:, :past], "past_observed_mask": torch.ones(count, past, 2)}
    return inputs | {
        "past_time_features": detected[:, :past],
        "future_time_features": detected[:, past:],
    }, steps[:, past:]


def train(num_batches, generator, model=None):
    model = model or TimeSeriesTransformerForPrediction(TimeSeriesTransformerConfig(
        prediction_length=STEPS, context_length=PAST, lags_sequence=LAGS, input_size=2, num_time_features=2,
        scaling=None, distribution_output="normal", **SIZES))  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(num_batches):
        inputs, future = simulate(torch.pi * torch.rand(64, generator=generator), generator)
        optimizer.zero_grad()
        model(**inputs, future_values=future).loss.backward()
        optimizer.step()
    return model.eval()


if __name__ == "__main__":
    model = train(100, generator := torch.Generator().manual_seed(0))
    for degrees in (0, 45, 90, 180):
        inputs, _ = simulate(torch.full((8,), degrees).deg2rad(), generator)
        out = secondguess.forecast(
            model, **inputs, num_samples=20, drafter=KalmanDrafter(trend=False), seed=1
        )
        print(f"turn of {degrees:3} degrees: {out.stats}")
