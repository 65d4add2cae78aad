"""Scoring and verification of a draft in one round."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from secondguess.core import Draft, Row, Verdict
from secondguess.errors import NonFiniteLogitsError
from secondguess.runtime.base import ForwardOutput
from secondguess.sampling.noise import Noise
from secondguess.verifiers.base import verify_logits

if TYPE_CHECKING:
    from secondguess.rounds import Components


class VerifiedDraft(NamedTuple):
    """Draft of a round, the target's output for it, and the verdict."""

    draft: Draft
    scores: ForwardOutput
    verdict: Verdict


def score_and_verify(
    components: Components, rows: Sequence[Row], draft: Draft, noise: Noise
) -> VerifiedDraft:
    """Score a draft in one forward pass of the target and verify it.

    A draft token whose keys or values overflow makes the logits before it NaN, too, as attention
    multiplies them by zero there. Such a draft is dropped, and the round is one of plain decoding,
    unless tokens were sampled for it: to drop these because of what they are would change the
    distribution.

    Raises:
        NonFiniteLogitsError: logits of the committed text that are NaN or infinite.
    """
    try:
        return _score_and_verify(components, rows, draft, noise)
    except NonFiniteLogitsError:
        if not draft.num_nodes or not (draft.probs is None or noise.all_greedy):
            raise
    target = components.target
    target.rewind(rows, [len(row.tokens) - 1 for row in rows])
    target.erase(rows, draft.num_nodes)
    vocab_size = None if draft.probs is None else draft.probs.shape[-1]
    return _score_and_verify(components, rows, Draft.empty(len(rows), draft.tokens.device, vocab_size), noise)


def _score_and_verify(
    components: Components, rows: Sequence[Row], draft: Draft, noise: Noise
) -> VerifiedDraft:
    with components.recorder.phase("score"):
        scores = components.target.score(rows, draft)
    with components.recorder.phase("verify"):
        verdict = verify_logits(components.verifier, rows, draft, scores.logits, noise)
    return VerifiedDraft(draft, scores, verdict)
