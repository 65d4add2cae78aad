"""Draws of a chain of draft tokens on the device, with the same random decisions as `KeyedNoise`."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from secondguess.runtime.graphs.capture import StaticInputs
from secondguess.runtime.graphs.operations import PassInputs
from secondguess.runtime.hashes import Purpose, hash_of, uniform_per_token_on_device


class Draws(NamedTuple):
    """Nodes of a chain on the device.

    Args:
        chosen: `[2, node]` in float64, tokens, and probabilities of the most likely token before sampling settings.
        logits: `[node, vocab]` in float32, from which they were drawn.
        probs: `[node, vocab]`, the distribution that each was drawn from; None at temperature 0.
    """

    chosen: Tensor
    logits: Tensor
    probs: Tensor | None

    def on_host(self) -> tuple[list[int], list[float]]:
        """Return tokens and confidences."""
        tokens, confidences = self.chosen.tolist()
        return [int(token) for token in tokens], confidences


def draw_nodes(
    run: Callable[[PassInputs], Tensor],
    static: StaticInputs,
    count: int,
    vocab_size: int,
    *,
    is_greedy: bool,
    races: bool,
) -> Draws:
    """Draw nodes, each after a pass over the one before it.

    Args:
        run: returns logits `[token, vocab]` of a forward pass.
        static: inputs of the first pass; `integers` has the key and position of the row's noise, `floats` the
            temperature, the logarithm of min-p and one uniform per node (at temperature 0 nothing).
        count: number of nodes.
        vocab_size: width of the distributions.
        is_greedy: whether the most likely tokens are drawn.
        races: whether tokens are drawn by races.
    """
    inputs = static.inputs
    found: list[Tensor] = []
    dists: list[Tensor] = []
    drawn: list[Tensor] = []
    floats = static.floats.unbind()
    for node in range(count):
        if node:
            inputs = _following(inputs, drawn[-1])
        logits = run(inputs)[-1, :vocab_size].float()
        found.append(logits)
        if is_greedy:
            drawn.append(logits.argmax(-1))
            continue
        temperature, log_min_p, *uniforms = floats
        probs = _probs(logits, temperature, log_min_p)
        dists.append(probs)
        if races:
            key, position = static.integers[:1], static.integers[1:]
            hashes = hash_of(key, position + node, Purpose.RACE)
            times = -uniform_per_token_on_device(hashes, vocab_size)[0].log() / probs
            drawn.append(times.argmin(-1))
        else:
            drawn.append(_inverted(probs, uniforms[node]))
    logits = torch.stack(found)
    chosen = torch.stack((torch.stack(drawn).double(), logits.softmax(-1).amax(-1).double()))
    return Draws(chosen, logits, torch.stack(dists) if dists else None)


def _following(inputs: PassInputs, token: Tensor) -> PassInputs:
    """Return the inputs of a pass over one more token of the only row."""
    return PassInputs(
        inputs.slots,
        inputs.starts + inputs.tokens.shape[1],
        token.view(1, 1),
        inputs.positions[:, -1:] + 1,
        torch.ones_like(inputs.positions[:, -1:]),
    )


def _probs(logits: Tensor, temperature: Tensor, log_min_p: Tensor) -> Tensor:
    """Return probabilities `[vocab]` after temperature and min-p, as `sampling.truncation` does."""
    logits = logits / temperature.float()
    threshold = logits.amax(-1) + log_min_p.float()
    return logits.masked_fill(logits < threshold, -torch.inf).softmax(-1)


def _inverted(probs: Tensor, uniform: Tensor) -> Tensor:
    """Return the token drawn by inverting the cumulative sum; any token if it is NaN."""
    totals = probs.cumsum(-1, dtype=torch.float64)
    return torch.searchsorted(totals, uniform * totals[-1:], right=True)[0].clamp(max=len(probs) - 1)
