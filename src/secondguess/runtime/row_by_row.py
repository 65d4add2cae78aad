"""Runtime for Transformers modules that do not take our masks."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from secondguess.core import Draft
from secondguess.errors import UnsupportedModelError
from secondguess.runtime import tree
from secondguess.runtime.attention import ForwardStep
from secondguess.runtime.base import HiddenStates
from secondguess.runtime.cached import Output
from secondguess.runtime.slots import CachedRow
from secondguess.runtime.support import takes_masks, unsupported
from secondguess.runtime.transformers import TransformersRuntime

NUM_PROBED = 8
"""Tokens of the check at loading."""


class RowByRowRuntime(TransformersRuntime):
    """Runtime over a Transformers module that makes its masks from the length of its cache.

    A forward pass serves one path of one row, as in `generate`: the rows of a batch run one after
    another, and so do the branches of a tree.

    Args:
        model, hidden_layers, prefill_chunk: as in `TransformersRuntime`.

    Raises:
        UnsupportedModelError: if several tokens after a cache give other logits than single ones.
    """

    def __init__(self, model: Any, hidden_layers: Sequence[int] = (), prefill_chunk: int = 512) -> None:
        super().__init__(model, hidden_layers, prefill_chunk)
        self._prefills_together = self.takes_images = False
        self._takes_positions = "position_ids" in inspect.signature(model.forward).parameters
        try:
            with torch.inference_mode():
                self._check_cache()
        except UnsupportedModelError:
            self.close()
            raise
        self.free()

    def _set_up_attention(self) -> None:
        """Leave the module's own attention in place."""

    def _check_cache(self) -> None:
        """Compare passes over several tokens with passes over single tokens."""
        tokens = [(5 + index) % self.vocab_size for index in range(NUM_PROBED)]
        try:
            single, several = (self._probe(tokens, width) for width in (1, NUM_PROBED // 2))
        except Exception as error:  # of code that is not ours, so of any kind
            raise unsupported(
                type(self.model).__name__, f"it cannot run with a cache per row ({_first_line(error)})"
            ) from error
        difference = float((several - single).abs().max() / single.abs().max())
        limit = torch.finfo(self.model.dtype).eps ** 0.5
        if not difference <= limit:  # also if it is not a number
            raise unsupported(
                type(self.model).__name__,
                "several tokens after a cache give other logits than single tokens "
                f"(relative error {difference:.1e}, expected at most {limit:.1e})",
            )

    def _probe(self, tokens: Sequence[int], width: int) -> Tensor:
        """Return the logits `[token, vocab]` of passes over `width` tokens each."""
        pieces = []
        for start in range(0, len(tokens), width):
            self.cache.place_path(0, start, range(start, start + width), width)
            pieces.append(self._run_path(tokens[start : start + width], start, width).logits[0])
        return torch.cat(pieces).double()

    def run(self, tokens: Tensor, step: ForwardStep, num_logits: int, with_hidden: bool) -> Output:
        positions = step.query_positions if self._takes_positions else None
        return self._call(tokens, positions, num_logits, with_hidden)

    def _run_path(self, tokens: Sequence[int], start: int, num_logits: int) -> Output:
        """Run tokens of one row, which follow each other from position `start` on."""
        step = ForwardStep(
            None, torch.arange(start, start + len(tokens), device=self.device)[None], start + len(tokens)
        )
        inputs = torch.tensor([list(tokens)], device=self.device)
        return self.run(inputs, step, num_logits, with_hidden=bool(self.hidden_layers))

    def _run_queries(
        self, states: Sequence[CachedRow], num_uncached: Sequence[int], draft: Draft
    ) -> tuple[Tensor, HiddenStates]:
        rows = zip(states, num_uncached, draft.tokens.tolist(), draft.shapes, strict=True)
        outputs = [self._run_row(*row) for row in rows]
        hidden = {
            layer: torch.stack([output.hidden[layer] for output in outputs]) for layer in self.hidden_layers
        }
        return torch.stack([output.logits for output in outputs]), hidden

    def _run_row(
        self, state: CachedRow, num_uncached: int, nodes: Sequence[int], parents: Sequence[int]
    ) -> Output:
        """Return logits and hidden states `[node + 1, ...]` of a row's pending and its nodes."""
        tokens = [*state.row.tokens[state.length :], *nodes]
        columns: list[int] = []
        counts: list[int] = []
        outputs = []
        for known, new in _branches(parents, num_uncached):
            positions = [state.length + query for query in (*known, *new)]
            self.cache.place_path(state.slot, state.length, positions, len(new))
            scored = [query - num_uncached + 1 for query in new if query >= num_uncached - 1]
            path = [tokens[query] for query in new]
            outputs.append(self._run_path(path, state.length + len(known), len(scored)))
            columns += scored
            counts.append(len(scored))

        def in_order(passes: Sequence[Tensor]) -> Tensor:
            """Return the values of the last queries of each pass at their columns, zeros at padding."""
            last = [values[0, -count:] for values, count in zip(passes, counts, strict=True)]
            found = torch.cat(last)
            ordered = found.new_zeros(len(nodes) + 1, found.shape[1])
            ordered[columns] = found
            return ordered

        return Output(
            in_order([output.logits for output in outputs]),
            {layer: in_order([output.hidden[layer] for output in outputs]) for layer in self.hidden_layers},
        )


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def wrap_module(model: Any) -> TransformersRuntime:
    """Return a runtime for a Transformers module: over whole batches if the module takes our masks."""
    kind = TransformersRuntime if takes_masks(type(model), model.config) else RowByRowRuntime
    return kind(model)


def _branches(parents: Sequence[int], num_uncached: int) -> Iterator[tuple[list[int], list[int]]]:
    """Yield each path to a leaf of a row's queries as the queries that ran before and the new ones.

    >>> list(_branches([-1, 0, -1], num_uncached=2))
    [([], [0, 1, 2, 3]), ([0, 1], [4])]
    """
    (above,) = tree.attach_drafts([parents], [len(parents)], [num_uncached])
    seen: set[int] = set()
    for leaf in range(len(above)):
        if leaf in above:
            continue
        path = [leaf]
        while above[path[0]] != tree.ROOT:
            path.insert(0, above[path[0]])
        new = [query for query in path if query not in seen]
        seen.update(new)
        yield path[: len(path) - len(new)], new
