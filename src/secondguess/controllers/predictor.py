"""Predictor of the acceptance probability of a draft node: its features, network and file format.

    h1 = silu(W1 x + b1),  h2 = h1 + silu(W2 h1 + b2),  z = w3 h2 + b3
    a = sigmoid(scale_depth z + shift_depth)

A small version of the head of SpecDec++ (arXiv 2405.19715), with summaries of the draft
distribution in place of the drafter's hidden states. It is calibrated by a temperature and a bias
per depth (DSpark, arXiv 2607.05147). Tokens are not among its features, so it is non-anticipating
(`base.py`). It runs in NumPy: for one row a call into torch takes longer than the arithmetic.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy
from numpy.typing import NDArray

from secondguess.controllers.draft_probs import DraftProbs
from secondguess.core import Row
from secondguess.errors import BadInputError

Array = NDArray[numpy.float64]

FEATURES = (
    "log_confidence",
    "logit_confidence",
    "log_runner_up",
    "entropy",
    "log_depth",
    "log_survival",
    "temperature",
    "coupled",
)
"""Names of the features, in order.

`log_survival` is the sum of `log_confidence` over the nodes before this one, `log_depth` is
log(1 + depth). Temperature and coupling are the request's settings: they affect acceptance but are
not visible in the draft distribution, which is taken before sampling settings.
"""

SMALLEST = 1e-6
"""Distance that probabilities keep from 0 and 1."""
LEAST_SURVIVAL = -20.0
"""Lower bound to which `log_survival` is clipped."""
HIGHEST_TEMPERATURE = 2.0
"""Upper bound to which the temperature is clipped."""

KIND, SCHEMA = "secondguess acceptance predictor", 1
MAX_FILE_BYTES = 1 << 20
"""Maximum size of a predictor file; a typical one takes about 6 kB."""


class PathFeatures:
    """Features of the drafts of a batch, level by level; decoding and training both use it."""

    def __init__(self) -> None:
        self._log_survivals: list[float] = []

    def level_features(self, rows: Sequence[Row], draft_probs: DraftProbs, depth: int) -> list[list[float]]:
        """Return the features `[row][feature]` of the nodes at this depth; depth 0 begins new drafts."""
        survivals = self._log_survivals if depth else [0.0] * len(rows)
        log_depth = math.log(1 + depth)
        summaries = zip(draft_probs.confidences, draft_probs.runners_up, draft_probs.entropies, strict=True)
        features = []
        for row, (confidence, runner_up, entropy), survival in zip(rows, summaries, survivals, strict=True):
            certainty = min(max(confidence, SMALLEST), 1 - SMALLEST)
            temperature = row.params.temperature
            line = [
                math.log(certainty),
                math.log(certainty / (1 - certainty)),
                math.log(max(runner_up, SMALLEST)),
                entropy,
                log_depth,
                max(survival, LEAST_SURVIVAL),
                min(temperature, HIGHEST_TEMPERATURE),
                # At temperature 0 coupling has no effect: only one token can be drawn.
                float(row.coupled and temperature > 0),
            ]
            features.append(line)
        self._log_survivals = [line[0] + before for line, before in zip(features, survivals, strict=True)]
        return features


class Predictor:
    """Predictor prepared for inference.

    With u = (W x + b) / 2, silu(W x + b) = u + u tanh(u): fewer calls than by its definition, and
    no overflow.

    Args:
        record: content of a predictor file: `kind`, `schema` and `features` as above; `layers`, three,
            each with `weights` `[output][input]` and `biases` `[output]`; `calibration`, with
            `scales` and `shifts` by depth, of which deeper nodes use the last; and `provenance`.

    Raises:
        BadInputError: another kind, schema or list of features, or numbers that are malformed.
    """

    def __init__(self, record: Mapping[str, Any]) -> None:
        for entry, expected in (("kind", KIND), ("schema", SCHEMA), ("features", list(FEATURES))):
            if record[entry] != expected:
                raise BadInputError(f"expected {entry} {expected!r}, got {record[entry]!r:.200}")
        first, second, last = record["layers"]
        width = len(first["biases"])
        self.record = record
        self.provenance: dict[str, object] = dict(record["provenance"])
        self._first = _numbers(first["weights"], width, len(FEATURES)).T / 2
        self._first_bias = _numbers(first["biases"], width) / 2
        self._second = _numbers(second["weights"], width, width).T / 2
        self._second_bias = _numbers(second["biases"], width) / 2
        self._last = _numbers(last["weights"], 1, width)[0]
        self._last_bias = float(_numbers(last["biases"], 1)[0])
        calibration = record["calibration"]
        num_depths = max(len(calibration["scales"]), 1)
        self._scales: list[float] = _numbers(calibration["scales"], num_depths).tolist()
        self._shifts: list[float] = _numbers(calibration["shifts"], num_depths).tolist()
        if min(self._scales) <= 0:
            raise BadInputError(f"expected positive scales, got {self._scales}")

    @classmethod
    def read(cls, path: Path) -> Predictor:
        """Read a predictor file.

        Raises:
            BadInputError: no such file, or not a complete predictor of this schema.
        """
        advice = "make one with `python -m builtin_pair acceptance` (tools/)"
        try:
            with path.open("rb") as file:
                content = file.read(MAX_FILE_BYTES + 1)
        except OSError as error:
            raise BadInputError(
                f"expected a predictor file, got {path}: {error.strerror}; {advice} (the length of a draft is "
                "the option length=K)"
            ) from None
        try:
            if len(content) > MAX_FILE_BYTES:
                raise BadInputError(f"expected at most {MAX_FILE_BYTES} bytes, got more")
            return cls(json.loads(content))
        except (BadInputError, ValueError, TypeError, KeyError, RecursionError) as error:
            reason = str(error) if isinstance(error, BadInputError) else f"it is broken ({error!r})"
            raise BadInputError(f"expected a predictor file, got {path}: {reason}; {advice}") from None

    def to_json(self) -> str:
        """Return the file content, one line per entry."""
        lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in self.record.items()]
        return "{" + ",\n".join(lines) + "}\n"

    def logits(self, features: Sequence[Sequence[float]] | Array) -> Array:
        """Return the outputs `[node]` before calibration for features `[node, feature]`."""
        half = numpy.asarray(features).dot(self._first)
        half += self._first_bias
        hidden = numpy.tanh(half)
        hidden += 1
        hidden *= half
        half = hidden.dot(self._second)
        half += self._second_bias
        hidden += half
        half *= numpy.tanh(half)
        hidden += half
        logits: Array = hidden.dot(self._last)
        logits += self._last_bias
        return logits

    def acceptance_probs(self, features: Sequence[Sequence[float]], depth: int) -> list[float]:
        """Return the calibrated acceptance probability of each node, given that those before it are accepted.

        Args:
            features: `[node][feature]`.
            depth: depth of these nodes.
        """
        index = min(depth, len(self._scales) - 1)
        scale, shift = self._scales[index], self._shifts[index]
        logits: list[float] = self.logits(features).tolist()
        return [0.5 + 0.5 * math.tanh((scale * logit + shift) / 2) for logit in logits]


def _numbers(values: object, *shape: int) -> Array:
    """Return finite numbers as an array of this shape."""
    array = numpy.array(values)
    if array.dtype.kind not in "fi" or array.shape != shape or not numpy.isfinite(array).all():
        raise BadInputError(f"expected finite numbers of shape {shape}, got {str(values)[:40]}")
    return array.astype(numpy.float64)
