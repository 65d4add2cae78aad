"""What a drafter would have guessed at every place of a text, and how much of it the verifier accepts.

Recorded once, such a trace replays any controller exactly (`replay.py`): at temperature 0 and for seeded requests the text
does not depend on the drafts, so the guess behind every prefix, and what is accepted of its first 1, 2, ... nodes,
is all there is to know. For other sampled text the replay goes on along the recorded text where a real run would go on along
the accepted draft: another sample of the same law.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from secondguess.controllers.base import Controller
from secondguess.controllers.draft_probs import DraftProbs
from secondguess.core import Candidate, Draft, Plan, RoundTime, Row, Verdict
from secondguess.decode import Team, decode
from secondguess.drafters.base import Drafter
from secondguess.errors import BadInputError
from secondguess.noise import Noise
from secondguess.runtime.base import Runtime
from secondguess.verifiers.base import Verifier, query_depths


@dataclass(frozen=True)
class NodeProbs:
    """The law that one node was drawn from, in what controllers ask of it (see `DraftProbs`)."""

    confidence: float
    entropy: float
    runner_up: float


@dataclass(frozen=True)
class Guess:
    """What one part of a drafter says at one place of a text.

    Args:
        candidate: what it says beforehand.
        dists: per node, its law; empty for a certain drafter. The last node's is not known.
        accepted: accepted nodes of a draft of the first 1, 2, ... nodes.
        chances: per node, the chance that it is accepted if all before it were (see `node_chances`); empty in traces
            that did not note it.
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
    """One prompt's text with the guesses at each of its places.

    Args:
        task: which part of a workload the prompt belongs to.
        num_prompt: tokens of the prompt.
        temperature: of the text.
        guesses: `[part][place]`; place i stands behind the prompt and i tokens of the text.
        coupled: whether drafts and text were drawn by one race.
        max_tokens: of the request, for a text that ended before; None where it did not.
    """

    task: str
    num_prompt: int
    temperature: float
    guesses: list[list[Guess]]
    coupled: bool = False
    max_tokens: int | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.guesses[0])


def record(
    target: Runtime,
    drafter: Drafter,
    verifier: Verifier,
    rows: Sequence[Row],
    num_tokens: int,
    depth: int = 12,
    tasks: Sequence[str] | None = None,
) -> list[Trace]:
    """Let the target write, token by token, and the drafter guess at every place.

    A guess is a chain, so that cut to its first nodes it is what a shorter draft would have been.

    Args:
        rows: fresh rows with room for `num_tokens` and `depth + 1` more; they keep the text.
        num_tokens: places to record per row.
        depth: most nodes of a guess.
        tasks: of the rows; all of one nameless task by default.

    Raises:
        BadInputError: the drafter draws trees.
    """
    num_parts = max(len(choices) for choices in _candidates(drafter, rows))
    tapes: list[list[list[Guess]]] = []
    originals = [list(row.tokens) for row in rows]
    for part in range(num_parts):
        for row, tokens in zip(rows, originals, strict=True):
            # Every part guesses along the same text: what a row's noise draws depends on its places alone.
            row.tokens[:] = tokens
            row.finish_reason = None
        tape = Tape(part, depth, len(rows))
        team = Team(target, drafter, Teacher(verifier, tape), tape)
        for number, _ in enumerate(decode(team, rows), start=1):
            if number == num_tokens:
                break
        tapes.append(tape.guesses)
    names = tasks or [""] * len(rows)
    return [
        Trace(
            names[index], row.num_prompt, row.params.temperature, [tape[index] for tape in tapes], row.coupled
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
class Tape(Controller):
    """Asks one part for long guesses and notes what it hears.

    Args:
        part: which part guesses.
        depth: most nodes of a guess; one more is asked for, so that the law of the last one is heard too.
        num_rows: of the batch.
    """

    part: int
    depth: int
    num_rows: int
    guesses: list[list[Guess]] = field(init=False)
    name: str = "tape"

    def __post_init__(self) -> None:
        self.guesses = [[] for _ in range(self.num_rows)]
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

    def hear(self, accepted: list[list[int]], chances: list[list[float]] | None = None) -> None:
        """Per row, the accepted nodes of its draft cut to 1, 2, ... nodes, and where it is known the chance of each node."""
        self._accepted = accepted
        self._chances = chances or [[] for _ in accepted]

    def learn(self, rows: Sequence[Row], draft: Draft, verdict: Verdict, time: RoundTime) -> None:
        for index, length in enumerate(draft.lengths.tolist()):
            length = min(length, self.depth)
            dists = () if self._candidates[index].deterministic else tuple(self._dists[index][:length])
            accepted = tuple(self._accepted[index][:length])
            chances = tuple(self._chances[index][:length])
            self.guesses[index].append(Guess(self._candidates[index], dists, accepted, chances))


class Teacher(Verifier):
    """Commits one token of the target's own per round, and tells a tape what a real verifier would have accepted."""

    name = "teacher"

    def __init__(self, verifier: Verifier, tape: Tape) -> None:
        self.exactness = verifier.exactness
        self._verifier = verifier
        self._tape = tape

    def verify(self, draft: Draft, target_probs: Tensor, noise: Noise) -> Verdict:
        if not draft.is_chain:
            raise BadInputError(
                "expected a drafter of chains to record a trace of, got a tree; leave out the drafter's option tree"
            )
        longest = min(draft.num_nodes, self._tape.depth)
        chances = node_chances(draft, target_probs, noise)
        if noise.all_greedy or noise.all_coupled:
            # What is accepted is what the text says: a shorter draft is accepted as far as it goes.
            whole = self._verifier.verify(draft, target_probs, noise).lengths.tolist()
            self._tape.hear(
                [[min(length, cut) for cut in range(1, longest + 1)] for length in whole], chances
            )
        else:
            cuts = [_cut(draft, length) for length in range(1, longest + 1)]
            verdicts = [
                self._verifier.verify(cut, target_probs[:, : cut.num_nodes + 1], noise).lengths.tolist()
                for cut in cuts
            ]
            by_row = [list(accepted) for accepted in zip(*verdicts, strict=True)]
            self._tape.hear(by_row or [[] for _ in range(draft.num_rows)], chances)
        nothing = torch.zeros(draft.num_rows, dtype=torch.long)
        first = noise.race(target_probs[:, :1], nothing[:, None].to(target_probs.device))
        return Verdict.of_chain(nothing, first[:, 0])


def node_chances(draft: Draft, target_probs: Tensor, noise: Noise) -> list[list[float]]:
    """Per row and node of chains, the chance that the node is accepted on its own prefix: min(1, p(x) / q(x)).

    That of the rejection rule (arXiv 2211.17192), which SpecDec++ (arXiv 2405.19715) learns from. Where the text is decided
    before the draft it is 1 or 0: at temperature 0 because p is one-hot, for a coupled row because the race is.
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
    """The first nodes of chains."""
    probs = None if draft.probs is None else draft.probs[:, :length]
    return Draft(draft.tokens[:, :length], draft.parents[:, :length], draft.lengths.clamp(max=length), probs)
