"""Target of continuous values: an autoregressive forecaster of Transformers with a distribution head.

The model's `generate` evaluates the decoder on the whole prefix once per step. Here one pass
evaluates it on the prefix and the drafted values of every row, of any lengths: the causal mask
hides what follows a position, padding included. Self-attention is computed anew in each pass, as
in `generate`, because the decoder numbers its positions from the beginning of its input whatever
the cache holds. Keys and values of the encoder's output are computed once per series.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TypeAlias

import torch
from torch import Tensor
from transformers import (
    DynamicCache,
    EncoderDecoderCache,
    InformerForPrediction,
    TimeSeriesTransformerForPrediction,
)

from secondguess.errors import BadInputError, UnsupportedModelError

HEADS = ("student_t", "normal")
"""Distribution heads with a density."""

ForecastModel: TypeAlias = TimeSeriesTransformerForPrediction | InformerForPrediction


class ForecastRuntime:
    """Forecaster over some series: encoded once, then scored for any number of rows per series.

    Args:
        model: the forecaster, in evaluation mode.
        inputs: arguments of the model's `generate`, by name.

    Attributes:
        head: name of the distribution head.
        horizon: number of steps to forecast.
        dim: number of values per step.

    Raises:
        UnsupportedModelError: a model without an autoregressive decoder or without a density.
        BadInputError: a model in training mode.
    """

    def __init__(self, model: ForecastModel, inputs: Mapping[str, Tensor]) -> None:
        check_model(model)
        self._model = model
        self.head: str = model.config.distribution_output
        self.horizon: int = model.config.prediction_length
        self.dim: int = model.config.input_size
        encoded = model(**{"past_observed_mask": None, **inputs}, use_cache=True, return_dict=True)
        loc, scale = encoded.loc, encoded.scale
        self._past = (inputs["past_values"] - loc) / scale
        future = inputs["future_time_features"]
        static = encoded.static_features[:, None].expand(-1, future.shape[1], -1)
        self._features = torch.cat((static, future), -1)
        self._loc, self._scale = (each.reshape(len(each), 1, self.dim) for each in (loc, scale))
        self._encoded = encoded.encoder_last_hidden_state
        self._cross_attention = encoded.past_key_values.cross_attention_cache
        self._encoder_keys = [(layer, layer.keys, layer.values) for layer in self._cross_attention.layers]
        self._rows: Tensor | None = None

    def score(self, series: Tensor, values: Tensor, starts: Tensor, lengths: Tensor) -> tuple[Tensor, ...]:
        """Return the parameters `[row, query, dim]` of the values at steps `starts` and after.

        There are as many queries as the longest draft has values, and one; those after a row's own
        draft are meaningless. Arguments and results are on the host, in float64.

        Args:
            series: `[row]`, index of the series that each row continues.
            values: `[row, step, dim]`, values so far, then drafted ones; others are ignored.
            starts: `[row]`, number of values so far.
            lengths: `[row]`, number of drafted values.
        """
        num_rows, num_steps, num_queries = len(series), int((starts + lengths).max()), int(lengths.max()) + 1
        device = self._past.device
        series, values, starts = series.to(device), values.to(device), starts.to(device)
        scaled = ((values[:, :num_steps] - self._loc[series]) / self._scale[series]).to(self._past.dtype)
        sequence = torch.cat(
            (self._past[series], scaled.reshape(num_rows, num_steps, *self._past.shape[2:])), 1
        )
        lagged = self._model.model.get_lagged_subsequences(sequence, num_steps + 1, shift=1)
        inputs = torch.cat(
            (lagged.reshape(num_rows, num_steps + 1, -1), self._features[series, : num_steps + 1]), -1
        )
        hidden = self._model.model.get_decoder()(
            inputs_embeds=inputs,
            # Only the shape is read, since the cache has the keys and values.
            encoder_hidden_states=self._encoded[:1].expand(num_rows, -1, -1),
            past_key_values=self._cache(series),
            use_cache=True,
        ).last_hidden_state
        steps = (starts[:, None] + torch.arange(num_queries, device=device)).clamp(max=num_steps)
        params = self._model.output_params(hidden[torch.arange(num_rows, device=device)[:, None], steps])
        return self._unscaled(
            [each.reshape(num_rows, num_queries, self.dim).double() for each in params], series
        )

    def _unscaled(self, params: list[Tensor], series: Tensor) -> tuple[Tensor, ...]:
        """Return the parameters in the units of the series; location and scale are the last two."""
        *shape, loc, scale = params
        factor = self._scale[series].double()
        params = [*shape, loc * factor + self._loc[series], scale * factor]
        if not all(each.isfinite().all() for each in params):
            raise BadInputError(
                "expected finite distribution parameters from the model, got NaN or infinity: check its"
                " weights, the past values and the features"
            )
        return tuple(each.cpu() for each in params)

    def _cache(self, series: Tensor) -> EncoderDecoderCache:
        """Return a cache with the encoder's keys and values, and no self-attention entries."""
        num_rows = len(series)
        if self._rows is None or not torch.equal(series, self._rows[:num_rows]):
            for layer, keys, values in self._encoder_keys:
                layer.keys, layer.values = keys[series], values[series]
        # Rows of one series are alike, so that fewer of them need no copy.
        for layer, *_ in self._encoder_keys:
            layer.keys, layer.values = layer.keys[:num_rows], layer.values[:num_rows]
        self._rows = series
        return EncoderDecoderCache(DynamicCache(), self._cross_attention)


def check_model(model: object) -> None:
    """Refuse what cannot be forecast with in several steps per pass."""
    if not isinstance(model, TimeSeriesTransformerForPrediction | InformerForPrediction):
        raise UnsupportedModelError(
            "expected a TimeSeriesTransformerForPrediction or an InformerForPrediction, which sample from a"
            f" distribution step by step, got {type(model).__name__}: a model without a distribution head"
            " gives no densities to compare drafts by"
        )
    config = model.config
    if config.distribution_output not in HEADS:
        raise UnsupportedModelError(
            f"expected a distribution head among {', '.join(HEADS)}, got {config.distribution_output!r}:"
            " use the model's own generate"
        )
    if isinstance(model, InformerForPrediction) and config.attention_type == "prob":
        sparse = first_sparse_length(config.sampling_factor, config.prediction_length)
        if sparse is not None:
            raise UnsupportedModelError(
                "expected attention_type='full', got 'prob': from step"
                f" {sparse} of {config.prediction_length}, the attention of a step depends on the steps after"
                " it, so that several cannot be scored in one pass; use the model's own generate"
            )
    if model.training:
        raise BadInputError(
            "expected a model in evaluation mode, got one in training mode: call model.eval()"
        )


def first_sparse_length(sampling_factor: int, longest: int) -> int | None:
    """Return the least number of queries of which ProbSparse attention leaves some out; None for none."""
    for length in range(1, longest + 1):
        if sampling_factor * math.ceil(math.log1p(length)) < length:
            return length
    return None
