"""Small network that predicts the acceptance probability of a draft node, and its file format.

    h1 = silu(W1 x + b1),  h2 = h1 + silu(W2 h1 + b2),  z = w3 h2 + b3
    a = sigmoid(scale_depth z + shift_depth)

A small version of the head of SpecDec++ (arXiv 2405.19715), with summaries of the draft
distribution in place of the drafter's hidden states. It is calibrated by a temperature and a bias
per depth (DSpark, arXiv 2607.05147). It runs in NumPy: for one row a call into torch takes longer
than the arithmetic.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy
from numpy.typing import NDArray

from secondguess.controllers.acceptance_features import FEATURES
from secondguess.errors import BadInputError

Array = NDArray[numpy.float64]

KIND, SCHEMA = "secondguess acceptance predictor", 1
MAX_FILE_BYTES = 1 << 20
"""Maximum size of a predictor file; a typical one takes about 20 kB."""


@dataclass(frozen=True)
class Layer:
    """Linear layer: `weights` `[output][input]` and `biases` `[output]`."""

    weights: tuple[tuple[float, ...], ...]
    biases: tuple[float, ...]

    def __post_init__(self) -> None:
        widths = {len(line) for line in self.weights}
        if len(widths) != 1 or len(self.weights) != len(self.biases):
            raise BadInputError("expected a layer with as many rows of weights as biases, all of one width")
        if not all(map(math.isfinite, (*self.biases, *(each for line in self.weights for each in line)))):
            raise BadInputError("expected finite weights, got one that is not")

    @property
    def num_inputs(self) -> int:
        return len(self.weights[0])

    @property
    def num_outputs(self) -> int:
        return len(self.biases)

    @classmethod
    def of(cls, weights: Array, biases: Array) -> Layer:
        """Return the layer for arrays `[output, input]` and `[output]`."""
        return cls(tuple(map(tuple, weights.tolist())), tuple(biases.tolist()))


@dataclass(frozen=True)
class Calibration:
    """Calibration per depth: `scale * z + shift` is the logit of the acceptance probability.

    Nodes deeper than the last entry use the last entry.

    Args:
        scales: inverse temperatures, at least one, all positive.
        shifts: biases, as many as scales.
    """

    scales: tuple[float, ...]
    shifts: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.scales or len(self.scales) != len(self.shifts):
            raise BadInputError("expected a calibration with as many scales as shifts, at least one")
        if not all(0 < scale < math.inf for scale in self.scales) or not all(map(math.isfinite, self.shifts)):
            raise BadInputError("expected positive scales and finite shifts in the calibration")

    def at(self, depth: int) -> tuple[float, float]:
        """Return the scale and shift of a node at this depth."""
        place = min(depth, len(self.scales) - 1)
        return self.scales[place], self.shifts[place]


@dataclass(frozen=True)
class Predictor:
    """Content of a predictor file.

    Args:
        layers: three; the input of the first is `FEATURES`.
        calibration: calibration of the network's output.
        provenance: hashes of weights and prompts, sizes, losses, calibration errors.
    """

    layers: tuple[Layer, Layer, Layer]
    calibration: Calibration
    provenance: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        shapes = [(layer.num_inputs, layer.num_outputs) for layer in self.layers]
        width = shapes[0][1] if shapes else 0
        expected = [(len(FEATURES), width), (width, width), (width, 1)]
        if shapes != expected:
            raise BadInputError(
                f"expected three layers of {len(FEATURES)} to n, n to n and n to 1 numbers, got {shapes}"
            )

    @classmethod
    def read(cls, path: Path) -> Predictor:
        """Read a predictor file.

        Raises:
            BadInputError: no such file, or not a complete predictor of this schema.
        """
        advice = "make one with `secondguess train acceptance`"
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
            return cls._from_record(json.loads(content))
        except (BadInputError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            reason = str(error) if isinstance(error, BadInputError) else f"it is broken ({error!r})"
            raise BadInputError(f"expected a predictor file, got {path}: {reason}; {advice}") from None

    @classmethod
    def _from_record(cls, record: object) -> Predictor:
        if not isinstance(record, dict) or record.get("kind") != KIND:
            raise BadInputError(f"expected an object of kind {KIND!r}, got something else")
        if record["schema"] != SCHEMA:
            raise BadInputError(f"expected schema {SCHEMA}, got {record['schema']!r}")
        if record["features"] != list(FEATURES):
            raise BadInputError(f"expected the features {', '.join(FEATURES)}, got {record['features']!r}")
        layers = tuple(
            Layer(tuple(map(_numbers, layer["weights"])), _numbers(layer["biases"]))
            for layer in record["layers"]
        )
        if len(layers) != 3:
            raise BadInputError(f"expected three layers, got {len(layers)}")
        calibration = record["calibration"]
        provenance = record["provenance"]
        if not isinstance(provenance, dict):
            raise BadInputError("expected the provenance to be an object, got something else")
        return cls(
            layers, Calibration(_numbers(calibration["scales"]), _numbers(calibration["shifts"])), provenance
        )

    def to_json(self) -> str:
        """Return the file content, one line per row of weights so that diffs are readable."""
        fields = {
            "kind": KIND,
            "schema": SCHEMA,
            "provenance": dict(self.provenance),
            "features": list(FEATURES),
            "calibration": asdict(self.calibration),
        }
        lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in fields.items()]
        layers = ",\n".join(
            f'{{"biases": {json.dumps(layer.biases)},\n "weights": [\n  '
            + ",\n  ".join(json.dumps(line) for line in layer.weights)
            + "]}"
            for layer in self.layers
        )
        return "{" + ",\n".join([*lines, f'"layers": [{layers}]']) + "}\n"


def _numbers(values: object) -> tuple[float, ...]:
    if not isinstance(values, list) or not all(type(value) in (int, float) for value in values):
        raise BadInputError(f"expected a list of numbers, got {str(values)[:40]}")
    return tuple(map(float, values))


class PredictorNetwork:
    """Predictor prepared for inference.

    With u = (W x + b) / 2, silu(W x + b) = u + u tanh(u): fewer calls than by its definition, and
    no overflow.
    """

    def __init__(self, predictor: Predictor) -> None:
        self.calibration = predictor.calibration
        first, second, last = predictor.layers
        self._first = numpy.array(first.weights).T / 2
        self._first_bias = numpy.array(first.biases) / 2
        self._second = numpy.array(second.weights).T / 2
        self._second_bias = numpy.array(second.biases) / 2
        self._last = numpy.array(last.weights[0])
        self._last_bias = last.biases[0]

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

    def chances(self, features: Sequence[Sequence[float]], depth: int) -> list[float]:
        """Return the calibrated acceptance probability of each node.

        It is conditional on all nodes before it being accepted.

        Args:
            features: `[node][feature]`.
            depth: depth of these nodes.
        """
        scale, shift = self.calibration.at(depth)
        logits: list[float] = self.logits(features).tolist()
        return [_sigmoid(scale * logit + shift) for logit in logits]


def _sigmoid(value: float) -> float:
    return 0.5 + 0.5 * math.tanh(value / 2)
