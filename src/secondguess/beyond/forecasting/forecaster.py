"""Target of continuous values: an autoregressive forecaster of Transformers with a distribution head.

The model's `generate` evaluates the decoder on the whole prefix once per step. Here one pass
evaluates it on the drafted values of every row, of any lengths, after the cached keys and values of
the row's own prefix: the mask hides what follows a position, padding included. Keys and values of the
encoder's output are computed once per series.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import TypeAlias

import torch
from torch import Tensor, nn
from transformers import (
    DynamicCache,
    EncoderDecoderCache,
    InformerForPrediction,
    TimeSeriesTransformerForPrediction,
)

from secondguess.errors import BadInputError, UnsupportedModelError
from secondguess.runtime.cache import KeyValueCache
from secondguess.runtime.modules.support import cache_parameter

HEADS = ("student_t", "normal")
"""Distribution heads with a density."""

ForecastModel: TypeAlias = TimeSeriesTransformerForPrediction | InformerForPrediction


class ForecastRuntime:
    """Forecaster over some series: encoded once, then scored for `num_rows` rows over all series.

    `inputs` are the arguments of the model's `generate`, `head` is the name of its distribution head, `horizon` the number
    of steps to forecast and `dim` that of values per step. A model without an autoregressive decoder or a density raises
    an UnsupportedModelError, one in training mode a BadInputError.
    """

    def __init__(self, model: ForecastModel, inputs: Mapping[str, Tensor], num_rows: int) -> None:
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
        self._loc, self._scale = (tensor.reshape(len(tensor), 1, self.dim) for tensor in (loc, scale))
        self._encoded = encoded.encoder_last_hidden_state
        self._cache_parameter = cache_parameter(type(model))
        self._cross_attention = encoded[self._cache_parameter].cross_attention_cache
        self._encoder_keys = [(layer, layer.keys, layer.values) for layer in self._cross_attention.layers]
        self._series: Tensor | None = None
        self._lags = torch.tensor(model.config.lags_sequence, device=self._past.device)
        self._decoder, self._positions = _with_positions(model)
        # The last step is never an input; shorter drafts of a batch are padded.
        self._cache = KeyValueCache(self._past.device, num_slots=num_rows, capacity=2 * self.horizon)
        self._num_cached = torch.zeros(num_rows, dtype=torch.long)
        # ProbSparse attention has as many keys as queries.
        self._keeps_prefix = not (
            isinstance(model, InformerForPrediction) and model.config.attention_type == "prob"
        )

    def score(
        self, rows: Tensor, series: Tensor, values: Tensor, starts: Tensor, lengths: Tensor
    ) -> tuple[Tensor, ...]:
        """Return the parameters `[row, query, dim]` of the values at steps `starts` `[row]` and after.

        There are as many queries as the longest draft has values, and one; those after a row's own draft are meaningless.
        `values` `[row, step, dim]` are those so far, then `lengths` `[row]` drafted ones. Those of `rows` `[row]` before
        `starts` are those of earlier calls, as far as they were accepted. All tensors are on the host, in float64.
        """
        num_rows, num_queries = len(rows), int(lengths.max()) + 1
        known = torch.minimum(self._num_cached[rows], starts) * self._keeps_prefix
        width = int((starts + lengths - known).max()) + 1
        self._num_cached[rows] = starts + lengths + 1
        places = known[:, None] + torch.arange(width)
        device, last = self._past.device, self.horizon - 1
        series, values, steps = series.to(device), values.to(device), places.to(device)
        hidden = self._decoder(
            inputs_embeds=self._inputs(series, values, steps.clamp(max=last)),
            attention_mask=self._place(rows, known, steps),
            # Only the shape is read, since the cache has the keys and values.
            encoder_hidden_states=self._encoded[:1].expand(num_rows, -1, -1),
            use_cache=True,
            **{self._cache_parameter: self._caches(series)},
        ).last_hidden_state
        wanted = ((starts - known)[:, None] + torch.arange(num_queries)).clamp(max=width - 1).to(device)
        params = self._model.output_params(hidden[torch.arange(num_rows, device=device)[:, None], wanted])
        return self._unscaled(
            [param.reshape(num_rows, num_queries, self.dim).double() for param in params], series
        )

    def rewind(self, rows: Tensor, counts: Tensor) -> None:
        """Forget cached steps of `rows` `[row]` beyond the first `counts` `[row]`."""
        self._num_cached[rows] = torch.minimum(self._num_cached[rows], counts)

    def _inputs(self, series: Tensor, values: Tensor, steps: Tensor) -> Tensor:
        """Return the decoder's inputs `[row, query, feature]` at `steps` `[row, query]`: lagged values, features."""
        scaled = ((values - self._loc[series]) / self._scale[series]).to(self._past.dtype)
        past = self._past[series].reshape(len(series), -1, self.dim)
        sequence = torch.cat((past, scaled), 1)
        index = past.shape[1] + steps[..., None] - self._lags
        lagged = sequence[torch.arange(len(series), device=steps.device)[:, None, None], index].mT.flatten(2)
        return torch.cat((lagged, self._features[series[:, None], steps]), -1)

    def _place(self, rows: Tensor, known: Tensor, steps: Tensor) -> Tensor:
        """Set where the pass writes its keys and values; return the mask `[row, 1, query, key]` to be added."""
        width, num_keys = steps.shape[1], int(known.max()) + steps.shape[1]
        self._cache.place(known.tolist(), width, rows.tolist(), num_keys)
        self._positions.steps = steps.clamp(max=self.horizon - 1)
        hidden = torch.arange(num_keys, device=steps.device) > steps[..., None]
        mask = torch.zeros(hidden.shape, dtype=self._past.dtype, device=steps.device)
        return mask.masked_fill_(hidden, torch.finfo(mask.dtype).min)[:, None]

    def _unscaled(self, params: list[Tensor], series: Tensor) -> tuple[Tensor, ...]:
        """Return the parameters in the units of the series; location and scale are the last two."""
        *shape, loc, scale = params
        factor = self._scale[series].double()
        params = [*shape, loc * factor + self._loc[series], scale * factor]
        if not all(param.isfinite().all() for param in params):
            raise BadInputError(
                "expected finite distribution parameters from the model, got NaN or infinity: check its"
                " weights, the past values and the features"
            )
        return tuple(param.cpu() for param in params)

    def _caches(self, series: Tensor) -> EncoderDecoderCache:
        """Return the cache of the rows with the encoder's keys and values of their series."""
        num_rows = len(series)
        if self._series is None or not torch.equal(series, self._series[:num_rows]):
            for layer, keys, values in self._encoder_keys:
                layer.keys, layer.values = keys[series], values[series]
        # Rows of one series are alike, so that fewer of them need no copy.
        for layer, *_ in self._encoder_keys:
            layer.keys, layer.values = layer.keys[:num_rows], layer.values[:num_rows]
        self._series = series
        caches = EncoderDecoderCache(DynamicCache(), self._cross_attention)
        caches.self_attention_cache = self._cache
        return caches


class _Positions(nn.Module):
    """Position embeddings of the steps `[row, query]` that a pass evaluates, after `num_past` positions."""

    def __init__(self, embeddings: nn.Embedding, num_past: int) -> None:
        super().__init__()
        self.weight, self.steps = embeddings.weight, torch.zeros(1, 1, dtype=torch.long)
        self.num_past = num_past

    def forward(self, *_: object, **__: object) -> Tensor:
        return self.weight[self.num_past + self.steps]


def _with_positions(model: ForecastModel) -> tuple[nn.Module, _Positions]:
    """Return the model's decoder with positions to be set for each pass; it shares its weights.

    The decoder numbers its positions from the beginning of its input, whatever the cache holds.
    """
    decoder = copy.copy(model.model.get_decoder())
    positions = _Positions(decoder.embed_positions, model.config.context_length)
    decoder._modules = decoder._modules | {"embed_positions": positions}
    return decoder, positions


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
        raise BadInputError("cannot forecast with the model: it is in training mode. Call model.eval().")


def first_sparse_length(sampling_factor: int, longest: int) -> int | None:
    """Return the least number of queries of which ProbSparse attention leaves some out; None for none."""
    for length in range(1, longest + 1):
        if sampling_factor * math.ceil(math.log1p(length)) < length:
            return length
    return None
