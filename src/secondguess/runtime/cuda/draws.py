"""Draws of a chain of draft tokens on the device, with the same random decisions as `KeyedNoise`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from secondguess.runtime.chains import ChainRequest
from secondguess.runtime.cuda.capture import StaticInputs
from secondguess.runtime.cuda.operations import PassInputs, most_likely
from secondguess.runtime.hashes import Purpose, hash_of, scalar_uniforms, uniform_per_token_on_device


class Draws(NamedTuple):
    """Nodes of chains on the device.

    Args:
        chosen: `[2, node, row]` in float64, tokens, and probabilities of the most likely token before sampling settings.
        logits: `[node, row, vocab]` in float32, from which they were drawn.
        probs: `[node, row, vocab]`, the distribution that each was drawn from; None at temperature 0.
    """

    chosen: Tensor
    logits: Tensor
    probs: Tensor | None

    def on_host(self) -> tuple[list[list[int]], list[list[float]]]:
        """Return tokens and confidences, per node and row."""
        tokens, confidences = self.chosen.tolist()
        return [[int(token) for token in node_tokens] for node_tokens in tokens], confidences


class Modes(NamedTuple):
    """Rules by which nodes are drawn.

    Args:
        all_greedy, some_greedy: whether all rows, or some, draw the most likely token.
        races: whether the others draw by races.
    """

    all_greedy: bool
    some_greedy: bool
    races: bool

    @classmethod
    def from_requests(cls, requests: Sequence[ChainRequest]) -> Modes:
        """Return the rules for requests whose sampled rows are all drawn by races, or none."""
        temperatures = [request.settings.temperature for request in requests]
        races = any(request.noise.races for request in requests if request.settings.temperature > 0)
        return cls(not any(temperatures), 0 in temperatures, races)


def draw_parameters(
    requests: Sequence[ChainRequest], nums_read: Sequence[int], nodes: range, modes: Modes
) -> tuple[list[int], list[float]]:
    """Return the integers and floats of `draw_nodes` for the nodes of some indices in their chains.

    `nums_read` has the number of tokens of each row, then of padding.
    """
    padding = len(nums_read) - len(requests)
    noises = [request.noise for request in requests]
    keys = [noise.key - (1 << 64) if noise.key >= 1 << 63 else noise.key for noise in noises]
    positions = [noise.position + nodes.start for noise in noises]
    integers = [*nums_read, *keys, *([0] * padding), *positions, *([0] * padding)]
    if modes.all_greedy:
        return integers, [1.0] * 2 * len(nums_read)
    row_uniforms = [scalar_uniforms(noise.key, noise.position, nodes, Purpose.DRAFT) for noise in noises]
    settings = [
        *(request.settings.temperature for request in requests),
        *([1.0] * padding),
        *(request.settings.log_min_p for request in requests),
        *([-math.inf] * padding),
    ]
    uniforms = [each for own in zip(*row_uniforms, strict=True) for each in (*own, *([0.5] * padding))]
    return integers, settings + uniforms


def draw_nodes(
    run: Callable[[PassInputs], Tensor],
    static: StaticInputs,
    count: int,
    vocab_size: int,
    *,
    modes: Modes,
) -> Draws:
    """Draw nodes, each after a pass over the one before it.

    Args:
        run: returns logits `[token, vocab]` of a forward pass.
        static: inputs of the first pass; `integers` has the number of tokens of each row, then the keys and the positions
            of their noise; `floats` the temperatures, the logarithms of min-p and the uniforms of each node.
        vocab_size: width of the distributions.
        modes: how they are drawn.
    """
    inputs = static.inputs
    num_rows = len(inputs.slots)
    num_read, keys, positions = static.integers.view(3, num_rows)
    temperatures, log_min_ps, *uniforms = static.floats.view(-1, num_rows)
    found: list[Tensor] = []
    dists: list[Tensor] = []
    drawn: list[Tensor] = []
    confidences: list[Tensor] = []
    for node in range(count):
        if node:
            inputs = _following(inputs, drawn[-1], num_read if node == 1 else torch.ones_like(num_read))
        query_logits = run(inputs)[:, :vocab_size].view(*inputs.tokens.shape, -1)
        logits = query_logits[:, 0] if inputs.tokens.shape[1] == 1 else _last(query_logits, num_read)
        logits = logits.float().contiguous()
        found.append(logits)
        largest, confidence = most_likely(logits, inputs.num_finished)
        confidences.append(confidence)
        if modes.all_greedy:
            drawn.append(largest)
            continue
        probs = _probs(logits, temperatures[:, None], log_min_ps[:, None])
        if modes.some_greedy:
            first = torch.zeros_like(probs).scatter_(-1, largest[:, None], 1.0)
            probs = torch.where(temperatures[:, None] == 0, first, probs)
        dists.append(probs)
        if modes.races:
            hashes = hash_of(keys, positions + node, Purpose.RACE)
            times = -uniform_per_token_on_device(hashes, vocab_size).log() / probs
            drawn.append(times.argmin(-1))
        else:
            drawn.append(_inverted(probs, uniforms[node][:, None]))
    chosen = torch.stack((torch.stack(drawn).double(), torch.stack(confidences)))
    return Draws(chosen, torch.stack(found), torch.stack(dists) if dists else None)


def _last(query_logits: Tensor, num_read: Tensor) -> Tensor:
    """Return `[row, ...]`, that of each row's last token, of values `[row, token, ...]`."""
    return query_logits[torch.arange(len(query_logits), device=query_logits.device), num_read - 1]


def _following(inputs: PassInputs, tokens: Tensor, num_read: Tensor) -> PassInputs:
    """Return the inputs of a pass over one more token per row."""
    starts = torch.where(inputs.starts < 0, inputs.starts, inputs.starts + num_read)
    positions = _last(inputs.positions, num_read) + 1
    ancestors = torch.ones_like(positions)[:, None]
    return PassInputs(
        inputs.slots, starts, tokens[:, None], positions[:, None], ancestors, inputs.num_finished
    )


def _probs(logits: Tensor, temperatures: Tensor, log_min_ps: Tensor) -> Tensor:
    """Return probabilities `[row, vocab]` after temperature and min-p, as `sampling.truncation` does."""
    scaled = logits / temperatures.float()
    threshold = scaled.amax(-1, keepdim=True) + log_min_ps.float()
    return scaled.masked_fill(scaled < threshold, -torch.inf).softmax(-1)


def _inverted(probs: Tensor, uniforms: Tensor) -> Tensor:
    """Return the tokens `[row]` drawn by inverting the cumulative sum; any token if it is NaN."""
    totals = probs.cumsum(-1, dtype=torch.float64)
    tokens = torch.searchsorted(totals, uniforms * totals[:, -1:], right=True)
    return tokens[:, 0].clamp(max=probs.shape[-1] - 1)
