"""One round of speculative decoding: draft, score, verify, commit.

1. The controller chooses the maximum draft length of each row; a request's own `draft_length`
   replaces it, and the room of the row limits it.
2. The drafter proposes a chain or a tree of draft tokens; after each level the controller decides
   whether to continue.
3. The target scores all of them in one forward pass.
4. The verifier accepts a path of draft tokens and samples the token that follows it.
5. The KV cache keeps the accepted path and drops all other draft tokens.
6. The row gains the accepted tokens and the sampled token.
7. Drafter and controller update their state from the result.

Invariant: between rounds, the target's KV cache holds every committed token of a row except the
last one, `pending`, which is the first input of the next forward pass. Therefore prefill samples
nothing, the first output token is verified like any other, and plain decoding is a round with an
empty draft.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor, inference_mode

from secondguess.controllers.base import Controller
from secondguess.controllers.draft_probs import DraftProbs
from secondguess.core import MAX_DRAFT_LENGTH, Budgets, Commit, Draft, Row, Verdict
from secondguess.drafters.base import Drafter, prepare_drafter
from secondguess.drafters.combined import merge_drafts
from secondguess.drafters.contract import check_draft
from secondguess.drafters.row_sources import PREDICTION_PART, chains_of_sources, with_sources
from secondguess.runtime.base import ForwardOutput, Runtime
from secondguess.sampling.noise import KeyedNoise, Noise
from secondguess.sampling.probs import commit_logprobs
from secondguess.scoring import score_and_verify
from secondguess.stats import StatsRecorder
from secondguess.verifiers.base import Verifier


@dataclass(frozen=True)
class Components:
    """Components of the decoding loop.

    With a lossless verifier, the output follows the target's distribution for any drafter and
    controller; these only determine the speed.

    Args:
        target: model whose distribution the output follows.
        drafter: proposes draft tokens.
        verifier: decides which draft tokens are accepted. A round without sampled tokens takes
            its `verify_greedy`.
        controller: chooses the draft lengths.
        recorder: collects counters and timings per row.
        make_noise: returns the noise of a round; None for `KeyedNoise`, keyed by the rows' seeds.
    """

    target: Runtime
    drafter: Drafter
    verifier: Verifier
    controller: Controller
    recorder: StatsRecorder = field(default_factory=StatsRecorder)
    make_noise: Callable[[Sequence[Row]], Noise] | None = None

    def noise(self, rows: Sequence[Row]) -> Noise:
        """Return the noise of this round; tests pass a `make_noise` that enumerates outcomes."""
        return self.make_noise(rows) if self.make_noise else KeyedNoise.from_rows(rows, self.target.device)


@inference_mode()
def run_round(
    components: Components, rows: Sequence[Row], max_prefill_tokens: int | None = None
) -> list[Commit]:
    """Run one round: draft, one target forward pass, verification and commit.

    Args:
        rows: rows whose prompts are cached.
        max_prefill_tokens: number of tokens above which a drafter's prefill of a row is not part of
            the round (`Drafter.prefill` does it between rounds); None for no limit.

    Returns:
        One `Commit` per row, with at least one token each.
    """
    recorder = components.recorder
    with recorder.round(rows):
        noise = components.noise(rows)
        with recorder.phase("plan"):
            budgets = _budgets(components, rows)
        if budgets.longest:
            with recorder.phase("prefill"):
                budgets = prepare_drafter(components.drafter, rows, budgets, max_prefill_tokens)
        draft = _draft(components, rows, budgets, noise)
        draft, scores, verdict = score_and_verify(components, rows, draft, noise)
        # The cache drops rejected nodes before the rows' tokens change.
        components.target.keep(rows, verdict.paths)
        commits = _commit(rows, draft, scores, verdict)
        with recorder.phase("draft"):
            components.drafter.observe(rows, verdict, scores.hidden)
        with recorder.phase("plan"):
            components.controller.learn(rows, draft, verdict, recorder.round_time())
    recorder.record(rows, draft, commits, [part == PREDICTION_PART for part in budgets.parts])
    return commits


def _budgets(components: Components, rows: Sequence[Row]) -> Budgets:
    """Choose the draft length of every row.

    A request's own `draft_length` overrides the controller, and its `max_draft_length` limits it;
    drafts that are certain to be accepted are taken unless the controller measures plain decoding.
    The last free position of a row is reserved for the token that the verifier samples.
    """
    controller = components.controller
    if not controller.begin_round(rows):
        return Budgets.empty(len(rows))
    candidates = with_sources(rows, components.drafter.candidates(rows))
    plans = controller.plan(rows, candidates)
    requested = [row.params.draft_length for row in rows]
    lengths, parts = [], []
    for row, (part, length), wanted, choices in zip(rows, plans, requested, candidates, strict=True):
        if wanted is not None:  # a request with a draft length of its own gets the preferred candidate
            part, length = choices[0].part, wanted
        elif choices[0].certain and not controller.measures_plain:
            part, length = choices[0].part, choices[0].longest
        limit = row.params.max_draft_length
        lengths.append(max(0, min(length, row.room - 1, MAX_DRAFT_LENGTH if limit is None else limit)))
        parts.append(part)
    keep_drafting = partial(_keep_drafting, controller, rows, requested)
    # For one row, without a draft length of its own.
    rule = controller.stopping_rule(rows) if requested == [None] else None
    return Budgets(lengths, keep_drafting, controller.uses_probs and None in requested, parts, rule)


def _keep_drafting(
    controller: Controller,
    rows: Sequence[Row],
    requested: Sequence[int | None],
    logits: Tensor,
    depth: int,
    acceptance_probs: Sequence[float] | None = None,
    confidences: Sequence[float] | None = None,
) -> list[bool]:
    """Return whether to draft another level, per row; always True for a request's own length."""
    answers = controller.keep_drafting(rows, DraftProbs(logits, acceptance_probs, confidences), depth)
    return [answer or wanted is not None for answer, wanted in zip(answers, requested, strict=True)]


def _draft(components: Components, rows: Sequence[Row], budgets: Budgets, noise: Noise) -> Draft:
    """Draft for all rows: from the row's own source where one was chosen (a negative part), else by the drafter."""
    if min(budgets.parts) >= 0:
        return _draft_by_drafter(components, rows, budgets, noise)
    chains = chains_of_sources(rows, budgets.lengths, budgets.parts, components.target.vocab_size)
    lengths = [
        length if part >= 0 else 0 for length, part in zip(budgets.lengths, budgets.parts, strict=True)
    ]
    draft = _draft_by_drafter(components, rows, budgets._replace(lengths=lengths), noise)
    own = Draft.chains(chains, device=draft.tokens.device)
    return merge_drafts([draft, own], None if draft.probs is None else draft.probs.shape[-1])


def _draft_by_drafter(components: Components, rows: Sequence[Row], budgets: Budgets, noise: Noise) -> Draft:
    """Draft with the drafter; skip it when every draft length is 0."""
    drafter, vocab_size = components.drafter, components.target.vocab_size
    if not budgets.longest:
        return drafter.empty_draft(len(rows), noise, vocab_size)
    with components.recorder.phase("draft"):
        return check_draft(drafter, drafter.propose(rows, budgets, noise), len(rows), vocab_size, noise)


def _commit(rows: Sequence[Row], draft: Draft, scores: ForwardOutput, verdict: Verdict) -> list[Commit]:
    """Append each row's accepted path and next token, up to the token that ends the row."""
    commits = []
    for index, (row, path) in enumerate(zip(rows, verdict.paths, strict=True)):
        accepted = [draft.token_lists[index][node] for node in path]
        commit = row.commit(accepted, int(verdict.next_tokens[index]), draft.following(index, path))
        commits.append(commit_logprobs(commit, scores.logits, index, path))
    return commits


def release(components: Components, row: Row) -> None:
    """Release the state that target, drafter and controller hold for a row."""
    components.target.release(row)
    components.drafter.release(row)
    components.controller.release(row)
