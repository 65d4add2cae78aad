"""Rotary position embeddings from tables of cosines and sines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from secondguess.runtime.decoder.families import NO_ROTARY, head_size_of
from secondguess.runtime.step import ForwardStep
from secondguess.runtime.system.quiet import quiet

with quiet():
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS


class Rotary:
    """Table of rotary cosines and sines, computed on demand.

    Args:
        frequencies: `[size / 2]`, angle between neighbouring positions. `size` numbers of a head are
            rotated, the first ones.
        scaling: factor on cosines and sines.
        dtype: dtype of the table.
        is_interleaved: whether the layout is interleaved, with pairs of neighbours, not half-split.
    """

    def __init__(
        self, frequencies: Tensor, scaling: float, dtype: torch.dtype, is_interleaved: bool = False
    ) -> None:
        self.frequencies = frequencies.float()
        self.scaling = scaling
        self.dtype = dtype
        self.is_interleaved = is_interleaved
        self._table = torch.empty(0)

    @classmethod
    def from_config(
        cls,
        config: Any,
        dtype: torch.dtype,
        device: torch.device,
        kind: str | None = None,
        is_interleaved: bool = False,
    ) -> Rotary:
        """Return the table of a model, from the configuration of its decoder.

        `kind` is the layer type whose frequencies are used; None if the model has only one set, or `NO_ROTARY` for a table that
        changes nothing.
        """
        layer_type = None if kind == NO_ROTARY else kind
        parameters = config.rope_parameters if layer_type is None else config.rope_parameters[layer_type]
        if parameters["rope_type"] == "default":
            size = int(head_size_of(config) * parameters.get("partial_rotary_factor", 1.0))
            factor = 1.0
            frequencies = 1.0 / (
                parameters["rope_theta"] ** (torch.arange(0, size, 2, dtype=torch.float32) / size)
            )
        else:
            initialise = ROPE_INIT_FUNCTIONS[parameters["rope_type"]]
            frequencies, factor = initialise(config, torch.device("cpu"), layer_type=layer_type)
        if kind == NO_ROTARY:
            frequencies, factor = torch.zeros_like(frequencies), 1.0
        return cls(frequencies.to(device), float(factor), dtype, is_interleaved)

    def to(self, dtype: torch.dtype) -> Rotary:
        """Return the same table in another dtype."""
        return Rotary(self.frequencies, self.scaling, dtype, self.is_interleaved)

    def at(self, step: ForwardStep) -> tuple[Tensor, Tensor]:
        """Return cos and sin of a forward pass's queries, `[row or 1, query, 1, size]` each.

        The sines of the first number of each pair are negated, as `rotate` expects.
        """
        table = self.table(step.num_keys)
        if step.start is None:
            found = table[step.query_positions]
        else:
            found = table[None, step.start : step.start + step.query_positions.shape[1]]
        cos, sin = found.unsqueeze(-2).chunk(2, -1)
        return cos, sin

    def table(self, num_positions: int) -> Tensor:
        """Return a table `[position, 2 * size]` of cosines, then sines.

        It has at least `num_positions` positions. Runtimes of several threads may share this
        object: one may replace the table while another uses the one that it was given.
        """
        table = self._table
        if num_positions > table.shape[0]:
            self._table = table = self._rows(max(256, 2 * num_positions))
        return table

    def _rows(self, count: int) -> Tensor:
        positions = torch.arange(count, dtype=torch.float32, device=self.frequencies.device)
        angles = torch.outer(positions, self.frequencies)
        cos, sin = angles.cos() * self.scaling, angles.sin() * self.scaling
        join = _interleaved if self.is_interleaved else torch.cat
        return torch.cat((join((cos, cos), -1), join((-sin, sin), -1)), -1).to(self.dtype)


def _interleaved(parts: Sequence[Tensor], dim: int) -> Tensor:
    return torch.stack(tuple(parts), dim).flatten(dim - 1)


def rotate(states: Tensor, cos: Tensor, sin: Tensor, is_interleaved: bool = False) -> Tensor:
    """Apply the rotary embedding to the first numbers of each head, rounding where the modules round.

    The modules negate half of the states; here the sine is negated, which gives the same bits. `cos` and `sin` are those of
    `Rotary.at`.
    """
    size = cos.shape[-1]
    part, rest = states[..., :size], states[..., size:]
    pairs = (*part.shape[:-1], -1, 2)
    other = part.reshape(pairs).flip(-1).flatten(-2) if is_interleaved else part.roll(size // 2, -1)
    rotated = (part * cos + other * sin).to(states.dtype)
    return torch.cat((rotated, rest), -1) if rest.shape[-1] else rotated
