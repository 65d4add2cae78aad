"""Cost model: predicted speed of a run, given the costs of its passes and its draft lengths.

A round that drafts k nodes costs k draft steps and one target pass over k + 1 tokens, so for a run

    predicted seconds = sum over rounds of  T(k + 1) + k * T_draft
                      = T(1) * sum over rounds of  v(k + 1) + k * c

with v(m) = T(m) / T(1) and c = T_draft / T(1) (section 3.3 of Leviathan et al., arXiv 2211.17192,
with the measured cost of verifying m tokens in place of the assumption v = 1). Per token this is
T(1) * E[v + k c] / tau. Sampling, verification, cache bookkeeping and Python are not part of the
model, so 1 minus `measured / predicted` (speeds) is overhead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from secondguess.errors import BadInputError
from secondguess.stats import Stats


@dataclass(frozen=True)
class Costs:
    """Costs of forward passes on this machine, in seconds.

    Args:
        target: seconds of one target pass over m tokens, by m; m = 1 is required.
        draft_step: seconds of one draft-model pass over one token; 0 without a draft model.
    """

    target: Mapping[int, float]
    draft_step: float = 0.0

    def __post_init__(self) -> None:
        if 1 not in self.target:
            raise BadInputError("expected the cost of a pass over 1 token among the target costs, got none")

    @property
    def cost_ratio(self) -> float:
        """Cost ratio c: one draft step over one target pass."""
        return self.draft_step / self.target[1]

    @property
    def curve(self) -> dict[int, float]:
        """Relative cost of a pass over m tokens, v(m) = T(m) / T(1)."""
        return {m: self.target[m] / self.target[1] for m in sorted(self.target)}

    def target_pass(self, num_tokens: int) -> float:
        """Return the seconds of a pass over `num_tokens`, inter- or extrapolated linearly."""
        known = sorted(self.target)
        if num_tokens in self.target or len(known) == 1:
            return self.target.get(num_tokens, self.target[1])
        above = next((m for m in known if m > num_tokens), known[-1])
        below = known[known.index(above) - 1]
        slope = (self.target[above] - self.target[below]) / (above - below)
        return self.target[below] + slope * (num_tokens - below)


def draft_length_counts(stats: Stats) -> dict[int, int]:
    """Return the number of rounds with exactly k nodes, by k (chains).

    >>> draft_length_counts(Stats(num_rounds=5, drafted_per_position=[4, 3, 3]))
    {0: 1, 1: 1, 3: 3}
    """
    at_least = [stats.num_rounds, *stats.drafted_per_position, 0]
    counts = {length: at_least[length] - at_least[length + 1] for length in range(len(at_least) - 1)}
    return {length: count for length, count in counts.items() if count}


def predicted_seconds(stats: Stats, costs: Costs) -> float:
    """Return the predicted seconds of a run's rounds, prefill excluded."""
    return sum(
        count * (costs.target_pass(length + 1) + length * costs.draft_step)
        for length, count in draft_length_counts(stats).items()
    )
