"""Forward passes of Transformers modules that do not take our masks: one path of one row each."""

from __future__ import annotations

import inspect
import math
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from secondguess.core import Draft
from secondguess.errors import UnsupportedModelError
from secondguess.runtime import tree
from secondguess.runtime.base import ForwardOutput, HiddenStates
from secondguess.runtime.cached import UNLIMITED
from secondguess.runtime.modules.forward import ModuleForward
from secondguess.runtime.modules.support import unsupported
from secondguess.runtime.slots import CachedRow
from secondguess.runtime.step import ForwardStep

NUM_CACHED = 3
"""Tokens of the first pass of the check at loading."""
PROBED_WIDTHS = (2, 3, 5)
"""Numbers of tokens of passes that follow it and are compared with single tokens."""
NUM_PROBED = 12
"""Tokens of the text that is run in one pass and in two."""


@dataclass(frozen=True)
class Probe:
    """Result of passes of the check at loading.

    Args:
        logits: `[token, vocab]`.
        states: recurrent states after the last token, if the model has any and they are compared.
    """

    logits: Tensor
    states: Mapping[Any, Tensor] = field(default_factory=dict)

    @classmethod
    def join(cls, single: Sequence[Probe]) -> Probe:
        """Return the result of successive passes."""
        return cls(torch.cat([each.logits for each in single]), single[-1].states)

    def relative_error(self, expected: Probe) -> float:
        """Return the largest difference from the expected values, relative to the largest of these."""
        pairs = [(self.logits, expected.logits)]
        pairs += [(self.states[key], state) for key, state in expected.states.items()]
        errors = [(got - right).double().abs().max() / _scale(right) for got, right in pairs]
        return float(torch.stack(errors).max())


class PathForward(ModuleForward):
    """Forward passes of a module that makes its masks from the length of its cache.

    A pass serves one path of one row, as in `generate`: the rows of a batch run one after another, and so do the branches
    of a tree.

    Attributes:
        single_steps: True if only single tokens can follow a cache.
        max_uncached: as in `CachedRuntime`.
    """

    single_steps = False
    max_uncached = UNLIMITED

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self._takes_positions = "position_ids" in inspect.signature(type(model).forward).parameters

    @abstractmethod
    def run_branch(
        self,
        state: CachedRow,
        tokens: Sequence[int],
        known: Sequence[int],
        new: Sequence[int],
        num_logits: int,
        hidden_layers: Sequence[int],
    ) -> ForwardOutput:
        """Run the new queries of one path after the `known` ones, which ran before; query 0 is the first uncached token."""

    @abstractmethod
    def prefill(self, state: CachedRow, tokens: list[int], hidden_layers: Sequence[int]) -> HiddenStates:
        """Cache the next tokens of a row; return their hidden states `[1, token, width]`."""

    @abstractmethod
    def probe(self, tokens: list[int], start: int, is_prompt: bool = False) -> Probe:
        """Run tokens from position `start` on, after tokens of earlier probes."""

    @abstractmethod
    def accept(self, error: float, error_of_single: float) -> None:
        """Refuse the module if passes over several tokens, with this relative error, or single ones compute other values."""

    def run(
        self, tokens: Tensor, step: ForwardStep, num_logits: int, hidden_layers: Sequence[int]
    ) -> ForwardOutput:
        positions = step.query_positions if self._takes_positions else None
        return self.call(tokens, positions, num_logits, self.cache, hidden_layers)

    def run_path(
        self, tokens: list[int], start: int, num_logits: int, hidden_layers: Sequence[int]
    ) -> ForwardOutput:
        """Run tokens of one row, which follow each other from position `start` on."""
        positions = torch.arange(start, start + len(tokens), device=self.cache.device)[None]
        step = ForwardStep(None, positions, start + len(tokens))
        return self.run(torch.tensor([tokens], device=self.cache.device), step, num_logits, hidden_layers)

    def run_rows(
        self,
        states: Sequence[CachedRow],
        num_uncached: Sequence[int],
        draft: Draft,
        hidden_layers: Sequence[int],
    ) -> ForwardOutput:
        """Return logits and hidden states `[row, node + 1, ...]` of pending and the nodes."""
        rows = zip(states, num_uncached, draft.tokens.tolist(), draft.shapes, strict=True)
        outputs = [self._run_row(*row, hidden_layers) for row in rows]
        hidden = {layer: torch.stack([output.hidden[layer] for output in outputs]) for layer in hidden_layers}
        return ForwardOutput(torch.stack([output.logits for output in outputs]), hidden)

    def _run_row(
        self,
        state: CachedRow,
        num_uncached: int,
        nodes: Sequence[int],
        parents: Sequence[int],
        hidden_layers: Sequence[int],
    ) -> ForwardOutput:
        """Return logits and hidden states `[node + 1, ...]` of a row's pending and its nodes."""
        tokens = [*state.row.tokens[state.length :], *nodes]
        columns: list[int] = []
        counts: list[int] = []
        outputs = []
        for known, new in _branches(parents, num_uncached):
            scored = [query - num_uncached + 1 for query in new if query >= num_uncached - 1]
            outputs.append(self.run_branch(state, tokens, known, new, len(scored), hidden_layers))
            columns += scored
            counts.append(len(scored))

        def in_order(passes: Sequence[Tensor]) -> Tensor:
            """Return the values of the last queries of each pass at their columns, zeros at padding."""
            last = [values[0, -count:] for values, count in zip(passes, counts, strict=True)]
            found = torch.cat(last)
            ordered = found.new_zeros(len(nodes) + 1, found.shape[1])
            ordered[columns] = found
            return ordered

        return ForwardOutput(
            in_order([output.logits for output in outputs]),
            {layer: in_order([output.hidden[layer] for output in outputs]) for layer in hidden_layers},
        )

    def set_up(self, vocab_size: int) -> None:
        """Compare passes over several tokens with passes over single tokens, and one pass with two."""
        tokens = [(5 + index) % vocab_size for index in range(NUM_PROBED)]
        rest = tokens[NUM_CACHED:]
        try:
            whole = self.probe(tokens, 0)
            self.probe(tokens[:NUM_CACHED], 0)
            second = self.probe(rest, NUM_CACHED, is_prompt=True)
            several = [self.probe(rest[:width], NUM_CACHED) for width in PROBED_WIDTHS]
            single = [
                self.probe([token], NUM_CACHED + index)
                for index, token in enumerate(rest[: max(PROBED_WIDTHS)])
            ]
        except Exception as error:  # of code that is not ours, so of any kind
            raise self._unsupported(f"it cannot run with a cache per row ({_first_line(error)})") from error
        pairs = [(second, Probe(whole.logits[NUM_CACHED:], whole.states))]
        pairs += [(each, Probe.join(single[: len(each.logits)])) for each in several]
        largest = _largest(got.relative_error(expected) for got, expected in pairs)
        joined = Probe(torch.cat([each.logits for each in single]))
        self.accept(largest, joined.relative_error(Probe(whole.logits[NUM_CACHED:][: len(single)])))

    def require_rounding(self, error: float, description: str) -> None:
        """Refuse the module if a relative error is larger than that of rounding."""
        if not self.is_rounding(error):
            raise self._unsupported(
                f"{description} (relative error {error:.1e}, expected at most {self._tolerance:.1e})"
            )

    def is_rounding(self, error: float) -> bool:
        """Return whether a relative error may come from rounding."""
        return error <= self._tolerance  # False if it is not a number

    @property
    def _tolerance(self) -> float:
        # Some layers compute in float32, whatever the dtype of the others is.
        return float(max(torch.finfo(dtype).eps for dtype in (self.call.model.dtype, torch.float32)) ** 0.5)

    def _unsupported(self, reason: str) -> UnsupportedModelError:
        return unsupported(type(self.call.model).__name__, reason)


class RowByRowForward(PathForward):
    """Forward passes of a module whose layers cache keys and values only."""

    description = "row by row"

    def run_branch(
        self,
        state: CachedRow,
        tokens: Sequence[int],
        known: Sequence[int],
        new: Sequence[int],
        num_logits: int,
        hidden_layers: Sequence[int],
    ) -> ForwardOutput:
        positions = [state.length + query for query in (*known, *new)]
        self.cache.place_path(state.slot, state.length, positions, len(new))
        new_tokens = [tokens[query] for query in new]
        return self.run_path(new_tokens, state.length + len(known), num_logits, hidden_layers)

    def prefill(self, state: CachedRow, tokens: list[int], hidden_layers: Sequence[int]) -> HiddenStates:
        return self._run_next(state.slot, state.length, tokens, 1, hidden_layers).hidden

    def probe(self, tokens: list[int], start: int, is_prompt: bool = False) -> Probe:
        logits = self._run_next(0, start, tokens, len(tokens)).logits
        return Probe(logits[0, -len(tokens) :].double())

    def accept(self, error: float, error_of_single: float) -> None:
        self.require_rounding(error, "several tokens after a cache give other results than single tokens")

    def _run_next(
        self, slot: int, start: int, tokens: list[int], num_logits: int, hidden_layers: Sequence[int] = ()
    ) -> ForwardOutput:
        self.cache.place_path(slot, start, range(start, start + len(tokens)), len(tokens))
        return self.run_path(tokens, start, num_logits, hidden_layers)


def _scale(values: Tensor) -> Tensor:
    return values.double().abs().max().clamp(min=torch.finfo(torch.float32).tiny)


def _largest(errors: Iterable[float]) -> float:
    return max(errors, key=lambda error: math.inf if math.isnan(error) else error)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


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
