"""Recording of drafts at every position of a text, with the number of nodes the verifier accepts.

A trace is the training data of acceptance predictors, and `benchmarks/replay.py` replays any
controller over it. At temperature 0 and for seeded requests the text does not depend on the
drafts, so the replay is exact. For other sampled text it continues along the recorded text where a
real run would continue along the accepted draft: another sample of the same distribution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from secondguess.controllers.base import Controller
from secondguess.controllers.draft_probs import DraftProbs
from secondguess.core import Candidate, Draft, Plan, RoundTime, Row, Verdict
from secondguess.decode import Components, decode
from secondguess.drafters.base import Drafter
from secondguess.errors import BadInputError
from secondguess.runtime.base import Runtime
from secondguess.sampling.noise import Noise
from secondguess.verifiers.base import Verifier, query_depths


@dataclass(frozen=True)
class NodeProbs:
    """Summary of the distribution that one node was drawn from (see `DraftProbs`)."""

    confidence: float
    entropy: float
    runner_up: float


@dataclass(frozen=True)
class RecordedDraft:
    """Draft of one component drafter at one position of a text.

    Args:
        candidate: its properties known before drafting.
        dists: per node, its distribution; empty for a deterministic drafter. That of the last node
            is unknown.
        accepted: number of accepted nodes of a draft of the first 1, 2, ... nodes.
        chances: per node, the probability that it is accepted if all before it are (see
            `node_chances`); may be empty.
    """

    candidate: Candidate
    dists: tuple[NodeProbs, ...]
    accepted: tuple[int, ...]
    chances: tuple[float, ...] = ()

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
        max_tokens: of the request, if the text ended earlier; else None.
    """

    task: str
    num_prompt: int
    temperature: float
    drafts: list[list[RecordedDraft]]
    coupled: bool = False
    max_tokens: int | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.drafts[0])


def record(
    target: Runtime,
    drafter: Drafter,
    verifier: Verifier,
    rows: Sequence[Row],
    num_tokens: int,
    depth: int = 12,
    tasks: Sequence[str] | None = None,
) -> list[Trace]:
    """Generate with the target token by token, and draft at every position.

    Drafts are chains: the first nodes of a draft are the draft of that shorter length.

    Args:
        rows: new rows with room for `num_tokens` and `depth + 1` more; they keep the text.
        num_tokens: number of positions to record per row.
        depth: maximum draft length.
        tasks: category of each row.

    Raises:
        BadInputError: the drafter draws trees.
    """
    num_parts = max(len(choices) for choices in _candidates(drafter, rows))
    recorded: list[list[list[RecordedDraft]]] = []
    originals = [list(row.tokens) for row in rows]
    for part in range(num_parts):
        for row, tokens in zip(rows, originals, strict=True):
            # Every part drafts along the same text: noise depends on positions only.
            row.tokens[:] = tokens
            row.finish_reason = None
        recorder = DraftRecorder(part, depth, len(rows))
        components = Components(target, drafter, RecordingVerifier(verifier, recorder), recorder)
        for number, _ in enumerate(decode(components, rows), start=1):
            if number == num_tokens:
                break
        recorded.append(recorder.drafts)
    names = tasks or [""] * len(rows)
    return [
        Trace(
            names[index],
            row.num_prompt,
            row.params.temperature,
            [of_part[index] for of_part in recorded],
            row.coupled,
        )
        for index, row in enumerate(rows)
    ]


def _candidates(drafter: Drafter, rows: Sequence[Row]) -> Sequence[Sequence[Candidate]]:
    drafter.begin(rows)
    try:
        return drafter.candidates(rows)
    finally:
        for row in rows:
            drafter.end(row)


@dataclass
class DraftRecorder(Controller):
    """Controller that requests long drafts of one component drafter and records them.

    Args:
        part: index of the component drafter.
        depth: maximum draft length; one more node is requested to see the distribution of the last.
        num_rows: batch size.
    """

    part: int
    depth: int
    num_rows: int
    drafts: list[list[RecordedDraft]] = field(init=False)
    name: str = "tape"

    def __post_init__(self) -> None:
        self.drafts = [[] for _ in range(self.num_rows)]
        self._candidates: list[Candidate] = []
        self._dists: list[list[NodeProbs]] = []
        self._accepted: list[list[int]] = []
        self._chances: list[list[float]] = []

    def plan(self, rows: Sequence[Row], candidates: Sequence[Sequence[Candidate]]) -> list[Plan]:
        self._candidates = [
            next(choice for choice in choices if choice.part == self.part) for choices in candidates
        ]
        self._dists = [[] for _ in rows]
        return [Plan(self.part, self.depth + 1) for _ in rows]

    def go_on(self, rows: Sequence[Row], dists: DraftProbs, depth: int) -> list[bool]:
        for index, numbers in enumerate(
            zip(dists.confidences, dists.entropies, dists.runners_up, strict=True)
        ):
            self._dists[index].append(NodeProbs(*numbers))
        return [True] * len(rows)

    def record_acceptance(self, accepted: list[list[int]], chances: list[list[float]] | None = None) -> None:
        """Record, per row, the accepted nodes of its draft cut to 1, 2, ... nodes, and the nodes' `chances`."""
        self._accepted = accepted
        self._chances = chances or [[] for _ in accepted]

    def learn(self, rows: Sequence[Row], draft: Draft, verdict: Verdict, time: RoundTime) -> None:
        for index, length in enumerate(draft.lengths.tolist()):
            length = min(length, self.depth)
            dists = () if self._candidates[index].deterministic else tuple(self._dists[index][:length])
            accepted = tuple(self._accepted[index][:length])
            chances = tuple(self._chances[index][:length])
            self.drafts[index].append(RecordedDraft(self._candidates[index], dists, accepted, chances))


class RecordingVerifier(Verifier):
    """Verifier that commits one token of the target per round and records what another would accept."""

    name = "recording"

    def __init__(self, verifier: Verifier, recorder: DraftRecorder) -> None:
        self.exactness = verifier.exactness
        self._verifier = verifier
        self._recorder = recorder

    def verify(self, draft: Draft, target_probs: Tensor, noise: Noise) -> Verdict:
        if not draft.is_chain:
            raise BadInputError(
                "expected a drafter of chains to record a trace of, got a tree; leave out the drafter's option tree"
            )
        longest = min(draft.num_nodes, self._recorder.depth)
        chances = node_chances(draft, target_probs, noise)
        if noise.all_greedy or noise.all_coupled:
            # The text does not depend on the draft: a shorter draft is accepted as far as it goes.
            whole = self._verifier.verify(draft, target_probs, noise).lengths.tolist()
            self._recorder.record_acceptance(
                [[min(length, cut) for cut in range(1, longest + 1)] for length in whole], chances
            )
        else:
            cuts = [_cut(draft, length) for length in range(1, longest + 1)]
            verdicts = [
                self._verifier.verify(cut, target_probs[:, : cut.num_nodes + 1], noise).lengths.tolist()
                for cut in cuts
            ]
            by_row = [list(accepted) for accepted in zip(*verdicts, strict=True)]
            self._recorder.record_acceptance(by_row or [[] for _ in range(draft.num_rows)], chances)
        nothing = torch.zeros(draft.num_rows, dtype=torch.long)
        first = noise.race(target_probs[:, :1], nothing[:, None].to(target_probs.device))
        return Verdict.from_chain(nothing, first[:, 0])


def node_chances(draft: Draft, target_probs: Tensor, noise: Noise) -> list[list[float]]:
    """Return the acceptance probability of each node of chains given its prefix: min(1, p(x) / q(x)).

    It is that of the rejection rule (arXiv 2211.17192), the training target of SpecDec++ (arXiv
    2405.19715). At temperature 0 and for coupled rows it is 1 or 0, as the text is decided before
    the draft.
    """
    if draft.num_nodes == 0:
        return [[] for _ in range(draft.num_rows)]
    tokens = draft.tokens.to(target_probs.device)
    ratios = target_probs[:, :-1].gather(-1, tokens[..., None])[..., 0].double()
    if draft.probs is not None:
        ratios = ratios / draft.probs.gather(-1, tokens[..., None])[..., 0].double()
    if noise.any_coupled:
        matches = noise.race(target_probs, query_depths(draft))[:, :-1] == tokens
        ratios = torch.where(noise.coupled.to(ratios.device)[:, None], matches.double(), ratios)
    chances: list[list[float]] = ratios.clamp(max=1).tolist()
    return chances


def _cut(draft: Draft, length: int) -> Draft:
    """Return the first nodes of chains."""
    probs = None if draft.probs is None else draft.probs[:, :length]
    return Draft(draft.tokens[:, :length], draft.parents[:, :length], draft.lengths.clamp(max=length), probs)
