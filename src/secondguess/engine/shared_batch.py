"""Rounds of the rows of several calls on the same models, which decode as one batch.

A call submits its rows as a `RowGroup` and takes the results of one round after the other. The
thread that takes them runs the rounds, for all groups that take part, so that no thread of its own
is needed. Rounds run one at a time. A `Scheduler` decides which rows join, a `PrefillBudget` how much of
their prompts is prefilled between two rounds.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from threading import Lock, RLock
from typing import Any, Generic, TypeVar
from weakref import WeakSet

from secondguess.core import Commit, Row
from secondguess.decode import Batch, Components
from secondguess.errors import SecondGuessError
from secondguess.runtime.base import Runtime
from secondguess.runtime.system.machine import without_defaults_of_caller

logger = logging.getLogger(__name__)

MAX_DELAY = 0.6
"""Maximum duration of the prefill between two rounds, in rounds.

With 1.0, a prompt of 2,000 tokens delayed tokens of eight streams by up to 3.9 rounds (99th percentile of each of
six runs), with 0.6 by up to 3.0, and was prefilled in 1.5 times the time.
"""
PREFILLING_WEIGHT = 4.0
"""Weight of a row that waits for the prefill of others, in rows that decode: the delay grows where they outweigh these.

Otherwise the batch is never full: of 16 clients of a 0.5B model 9 waited for their first token while 7 decoded.
"""
ARRIVAL_DELAY = 4.0
"""Maximum duration of any prefill between two rounds, in rounds: a row that arrives meanwhile waits for its end."""
MIN_TOKENS = 8
"""Minimum number of tokens of such a prefill: with fewer, a forward pass costs more per token."""
MIN_TOKENS_ALONE = 48
"""The same while no row waits; prefill passes of 48 tokens took 6 % longer than of 512 on a CPU, those of 32 took 12 %."""
MAX_TOKENS = 512
"""Maximum number of tokens: cancellations are noticed between two prefills."""
WEIGHT = 0.2
"""Weight of the newest measurement in an average of times."""

ResultT = TypeVar("ResultT")
RowT = TypeVar("RowT", bound=Hashable)


class RowGroup(Generic[ResultT]):
    """Rows of one call.

    Args:
        rows: the rows; finished ones are skipped.
        receive: turns the commits of a round into a result. It is called in the thread that runs
            the round, before the next round of these rows.
        is_eager: True to take part in every round; False to take part only while the caller waits
            for a result, as for a stream that may be read slowly or not at all.

    Attributes:
        is_eager: as given; it may be changed.
        num_callers_waiting: number of threads that wait for a result.
        is_cancelled: True if no more rounds are to run for these rows.
        results: results per round that the caller has not taken.
        num_open: number of rows whose last commit has not been received.
        error: exception that ended the group; its rows are released.
        admitted_at: `time.monotonic()` when the first row was admitted.
    """

    def __init__(
        self, rows: Sequence[Row], receive: Callable[[list[Commit]], ResultT], is_eager: bool = True
    ) -> None:
        self.rows = [row for row in rows if not row.finished]
        self.num_open = len(self.rows)
        self.receive = receive
        self.results: deque[ResultT] = deque()
        self.error: BaseException | None = None
        self.admitted_at: float | None = None
        self.is_eager = is_eager
        self.num_callers_waiting = 0
        self.is_cancelled = False

    @property
    def takes_part(self) -> bool:
        return self.is_eager or self.num_callers_waiting > 0

    @property
    def is_done(self) -> bool:
        """True if no more results follow those in `results`; read it before these."""
        return self.is_cancelled or self.error is not None or self.num_open == 0


class Scheduler(Generic[RowT]):
    """Queue of waiting rows, and the rows that have been admitted; first come, first served.

    A row is never overtaken: if the first one does not fit, those behind it wait too, so that a
    long row is not starved by short ones. A row that does not fit is admitted all the same if no
    admitted row can make progress, as waiting would not help it.

    Args:
        fits: returns whether this number of rows, the longest of which may reach this number of
            tokens, fits into memory.
        max_rows: maximum number of admitted rows; a row with several slots counts as as many rows.
    """

    def __init__(self, fits: Callable[[int, int], bool], max_rows: int) -> None:
        self._fits = fits
        self.max_rows = max_rows
        self._waiting: dict[RowT, tuple[int, int]] = {}
        self._admitted: dict[RowT, tuple[int, int]] = {}

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_admitted(self) -> int:
        return len(self._admitted)

    def add(self, row: RowT, longest: int, num_slots: int = 1) -> None:
        """Append a row, which may reach `longest` tokens in each of its cache slots, to the queue."""
        self._waiting[row] = (longest, num_slots)

    def remove(self, row: RowT) -> None:
        """Remove a row that has finished or was cancelled, waiting or admitted."""
        self._waiting.pop(row, None)
        self._admitted.pop(row, None)

    def admit(self, num_active: int) -> list[RowT]:
        """Return the rows that join now, in the order of the queue; `num_active` admitted rows make progress."""
        joining: list[RowT] = []
        longest = max([length for length, _ in self._admitted.values()], default=0)
        num_rows = sum([num_slots for _, num_slots in self._admitted.values()])
        for row, (own, num_slots) in self._waiting.items():
            num_rows, longest = num_rows + num_slots, max(longest, own)
            may_wait = num_active + len(joining) > 0
            if may_wait and (num_rows > self.max_rows or not self._fits(num_rows, longest)):
                break
            self._admitted[row] = (own, num_slots)
            joining.append(row)
        for row in joining:
            del self._waiting[row]
        return joining


class PrefillBudget:
    """Bound on the delay that rows which join cause to rows that are decoding."""

    def __init__(self) -> None:
        self._round_seconds = 0.0
        self._token_seconds = {True: 0.0, False: 0.0}  # beside rows that decode, in short passes; and alone

    def max_tokens(
        self, num_decoding: int, num_prefilling: int = 1, spent: float = 0.0, rows_may_arrive: bool = True
    ) -> int:
        """Return the maximum number of tokens of `num_prefilling` rows to prefill before the next round.

        `num_decoding` rows wait for the prefill, and have done so for `spent` seconds; others may arrive during it or not.
        """
        if not self._round_seconds or not (num_decoding or rows_may_arrive):
            return MAX_TOKENS
        delay = ARRIVAL_DELAY * self._round_seconds
        if num_decoding:
            share = max(1.0, PREFILLING_WEIGHT * (num_prefilling - 1) / num_decoding)
            delay = min(MAX_DELAY * share * self._round_seconds - spent, delay)
        fewest = MIN_TOKENS if num_decoding else MIN_TOKENS_ALONE
        token_seconds = self._token_seconds[num_decoding > 0]
        tokens = int(delay / token_seconds) if token_seconds else fewest
        return min(max(tokens, fewest), MAX_TOKENS)

    def add_round(self, seconds: float) -> None:
        """Add the duration of a round."""
        self._round_seconds = _averaged(self._round_seconds, seconds)

    def add_prefill(self, num_tokens: int, seconds: float, num_decoding: int) -> None:
        """Add the duration of a prefill; of those for which no row waits, short ones say nothing of longer ones."""
        is_beside = num_decoding > 0
        if num_tokens >= (1 if is_beside else MIN_TOKENS_ALONE):
            self._token_seconds[is_beside] = _averaged(self._token_seconds[is_beside], seconds / num_tokens)


def _averaged(average: float, value: float) -> float:
    return value if not average else average + WEIGHT * (value - average)


class InterruptedRoundError(SecondGuessError):
    """A round was interrupted by another thread (Ctrl-C) after it had changed the row."""


class SharedBatch:
    """The batch of an `LLM`, which the groups of all its calls share.

    Args:
        components: components of the loop.
        fits: returns whether this number of rows, the longest of which may reach this number of
            tokens, fits into memory.
        max_rows: maximum number of rows that decode at the same time; a row with several cache slots counts as as many.
    """

    def __init__(self, components: Components, fits: Callable[[int, int], bool], max_rows: int) -> None:
        self.components = components
        self.scheduler: Scheduler[Row] = Scheduler(fits, max_rows)
        self._batch = Batch(components)
        self._budget = PrefillBudget()
        self._group_of: dict[Row, RowGroup[Any]] = {}
        self._submitted: deque[RowGroup[Any]] = deque()
        self._cancelled: deque[RowGroup[Any]] = deque()
        self._reset_locks()
        _all.add(self)

    def _reset_locks(self) -> None:
        self._queue = Lock()
        self._lock = RLock()
        self._is_busy = False

    @property
    def num_waiting(self) -> int:
        """Number of rows that have not been admitted."""
        return self.scheduler.num_waiting + sum([len(group.rows) for group in list(self._submitted)])

    @property
    def num_admitted(self) -> int:
        """Number of rows that are prefilled or decode."""
        return self.scheduler.num_admitted

    def submit(self, group: RowGroup[Any]) -> None:
        """Add a group; it joins before one of the next rounds. Safe to call from any thread."""
        self._submitted.append(group)

    def cancel(self, group: RowGroup[Any]) -> None:
        """Release a group's rows, at once or after the round in progress; does nothing if it is done.

        Safe to call from any thread, and by the garbage collector inside a round of this thread.
        """
        group.is_cancelled = True
        self._cancelled.append(group)
        self._release_cancelled()

    def _release_cancelled(self) -> None:
        """Release the rows of cancelled groups, if no thread is about to do so.

        A thread that holds the lock calls this when it has released it.
        """
        while self._cancelled and not self._is_busy:  # a round, of any thread, ends with the same work
            try:
                if not self._lock.acquire(blocking=False):
                    return
                with self._busy():
                    self._remove_cancelled()
            finally:
                try:  # noqa: SIM105 - a call before the release could be interrupted
                    self._lock.release()
                except RuntimeError:  # another thread holds it
                    pass

    def take(self, group: RowGroup[ResultT]) -> ResultT | None:
        """Return the result of the group's next round, running rounds as needed; None at its end.

        Raises the error of a round that ended the group.
        """
        group.num_callers_waiting += 1
        try:
            while True:
                is_done = group.is_done
                if group.results:
                    return group.results.popleft()
                if group.error is not None:
                    raise group.error
                if is_done:
                    return None
                with self.between_rounds():
                    if not group.results and not group.is_done:
                        self._step(rows_may_arrive=False)
        finally:
            group.num_callers_waiting -= 1

    def step(self) -> None:
        """Run one round for all groups that take part in it; for a thread that serves them all."""
        with self.between_rounds():
            self._step(rows_may_arrive=True)

    def replace_target(self, target: Runtime) -> None:
        """Decode with another runtime around the target; call it between rounds."""
        self.components = self._batch.components = replace(self.components, target=target)

    @contextmanager
    def between_rounds(self) -> Iterator[None]:
        """Return a context in which no round runs."""
        try:
            # A thread that has just finished a round finds the queue taken by a thread that waits.
            with self._queue:
                self._lock.acquire()
            yield
        finally:
            try:  # noqa: SIM105 - a call before the release could be interrupted
                self._lock.release()
            except RuntimeError:  # interrupted before it was acquired
                pass
            self._release_cancelled()

    @contextmanager
    def _busy(self) -> Iterator[None]:
        self._is_busy = True
        try:
            yield
        finally:
            self._is_busy = False

    def _step(self, rows_may_arrive: bool) -> None:
        with self._busy(), without_defaults_of_caller(self.components.target.device):
            try:
                start = time.perf_counter()
                self._join()
                self._prefill(time.perf_counter() - start, rows_may_arrive)
                self._prefill_drafter()
                self._run()
            finally:
                self._remove_cancelled()

    def _join(self) -> None:
        """Queue the rows of new groups, and admit those that fit."""
        while self._submitted:
            group = self._submitted.popleft()
            for row in group.rows:
                self._group_of[row] = group
                lengths = self.components.target.slot_lengths(row)
                self.scheduler.add(row, max(lengths) + row.room, len(lengths))
        self._remove_cancelled()
        if not self.scheduler.num_waiting:
            return
        present = [*self._batch.decoding, *self._batch.prefilling]
        joining = self.scheduler.admit(sum([self._group_of[row].takes_part for row in present]))
        groups = self._by_group(joining)
        with self._failing(groups):
            for group, rows in groups.items():
                group.admitted_at = group.admitted_at or time.monotonic()
                with self._failing([group]):
                    self._batch.add(rows)

    def _prefill(self, spent: float, rows_may_arrive: bool) -> None:
        """Prefill rows that have joined, as many tokens as other rows can wait for.

        `spent` is the seconds since the last round.
        """
        batch, target = self._batch, self.components.target
        num_decoding, rows = len(self._running()), self._taking_part(batch.prefilling)
        batch.max_prefill_tokens = self._budget.max_tokens(num_decoding, len(rows), spent, rows_may_arrive)
        if not rows:
            return
        before, start = target.num_prefilled - _num_scored(rows), time.perf_counter()
        groups = self._by_group(rows)
        with self._failing(groups):
            try:
                commits = batch.prefill(rows)
                num_tokens = target.num_prefilled + _num_scored(rows) - before
                self._budget.add_prefill(num_tokens, time.perf_counter() - start, num_decoding)
                self._deliver(commits)
            except Exception as error:
                if len(groups) == 1:
                    raise
                logger.warning("a prefill of %d calls failed; each runs its own", len(groups), exc_info=error)
                for group, own_rows in groups.items():
                    with self._failing([group]):
                        self._deliver(batch.prefill(own_rows))

    def _prefill_drafter(self) -> None:
        """Continue the drafter's prefill of the oldest row for which it is not finished."""
        rows = self._taking_part(self.components.drafter.unfinished)[:1]
        if rows:
            with self._failing(self._by_group(rows)):
                self._batch.prefill_drafter(rows)

    def _run(self) -> None:
        """Run a round, and end only the group for which it fails."""
        rows = self._running()
        if not rows:
            return
        groups = self._by_group(rows)
        lengths = {row: len(row.tokens) for row in rows}
        start = time.perf_counter()
        try:
            try:
                self._deliver(self._batch.run(rows))
                self._budget.add_round(time.perf_counter() - start)
            except Exception as error:
                self._run_each_alone(groups, lengths, error)
        except BaseException:
            for group, own_rows in groups.items():
                if any(len(row.tokens) != lengths[row] for row in own_rows):
                    self._fail(group, InterruptedRoundError("another thread was interrupted"))
            raise

    def _run_each_alone(
        self, groups: Mapping[RowGroup[Any], Sequence[Row]], lengths: Mapping[Row, int], error: Exception
    ) -> None:
        """Run a round per group after a round over all of them has raised `error`."""
        if len(groups) > 1:
            logger.warning("a round over %d calls failed; each runs its own", len(groups), exc_info=error)
        for group, rows in groups.items():
            if len(groups) == 1 or any(len(row.tokens) != lengths[row] for row in rows):
                self._fail(group, error)  # commits of these rows are lost
                continue
            try:
                self._deliver(self._batch.run(rows))
            except Exception as own_error:
                self._fail(group, own_error)

    def _running(self) -> list[Row]:
        """Return the rows that take part in the next round.

        If every group with decoding rows is also prefilling, no round runs: a call ends sooner if its
        rows decode together. If another group decodes, rounds continue, so that a long prefill does
        not stall them.
        """
        rows = self._taking_part(self._batch.decoding)
        waiting = {self._group_of[row] for row in self._batch.prefilling}
        return [] if all(self._group_of[row] in waiting for row in rows) else rows

    def _taking_part(self, rows: Sequence[Row]) -> list[Row]:
        return [row for row in rows if self._group_of[row].takes_part]

    def _by_group(self, rows: Sequence[Row]) -> dict[RowGroup[Any], list[Row]]:
        groups: dict[RowGroup[Any], list[Row]] = {}
        for row in rows:
            groups.setdefault(self._group_of[row], []).append(row)
        return groups

    def _deliver(self, commits: Sequence[Commit]) -> None:
        by_group: dict[RowGroup[Any], list[Commit]] = {}
        for commit in commits:
            by_group.setdefault(self._group_of[commit.row], []).append(commit)
            if commit.row.finished:
                self._forget(commit.row)
        for group, own_commits in by_group.items():
            try:
                group.results.append(group.receive(own_commits))
                group.num_open -= sum([commit.row.finished for commit in own_commits])
            except Exception as error:
                self._fail(group, error)

    @contextmanager
    def _failing(self, groups: Iterable[RowGroup[Any]]) -> Iterator[None]:
        """Return a context whose exception ends these groups."""
        try:
            yield
        except BaseException as error:
            is_interrupted = not isinstance(error, Exception)
            found = InterruptedRoundError("another thread was interrupted") if is_interrupted else error
            for group in groups:
                self._fail(group, found)
            if is_interrupted:
                raise

    def _fail(self, group: RowGroup[Any], error: BaseException) -> None:
        group.error = error
        self._release(group)

    def _remove_cancelled(self) -> None:
        while self._cancelled:
            self._release(self._cancelled.popleft())

    def _release(self, group: RowGroup[Any]) -> None:
        if group in self._submitted:
            self._submitted.remove(group)
        present = [*self._batch.decoding, *self._batch.prefilling]
        self._batch.remove([row for row in present if self._group_of.get(row) is group])
        for row in group.rows:
            self._forget(row)

    def _forget(self, row: Row) -> None:
        self.scheduler.remove(row)
        self._group_of.pop(row, None)


def _num_scored(rows: Sequence[Row]) -> int:
    """Return the number of prompt tokens whose log-probabilities are known."""
    return sum([len(row.prompt_logprobs or ()) for row in rows])


_all: WeakSet[SharedBatch] = WeakSet()


def _reset_after_fork() -> None:
    """Replace locks that other threads of the parent process held, and drop the calls of these threads."""
    for shared in _all:
        shared._reset_locks()
        for group in {*shared._group_of.values(), *shared._submitted}:
            if group.takes_part:
                shared.cancel(group)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_after_fork)
