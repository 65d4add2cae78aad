"""Prefill of the rows of a batch, within a limit, and shared by rows with the same prompt."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from secondguess.core import Draft, Row, TokenLogprob
from secondguess.errors import NonFiniteLogitsError
from secondguess.rounds import Components
from secondguess.runtime.base import HiddenStates
from secondguess.sampling.probs import token_logprobs

LOGITS_BYTES = 2**26
"""Largest size of the logits of a pass that scores a prompt."""


def prefill_rows(
    components: Components,
    rows: Sequence[Row],
    hidden: Mapping[Row, list[HiddenStates]],
    max_tokens: int | None,
) -> list[Row]:
    """Prefill admitted rows as far as the limit allows; return those whose prompts are cached now.

    Rows are prefilled in their order. Where the limit is reached, up to half of what is left goes to the row
    that needs the fewest tokens, so that a short prompt does not wait for the end of a long one.

    Args:
        rows: rows whose prompts are not cached. Of those with the same prompt, one is prefilled.
        hidden: hidden states of each row so far, to which those of the new tokens are added.
        max_tokens: maximum number of tokens; None for no limit.
    """
    target = components.target
    by_prompt: dict[tuple[int, ...], list[Row]] = {}
    for row in rows:
        # Equal tokens may stand for different images, and log-probabilities are not copied.
        distinct = row.images if row.prompt_logprobs is None else row
        by_prompt.setdefault((id(distinct), *row.tokens), []).append(row)
    firsts = [equal[0] for equal in by_prompt.values()]
    whole, left = _within_limit(components, firsts, max_tokens)
    _prefill(components, whole, hidden)
    following = firsts[len(whole) :]
    if following and left:
        shortest = min(following, key=target.num_to_prefill)
        if shortest is not following[0]:
            left -= _prefill(components, [shortest], hidden, -(-left // 2))
        if target.num_to_prefill(shortest):  # else it need not wait for more than its own prompt
            _prefill(components, following[:1], hidden, left)
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


def _prefill(
    components: Components,
    rows: Sequence[Row],
    hidden: Mapping[Row, list[HiddenStates]],
    max_tokens: int | None = None,
) -> int:
    """Prefill rows, of which a limit allows one; return the number of tokens."""
    target = components.target
    before = sum(map(target.num_to_prefill, rows))
    unscored = [row for row in rows if row.prompt_logprobs is None]
    for row, piece in zip(unscored, target.prefill(unscored, max_tokens), strict=True):
        if piece:
            hidden[row].append(piece)
    for row in rows:
        if row.prompt_logprobs is not None:
            _score_prompt(components, row, row.prompt_logprobs, hidden[row], max_tokens)
    return before - sum(map(target.num_to_prefill, rows))


def _score_prompt(
    components: Components,
    row: Row,
    logprobs: list[TokenLogprob],
    hidden: list[HiddenStates],
    max_tokens: int | None,
) -> None:
    """Prefill a row in passes that score the next tokens of its prompt as a draft, and add their log-probabilities."""
    target, prompt = components.target, row.tokens
    most = max(1, LOGITS_BYTES // (4 * target.vocab_size))
    if row.params.draft_length is not None:
        most = min(most, row.params.draft_length + 1)
    end = len(prompt) if max_tokens is None else min(len(prompt), 1 + len(logprobs) + max_tokens)
    try:
        while (start := 1 + len(logprobs)) < end:
            tokens = prompt[start : min(start + most, end)]
            row.tokens = prompt[:start]
            output = target.score([row], Draft.chains([tokens[:-1]], device=target.device))
            target.keep([row], [range(len(tokens) - 1)])
            found = token_logprobs(output.logits[0], tokens, row.params.prompt_logprobs or 0)
            if math.isnan(sum(token.logprob for token in found)):
                raise NonFiniteLogitsError(
                    f"expected finite logits after tokens {start} to {start + len(tokens)} of the prompt, got NaN; "
                    "use float32 or other weights"
                )
            logprobs += found
            if output.hidden:
                hidden.append({layer: states[0] for layer, states in output.hidden.items()})
    finally:
        row.tokens = prompt
