"""Selection of the drafts that pay together in a batch.

The rows of a batch wait for each other's draft steps and for the pass over all nodes. Rows with equal
values are treated alike. If positions in the batch decided, whether a row is drafted for would
depend on something unrelated to it, and the exact enumeration (`proof/enumeration.py`), whose batch
holds all possible outcomes of a row, would report that as anticipation. If only a few of many rows
can be taken, ties are broken by their tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import NamedTuple

from secondguess.controllers.cost.cost_model import CostModel
from secondguess.controllers.cost.proposals import SURVIVALS, DraftProposal
from secondguess.core import Row


class Drafts(NamedTuple):
    """Drafts of a round.

    Args:
        chosen: their proposals.
        tokens: expected number of tokens gained by all.
        seconds: that they add to the round.
        is_trial: whether there would be more if the drafter had been tried on more rows.
    """

    chosen: list[DraftProposal]
    tokens: float = 0.0
    seconds: float = 0.0
    is_trial: bool = False


def worthwhile(proposals: Sequence[DraftProposal], rows: Sequence[Row], cost_model: CostModel) -> Drafts:
    """Return the drafts that pay together, with lookups cut where their nodes do not pay.

    In a batch, the rate of the cost model is raised to the one that they are expected to reach.
    """
    if len(rows) == 1:
        return Drafts([proposal for proposal in proposals if proposal.net > 0])
    lookups = [proposal for proposal in proposals if proposal.deterministic]
    models = [(proposal.estimate.gain, proposal) for proposal in proposals if not proposal.deterministic]
    models.sort(key=itemgetter(0), reverse=True)
    sums = _sums([proposal for _, proposal in models], cost_model)
    best, best_drafts, best_lengths = 0.0, Drafts([]), [0] * len(lookups)
    lengths: list[int] = []
    for index in range(len(SURVIVALS)):
        before, lengths = lengths, [proposal.estimate.lengths[index] for proposal in lookups]
        if lengths == before and index:
            continue
        drafts = _together(lookups, lengths, models, sums, rows, cost_model)
        net = drafts.tokens - cost_model.rate * drafts.seconds + _exploration_bonus(drafts.chosen)
        if drafts.chosen and net > best:
            best, best_drafts, best_lengths = net, drafts, lengths
    if not best_drafts.is_trial:
        cost_model.expect(best_drafts.tokens, best_drafts.seconds)
    for proposal, length in zip(lookups, best_lengths, strict=True):
        if length:
            proposal.length = length
    return best_drafts


class ModelDrafts(NamedTuple):
    """Sums over the first few drafts of models.

    Args:
        tokens: expected number of tokens gained.
        seconds: to draft, with prefill.
        num_levels: expected number of levels.
    """

    tokens: float = 0.0
    seconds: float = 0.0
    num_levels: int = 0


def _sums(models: Sequence[DraftProposal], cost_model: CostModel) -> list[ModelDrafts]:
    """Return the sums over the first 0, 1, 2, ... of these drafts."""
    tokens = prefill = 0.0
    num_levels = 0
    sums = [ModelDrafts()]
    for count, proposal in enumerate(models, start=1):
        tokens += proposal.estimate.gain
        prefill += proposal.prefill_seconds
        num_levels += proposal.estimate.width
        drafting = cost_model.drafting(proposal.part, count, proposal.estimate.width)
        sums.append(ModelDrafts(tokens, prefill + drafting, num_levels))
    return sums


def _exploration_bonus(proposals: Sequence[DraftProposal]) -> float:
    """Return the exploration bonus of drafts, which counts once, however many rows are drafted for."""
    return max([proposal.estimate.exploration_bonus for proposal in proposals], default=0.0)


def _together(
    lookups: Sequence[DraftProposal],
    lengths: Sequence[int],
    models: Sequence[tuple[float, DraftProposal]],
    sums: Sequence[ModelDrafts],
    rows: Sequence[Row],
    cost_model: CostModel,
) -> Drafts:
    """Return lookup drafts of these lengths with the drafts of models that give the largest net gain.

    Args:
        models, sums: expected tokens and drafts of models, best first, and the sums over them.
        cost_model: costs in the current round.
    """
    rate = cost_model.rate
    chosen = [proposal for proposal, length in zip(lookups, lengths, strict=True) if length]
    tokens = sum([proposal.estimate.gains[length] for proposal, length in zip(lookups, lengths, strict=True)])
    num_levels = sum(lengths)
    seconds = [of.seconds + cost_model.extra_pass_seconds(0, num_levels + of.num_levels) for of in sums]
    nets = [of.tokens - rate * spent for of, spent in zip(sums, seconds, strict=True)]
    nets[0] -= _exploration_bonus([proposal for _, proposal in models])
    best_count = _with_equals([expected_tokens for expected_tokens, _ in models], nets.index(max(nets)))
    is_trial = False
    if models:
        # A new drafter's cost is unknown, and prefilling a whole batch only to measure it is
        # expensive: it is tried on one row first, then on at most twice as many as before. (The
        # net gain is that of all rows.)
        limit = max(2 * cost_model.times.max_rows(models[0][1].part), 1)
        is_trial = limit < best_count
        chosen += best_with_ties(models[:best_count], limit, rows)
    return Drafts(chosen, tokens + sums[best_count].tokens, seconds[best_count], is_trial)


def best_with_ties(
    ordered: Sequence[tuple[float, DraftProposal]], count: int, rows: Sequence[Row]
) -> list[DraftProposal]:
    """Return the best `count` candidates.

    Ties are broken by the order of the rows' tokens; rows with the same tokens are taken together,
    so there may be more than `count`.

    Args:
        ordered: values and candidates, best first.
        count: number of candidates wanted.
    """
    if count >= len(ordered):
        return [proposal for _, proposal in ordered]
    least = ordered[count - 1][0]
    better = [proposal for value, proposal in ordered if value > least]
    equal = [(rows[proposal.row].tokens, proposal) for value, proposal in ordered if value == least]
    last = sorted(tokens for tokens, _ in equal)[count - len(better) - 1]
    return better + [proposal for tokens, proposal in equal if tokens <= last]


def select_extensions(
    acceptance_probs: list[tuple[float, DraftProposal]], num_levels: int, cost_model: CostModel
) -> list[DraftProposal]:
    """Return the candidates whose drafts should get another node.

    Args:
        acceptance_probs: the probability that the node is accepted, for each row that could get one.
        cost_model: costs in the current round.
    """
    rate = cost_model.rate
    ordered = sorted(acceptance_probs, key=itemgetter(0), reverse=True)
    total, best, best_count = 0.0, 0.0, 0
    for count, (prob, proposal) in enumerate(ordered, start=1):
        total += prob
        extra_pass_seconds = cost_model.extra_pass_seconds(num_levels, num_levels + count)
        net = total - rate * (cost_model.step(proposal.part, count) + extra_pass_seconds)
        if net > best:
            best, best_count = net, count
    best_count = _with_equals([prob for prob, _ in ordered], best_count)
    return [proposal for _, proposal in ordered[:best_count]]


def _with_equals(values: Sequence[float], count: int) -> int:
    """Return `count`, increased to include all descending `values` equal to the last one."""
    while 0 < count < len(values) and values[count] == values[count - 1]:
        count += 1
    return count
