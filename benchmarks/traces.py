"""Record the drafts at every position of a text, with the number of nodes the verifier accepts.

`replay.py` replays any controller over such a trace. At temperature 0 and for seeded requests the
text does not depend on the drafts, so the replay is exact. For other sampled text it continues
along the recorded text where a real run would continue along the accepted draft: another sample
of the same distribution.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from torch import Tensor

from secondguess.controllers.base import Controller
from secondguess.controllers.draft_probs import DraftProbs
from secondguess.core import Candidate, Draft, Plan, Row, Verdict
from secondguess.decode import Components, decode
from secondguess.drafters.base import Drafter
from secondguess.errors import BadInputError
from secondguess.runtime.base import Runtime
from secondguess.sampling.noise import Noise
from secondguess.verifiers.base import Verifier, query_depths


class NodeProbs(NamedTuple):
    """Summary of the distribution that one node was drawn from (see `DraftProbs`)."""

    confidence: float
    entropy: float
    runner_up: float


@dataclass(frozen=True)
class RecordedDraft:
    """Draft of one component drafter at one position of a text.

    Args:
        candidate: its properties known before drafting.
        dists: per node, its distribution; empty for a deterministic drafter.
        accepted: number of accepted nodes of a draft of the first 1, 2, ... nodes.
    """

    candidate: Candidate
    dists: tuple[NodeProbs, ...]
    accepted: tuple[int, ...]

    @property
    def num_nodes(self) -> int:
        return len(self.accepted)


@dataclass(frozen=True)
class Trace:
    """Text of one prompt with the drafts at each of its positions.

    Args:
        task: category of the prompt in its workload.
        num_prompt: tokens of the prompt.
        temperature: sampling temperature of the text.
        drafts: `[part][position]`; position i follows the prompt and i tokens of the text.
        coupled: True if drafts and text were drawn from the same exponential race.
    """

    task: str
    num_prompt: int
    temperature: float
    drafts: list[list[RecordedDraft]]
    coupled: bool = False

    @property
    def num_tokens(self) -> int:
        return len(self.drafts[0])


def record(
    target: Runtime,
    drafter: Drafter,
    verifier: Verifier,
    row: Row,
    num_tokens: int,
    depth: int = 12,
    task: str = "",
) -> Trace:
    """Generate with the target token by token, and draft at every position.

    Args:
        row: a new row with room for `num_tokens` and `depth + 1` more; it keeps the text.
        num_tokens: number of positions to record.
        depth: maximum draft length.
        task: category of the prompt.

    Raises:
        BadInputError: the drafter draws trees, of which a part is not the draft of a shorter length.
    """
    if drafter.can_draft_trees:
        raise BadInputError(f"expected a drafter of chains, got {drafter.name}; leave out its option tree")
    prompt, drafts, num_parts = list(row.tokens), [], 1
    while len(drafts) < num_parts:
        # Every part drafts along the same text: noise depends on positions only.
        row.tokens[:], row.finish_reason = prompt, None
        recorder = Recorder(verifier, len(drafts), depth)
        for _ in islice(decode(Components(target, drafter, recorder, recorder), [row]), num_tokens):
            pass
        drafts.append(recorder.drafts)
        num_parts = recorder.num_parts
    return Trace(task, row.num_prompt, row.params.temperature, drafts, row.coupled)


class Recorder(Controller, Verifier):
    """Controller and verifier that record the drafts of one row, and commit one token per round.

    Args:
        verifier: decides how many nodes are accepted.
        part: index of the component drafter.
        depth: maximum draft length; one more node is drafted, as `keep_drafting` is not called after the last.
    """

    name = "recorder"

    def __init__(self, verifier: Verifier, part: int, depth: int) -> None:
        self.exactness = verifier.exactness
        self.drafts: list[RecordedDraft] = []
        self.num_parts = 0
        self._verifier, self._part, self._depth = verifier, part, depth

    def plan(self, rows: Sequence[Row], candidates: Sequence[Sequence[Candidate]]) -> list[Plan]:
        (choices,) = candidates
        self.num_parts = len(choices)
        self._candidate = next(choice for choice in choices if choice.part == self._part)
        self._dists: list[NodeProbs] = []
        return [Plan(self._part, self._depth + 1)]

    def keep_drafting(self, rows: Sequence[Row], draft_probs: DraftProbs, depth: int) -> list[bool]:
        summary = NodeProbs(draft_probs.confidences[0], draft_probs.entropies[0], draft_probs.runners_up[0])
        self._dists.append(summary)
        return [True]

    def verify(self, draft: Draft, target_probs: Tensor, noise: Noise) -> Verdict:
        self._record(
            draft,
            lambda cut: self._verifier.verify(cut, target_probs[:, : cut.num_nodes + 1], noise),
        )
        chosen = noise.race(target_probs, query_depths(draft))
        return Verdict.from_chain([0] * draft.num_rows, chosen[:, 0].tolist())

    def verify_greedy(self, draft: Draft, chosen: Sequence[Sequence[int]]) -> Verdict:
        self._record(draft, lambda cut: self._verifier.verify_greedy(cut, chosen))
        return Verdict.from_chain([0] * draft.num_rows, [row[0] for row in chosen])

    def _record(self, draft: Draft, verify: Callable[[Draft], Verdict]) -> None:
        """Record how many nodes are accepted of a draft of each length."""
        lengths = range(1, min(draft.num_nodes, self._depth) + 1)
        accepted = [verify(_cut(draft, length)).lengths[0] for length in lengths]
        dists = () if self._candidate.deterministic else self._dists[: len(accepted)]
        self.drafts.append(RecordedDraft(self._candidate, tuple(dists), tuple(accepted)))


def _cut(draft: Draft, length: int) -> Draft:
    """Return the first nodes of a chain."""
    probs = None if draft.probs is None else draft.probs[:, :length]
    return Draft(draft.tokens[:, :length], draft.parents[:, :length], draft.lengths.clamp(max=length), probs)
