"""Decoding statistics: counts per round and position, seconds per phase.

Only counters are stored; ratios are computed on access.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from weakref import WeakKeyDictionary

from secondguess.core import Commit, Draft, RoundTime, Row
from secondguess.preparation import preparation_time, working_time

PHASES = ("plan", "prefill", "draft", "score", "verify", "other")

Clock = Callable[[], float]
"""Seconds since a fixed moment; tests and replays pass clocks of their own."""


@dataclass
class Stats:
    """Counters of one row, or the sum over several rows.

    Attributes:
        num_rounds: number of target passes.
        num_tokens: number of committed tokens.
        num_drafted: number of drafted nodes; in a tree, over all branches.
        num_accepted: number of accepted nodes; in a tree, at most one per position.
        drafted_per_position: number of rounds with a node at depth 0, 1, ...; a tree counts once
            per depth, because only one of its nodes there can be accepted.
        accepted_per_position: number of rounds with an accepted node at that depth. Divided by
            `drafted_per_position`, the acceptance rate by position.
        seconds: wall-clock seconds per phase, over the rounds in which the row took part; the rows
            of a batch share them.
        accepted_prediction_tokens: number of accepted nodes drafted from the request's `prediction`.
        rejected_prediction_tokens: number of rejected nodes drafted from it.
        drafting_seconds: seconds of phase `draft` in rounds that drafted for the row. In other
            rounds this phase only updates the drafter's state.
        num_reused: number of prompt tokens that were in the target's KV cache already.
    """

    num_rounds: int = 0
    num_tokens: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    drafted_per_position: list[int] = field(default_factory=list)
    accepted_per_position: list[int] = field(default_factory=list)
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    drafting_seconds: float = 0.0
    num_reused: int = 0

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted over drafted nodes; None when nothing was drafted.

        Low for trees, which draft several nodes per position.
        """
        return self.num_accepted / self.num_drafted if self.num_drafted else None

    @property
    def acceptance_length(self) -> float:
        """Tokens per target pass, correction or bonus included (tau); 1 for plain decoding."""
        return self.num_tokens / self.num_rounds if self.num_rounds else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Output tokens per second over all phases, prefill included."""
        total = sum(self.seconds.values())
        return self.num_tokens / total if total else 0.0

    def count(self, num_drafted: int, depth: int, commit: Commit, predicted: bool = False) -> None:
        """Add one round of one row, whose draft had `num_drafted` nodes on `depth` levels.

        `predicted` is True if they came from the request's prediction.
        """
        if predicted:
            self.accepted_prediction_tokens += commit.num_accepted
            self.rejected_prediction_tokens += num_drafted - commit.num_accepted
        self.num_rounds += 1
        self.num_tokens += len(commit.tokens)
        self.num_drafted += num_drafted
        self.num_accepted += commit.num_accepted
        positions = ((self.drafted_per_position, depth), (self.accepted_per_position, commit.num_accepted))
        for counters, reached in positions:
            counters.extend([0] * (max(depth, reached) - len(counters)))
            for position in range(reached):
                counters[position] += 1

    def copy(self) -> Stats:
        """Return counters that grow on their own; the seconds are shared."""
        return replace(
            self,
            drafted_per_position=list(self.drafted_per_position),
            accepted_per_position=list(self.accepted_per_position),
        )

    def as_dict(self) -> dict[str, object]:
        """Return counters and ratios by their public names."""
        ratios = ("acceptance_rate", "acceptance_length", "tokens_per_second")
        return vars(self) | {name: getattr(self, name) for name in ratios}

    def __str__(self) -> str:
        rate = self.acceptance_rate
        return (
            f"{self.tokens_per_second:.1f} tokens/s, "
            f"{'nothing drafted' if rate is None else f'acceptance rate {rate:.0%}'}, "
            f"{self.acceptance_length:.2f} tokens per target pass"
        )


class StatsRecorder:
    """Statistics of rows that decode together.

    Time of preparation, such as capturing a CUDA graph, counts as `other` and is not part of `round_time`.

    Attributes:
        totals: sums over all rows of the rounds since it was set; None for no sums. Each round replaces
            it, so that other threads read the counters of whole rounds.
    """

    def __init__(self, clock: Clock = working_time) -> None:
        self._clock = clock
        self.totals: Stats | None = None
        # Rows are forgotten with the outputs that refer to them.
        self._stats: WeakKeyDictionary[Row, Stats] = WeakKeyDictionary()
        self._phase_seconds = dict.fromkeys(PHASES, 0.0)
        self._round_start = 0.0
        # Of phase `plan`: what `round_time` has returned, if it was called, and what earlier rounds spent after it.
        self._planned: float | None = None
        self._learning = 0.0

    def of(self, row: Row) -> Stats:
        """Return the counters of one row."""
        stats = self._stats.get(row)
        if stats is None:
            stats = self._stats[row] = Stats()
        return stats

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time spent inside to a phase of the current round."""
        start = self._clock()
        try:
            yield
        finally:
            self._phase_seconds[name] += self._clock() - start

    def round_time(self) -> RoundTime:
        """Return the duration of the current round so far.

        A controller learns from a round after this call: that time counts for the next round.
        """
        seconds, learning = self._phase_seconds, self._learning
        self._planned, self._learning = seconds["plan"], 0.0
        total = self._clock() - self._round_start + learning
        return RoundTime(seconds["prefill"], seconds["draft"], total, seconds["plan"] + learning)

    @contextmanager
    def round(self, rows: Sequence[Row]) -> Iterator[None]:
        """Add the time spent inside to these rows; time outside of phases counts as `other`."""
        if self._planned is not None:
            self._learning += self._phase_seconds["plan"] - self._planned
        self._planned = None
        self._phase_seconds = dict.fromkeys(PHASES, 0.0)
        self._round_start = self._clock()
        prepared = preparation_time()
        try:
            yield
        finally:
            elapsed = self._clock() - self._round_start + preparation_time() - prepared
            self._phase_seconds["other"] += elapsed - sum(self._phase_seconds.values())
            for row in rows:
                seconds = self.of(row).seconds
                for name, spent in self._phase_seconds.items():
                    seconds[name] += spent
            if self.totals is not None:
                for name, spent in self._phase_seconds.items():
                    self.totals.seconds[name] += spent * len(rows)

    def record(
        self, rows: Sequence[Row], draft: Draft, commits: Sequence[Commit], predicted: Sequence[bool] = ()
    ) -> None:
        """Count one round of every row; `predicted` is True for rows drafted from their prediction."""
        totals = None if self.totals is None else self.totals.copy()
        sizes = zip(map(len, draft.shapes), draft.num_levels, strict=True)
        for index, (row, (num_drafted, depth), commit) in enumerate(zip(rows, sizes, commits, strict=True)):
            stats, is_predicted = self.of(row), bool(predicted) and predicted[index]
            stats.count(num_drafted, depth, commit, is_predicted)
            if num_drafted:
                stats.drafting_seconds += self._phase_seconds["draft"]
            if totals is not None:
                totals.count(num_drafted, depth, commit, is_predicted)
        self.totals = totals
