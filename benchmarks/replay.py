"""Any controller over recorded traces, on a clock that runs by measured costs: exact, and free of timing noise.

The controller is the shipping object, asked and taught as the loop asks and teaches it; only target and drafter are
replaced by what they said when the trace was recorded. What its own decisions take can be timed while it is replayed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from round_costs import RoundCosts

from secondguess.bench.traces import NodeProbs, RecordedDraft, Trace
from secondguess.controllers.base import Controller
from secondguess.controllers.draft_probs import DraftProbs
from secondguess.core import Candidate, Draft, Plan, RoundTime, Row, Verdict
from secondguess.drafters.sampling_drafter import PREFILL_THRESHOLD
from secondguess.sampling import SamplingParams
from secondguess.stats import Clock


class RecordedProbs(DraftProbs):
    """Summaries of the distributions of a trace's nodes, one per row."""

    def __init__(self, dists: Sequence[NodeProbs]) -> None:
        self.acceptance_probs = None
        self._confidences = [dist.confidence for dist in dists]
        self.__dict__["entropies"] = [dist.entropy for dist in dists]
        self.__dict__["runners_up"] = [dist.runner_up for dist in dists]


NO_PROBS = NodeProbs(1.0, 0.0, 0.0)
"""The line of a row that drew no node: it means nothing."""


@dataclass(frozen=True)
class Replayed:
    """What a controller did with some texts.

    Args:
        task: of the rows.
        num_tokens: committed.
        seconds: by the costs.
        num_rounds, num_drafted, num_accepted: over all rows.
    """

    task: str
    num_tokens: int
    seconds: float
    num_rounds: int
    num_drafted: int
    num_accepted: int

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds


@dataclass(frozen=True)
class Prefill:
    """Seconds that prompts of one batch take before anything is written.

    Args:
        begin: of the target and of look-ups, for the whole batch.
        first_draft: by part of the drafter, of a draft model per row, when it first guesses for that row.
    """

    begin: float = 0.0
    first_draft: Sequence[float] = ()


class ReplayRow:
    """One text under way."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        params = SamplingParams(
            max_tokens=trace.max_tokens or trace.num_tokens, temperature=trace.temperature
        )
        self.row = Row([0] * trace.num_prompt, params, coupled=trace.coupled)
        self.place = 0
        self.num_uncached: dict[int, int] = {}

    @property
    def drafts(self) -> list[RecordedDraft]:
        """By part, at the present place."""
        return [part[self.place] for part in self.trace.drafts]

    @property
    def candidates(self) -> list[Candidate]:
        """By part, as they were recorded, but for what has been read in this replay."""
        return [self._up_to_date(guess.candidate) for guess in self.drafts]

    def _up_to_date(self, candidate: Candidate) -> Candidate:
        if candidate.deterministic:
            return candidate
        num_uncached = self.num_uncached.get(candidate.part, len(self.row.tokens))
        return candidate._replace(
            num_uncached=num_uncached // PREFILL_THRESHOLD * PREFILL_THRESHOLD
            if num_uncached > PREFILL_THRESHOLD
            else 0
        )

    def advance(self, num_accepted: int, part: int, length: int) -> int:
        """Commit what was accepted of a part's draft and one token more; gives the number of tokens."""
        committed = min(num_accepted + 1, self.trace.num_tokens - self.place)
        self.row.tokens.extend([0] * committed)
        self.place += committed
        for reader in self.num_uncached:
            self.num_uncached[reader] += committed
        if length:
            # A draft model has read its own guesses but the last: two tokens are new to it after a draft accepted whole.
            self.num_uncached[part] = 2 if num_accepted == length else 1
        return committed

    @property
    def finished(self) -> bool:
        return self.place >= self.trace.num_tokens


class TimedController(Controller):
    """Passes everything on, and counts the seconds of the controller's own decisions.

    Args:
        clock: seconds from some moment on; None counts nothing.
    """

    def __init__(self, controller: Controller, clock: Clock | None) -> None:
        self._controller = controller
        self._clock: Clock = clock or (lambda: 0.0)
        self.name = controller.name
        self.uses_probs = controller.uses_probs
        self.seconds = 0.0

    def plan(self, rows: Sequence[Row], candidates: Sequence[Sequence[Candidate]]) -> list[Plan]:
        start = self._clock()
        plans = self._controller.plan(rows, candidates)
        self.seconds += self._clock() - start
        return plans

    def go_on(self, rows: Sequence[Row], dists: DraftProbs, depth: int) -> list[bool]:
        start = self._clock()
        answers = self._controller.go_on(rows, dists, depth)
        self.seconds += self._clock() - start
        return answers

    def learn(self, rows: Sequence[Row], draft: Draft, verdict: Verdict, time: RoundTime) -> None:
        start = self._clock()
        self._controller.learn(rows, draft, verdict, time)
        self.seconds += self._clock() - start

    def end(self, row: Row) -> None:
        self._controller.end(row)


@dataclass(frozen=True)
class Drafting:
    """One round's drafts, and what they asked for on the way.

    Args:
        plans, lengths: per live row.
        steps: per draft step, the part and the rows that took it.
        endings: part and rows of the questions after which the controller ended all drafts of the part.
    """

    plans: list[Plan]
    lengths: list[int]
    steps: list[tuple[int, int]]
    endings: list[tuple[int, int]]


def replay(
    controller: Controller,
    traces: Sequence[Trace],
    costs: RoundCosts,
    batch_size: int = 1,
    prefills: Sequence[Prefill] | None = None,
    clock: Clock | None = None,
) -> list[Replayed]:
    """Decode the traces' texts in order, `batch_size` at a time, with one controller: a result per batch.

    Args:
        prefills: per batch; nothing by default.
        clock: times the controller's own decisions, which then count too; none by default, so that the result is exact.
    """
    timed = TimedController(controller, clock)
    starts = range(0, len(traces), batch_size)
    return [
        _replay_batch(timed, traces[start : start + batch_size], costs, prefill)
        for start, prefill in zip(starts, prefills or [Prefill()] * len(starts), strict=True)
    ]


def _replay_batch(
    controller: TimedController, traces: Sequence[Trace], all_costs: RoundCosts, prefill: Prefill
) -> Replayed:
    rows = [ReplayRow(trace) for trace in traces]
    in_cache = list(rows)
    seconds, num_tokens, num_rounds, num_drafted, num_accepted = prefill.begin, 0, 0, 0, 0
    while live := [row for row in rows if not row.finished]:
        decided = controller.seconds
        drafting = _draft(controller, live)
        costs = all_costs if in_cache == live else all_costs.disordered or all_costs
        plans, lengths = drafting.plans, drafting.lengths
        parts = {plan.part for plan, length in zip(plans, lengths, strict=True) if length}
        reading = sum(_reading(part, live, drafting, costs, prefill) for part in sorted(parts))
        draft_seconds = costs.drafting(drafting.steps, controller.uses_probs, len(live))
        draft_seconds += sum(costs.asking(part, count) for part, count in drafting.endings)
        total = reading + draft_seconds + costs.rest(len(live), max(lengths), parts) + costs.upkeep(len(live))
        total += controller.seconds - decided
        accepted = [
            row.drafts[plan.part].accepted[length - 1] if length else 0
            for row, plan, length in zip(live, plans, lengths, strict=True)
        ]
        real_rows = [row.row for row in live]
        for row, plan, length, count in zip(live, plans, lengths, accepted, strict=True):
            committed = row.advance(count, plan.part, length)
            num_tokens += committed
            num_accepted += min(count, committed)
        draft = Draft.chains([[0] * length for length in lengths])
        verdict = Verdict.from_chain(torch.tensor(accepted), torch.zeros(len(live), dtype=torch.long))
        decided = controller.seconds
        controller.learn(real_rows, draft, verdict, RoundTime(reading, draft_seconds, total))
        seconds += total + controller.seconds - decided
        num_rounds += len(live)
        num_drafted += sum(lengths)
        for row in reversed(live):
            if row.finished:
                controller.end(row.row)
                _leave(in_cache, row)
    return Replayed(traces[0].task, num_tokens, seconds, num_rounds, num_drafted, num_accepted)


def _leave(in_cache: list[ReplayRow], row: ReplayRow) -> None:
    """Caches keep their rows packed: the last one moves to where a row was."""
    place = in_cache.index(row)
    last = in_cache.pop()
    if last is not row:
        in_cache[place] = last


def _reading(
    part: int, live: Sequence[ReplayRow], drafting: Drafting, costs: RoundCosts, prefill: Prefill
) -> float:
    """Seconds in which a part reads what it has not read of the rows that it drafts for: at first, the prompts."""
    readers = [
        row
        for row, plan, length in zip(live, drafting.plans, drafting.lengths, strict=True)
        if length and plan.part == part
    ]
    new = [row for row in readers if part not in row.num_uncached]
    behind = [row.num_uncached[part] for row in readers if row.num_uncached.get(part, 0) > 2]
    per_row = prefill.first_draft[part] if prefill.first_draft else 0.0
    apart = any(num_uncached > PREFILL_THRESHOLD for num_uncached in behind)
    catching_up = (
        costs.catching_up(part, len(behind), sum(behind) - 2 * len(behind), apart) if behind else 0.0
    )
    return len(new) * per_row + catching_up


def _draft(controller: Controller, live: Sequence[ReplayRow]) -> Drafting:
    rows = [row.row for row in live]
    # A drafter made of several puts parts without a guess last.
    candidates = [sorted(row.candidates, key=lambda candidate: candidate.longest == 0) for row in live]
    plans = controller.plan(rows, candidates)
    limits = [
        max(0, min(plan.length, row.row.room - 1, row.drafts[plan.part].num_nodes))
        for plan, row in zip(plans, live, strict=True)
    ]
    lengths = [0] * len(live)
    steps: list[tuple[int, int]] = []
    endings: list[tuple[int, int]] = []
    active = [index for index, limit in enumerate(limits) if limit]
    depth = 0
    while active:
        for part in sorted({plans[index].part for index in active}):
            members = [index for index in active if plans[index].part == part]
            steps.append((part, len(members)))
        for index in active:
            lengths[index] += 1
        asked = [index for index in active if lengths[index] < limits[index]]
        uncertain = [index for index in asked if live[index].drafts[plans[index].part].dists]
        if uncertain and controller.uses_probs:
            dists = [NO_PROBS] * len(live)
            for index in uncertain:
                dists[index] = live[index].drafts[plans[index].part].dists[depth]
            answers = controller.go_on(rows, RecordedProbs(dists), depth)
            asked = [index for index in asked if index not in uncertain or answers[index]]
            if not any(answers[index] for index in uncertain):
                endings.append((plans[uncertain[0]].part, len(uncertain)))
        active = asked
        depth += 1
    return Drafting(plans, lengths, steps, endings)
