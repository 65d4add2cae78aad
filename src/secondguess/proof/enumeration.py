"""Exact distribution of decoding rounds, by enumerating every outcome of every random decision.

A custom verifier, drafter or controller is lossless if `text_dist` of `enumerate_rounds` equals
`exact_dist` up to rounding. Test it on distributions with zeros, one-hot distributions, p = q, and
disjoint supports of p and q. Nothing is sampled: each row of one large batch follows one branch of
the tree of outcomes and carries its probability. Intended for `secondguess.proof.fakes.TableModel`
with a few tokens and draft lengths up to about four.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from secondguess.core import Row
from secondguess.decode import Batch, Components
from secondguess.errors import BadInputError, SecondGuessError
from secondguess.sampling.noise import Noise
from secondguess.stats import StatsRecorder

MAX_BRANCHES = 300_000
COMPLETE = 1e-9
"""Largest error of the sum of all branches' probabilities."""

Decision = tuple[int, str, int]
"""Key of a random decision: (round, kind, index).

The index is the node for "draft" and "accept", 0 for "draw", and the query for "race".
"""


@dataclass(frozen=True)
class Branch:
    """One possible outcome of a row's rounds: its probability and committed tokens.

    `num_accepted` counts the draft tokens among the committed ones.
    """

    probability: float
    tokens: tuple[int, ...]
    num_accepted: int


@dataclass
class OutcomeScript:
    """Scripted outcomes of the random decisions of every row.

    Tensors are `[row]`. `origins` has the index of the original row that each row is a branch of, `digits` the outcome of
    each scripted decision, and `outcomes` the number of outcomes of each decision seen so far, in the order of first use.
    `probabilities` are those of the scripted outcomes used so far, and `asked` is True for rows that have used a decision.
    `coupled_drafts` has, by round and depth, the draft distributions `[row, vocab]` and tokens of coupled rows; -1 for others.
    """

    origins: Tensor
    digits: dict[Decision, Tensor] = field(default_factory=dict)
    outcomes: dict[Decision, int] = field(default_factory=dict)
    probabilities: Tensor = field(init=False)
    asked: dict[Decision, Tensor] = field(init=False, default_factory=dict)
    coupled_drafts: dict[tuple[int, int], tuple[Tensor, Tensor]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.probabilities = torch.ones(self.num_rows, dtype=torch.float64)

    @property
    def num_rows(self) -> int:
        return len(self.origins)

    def answer(self, question: Decision, rows: Tensor, num_outcomes: int) -> Tensor:
        """Return the scripted outcomes `[n]` of a decision for some rows; one that is not in the script is recorded as 0."""
        seen = self.asked.setdefault(question, torch.zeros(self.num_rows, dtype=torch.bool))
        if bool(seen[rows].any()):
            raise SecondGuessError(
                f"expected each random decision once, got {question} twice: keyed noise would answer both "
                "with one number; ask it once and keep the answer"
            )
        seen[rows] = True
        if self.outcomes.setdefault(question, num_outcomes) != num_outcomes:
            raise SecondGuessError(
                f"expected {question} with {self.outcomes[question]} outcomes, got {num_outcomes}; "
                "ask all rows over one vocabulary"
            )
        return self.digits[question][rows] if question in self.digits else torch.zeros_like(rows)

    def weigh(self, question: Decision, rows: Tensor, probs: Tensor) -> None:
        """Multiply the probabilities of some rows by those `[n]` of their outcomes of a scripted decision."""
        if question in self.digits:
            so_far = self.probabilities[rows]
            self.probabilities[rows] = torch.where(so_far > 0, so_far * probs.double(), 0.0)

    def real(self) -> Tensor:
        """Return the `[row]` bool mask of distinct branches of positive probability.

        Copies of a branch that differ only in decisions it never used are left out.
        """
        real = self.probabilities > 0
        for question, digits in self.digits.items():
            asked = self.asked.get(question)
            real &= (digits == 0) if asked is None else (asked | (digits == 0))
        return real

    def expanded(self, prunes: bool) -> OutcomeScript | None:
        """Return the script of the next repetition, or None if every decision used is in this one.

        Each row is followed by all outcomes of the first of the new decisions, and of those of the same round and kind.
        `prunes` leaves out rows that are not `real`, and outcomes of decisions that a row did not use.
        """
        every = torch.ones(self.num_rows, dtype=torch.bool)
        kept = (self.real() if prunes else every).nonzero()[:, 0]
        used = self.asked if prunes else dict.fromkeys(self.outcomes, every)
        new = [
            question
            for question, rows in used.items()
            if question not in self.digits and bool(rows[kept].any())
        ]
        if not new:
            return None
        digits = {question: digits[kept] for question, digits in self.digits.items()}
        for question in (question for question in new if question[:2] == new[0][:2]):
            counts = torch.where(used[question][kept], self.outcomes[question], 1)
            if int(counts.sum()) > MAX_BRANCHES:
                raise BadInputError(
                    f"expected at most {MAX_BRANCHES} branches to enumerate, got {int(counts.sum())}; "
                    "use a smaller vocabulary or shorter drafts"
                )
            copies = torch.arange(len(kept)).repeat_interleave(counts)
            digits = {known: digits[copies] for known, digits in digits.items()}
            digits[question] = torch.arange(len(copies)) - (counts.cumsum(0) - counts)[copies]
            kept = kept[copies]
        return OutcomeScript(self.origins[kept], digits, self.outcomes)


class EnumeratingNoise(Noise):
    """Noise of one round whose outcomes come from a script.

    In a coupled row, the draft and the race at one depth share their exponential variables, so
    their outcomes follow the joint distribution of `joint_race_probability`. Several drafts at one
    depth have none in closed form, so trees of coupled rows are refused. Races of several queries
    at one depth are treated as independent, because verification reads one query per depth. Rounds
    are treated as independent, too.
    """

    def __init__(
        self, script: OutcomeScript, number: int, rows: Tensor, coupled: Tensor, greedy: Tensor
    ) -> None:
        self.script = script
        self.number = number
        self.rows = rows
        self.coupled = coupled
        self.greedy = greedy

    def draft(
        self,
        dists: Tensor,
        depth: int,
        node: int | Sequence[int] | None = None,
        token_ids: Tensor | None = None,
    ) -> Tensor:
        if isinstance(node, Sequence):
            return self._draft_each(dists, depth, torch.tensor(node))
        tokens = drafted = self._decide("draft", depth if node is None else node, dists)
        if token_ids is not None:
            padded = dists.new_zeros(len(dists), int(token_ids.max()) + 1)
            dists, drafted = padded.index_copy(1, token_ids, dists), token_ids[tokens]
        if self.coupled.any():
            self._record_coupled(dists[self.coupled].double(), drafted[self.coupled], depth)
        return tokens

    def _draft_each(self, dists: Tensor, depth: int, nodes: Tensor) -> Tensor:
        tokens = torch.zeros_like(nodes)
        for node in sorted(set(nodes.tolist())):
            rows = (nodes == node).nonzero()[:, 0]
            tokens[rows] = self.select(rows).draft(dists[rows], depth, node)
        return tokens

    def _record_coupled(self, dists: Tensor, tokens: Tensor, depth: int) -> None:
        rows, num_rows = self.rows[self.coupled], self.script.num_rows
        nothing = (dists.new_zeros(num_rows, dists.shape[-1]), tokens.new_full((num_rows,), -1))
        all_dists, all_tokens = self.script.coupled_drafts.setdefault((self.number, depth), nothing)
        if bool((all_tokens[rows] >= 0).any()):
            raise BadInputError(
                f"expected one draft per depth of a coupled row, got a second one at depth {depth}: several winners of "
                "one race have no joint distribution in closed form; enumerate chains, and compare the text of coupled "
                "trees with plain decoding's"
            )
        all_dists[rows], all_tokens[rows] = dists, tokens

    def accept(self, probs: NDArray[numpy.float64]) -> NDArray[numpy.bool_]:
        answers = numpy.zeros(probs.shape, dtype=numpy.bool_)
        for node, prob in enumerate(torch.from_numpy(probs).clamp(0, 1).unbind(1)):
            chosen = self._decide("accept", node, torch.stack([1 - prob, prob], -1))
            answers[:, node] = chosen.numpy() > 0
        return answers

    def draw(self, dists: Tensor, depths: Tensor) -> Tensor:
        dists = dists.double()
        return self._decide("draw", 0, dists / dists.sum(-1, keepdim=True))

    def race(self, dists: Tensor, depths: Tensor) -> Tensor:
        return torch.stack(
            [self._race(query, dists[:, query], depths[:, query]) for query in range(dists.shape[1])], 1
        )

    def select(self, rows: Tensor) -> EnumeratingNoise:
        return EnumeratingNoise(
            self.script, self.number, self.rows[rows], self.coupled[rows], self.greedy[rows]
        )

    def _decide(self, what: str, where: int, dists: Tensor) -> Tensor:
        question = self.number, what, where
        answers = self.script.answer(question, self.rows, dists.shape[-1])
        self.script.weigh(question, self.rows, _at(dists, answers)[:, 0])
        return answers

    def _race(self, query: int, dists: Tensor, depths: Tensor) -> Tensor:
        dists = dists.double()
        question = self.number, "race", query
        tokens = self.script.answer(question, self.rows, dists.shape[-1])
        probs = _at(dists, tokens)[:, 0]
        for (number, depth), (draft_dists, drafted) in self.script.coupled_drafts.items():
            if number == self.number:
                joined = self.coupled & (depths == depth) & (drafted[self.rows] >= 0)
                q, x = draft_dists[self.rows[joined]], drafted[self.rows[joined]]
                width = max(q.shape[1], dists.shape[1])  # the draft may be of another vocabulary
                q = pad(q, (0, width - q.shape[1]))
                p = pad(dists[joined], (0, width - dists.shape[1]))
                both = joint_race_probability(q, p, x, tokens[joined])
                alone = _at(q, x)[:, 0]
                probs[joined] = torch.where(alone > 0, both / alone, 0.0)
        self.script.weigh(question, self.rows, probs)
        return tokens


def joint_race_probability(q: Tensor, p: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Return P(argmin_v e_v / q_v = x, argmin_v e_v / p_v = y) `[n]` for independent e_v ~ Exp(1), in float64.

    q and p are draft and target distributions `[n, vocab]`, x and y tokens `[n]` drawn from them.

    With (e_x, e_y) = a (1 - t, t), every other e_v must exceed a A_v(t), where A_v(t) is the
    larger of (1 - t) q_v / q_x and t p_v / p_y. Integrating over these e_v and over a leaves the
    integral of A(t)^-2 with A = 1 + sum_v A_v. A is linear between breakpoints, so an interval
    from s to t contributes (t - s) / (A(s) A(t)). The limits of integration follow from x winning
    against y under q, and y against x under p.
    """
    possible = (_at(q, x) > 0) & (_at(p, y) > 0)
    by_q = torch.where(possible, q / _at(q, x), 1.0)
    by_p = torch.where(possible, p / _at(p, y), 1.0)
    match = 1 / torch.maximum(by_q, by_p).sum(-1)

    breakpoints = torch.where(by_q + by_p > 0, by_q / (by_q + by_p), 0.0)
    low = _at(by_q, y) / (1 + _at(by_q, y))
    high = torch.maximum(low, 1 / (1 + _at(by_p, x)))
    points = torch.cat([low, breakpoints.clamp(low, high).sort(-1).values, high], -1)
    rates = torch.maximum((1 - points[..., None]) * by_q[:, None], points[..., None] * by_p[:, None])
    others = torch.ones_like(q).scatter(-1, x[:, None], 0.0).scatter(-1, y[:, None], 0.0)
    area = 1 + (rates * others[:, None]).sum(-1)
    differ = (points.diff(dim=-1) / (area[:, 1:] * area[:, :-1])).sum(-1)
    return torch.where(possible[:, 0], torch.where(x == y, match, differ), 0.0)


def _at(dists: Tensor, tokens: Tensor) -> Tensor:
    return dists.gather(-1, tokens[:, None])


def enumerate_rounds(
    components: Components, make_rows: Callable[[], Sequence[Row]], num_rounds: int = 1
) -> list[list[Branch]]:
    """Enumerate all outcomes of the first rounds of the decoding loop.

    The rounds are repeated until no new decision appears, without branches of probability zero.
    Every repetition starts with a copy of the given controller, which may be in any state, and
    uses a clock with constant ticks; the controller must decide the same in every repetition.

    Args:
        components: target, drafter, verifier and controller; `make_noise` and recorder are replaced.
        make_rows: returns the same fresh rows on every call.
        num_rounds: rounds to enumerate, fewer for rows that finish earlier. The number of branches
            grows exponentially with it.

    Returns:
        For each row, its branches; their probabilities sum to one.

    Raises:
        BadInputError: there are more than `MAX_BRANCHES` branches, or coupled rows with trees.
    """
    branches = _enumerate(components, make_rows, num_rounds, prunes=True)
    if all(
        abs(sum(branch.probability for branch in row_branches) - 1) < COMPLETE for row_branches in branches
    ):
        return branches
    # A controller that learns from the whole batch can use a decision that was pruned in a smaller batch.
    return _enumerate(components, make_rows, num_rounds, prunes=False)


def _enumerate(
    components: Components, make_rows: Callable[[], Sequence[Row]], num_rounds: int, prunes: bool
) -> list[list[Branch]]:
    script = OutcomeScript(torch.arange(len(make_rows())))
    while True:
        branches = _run_rounds(components, make_rows, num_rounds, script)
        following = script.expanded(prunes)
        if following is None:
            return branches
        script = following


def _run_rounds(
    components: Components, make_rows: Callable[[], Sequence[Row]], num_rounds: int, script: OutcomeScript
) -> list[list[Branch]]:
    components = replace(components, controller=copy.deepcopy(components.controller))
    origins = script.origins.tolist()
    num_input_rows = len(make_rows())
    fresh = [[make_rows()[index] for _ in range(origins.count(index))] for index in range(num_input_rows)]
    rows = [fresh[index].pop() for index in origins]
    num_accepted = dict.fromkeys(rows, 0)
    batch = Batch(replace(components, recorder=StatsRecorder()))
    try:
        batch.add(rows)
        for number in range(num_rounds):
            live = [index for index, row in enumerate(rows) if not row.finished]
            batch.components = _scripted(components, script, number, live)
            for commit in batch.step():
                num_accepted[commit.row] += commit.num_accepted
    finally:
        batch.close()
    branches: list[list[Branch]] = [[] for _ in range(num_input_rows)]
    for index in script.real().nonzero()[:, 0].tolist():
        row = rows[index]
        branch = Branch(float(script.probabilities[index]), tuple(row.output), num_accepted[row])
        branches[origins[index]].append(branch)
    return branches


def _scripted(components: Components, script: OutcomeScript, number: int, live: list[int]) -> Components:
    def make_noise(rows: Sequence[Row]) -> EnumeratingNoise:
        coupled = torch.tensor([row.coupled for row in rows], dtype=torch.bool)
        greedy = torch.tensor([row.params.temperature == 0 for row in rows], dtype=torch.bool)
        return EnumeratingNoise(script, number, torch.tensor(live, dtype=torch.long), coupled, greedy)

    return replace(
        components, make_noise=make_noise, recorder=StatsRecorder(map(float, itertools.count()).__next__)
    )


TextProbs = dict[tuple[int, ...], float]
"""Probability of each text; texts that end with an end token may be shorter."""


def text_dist(
    branches: Sequence[Branch],
    next_dist: Callable[[tuple[int, ...]], Tensor],
    num_tokens: int,
    end_tokens: frozenset[int] = frozenset(),
) -> TextProbs:
    """Return the distribution of the first `num_tokens` tokens, given the enumerated rounds of a row.

    Later tokens of branches are marginalised out; branches with fewer tokens are continued by
    plain decoding. `next_dist` returns the target's distribution `[vocab]` after an output.
    """
    dist: TextProbs = {}
    for branch in branches:
        text = branch.tokens[:num_tokens]
        dist[text] = dist.get(text, 0.0) + branch.probability
    for length in range(num_tokens):
        for text in [text for text in dist if len(text) == length and not end_tokens.intersection(text)]:
            mass = dist.pop(text)
            for token, prob in enumerate(next_dist(text).tolist()):
                longer = (*text, token)
                dist[longer] = dist.get(longer, 0.0) + mass * prob
    return dist


def exact_dist(
    next_dist: Callable[[tuple[int, ...]], Tensor], num_tokens: int, end_tokens: frozenset[int] = frozenset()
) -> TextProbs:
    """Return the distribution of the first `num_tokens` tokens under plain decoding."""
    return text_dist([Branch(1.0, (), 0)], next_dist, num_tokens, end_tokens)


def largest_difference(one: TextProbs, other: TextProbs) -> float:
    """Return the largest absolute difference in the probability of any text."""
    return max(abs(one.get(text, 0.0) - other.get(text, 0.0)) for text in one.keys() | other.keys())
