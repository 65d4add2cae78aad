"""Speculative decoding, whole: draft, score, judge, keep, commit; repeat. Read this first.

Between rounds the target has cached every committed token of a row except the last, its `pending` token, which
opens the next forward. So prefill samples nothing, the first output token is judged like any other, and plain
decoding is a round whose draft is empty. There is no other loop: `generate`, `stream`, the command line and the
benchmarks all run this one.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor, inference_mode

from secondguess.controllers.base import Controller
from secondguess.controllers.laws import DraftLaws
from secondguess.core import Budgets, Commit, Draft, Row, Verdict
from secondguess.drafters.base import Drafter
from secondguess.noise import KeyedNoise, Noise
from secondguess.runtime.base import Runtime, Scores
from secondguess.sampling import commit_logprobs, target_laws
from secondguess.stats import Ledger
from secondguess.verifiers.base import Verifier


@dataclass(frozen=True)
class Team:
    """Who takes part: the target, and the three that may vary without changing the law of the text."""

    target: Runtime
    drafter: Drafter
    verifier: Verifier
    controller: Controller
    ledger: Ledger = field(default_factory=Ledger)
    make_noise: Callable[[Sequence[Row]], Noise] | None = None

    def noise(self, rows: Sequence[Row]) -> Noise:
        """This round's noise; tests hand in one that enumerates."""
        return self.make_noise(rows) if self.make_noise else KeyedNoise.of_rows(rows, self.target.device)


def decode(team: Team, rows: Sequence[Row]) -> Generator[list[Commit], None, None]:
    """Decode rows to their ends, yielding after each round what every live row gained; closed early, release what they hold.

    Args:
        rows: changed in place: they get tokens, and keep them, and a reason to finish; finished ones are left as they are.

    Raises:
        BadInputError: a draft or a row that the verifier cannot judge exactly.
    """
    held = [row for row in rows if not row.finished]
    try:
        begin(team, held)
        while held:
            yield play_round(team, held)
            # Caches keep their rows packed, so the last ones leave most cheaply.
            for row in reversed(held):
                if row.finished:
                    release(team, row)
            held = [row for row in held if not row.finished]
    finally:
        for row in held:
            release(team, row)


@inference_mode()
def begin(team: Team, rows: Sequence[Row]) -> None:
    """Prefill: cache all of each prompt but its last token."""
    with team.ledger.round(rows), team.ledger.phase("prefill"):
        team.target.request_hidden(team.drafter.hidden_layers)
        hidden = team.target.begin(rows)
        team.drafter.begin(rows, hidden)


def release(team: Team, row: Row) -> None:
    """Forget what target, drafter and controller hold for a row."""
    team.target.end(row)
    team.drafter.end(row)
    team.controller.end(row)


@inference_mode()
def play_round(team: Team, rows: Sequence[Row]) -> list[Commit]:
    """One draft and one target forward; every row gains at least one token."""
    ledger = team.ledger
    with ledger.round(rows):
        noise = team.noise(rows)
        budgets = _budgets(team, rows)
        draft = _draft(team, rows, budgets, noise)
        with ledger.phase("score"):
            scores = team.target.score(rows, draft)
        with ledger.phase("judge"):
            verdict = team.verifier.judge(draft, target_laws(scores.logits, rows, draft), noise)
            paths = verdict.path_lists()
        team.target.keep(rows, paths)
        commits = _commit(rows, draft, scores, verdict, paths)
        with ledger.phase("draft"):
            team.drafter.observe(rows, verdict, scores.hidden)
        team.controller.learn(rows, draft, verdict, ledger.round_time())
    ledger.record(rows, draft, commits)
    return commits


def _budgets(team: Team, rows: Sequence[Row]) -> Budgets:
    """How far to draft; a row's last place belongs to the verdict's own token."""
    controller = team.controller
    prospects = team.drafter.prospects(rows)
    plans = controller.plan(rows, prospects)
    wishes = [row.params.draft_length for row in rows]
    lengths = [
        max(0, min(plan.length if wish is None else wish, row.room - 1))
        for row, plan, wish in zip(rows, plans, wishes, strict=True)
    ]
    # A request that decides how far to draft leaves it to the drafter who does.
    parts = [
        plan.part if wish is None else choices[0].part
        for plan, wish, choices in zip(plans, wishes, prospects, strict=True)
    ]
    go_on = partial(_go_on, controller, rows, wishes)
    return Budgets(lengths, go_on, controller.reads_laws, parts)


def _go_on(
    controller: Controller,
    rows: Sequence[Row],
    wishes: Sequence[int | None],
    logits: Tensor,
    depth: int,
    foretold: Sequence[float] | None = None,
) -> list[bool]:
    """The controller's answers, but for rows whose request set its own draft length."""
    answers = controller.go_on(rows, DraftLaws(logits, foretold), depth)
    return [answer or wish is not None for answer, wish in zip(answers, wishes, strict=True)]


def _draft(team: Team, rows: Sequence[Row], budgets: Budgets, noise: Noise) -> Draft:
    """What is guessed; of a drafter that is to guess for nobody nothing is asked."""
    if not budgets.longest:
        return team.drafter.decline(len(rows), noise, team.target.vocab_size)
    members = [index for index, length in enumerate(budgets.lengths) if length > 0]
    with team.ledger.phase("prefill"):
        team.drafter.prepare([rows[index] for index in members], [budgets.parts[index] for index in members])
    with team.ledger.phase("draft"):
        return team.drafter.propose(rows, budgets, noise)


def _commit(
    rows: Sequence[Row], draft: Draft, scores: Scores, verdict: Verdict, paths: Sequence[Sequence[int]]
) -> list[Commit]:
    """Append each row's accepted path and next token; the row ends where its settings say."""
    node_tokens = draft.tokens.tolist()
    next_tokens = verdict.next_tokens.tolist()
    commits = []
    for index, (row, path) in enumerate(zip(rows, paths, strict=True)):
        commit = row.commit([node_tokens[index][node] for node in path], next_tokens[index])
        commits.append(commit_logprobs(commit, scores.logits[index], path))
    return commits
