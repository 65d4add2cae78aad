"""Speculative decoding loop: rows are prefilled, decode in rounds, and are released. Read this first.

Rows join a `Batch`, are prefilled, take part in rounds until they are finished, and leave it. `decode` runs
the loop for a fixed set of rows; `engine/shared_batch.py` uses the same `Batch` for `generate`, `stream`, the
command line and the server. A round (`run_round`):

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

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from torch import Tensor, inference_mode

from secondguess.controllers.base import Controller
from secondguess.controllers.draft_probs import DraftProbs
from secondguess.core import MAX_DRAFT_LENGTH, Budgets, Commit, Draft, Row, TokenLogprob, Verdict
from secondguess.drafters.base import Drafter, prepare_drafter
from secondguess.drafters.combined import merge_drafts
from secondguess.drafters.contract import check_draft
from secondguess.drafters.row_sources import PREDICTION_PART, chains_of_sources, with_sources
from secondguess.errors import BadInputError, NonFiniteLogitsError
from secondguess.runtime.base import ForwardOutput, HiddenStates, Runtime, join_hidden
from secondguess.sampling.noise import KeyedNoise, Noise
from secondguess.sampling.probs import commit_logprobs, token_logprobs
from secondguess.stats import StatsRecorder
from secondguess.verifiers.base import Verifier, verify_logits

LOGITS_BYTES = 2**26
"""Largest size of the logits of a pass that scores a prompt."""


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


def decode(components: Components, rows: Sequence[Row]) -> Generator[list[Commit], None, None]:
    """Decode rows until all are finished, yielding the commits of each round.

    If the generator is closed early, the state of all unfinished rows is released.

    Args:
        components: components of the loop.
        rows: extended in place, with a finish reason at the end. Finished rows are skipped.

    Yields:
        One `Commit` per row that took part in the round.

    Raises:
        BadInputError: a draft or a row that the verifier cannot verify exactly.
    """
    batch = Batch(components)
    try:
        batch.add([row for row in rows if not row.finished])
        while batch:
            yield batch.step()
    finally:
        batch.close()


class Batch:
    """Rows that decode together; rows join and leave between rounds.

    Args:
        components: components of the loop.
        max_prefill_tokens: maximum number of prompt tokens that a step prefills before its round, in
            the target and then in the drafter; None for all of them. It bounds how long rows that
            join delay the others.
    """

    def __init__(self, components: Components, max_prefill_tokens: int | None = None) -> None:
        if max_prefill_tokens is not None and max_prefill_tokens < 1:
            raise BadInputError(f"expected max_prefill_tokens of at least 1, got {max_prefill_tokens}")
        self.components = components
        self.max_prefill_tokens = max_prefill_tokens
        self._decoding: list[Row] = []
        self._prefilling: dict[Row, list[HiddenStates]] = {}

    def __len__(self) -> int:
        """Return the number of rows, those that are still prefilled included."""
        return len(self._prefilling) + len(self._decoding)

    @property
    def decoding(self) -> list[Row]:
        """Rows that take part in rounds: all tokens of their prompts but the last are cached."""
        return self._decoding

    @property
    def prefilling(self) -> list[Row]:
        """Rows whose prompts are not cached yet, in the order in which they are prefilled."""
        return list(self._prefilling)

    @inference_mode()
    def add(self, rows: Sequence[Row]) -> None:
        """Admit rows, whose prompts the next steps prefill in this order."""
        # Registered first, so that `close` releases them even if this is interrupted.
        self._prefilling.update((row, []) for row in rows)
        limits = self.components.drafter.admit(rows)
        # A token is scored only if it is prefilled.
        limits = [
            0 if row.prompt_logprobs is not None else limit for row, limit in zip(rows, limits, strict=True)
        ]
        # Per row, the number of tokens that are cached already: its slot's former row began with them.
        reused = self.components.target.admit(rows, limits)
        for row, num_reused in zip(rows, reused, strict=True):
            self.components.recorder.of(row).num_reused = num_reused
        # Other batches with the same target may have drafters that read other layers.
        self.components.target.request_hidden_states(self.components.drafter.hidden_layers, rows)

    def step(self) -> list[Commit]:
        """Prefill, then run a round over the rows whose prompts are cached, and release finished rows.

        Returns:
            One `Commit` per row that took part in the round or that needed a prefill alone.
        """
        commits = self.prefill(self.prefilling)
        self.prefill_drafter(self.components.drafter.unfinished)
        return commits + self.run(self._decoding)

    def run(self, rows: Sequence[Row]) -> list[Commit]:
        """Run a round over some of the rows whose prompts are cached, and release finished rows."""
        if not rows:
            return []
        # The drafter's prefill of a single row delays no other row, so it is part of the round.
        limit = self.max_prefill_tokens if len(rows) > 1 else None
        commits = run_round(self.components, rows, limit)
        self.remove([row for row in rows if row.finished])
        return commits

    def remove(self, rows: Sequence[Row]) -> None:
        """Release rows, finished or not."""
        if not rows:
            return
        # Slots stay contiguous: releasing the last row first moves the fewest cache entries.
        for row in reversed(rows):
            for component in (self.components.target, self.components.drafter, self.components.controller):
                component.release(row)
            self._prefilling.pop(row, None)
        removed = set(rows)
        self._decoding = [row for row in self._decoding if row not in removed]

    def close(self) -> None:
        """Release all rows."""
        self.remove([*self._decoding, *self._prefilling])

    @inference_mode()
    def prefill(self, rows: Sequence[Row]) -> list[Commit]:
        """Prefill some of the rows whose prompts are not cached, up to `max_prefill_tokens` tokens.

        Of rows with the same prompt only the first is prefilled; the others wait for it and then
        copy its cache entries. After an error, the rows are as they were when they were admitted.

        Returns:
            Commits without tokens of the rows that are finished, because they may gain none (`max_tokens` 0).
        """
        if not rows:
            return []
        recorder = self.components.recorder
        try:
            with recorder.round([*self._decoding, *rows]), recorder.phase("prefill"):
                ready = _prefill_rows(self.components, rows, self._prefilling, self.max_prefill_tokens)
                self.components.drafter.begin(ready, [join_hidden(self._prefilling[row]) for row in ready])
        except BaseException:
            self.components.target.rewind(rows, [recorder.of(row).num_reused for row in rows])
            for row in rows:
                self._prefilling[row] = []
                if row.prompt_logprobs is not None:
                    row.prompt_logprobs.clear()
            raise
        self._decoding += ready
        for row in ready:
            del self._prefilling[row]
        finished = [row for row in ready if not row.params.max_tokens]
        commits = [row.commit_nothing() for row in finished]
        self.remove(finished)
        return commits

    @inference_mode()
    def prefill_drafter(self, rows: Sequence[Row]) -> None:
        """Continue the drafter's prefill of rows that it has not finished, for which rounds do not wait."""
        if rows and self.max_prefill_tokens is not None:
            with self.components.recorder.round(rows), self.components.recorder.phase("prefill"):
                self.components.drafter.prefill(rows, self.max_prefill_tokens)


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
        draft, scores, verdict = _score_and_verify(components, rows, draft, noise)
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
    return Budgets(lengths, keep_drafting, controller.uses_probs and None in requested, parts)


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
    drafter, vocab_size = components.drafter, components.target.vocab_size
    lengths = [
        length if part >= 0 else 0 for length, part in zip(budgets.lengths, budgets.parts, strict=True)
    ]
    if any(lengths):
        with components.recorder.phase("draft"):
            proposed = drafter.propose(rows, budgets._replace(lengths=lengths), noise)
            draft = check_draft(drafter, proposed, len(rows), vocab_size, noise)
    else:
        draft = drafter.empty_draft(len(rows), noise, vocab_size)
    if min(budgets.parts) >= 0:
        return draft
    chains = chains_of_sources(rows, budgets.lengths, budgets.parts, vocab_size)
    own = Draft.chains(chains, device=draft.tokens.device)
    return merge_drafts([draft, own], None if draft.probs is None else draft.probs.shape[-1])


def _commit(rows: Sequence[Row], draft: Draft, scores: ForwardOutput, verdict: Verdict) -> list[Commit]:
    """Append each row's accepted path and next token, up to the token that ends the row."""
    commits = []
    for index, (row, path) in enumerate(zip(rows, verdict.paths, strict=True)):
        accepted = [draft.token_lists[index][node] for node in path]
        commit = row.commit(accepted, int(verdict.next_tokens[index]), draft.following(index, path))
        commits.append(commit_logprobs(commit, scores.logits, index, path))
    return commits


class _VerifiedDraft(NamedTuple):
    """Draft of a round, the target's output for it, and the verdict."""

    draft: Draft
    scores: ForwardOutput
    verdict: Verdict


def _score_and_verify(
    components: Components, rows: Sequence[Row], draft: Draft, noise: Noise
) -> _VerifiedDraft:
    """Score a draft in one forward pass of the target and verify it.

    A draft token whose keys or values overflow makes the logits before it NaN, too, as attention
    multiplies them by zero there. Such a draft is dropped, and the round is one of plain decoding,
    unless tokens were sampled for it: to drop these because of what they are would change the
    distribution.

    Raises:
        NonFiniteLogitsError: logits of the committed text that are NaN or infinite.
    """
    try:
        return _verified(components, rows, draft, noise)
    except NonFiniteLogitsError:
        if not draft.num_nodes or not (draft.probs is None or noise.all_greedy):
            raise
    target = components.target
    target.rewind(rows, [len(row.tokens) - 1 for row in rows])
    target.erase(rows, draft.num_nodes)
    vocab_size = None if draft.probs is None else draft.probs.shape[-1]
    return _verified(components, rows, Draft.empty(len(rows), draft.tokens.device, vocab_size), noise)


def _verified(components: Components, rows: Sequence[Row], draft: Draft, noise: Noise) -> _VerifiedDraft:
    with components.recorder.phase("score"):
        scores = components.target.score(rows, draft)
    with components.recorder.phase("verify"):
        verdict = verify_logits(components.verifier, rows, draft, scores.logits, noise)
    return _VerifiedDraft(draft, scores, verdict)


def _prefill_rows(
    components: Components,
    rows: Sequence[Row],
    hidden: Mapping[Row, list[HiddenStates]],
    max_tokens: int | None,
) -> list[Row]:
    """Prefill admitted rows as far as the limit allows; return those whose prompts are cached now.

    Rows are prefilled in their order. Where the limit is reached, up to three quarters of what is left go to the
    row that needs the fewest tokens, so that a short prompt does not wait for the end of a long one. Of rows with
    the same prompt, one is prefilled. `hidden` are the hidden states of each row so far, to which new ones are added.
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
            left -= _prefill(components, [shortest], hidden, -(-3 * left // 4))
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
