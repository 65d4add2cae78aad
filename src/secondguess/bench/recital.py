"""Traces along a text that the target has written already: one plain run, and then no target pass per drafter.

Whatever does not look at the drafted law (greedy text, and look-ups under any sampling) is accepted exactly as far as it says
what the text says. So the loop runs with the target replaced by the text, which costs a drafter's own time and nothing else,
and that time is noted too. Sampled drafts have to be judged against the target's laws: `traces.record` does that.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import takewhile

import torch
from torch import Tensor

from secondguess.bench.traces import Guess, Tape, Trace
from secondguess.controllers import make_controller
from secondguess.core import Budgets, Draft, Prospect, Row, Verdict
from secondguess.decode import Team, decode
from secondguess.drafters.base import Drafter
from secondguess.drafters.none import NoDrafter
from secondguess.errors import BadInputError
from secondguess.noise import Noise
from secondguess.runtime.base import Hidden, Runtime, Scores
from secondguess.verifiers.base import Exactness, Verifier


def write_texts(target: Runtime, verifier: Verifier, rows: Sequence[Row]) -> list[list[int]]:
    """Let the target write, without drafts, to the rows' ends; gives each row's new tokens."""
    for _ in decode(Team(target, NoDrafter(), verifier, make_controller("fixed:0")), rows):
        pass
    return [row.output for row in rows]


class Recital(Runtime):
    """Stands in for the target of a text that is known: scores nothing, keeps nothing."""

    vocab_size = 1
    context_length = 2**31
    num_layers = 0

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def begin(self, rows: Sequence[Row]) -> list[Hidden]:
        return [{}] * len(rows)

    def read_up(self, rows: Sequence[Row]) -> None:
        pass

    def score(self, rows: Sequence[Row], draft: Draft) -> Scores:
        return Scores(torch.zeros(len(rows), draft.num_nodes + 1, 1, device=self.device), {})

    def keep(self, rows: Sequence[Row], paths: Sequence[Sequence[int]]) -> None:
        pass

    def rewind(self, rows: Sequence[Row], lengths: Sequence[int]) -> None:
        pass

    def end(self, row: Row) -> None:
        pass


class Prompter(Verifier):
    """Commits the next token of each text, and tells a tape how far each draft said the same as the text."""

    name = "prompter"
    exactness = Exactness.LOSSLESS

    def __init__(self, texts: Sequence[Sequence[int]], tape: Tape) -> None:
        self._texts = texts
        self._tape = tape
        self._place = 0

    def judge(self, draft: Draft, target_probs: Tensor, noise: Noise) -> Verdict:
        place, drafts = self._place, zip(draft.tokens.tolist(), draft.lengths.tolist(), strict=True)
        whole = [
            _num_equal(tokens[:length], text[place:])
            for (tokens, length), text in zip(drafts, self._texts, strict=True)
        ]
        self._tape.hear([[min(length, cut) for cut in range(1, draft.num_nodes + 1)] for length in whole])
        self._place += 1
        next_tokens = torch.tensor([text[place] for text in self._texts], device=draft.tokens.device)
        return Verdict.of_chain(torch.zeros_like(draft.lengths), next_tokens)


def _num_equal(tokens: Sequence[int], text: Sequence[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(tokens, text, strict=False)))


class WatchedDrafter(Drafter):
    """Passes everything on to a drafter of one part, and counts the processor seconds of its rounds.

    Processor time of this thread: what look-ups do is Python, and other programs' load is not theirs.
    """

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self.name, self.certain = drafter.name, drafter.certain
        self.default_controller = drafter.default_controller
        self.seconds = 0.0

    def begin(self, rows: Sequence[Row], hidden: Sequence[Hidden] = ()) -> None:
        self._drafter.begin(rows, hidden)

    def prospects(self, rows: Sequence[Row]) -> Sequence[Sequence[Prospect]]:
        start = time.thread_time()
        prospects = self._drafter.prospects(rows)
        self.seconds += time.thread_time() - start
        return prospects

    def prepare(self, rows: Sequence[Row], parts: Sequence[int]) -> None:
        self._drafter.prepare(rows, parts)

    def propose(self, rows: Sequence[Row], budgets: Budgets, noise: Noise) -> Draft:
        start = time.thread_time()
        draft = self._drafter.propose(rows, budgets, noise)
        self.seconds += time.thread_time() - start
        return draft

    def observe(self, rows: Sequence[Row], verdict: Verdict, hidden: Hidden) -> None:
        start = time.thread_time()
        self._drafter.observe(rows, verdict, hidden)
        self.seconds += time.thread_time() - start

    def end(self, row: Row) -> None:
        self._drafter.end(row)


def recite(
    drafter: Drafter,
    rows: Sequence[Row],
    texts: Sequence[Sequence[int]],
    num_places: int,
    depth: int,
    device: torch.device,
) -> tuple[list[list[Guess]], float]:
    """Let a drafter of one part guess at every place of known texts.

    Args:
        rows: fresh rows with room for `num_places + depth + 2` tokens; they gain the texts.
        texts: new tokens of each row, at least `num_places`; guesses beyond a text's end count as wrong.
        num_places: places per row.
        depth: most nodes of a guess.
        device: where the target is.

    Returns:
        Guesses `[row][place]`, and the processor seconds that the drafter took per row and place.
    """
    if min(map(len, texts)) < num_places:
        raise BadInputError(
            f"expected texts of at least {num_places} tokens, got one of {min(map(len, texts))}; ask for fewer places"
        )
    if not num_places:
        return [[] for _ in rows], 0.0
    tape = Tape(0, depth, len(rows))
    watched = WatchedDrafter(drafter)
    team = Team(Recital(device), watched, Prompter(texts, tape), tape)
    for number, _ in enumerate(decode(team, rows), start=1):
        if number == num_places:
            break
    return tape.guesses, watched.seconds / (num_places * len(rows))


def make_trace(
    task: str, row: Row, parts: Sequence[Sequence[Guess]], num_tokens: int, max_tokens: int
) -> Trace:
    """One row's trace from the guesses of the parts of a drafter, cut where the text ends."""
    guesses = [list(part[:num_tokens]) for part in parts]
    return Trace(
        task, row.num_prompt, row.params.temperature, guesses, coupled=row.coupled, max_tokens=max_tokens
    )
