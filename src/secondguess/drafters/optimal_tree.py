"""Optimal tree, planned from measured acceptance and pass times (Sequoia, arXiv 2402.12374).

Let a_b be the probability that the b-th child of an accepted node is accepted as well, and F(m, l)
the expected number of tokens accepted below a node that has m descendants on at most l levels:

    F(m, l)    = G(m, l, 1)
    G(m, l, b) = max over y of  a_b (1 + F(y - 1, l - 1)) + G(m - y, l, b + 1)

y nodes go to the b-th child and its descendants, the rest to the siblings after it. Of these
trees, one for each m and l, the one with the most tokens per second is used: 1 + F(m, l) tokens,
in the time of a target pass over m + 1 queries and, for each level, a draft-model pass over
pending and all nodes of the levels above.

The probabilities are learned from completed rounds and the tree is fixed in between, so a draft
never depends on tokens of its own round.
"""

from __future__ import annotations

import math
import statistics
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate

from secondguess.core import Draft, Row
from secondguess.drafters.trees import Node, NodePath, StaticTree, TreeShape
from secondguess.errors import BadInputError
from secondguess.runtime.base import Runtime
from secondguess.sampling import SamplingParams

MAX_LEVELS, MAX_RANKS = 8, 8
"""Largest number of levels of a tree, and of children of a node."""
PRIOR_ACCEPTANCE = tuple(0.6 if rank == 0 else 0.15 / rank for rank in range(MAX_RANKS))
"""Initial acceptance probabilities by rank (first child, second child, ...)."""
PRIOR_WEIGHT, MEMORY = 8.0, 500.0
"""Weight of the initial values, and time constant of the moving average, in observations."""
FIRST_RENEWAL, RENEWAL = 8, 64
"""Rounds before the tree is first planned again, and the limit as this interval doubles."""
NUM_WARM_UPS, NUM_TIMED = 2, 5
NUM_SCRATCH_TOKENS = 64
"""Tokens of the scratch row on which passes are timed."""


@dataclass(frozen=True)
class PassTimes:
    """Measured times of a model's forward passes.

    Args:
        measured: pairs of a number of queries, rising from 1, and the time of a pass over them.

    Raises:
        BadInputError: fewer than two pairs, numbers that do not rise from 1, or times that are not
            positive and finite.
    """

    measured: tuple[tuple[int, float], ...]

    def __post_init__(self) -> None:
        counts = [count for count, _ in self.measured]
        if len(counts) < 2 or counts[0] != 1 or counts != sorted(set(counts)):
            raise BadInputError(
                f"expected passes over two or more rising numbers of queries from 1 on, got {counts}"
            )
        if not all(0 < time < math.inf for _, time in self.measured):
            raise BadInputError(f"expected passes that take time, got {self.measured}")

    def at(self, num_queries: int) -> float:
        """Return the time of a pass, by linear interpolation or extrapolation."""
        place = bisect_right(self.measured, num_queries, key=_num_queries)
        (low, at_low), (high, at_high) = self.measured[min(place, len(self.measured) - 1) - 1 :][:2]
        return at_low + (at_high - at_low) * (num_queries - low) / (high - low)


@dataclass(frozen=True)
class Costs:
    """Time of a round, in any one unit, from the pass times of the target and the draft model."""

    target: PassTimes
    draft_model: PassTimes

    @property
    def plain(self) -> float:
        """Time of a round without a draft."""
        return self.target.at(1)

    def of_tree(self, paths: Collection[NodePath]) -> float:
        """Return the time of a round with this tree.

        Drafting a level takes one draft-model pass over pending and all nodes of the levels above.
        """
        counts = Counter(map(len, paths))
        levels = accumulate(counts[depth] for depth in range(max(counts)))
        return self.target.at(len(paths) + 1) + sum(self.draft_model.at(1 + above) for above in levels)


def _num_queries(measured: tuple[int, float]) -> int:
    return measured[0]


class RankAcceptance:
    """Acceptance rates of the first, second, ... child of an accepted node."""

    def __init__(self) -> None:
        self._accepted = [PRIOR_WEIGHT * share for share in PRIOR_ACCEPTANCE]
        self._reached = [PRIOR_WEIGHT] * MAX_RANKS

    @property
    def shares(self) -> list[float]:
        """Acceptance rates a_b by rank."""
        return [accepted / reached for accepted, reached in zip(self._accepted, self._reached, strict=True)]

    def learn(self, parents: Sequence[int], path: Sequence[int]) -> None:
        """Update the rates with the accepted path of one tree."""
        for parent, chosen in zip([-1, *path], [*path, -1], strict=True):
            children = [node for node, above in enumerate(parents) if above == parent]
            for rank, child in enumerate(children[:MAX_RANKS]):
                decay = 1 - 1 / MEMORY
                self._reached[rank] = self._reached[rank] * decay + 1
                self._accepted[rank] = self._accepted[rank] * decay + (child == chosen)


class PlanTables:
    """Best trees for each number of nodes and levels, given acceptance rates by rank."""

    def __init__(self, shares: Sequence[float], most_nodes: int, most_levels: int) -> None:
        self._tokens = [[0.0] * (most_nodes + 1)]
        self._splits: list[list[list[int]]] = [[]]
        for _ in range(most_levels):
            self._add_level(shares, most_nodes)

    def tokens(self, num_nodes: int, num_levels: int) -> float:
        """Return F(m, l)."""
        return self._tokens[num_levels][num_nodes]

    def paths(self, num_nodes: int, num_levels: int, above: NodePath = ()) -> list[NodePath]:
        """Return the nodes of the best tree, below the node `above`."""
        found: list[NodePath] = []
        rank, left = 0, num_nodes
        while left and num_levels and rank < len(self._splits[num_levels]):
            share = self._splits[num_levels][rank][left]
            if not share:
                break
            node = (*above, rank)
            found += [node, *self.paths(share - 1, num_levels - 1, node)]
            rank, left = rank + 1, left - share
        return found

    def _add_level(self, shares: Sequence[float], most_nodes: int) -> None:
        below = self._tokens[-1]
        younger = [0.0] * (most_nodes + 1)
        splits = []
        for share in reversed(shares):
            best, split = [0.0] * (most_nodes + 1), [0] * (most_nodes + 1)
            for num_nodes in range(1, most_nodes + 1):
                for own in range(1, num_nodes + 1):
                    tokens = share * (1 + below[own - 1]) + younger[num_nodes - own]
                    if tokens > best[num_nodes]:
                        best[num_nodes], split[num_nodes] = tokens, own
            younger = best
            splits.append(split)
        self._tokens.append(younger)
        self._splits.append(splits[::-1])


def plan_tree(shares: Sequence[float], costs: Costs, most_nodes: int) -> StaticTree:
    """Return the tree with the most tokens per second; one node if none beats plain decoding."""
    most_levels = min(MAX_LEVELS, most_nodes)
    tables = PlanTables(shares, most_nodes, most_levels)
    best = 1 / costs.plain
    chosen: list[NodePath] = [(0,)]
    for num_levels in range(1, most_levels + 1):
        for num_nodes in range(num_levels, most_nodes + 1):
            paths = tables.paths(num_nodes, num_levels)
            rate = (1 + tables.tokens(num_nodes, num_levels)) / costs.of_tree(paths) if paths else 0.0
            if rate > best:
                best, chosen = rate, paths
    return StaticTree(frozenset(chosen))


class OptimalTree(TreeShape):
    """Tree shape that is planned again at intervals.

    One plan serves all rows; it assumes a batch of one row.

    Args:
        most_nodes: largest number of nodes of a tree.
        costs: measured pass times.
    """

    def __init__(self, most_nodes: int, costs: Costs) -> None:
        self.acceptance = RankAcceptance()
        self._most_nodes = most_nodes
        self._costs = costs
        self._num_rounds = 0
        self._renewal = FIRST_RENEWAL
        self._plan()

    def _plan(self) -> None:
        self.tree = plan_tree(self.acceptance.shares, self._costs, self._most_nodes)
        self.depth = self.tree.depth

    def num_children(
        self, frontier: Sequence[Node], chances: Callable[[int], list[float]], free: bool
    ) -> list[int]:
        return self.tree.num_children(frontier, chances, free)

    def learn(self, forms: Sequence[Sequence[int]], paths: Sequence[Sequence[int]]) -> None:
        for parents, path in zip(forms, paths, strict=True):
            if parents:
                self.acceptance.learn(parents, path)
        self._num_rounds += 1
        if self._num_rounds >= self._renewal:
            self._num_rounds, self._renewal = 0, min(2 * self._renewal, RENEWAL)
            self._plan()


def measure_costs(
    target: Runtime, draft_model: Runtime, most_nodes: int, clock: Callable[[], float] = time.perf_counter
) -> Costs:
    """Time forward passes of both models on a scratch row, which is released afterwards.

    Raises:
        BadInputError: the passes cannot be timed.
    """
    counts = sorted({1, *(count for count in (2, 3, 5, 9, 17) if count <= most_nodes), most_nodes + 1})
    try:
        times = [_time_passes(model, counts, clock) for model in (target, draft_model)]
    except BadInputError:
        raise
    except (RuntimeError, ValueError) as error:
        raise _not_timed(str(error)) from error
    if not all(seconds > 0 for passes in times for seconds in passes):
        raise _not_timed("a pass took no time by the clock")
    return Costs(*(PassTimes(tuple(zip(counts, passes, strict=True))) for passes in times))


def _not_timed(reason: str) -> BadInputError:
    return BadInputError(
        f"expected passes that can be timed to plan tree=optimal from, got: {reason}; give the tree, as in tree=2x2x1"
    )


def _time_passes(runtime: Runtime, counts: Sequence[int], clock: Callable[[], float]) -> list[float]:
    """Return the median seconds of a pass over each number of queries."""
    num_tokens = min(NUM_SCRATCH_TOKENS, runtime.context_length - max(counts))
    if num_tokens < 1:
        raise _not_timed(
            f"a context of {runtime.context_length} positions, which {max(counts)} queries overfill"
        )
    row = Row([0] * num_tokens, SamplingParams())
    runtime.begin([row])
    try:
        return [_time_pass(runtime, row, count, clock) for count in counts]
    finally:
        runtime.release(row)


def _time_pass(runtime: Runtime, row: Row, num_queries: int, clock: Callable[[], float]) -> float:
    draft = Draft.chains([[0] * (num_queries - 1)], device=runtime.device)
    seconds = []
    for _ in range(NUM_WARM_UPS + NUM_TIMED):
        start = clock()
        # The copy to the host waits for the device.
        runtime.score([row], draft).logits[0, -1, 0].item()
        seconds.append(clock() - start)
        runtime.rewind([row], [len(row.tokens) - 1])
    return statistics.median(seconds[NUM_WARM_UPS:])
