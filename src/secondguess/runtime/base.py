"""Interface of the models that take part in speculative decoding.

A runtime caches a prefix of `row.tokens` per row. The decoding loop keeps one invariant: between
rounds the target has cached every committed token of a row but the last, its `pending`. A runtime
itself requires less: `score` also runs the forward pass over tokens of `row.tokens` that are not
cached yet, so that a draft model catches up after any verification result.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from secondguess.core import Draft, Row
from secondguess.errors import UnsupportedModelError
from secondguess.runtime.chains import ChainDecision, ChainRequest, DrawnChains
from secondguess.runtime.refusals import partial_forward_error, quantised_copy_error
from secondguess.runtime.weight_format import WeightFormat

HiddenStates = dict[int, Tensor]
"""Hidden states by layer, numbered as in `output_hidden_states`.

0 is the embeddings, `k` the output of layer k (counted from 1), -1 that of the last layer,
normalised.
"""


@dataclass(frozen=True)
class ForwardOutput:
    """Logits and hidden states of one forward pass.

    Args:
        logits: `[row, node + 1, vocab]`, float32 or float64. Query 0 predicts the token after
            `pending`, query `i + 1` the token after node `i`. Values at padding nodes are finite
            and meaningless.
        hidden: `[row, node + 1, width]` per requested layer; empty if none was requested.
    """

    logits: Tensor
    hidden: HiddenStates = field(default_factory=dict)


class CachedLayer(NamedTuple):
    """Layer with keys and values of its own: its number, counted from 0, and the size of a head."""

    number: int
    head_size: int


@dataclass(frozen=True)
class EmbeddingAndHead:
    """Embeddings, final norm and language-modelling head of a model, which a drafter may share.

    Args:
        width: size of the hidden states.
        dtype: dtype of the hidden states.
        embed: maps token ids `[...]` to the inputs of the first layer `[..., width]`.
        normalise: the model's final norm.
        unembed: maps normalised hidden states `[..., width]` to logits `[..., vocab]`.
    """

    width: int
    dtype: torch.dtype
    embed: Callable[[Tensor], Tensor]
    normalise: Callable[[Tensor], Tensor]
    unembed: Callable[[Tensor], Tensor]


class QuantisedCopy(ABC):
    """Copy of a target with quantised weights, which drafts in the target's own KV cache.

    The entries of committed tokens are the target's. The copy writes those of pending and of nodes
    after them, where the target's next pass overwrites them.
    """

    @abstractmethod
    def draft_logits(self, rows: Sequence[Row], draft: Draft, num_known: int) -> Tensor:
        """Run the copy over the nodes that a draft has gained since the last call of the round.

        Args:
            rows: rows of the target, with all tokens but pending cached.
            num_known: number of leading queries (pending, then the nodes) that calls of this round
                have already run for each of these rows.

        Returns:
            Logits `[row, query, vocab]` after the other queries.
        """

    @abstractmethod
    def draft_chains(
        self, rows: Sequence[Row], requests: Sequence[ChainRequest], decision: ChainDecision
    ) -> DrawnChains | None:
        """Draw chains after the pending tokens of rows at once, as `Runtime.draft_chains`.

        None if `draft_logits` must be called per level.
        """


class Runtime(ABC):
    """Language model with a KV cache that can be rolled back.

    Rows of a batch may differ in length and never attend to each other.

    Attributes:
        vocab_size: width of the logits.
        context_length: largest number of positions.
        num_layers: number of decoder layers.
        device: device of the input tensors.
        supports_partial_forward: True if `run_first_layers` and `skip_layers` are supported.
        num_prefilled: number of tokens that prefills have run through the model so far.
    """

    vocab_size: int
    context_length: int
    num_layers: int
    device: torch.device
    supports_partial_forward: bool = False
    num_prefilled: int = 0

    @property
    def num_input_tokens(self) -> int:
        """Number of token ids that a text may have; more than logits if some are never generated."""
        return self.vocab_size

    def request_hidden_states(self, layers: Sequence[int], rows: Sequence[Row] | None = None) -> None:
        """Set the layers whose hidden states `begin`, `prefill` and `score` return from now on.

        Args:
            layers: numbers of the layers.
            rows: admitted rows to request them for; None for all rows without a request of their own.

        Raises:
            UnsupportedModelError: if the runtime cannot return hidden states.
        """
        if layers:
            raise UnsupportedModelError(
                f"expected a target that provides its hidden states, got a {type(self).__name__}; "
                "use a drafter that needs none"
            )

    def embedding_and_head(self) -> EmbeddingAndHead:
        """Return the model's embeddings, final norm and head.

        Raises:
            UnsupportedModelError: if the runtime cannot share them.
        """
        raise UnsupportedModelError(
            f"expected a target that provides its embeddings, got a {type(self).__name__}; use a drafter that needs none"
        )

    def find_cached_layer(self, kind: str) -> CachedLayer:
        """Return the last layer of a kind of attention that caches keys and values of its own.

        Kinds are those of `layer_types` in Transformers, such as `full_attention`.

        Raises:
            UnsupportedModelError: if there is none, or if the runtime cannot share keys and values.
        """
        raise UnsupportedModelError(
            f"expected a target that provides its keys and values, got a {type(self).__name__}; "
            "use a drafter that needs none"
        )

    def keys_and_values(self, rows: Sequence[Row], layer: CachedLayer) -> tuple[Tensor, Tensor]:
        """Return the cached keys and values `[row, kv_head, position, size]` of all tokens of rows but the last.

        Rotary positions are applied. Shorter rows are padded with any finite numbers.
        """
        raise NotImplementedError

    def require_partial_forward(self) -> None:
        """Check that layers can be run separately, for drafters to fail before any work is done.

        Raises:
            UnsupportedModelError: if the layers cannot be run separately.
        """
        if not self.supports_partial_forward:
            raise partial_forward_error()

    def run_first_layers(self, rows: Sequence[Row], draft: Draft, num_layers: int) -> Tensor:
        """Run only the first layers over pending and a draft that may still grow.

        The next `score` runs the remaining layers and keeps the cache entries that these have
        written. When called again in the same round with a longer draft, only the added nodes are
        run.

        Returns:
            Hidden states `[row, node + 1, width]` after these layers.

        Raises:
            UnsupportedModelError: if the layers cannot be run separately.
        """
        raise partial_forward_error()

    def skip_layers(self, skipped: Sequence[int]) -> Runtime:
        """Return a runtime that shares the weights but skips some layers, with a cache of its own.

        Raises:
            BadInputError: if a layer does not exist, or none would be left.
            UnsupportedModelError: if the layers cannot be run separately.
        """
        raise partial_forward_error()

    @property
    def why_not_copied(self) -> str:
        """Description of a model of which `quantised_copy` returns no copy; empty if it returns one."""
        return f"a {type(self).__name__}"

    def quantised_copy(self, weight_format: WeightFormat) -> QuantisedCopy:
        """Return a copy with weights in another encoding, which drafts for rows of this model.

        Copies in use are shared.

        Raises:
            UnsupportedModelError: if there is a reason against it (`why_not_copied`).
        """
        raise quantised_copy_error(weight_format, self.why_not_copied)

    @abstractmethod
    def admit(self, rows: Sequence[Row], reuse_limits: Sequence[int | None] | None = None) -> list[int]:
        """Add rows, which hold their whole prompt.

        A row starts with the cache entries of the longest prefix that it has in common with a live
        row or with a released one whose slot is still free.

        Args:
            reuse_limits: per row, the maximum number of tokens whose entries are reused, for
                callers that need the hidden states of the others; None for no limit.

        Returns:
            Per row, the number of leading tokens that are cached already.
        """

    @abstractmethod
    def prefill(
        self, rows: Sequence[Row], max_tokens: int | None = None, with_hidden: bool = True
    ) -> list[HiddenStates]:
        """Cache the uncached tokens of rows, except each row's last token.

        `score` would process these tokens too, which makes all rows of its batch wait.

        Args:
            max_tokens: maximum number of tokens to run through the model, over all rows; None for
                no limit.
            with_hidden: whether to return the requested hidden states. If there are none to
                return, the entries of tokens that another live row has cached are copied.

        Returns:
            Per row, the requested hidden states of the tokens cached by this call, `[position,
            width]` each; empty if there are none.
        """

    @abstractmethod
    def num_to_prefill(self, row: Row) -> int:
        """Return how many tokens of a row, except its last, are not cached yet."""

    def slot_lengths(self, row: Row) -> list[int]:
        """Return the number of tokens in each cache slot of a row, which has one if nothing else is needed for it.

        Also asked for rows that are not admitted yet.
        """
        return [len(row.tokens)]

    def reset_prefix_cache(self) -> None:
        """Forget the cache entries of released rows, so that new rows do not reuse them."""

    def begin(self, rows: Sequence[Row]) -> list[HiddenStates]:
        """Admit rows, reusing nothing, and prefill them.

        Returns:
            Per row, the requested hidden states of all tokens but the last, as `prefill` does.
        """
        self.admit(rows, [0] * len(rows))
        return self.prefill(rows)

    @abstractmethod
    def score(self, rows: Sequence[Row], draft: Draft) -> ForwardOutput:
        """Run one forward pass over each row's uncached tokens (at least `pending`) and its nodes.

        Afterwards every token of `row.tokens` is cached. The cache entries of the nodes are held
        until `keep` or `rewind`.
        """

    def draft_chains(
        self, rows: Sequence[Row], requests: Sequence[ChainRequest], decision: ChainDecision
    ) -> DrawnChains | None:
        """Append chains drawn from this model to the tokens of rows. All tokens but the last are cached afterwards.

        Returns:
            The chains; None if `score` must be called per level.
        """
        return None

    @abstractmethod
    def keep(self, rows: Sequence[Row], paths: Sequence[Sequence[int]]) -> None:
        """Keep the accepted path of the draft scored last in each row's cache, and drop the rest.

        Must be called before the row's tokens change.
        """

    @abstractmethod
    def rewind(self, rows: Sequence[Row], lengths: Sequence[int]) -> None:
        """Drop what is cached beyond the first `lengths[i]` tokens of row i.

        A row with fewer cached tokens keeps them.
        """

    def erase(self, rows: Sequence[Row], num_nodes: int) -> None:
        """Overwrite what a draft of `num_nodes` nodes has left beyond the cached tokens of rows.

        For entries that are not finite: attention may read them with weight 0, and 0 times NaN is NaN.
        Nothing to do for a runtime that does not read them.
        """

    @abstractmethod
    def release(self, row: Row) -> None:
        """Release the cache slot of a row; do nothing for a row that was never admitted."""


def join_hidden(pieces: Sequence[HiddenStates]) -> HiddenStates:
    """Return the hidden states of successive tokens, concatenated."""
    return {layer: torch.cat([piece[layer] for piece in pieces]) for layer in pieces[0]} if pieces else {}
