"""The contract of a model that can be speculated on.

A runtime caches, per row, a prefix of `row.tokens`. The loop keeps one invariant: between rounds the target has
cached every committed token of a row but the last, its `pending`. A runtime itself asks for less: `score`
forwards whatever part of `row.tokens` is not cached yet, and that is how a draft model catches up after any verdict.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from secondguess.core import Draft, Row
from secondguess.errors import UnsupportedModelError

Hidden = dict[int, Tensor]
"""Hidden states by layer, numbered as in `output_hidden_states`: 0 is the embeddings, `k` the output of layer k, -1 the last,
normalised one."""


@dataclass(frozen=True)
class Scores:
    """What one forward says.

    Args:
        logits: `[row, node + 1, vocab]`, float32 or float64; query 0 follows `pending`, query `i + 1` follows
            node `i`. Queries of padding nodes hold finite numbers without meaning.
        hidden: per requested layer `[row, node + 1, width]`, empty when none was requested.
    """

    logits: Tensor
    hidden: Hidden


@dataclass(frozen=True)
class Ends:
    """The two ends of a model, which a drafter may borrow instead of holding its own.

    Args:
        width: of the states.
        dtype: of the states.
        embed: token ids `[...]` to states `[..., width]`, as they enter the first layer.
        normalise: the model's last norm.
        unembed: normalised states `[..., width]` to logits `[..., vocab]`.
    """

    width: int
    dtype: torch.dtype
    embed: Callable[[Tensor], Tensor]
    normalise: Callable[[Tensor], Tensor]
    unembed: Callable[[Tensor], Tensor]


class Runtime(ABC):
    """A language model with a cache that can be rolled back, for ragged rows that never see each other.

    Attributes:
        vocab_size: width of the logits.
        context_length: positions the model can hold.
        num_layers: how deep the model is.
        device: where tensors that are handed in should live.
        runs_layers_apart: whether it can `read_ahead`, and lend its weights `without_layers`.
    """

    vocab_size: int
    context_length: int
    num_layers: int
    device: torch.device
    runs_layers_apart: bool = False

    def request_hidden(self, layers: Sequence[int]) -> None:
        """Have `begin` and `score` return exactly these layers' hidden states from now on.

        Raises:
            UnsupportedModelError: a model that shows none.
        """
        if layers:
            raise UnsupportedModelError(
                f"expected a target that shows its hidden states, got a {type(self).__name__}; "
                "use a drafter that needs none"
            )

    def ends(self) -> Ends:
        """The model's embeddings, last norm and head.

        Raises:
            UnsupportedModelError: a model that cannot lend them.
        """
        raise UnsupportedModelError(
            f"expected a target that lends its embeddings, got a {type(self).__name__}; use a drafter that needs none"
        )

    def require_layers_apart(self) -> None:
        """For whoever will run some of the layers, so that it is known before any work is spent.

        Raises:
            UnsupportedModelError: a runtime whose layers cannot be run apart.
        """
        if not self.runs_layers_apart:
            raise _runs_as_a_whole()

    def read_ahead(self, rows: Sequence[Row], draft: Draft, num_layers: int) -> Tensor:
        """Run only the first layers over pending and a draft that may still grow; the next `score` does the rest.

        Asked again in the same round with the draft grown, it runs what was added. The cache entries that it writes are
        those that the row keeps.

        Returns:
            `[row, node + 1, width]`, the states behind these layers.

        Raises:
            UnsupportedModelError: a runtime whose layers cannot be run apart.
        """
        raise _runs_as_a_whole()

    def without_layers(self, skipped: Sequence[int]) -> Runtime:
        """The same weights as a model that leaves out these layers, counted from 0; it has a cache of its own.

        Raises:
            BadInputError: no such layer, or none left.
            UnsupportedModelError: a runtime whose layers cannot be run apart.
        """
        raise _runs_as_a_whole()

    @abstractmethod
    def begin(self, rows: Sequence[Row]) -> Sequence[Hidden]:
        """Admit rows and cache all of their tokens but the last (in chunks).

        Returns:
            Per row the hidden states that were requested, `[position, width]` each, of the tokens cached.
        """

    @abstractmethod
    def read_up(self, rows: Sequence[Row]) -> None:
        """Cache all tokens of rows but the last (in chunks), where more than that is uncached.

        `score` would do it too, in the forward in which everybody else waits.
        """

    @abstractmethod
    def score(self, rows: Sequence[Row], draft: Draft) -> Scores:
        """One forward over each row's uncached tokens (at least `pending`) and its nodes.

        Afterwards every token of `row.tokens` is cached; the nodes are held until `keep` or `rewind`.
        """

    @abstractmethod
    def keep(self, rows: Sequence[Row], paths: Sequence[Sequence[int]]) -> None:
        """Make the accepted path of the draft scored last part of each row's cache; forget its other nodes.

        To be called before the row's tokens change.
        """

    @abstractmethod
    def rewind(self, rows: Sequence[Row], lengths: Sequence[int]) -> None:
        """Forget what is cached beyond the first `lengths[i]` tokens of row i (less may be cached already)."""

    @abstractmethod
    def end(self, row: Row) -> None:
        """Release what is held for a row; nothing, for one that never began."""


def _runs_as_a_whole() -> UnsupportedModelError:
    return UnsupportedModelError(
        "expected a target whose layers run one by one, got one that runs as a whole; load it with runtime native or fused "
        "if one covers the model (docs/runtimes.md), or use a drafter that does without, such as suffix"
    )
