"""Requests for chains of draft tokens that a runtime draws in one call, and their results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


class KernelSettings(NamedTuple):
    """Sampling settings of a row.

    Args:
        temperature: 0 for the most likely token.
        top_k: 0 if it is disabled.
        top_p: infinity if it is disabled, so that rounding drops no token.
        log_min_p: -inf if it is disabled.
    """

    temperature: float
    top_k: int
    top_p: float
    log_min_p: float

    @property
    def truncates(self) -> bool:
        """True if logits are selected by top-k or top-p."""
        return self.top_k > 0 or self.top_p < 1


class RowNoise(NamedTuple):
    """Source of the random decisions of one row in a round, which the kernels make like `KeyedNoise`.

    Args:
        key: unsigned hash of the row's seed and sample index.
        position: at which the round begins.
        races: True if draft tokens are drawn by races.
    """

    key: int
    position: int
    races: bool


@dataclass(frozen=True, eq=False)
class VocabularyMap:
    """Tokens of a draft model with another vocabulary than the target's.

    Args:
        ids: `[vocab]` int64, the target's token whose arrival time in races each has; an id beyond them for
            a token that the target does not have.
        lengths: `[vocab]` int64, number of the target's tokens that each stands for; 0 for a token without bytes, which
            ends the draft.
    """

    ids: Tensor
    lengths: Tensor


@dataclass(frozen=True)
class ChainRequest:
    """Chain of draft tokens to draw for one row, each after a forward pass over the one before it.

    Args:
        num_nodes: largest number of nodes.
        vocab_size: width of the distributions; logits beyond are not used.
        settings: temperature, top-k, top-p and min-p of the row.
        noise: by which the nodes are drawn; unused at temperature 0.
        vocabulary: of a model with another vocabulary than the target's; None for the target's.
    """

    num_nodes: int
    vocab_size: int
    settings: KernelSettings
    noise: RowNoise
    vocabulary: VocabularyMap | None = None


class DrawnChains(NamedTuple):
    """Chains of draft tokens of several rows.

    Args:
        tokens: per row, at least one.
        probs: `[row, node, vocab]`, the distribution that each was drawn from, zeros beyond a row's nodes; None if all
            rows have temperature 0.
    """

    tokens: list[list[int]]
    probs: Tensor | None


KeepChains = Callable[[Sequence[int], Tensor, int, Sequence[float]], list[bool]]
"""Decides which chains continue: called with the rows in question, the logits `[row, vocab]` of their last nodes, which are
valid during the call, the depth of these nodes and the probabilities of the most likely tokens. Entries of rows that drew
no node at this depth are meaningless."""


ChainDecision = KeepChains | None
"""Decides which chains continue, after each level but the last of a row; None draws all nodes."""
