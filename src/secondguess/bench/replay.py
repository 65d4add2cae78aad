"""Any controller over recorded traces, on a clock that runs by measured costs: exact, and free of timing noise.

The controller is the shipping object, asked and taught as the loop asks and teaches it; only target and drafter are
replaced by what they said when the trace was recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from secondguess.bench.round_costs import RoundCosts
from secondguess.bench.traces import Guess, NodeLaw, Trace
from secondguess.controllers.base import Controller
from secondguess.controllers.laws import DraftLaws
from secondguess.core import Draft, Plan, RoundTime, Row, Verdict
from secondguess.sampling import SamplingParams


class RecordedLaws(DraftLaws):
    """The laws of a trace's nodes, one per row."""

    def __init__(self, laws: Sequence[NodeLaw]) -> None:
        self.__dict__["confidences"] = [law.confidence for law in laws]
        self.__dict__["entropies"] = [law.entropy for law in laws]
        self.__dict__["runners_up"] = [law.runner_up for law in laws]


NO_LAW = NodeLaw(1.0, 0.0, 0.0)
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


class ReplayRow:
    """One text under way."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        params = SamplingParams(max_tokens=trace.num_tokens, temperature=trace.temperature)
        self.row = Row([0] * trace.num_prompt, params, coupled=trace.coupled)
        self.place = 0

    @property
    def guesses(self) -> list[Guess]:
        """By part, at the present place."""
        return [part[self.place] for part in self.trace.guesses]

    def advance(self, num_accepted: int) -> int:
        """Commit; gives the number of tokens."""
        committed = min(num_accepted + 1, self.trace.num_tokens - self.place)
        self.row.tokens.extend([0] * committed)
        self.place += committed
        return committed

    @property
    def finished(self) -> bool:
        return self.place >= self.trace.num_tokens


def replay(
    controller: Controller, traces: Sequence[Trace], costs: RoundCosts, batch_size: int = 1
) -> list[Replayed]:
    """Decode the traces' texts in order, `batch_size` at a time, with one controller: a result per batch."""
    return [
        _replay_batch(controller, traces[start : start + batch_size], costs)
        for start in range(0, len(traces), batch_size)
    ]


def _replay_batch(controller: Controller, traces: Sequence[Trace], costs: RoundCosts) -> Replayed:
    rows = [ReplayRow(trace) for trace in traces]
    seconds, num_tokens, num_rounds, num_drafted, num_accepted = 0.0, 0, 0, 0, 0
    while live := [row for row in rows if not row.finished]:
        plans, lengths, steps = _draft(controller, live)
        parts = {plan.part for plan, length in zip(plans, lengths, strict=True) if length}
        draft_seconds = costs.drafting(steps, controller.reads_laws)
        total = draft_seconds + costs.rest(len(live), max(lengths), parts)
        accepted = [
            row.guesses[plan.part].accepted[length - 1] if length else 0
            for row, plan, length in zip(live, plans, lengths, strict=True)
        ]
        real_rows = [row.row for row in live]
        for row, count in zip(live, accepted, strict=True):
            num_tokens += row.advance(count)
        draft = Draft.chains([[0] * length for length in lengths])
        verdict = Verdict.of_chain(torch.tensor(accepted), torch.zeros(len(live), dtype=torch.long))
        controller.learn(real_rows, draft, verdict, RoundTime(0.0, draft_seconds, total))
        seconds += total
        num_rounds += len(live)
        num_drafted += sum(lengths)
        num_accepted += sum(accepted)
        for row in live:
            if row.finished:
                controller.end(row.row)
    return Replayed(traces[0].task, num_tokens, seconds, num_rounds, num_drafted, num_accepted)


def _draft(
    controller: Controller, live: Sequence[ReplayRow]
) -> tuple[list[Plan], list[int], list[tuple[int, int]]]:
    """Plans, drafted lengths, and per draft step the part and the rows that took it."""
    rows = [row.row for row in live]
    # A drafter made of several puts parts without a guess last.
    prospects = [
        sorted((guess.prospect for guess in row.guesses), key=lambda prospect: prospect.longest == 0)
        for row in live
    ]
    plans = controller.plan(rows, prospects)
    limits = [
        max(0, min(plan.length, row.row.room - 1, row.guesses[plan.part].num_nodes))
        for plan, row in zip(plans, live, strict=True)
    ]
    lengths = [0] * len(live)
    steps: list[tuple[int, int]] = []
    active = [index for index, limit in enumerate(limits) if limit]
    depth = 0
    while active:
        asked = []
        for part in sorted({plans[index].part for index in active}):
            members = [index for index in active if plans[index].part == part]
            steps.append((part, len(members)))
        for index in active:
            lengths[index] += 1
        asked = [index for index in active if lengths[index] < limits[index]]
        uncertain = [index for index in asked if live[index].guesses[plans[index].part].laws]
        if uncertain and controller.reads_laws:
            laws = [NO_LAW] * len(live)
            for index in uncertain:
                laws[index] = live[index].guesses[plans[index].part].laws[depth]
            answers = controller.go_on(rows, RecordedLaws(laws), depth)
            asked = [index for index in asked if index not in uncertain or answers[index]]
        active = asked
        depth += 1
    return plans, lengths, steps
