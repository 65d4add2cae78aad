"""Replay controllers over recorded traces, on a clock of measured costs: exact, without timing noise.

The controller is the shipped object, called as the decoding loop calls it. Target and drafter are
replaced by a trace (`traces.py`), and the times of rounds by their costs (`round_costs.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from round_costs import RoundCosts
from traces import NodeProbs, RecordedDraft, Trace

from secondguess.controllers.base import Controller
from secondguess.controllers.draft_probs import DraftProbs
from secondguess.core import Candidate, Draft, Plan, RoundTime, Row, Verdict
from secondguess.drafters.sampling_drafter import PREFILL_THRESHOLD
from secondguess.sampling import SamplingParams


class RecordedProbs(DraftProbs):
    """Summaries of the distribution of one recorded node."""

    def __init__(self, node: NodeProbs) -> None:
        super().__init__(torch.empty(1, 0), confidences=[node.confidence])
        self.entropies, self.runners_up = [node.entropy], [node.runner_up]


@dataclass(frozen=True)
class Replayed:
    """Result of the replay of one text.

    Args:
        task: task of the trace.
        num_tokens: committed tokens.
        seconds: sum of the rounds' costs.
        num_rounds, num_drafted, num_accepted: counts of rounds and nodes.
    """

    task: str
    num_tokens: int
    seconds: float
    num_rounds: int
    num_drafted: int
    num_accepted: int


class ReplayRow:
    """Row of a text that is being replayed, at `position` in its trace."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        params = SamplingParams(max_tokens=trace.num_tokens, temperature=trace.temperature)
        self.row = Row([0] * trace.num_prompt, params, coupled=trace.coupled)
        self.position = 0
        self.num_uncached: dict[int, int] = {}
        """Tokens that the draft model of a part has not read; a part without entry has read nothing."""

    @property
    def finished(self) -> bool:
        return self.position >= self.trace.num_tokens

    def draft(self, part: int) -> RecordedDraft:
        """Return the draft of a part at this position."""
        return self.trace.drafts[part][self.position]

    @property
    def candidates(self) -> list[Candidate]:
        """Candidates as recorded, with the uncached tokens of this replay; those of length 0 last."""
        recorded = [part[self.position].candidate for part in self.trace.drafts]
        return sorted(map(self._updated, recorded), key=lambda candidate: candidate.longest == 0)

    def _updated(self, candidate: Candidate) -> Candidate:
        if candidate.deterministic:
            return candidate
        num_uncached = self.num_uncached.get(candidate.part, len(self.row.tokens))
        coarse = num_uncached // PREFILL_THRESHOLD * PREFILL_THRESHOLD
        return candidate._replace(num_uncached=coarse if num_uncached > PREFILL_THRESHOLD else 0)

    def advance(self, num_accepted: int, part: int, length: int) -> int:
        """Commit the accepted nodes of a draft of `length` nodes and one more token; return their number."""
        committed = min(num_accepted + 1, self.trace.num_tokens - self.position)
        self.row.tokens.extend([0] * committed)
        self.position += committed
        for reader in self.num_uncached:
            self.num_uncached[reader] += committed
        if length:
            # A draft model has cached its own nodes except the last, so that two tokens are new after full acceptance.
            self.num_uncached[part] = 2 if num_accepted == length else 1
        return committed


def replay(controller: Controller, traces: Sequence[Trace], costs: RoundCosts) -> list[Replayed]:
    """Decode the texts of the traces in order with one controller; prefill of prompts costs nothing."""
    return [_replay_text(controller, trace, costs) for trace in traces]


def _replay_text(controller: Controller, trace: Trace, costs: RoundCosts) -> Replayed:
    text = ReplayRow(trace)
    seconds, num_tokens, num_rounds, num_drafted, num_accepted = 0.0, 0, 0, 0, 0
    while not text.finished:
        paused = not controller.begin_round([text.row])
        (plan,) = [Plan(0, 0)] if paused else controller.plan([text.row], [text.candidates])
        recorded = text.draft(plan.part)
        limit = max(0, min(plan.length, text.row.room - 1, recorded.num_nodes))
        length, was_ended = _draft_length(controller, text.row, recorded, limit)
        reading = _reading_seconds(text, plan.part, costs) if length else 0.0
        drafting = costs.drafting(plan.part, length, controller.uses_probs, was_ended)
        total = reading + drafting + costs.rest(plan.part, length)
        accepted = recorded.accepted[length - 1] if length else 0
        committed = text.advance(accepted, plan.part, length)
        verdict = Verdict.from_chain([accepted], [0])
        time = RoundTime(reading, drafting, total)
        controller.learn([text.row], Draft.chains([[0] * length]), verdict, time)
        seconds += total
        num_tokens += committed
        num_rounds += 1
        num_drafted += length
        num_accepted += min(accepted, committed)
    controller.release(text.row)
    return Replayed(trace.task, num_tokens, seconds, num_rounds, num_drafted, num_accepted)


def _draft_length(controller: Controller, row: Row, recorded: RecordedDraft, limit: int) -> tuple[int, bool]:
    """Return the length of the draft, and whether the controller ended it before the limit."""
    if recorded.dists and controller.uses_probs:
        for depth in range(limit - 1):
            if not controller.keep_drafting([row], RecordedProbs(recorded.dists[depth]), depth)[0]:
                return depth + 1, True
    return limit, False


def _reading_seconds(text: ReplayRow, part: int, costs: RoundCosts) -> float:
    """Return the seconds of the forward pass in which a draft model that is far behind catches up."""
    return costs.parts[part].step if text.num_uncached.get(part, 0) > PREFILL_THRESHOLD else 0.0
