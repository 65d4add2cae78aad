"""Prefill of the rows of a batch, within a limit, and shared by rows with the same prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from secondguess.core import Row
from secondguess.rounds import Components
from secondguess.runtime.base import HiddenStates


def prefill_rows(
    components: Components,
    rows: Sequence[Row],
    hidden: Mapping[Row, list[HiddenStates]],
    max_tokens: int | None,
) -> list[Row]:
    """Prefill admitted rows as far as the limit allows; return those whose prompts are cached now.

    Args:
        rows: rows whose prompts are not cached. Of those with the same prompt, one is prefilled.
        hidden: hidden states of each row so far, to which those of the new tokens are added.
        max_tokens: maximum number of tokens; None for no limit.
    """
    target = components.target
    by_prompt: dict[tuple[int, ...], list[Row]] = {}
    for row in rows:
        # equal tokens may stand for different images
        by_prompt.setdefault((id(row.images), *row.tokens), []).append(row)
    firsts = [equal[0] for equal in by_prompt.values()]
    whole, left = _within_limit(components, firsts, max_tokens)
    _store(hidden, whole, target.prefill(whole))
    if left:
        following = [firsts[len(whole)]]
        _store(hidden, following, target.prefill(following, left))
    for first, *others in by_prompt.values():
        if others and not target.num_to_prefill(first):
            _copy_prefill(components, first, others, hidden)
    return [row for row in rows if not target.num_to_prefill(row)]


def _copy_prefill(
    components: Components, first: Row, others: Sequence[Row], hidden: Mapping[Row, list[HiddenStates]]
) -> None:
    """Give rows the cache entries and hidden states of a row with the same prompt."""
    # The drafter needs hidden states of a row from the first token that its target has not reused.
    num_reused = components.recorder.of(first).num_reused
    members = [row for row in others if components.recorder.of(row).num_reused >= num_reused]
    components.target.prefill(members, with_hidden=False)
    for row in members:
        hidden[row][:] = hidden[first]


def _within_limit(
    components: Components, rows: Sequence[Row], max_tokens: int | None
) -> tuple[list[Row], int]:
    """Return the first rows that can be prefilled whole, and the tokens left for the next one."""
    left = max_tokens
    if left is None:
        return list(rows), 0
    for index, row in enumerate(rows):
        needed = components.target.num_to_prefill(row)
        if needed > left:
            return list(rows[:index]), left
        left -= needed
    return list(rows), 0


def _store(
    hidden: Mapping[Row, list[HiddenStates]], rows: Sequence[Row], pieces: Sequence[HiddenStates]
) -> None:
    for row, piece in zip(rows, pieces, strict=True):
        if piece:
            hidden[row].append(piece)
