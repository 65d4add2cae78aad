"""A smaller language model guesses (arXiv 2211.17192, 2302.01318): `model:PATH`.

The draft model is a runtime like the target, with a cache of its own. Each target row has a *shadow*: a row
whose tokens are the committed ones plus what was drafted this round. A draft step scores the shadows; the
runtime forwards what it has not cached yet: normally one token, two after a draft was accepted whole.

A row that is not drafted for costs nothing: the draft model reads its text when (and if) the controller first
wants a draft, and what was written meanwhile when it next wants one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from secondguess.core import MAX_DRAFT_LENGTH, Budgets, Draft, Prospect, Row
from secondguess.drafters.base import Drafter, Supplies
from secondguess.errors import BadInputError
from secondguess.names import Name, refuse_options
from secondguess.noise import Noise
from secondguess.runtime.base import Runtime
from secondguess.sampling import drafter_laws

UNREADABLE = 0
"""What a draft model is shown in place of a token that its vocabulary lacks."""

FAR_BEHIND = 16
"""A shadow with more unread tokens than this reads them before the draft begins, and not in its first step. Unread tokens
are told in steps of so many."""


@dataclass(eq=False)
class Shadow:
    """What the draft model believes a row to be.

    Args:
        row: committed tokens, then those drafted this round; the draft model caches a prefix of them.
        num_agreed: how many of them are known to be committed and will not change.
    """

    row: Row
    num_agreed: int


class ModelDrafter(Drafter):
    """Drafts chains by sampling from a second model under each row's own settings.

    Args:
        runtime: the draft model; nobody else may use it.
        name: as given to `--drafter`.
        vocab_size: width of the target's logits. The draft model's may be wider (the rest is never drafted)
            or narrower (the rest gets probability zero, and is read as token 0 where the text has it).
    """

    certain = False

    def __init__(self, runtime: Runtime, name: str, vocab_size: int) -> None:
        self.runtime = runtime
        self.name = name
        self.vocab_size = vocab_size
        self._shadows: dict[Row, Shadow] = {}

    @classmethod
    def build(cls, name: Name, supplies: Supplies) -> ModelDrafter:
        if not name.argument:
            raise BadInputError("expected the path of a draft model, as in model:PATH, got none")
        refuse_options(name, "drafter")
        runtime = supplies.load_draft_model(name.argument)
        return cls(runtime, f"{name.kind}:{name.argument}", supplies.target_vocab_size)

    def prospects(self, rows: Sequence[Row]) -> list[tuple[Prospect]]:
        """Nothing, for rows that the draft model's context does not hold."""
        return [(self._prospect(row),) for row in rows]

    def _prospect(self, row: Row) -> Prospect:
        shadow = self._shadows.get(row)
        unread = len(row.tokens) - (shadow.num_agreed if shadow else 0)
        # To a few tokens: the same few values come back in every round.
        coarse = unread // FAR_BEHIND * FAR_BEHIND if unread > FAR_BEHIND else 0
        return _make_prospect(min(self._room(row), MAX_DRAFT_LENGTH), coarse)

    def prepare(self, rows: Sequence[Row], parts: Sequence[int]) -> None:
        """Make the shadows agree with the rows, and read what is more than a step's worth."""
        held = [row for row in rows if self._room(row) > 0]
        new = [row for row in held if row not in self._shadows]
        known = [row for row in held if row in self._shadows]
        behind = [self._shadows[row] for row in known]
        for row, shadow in zip(known, behind, strict=True):
            self._agree(shadow, row.tokens)
        self.runtime.rewind([shadow.row for shadow in behind], [shadow.num_agreed for shadow in behind])
        far = [shadow.row for shadow in behind if len(shadow.row.tokens) - shadow.num_agreed > FAR_BEHIND]
        if far:
            self.runtime.read_up(far)
        if new:
            self._admit(new)

    def _admit(self, rows: Sequence[Row]) -> None:
        shadows = [Row([self._readable(token) for token in row.tokens], row.params) for row in rows]
        # Known before the prefill, so that `end` releases them even if it is interrupted.
        for row, shadow in zip(rows, shadows, strict=True):
            self._shadows[row] = Shadow(shadow, num_agreed=len(shadow.tokens))
        self.runtime.begin(shadows)

    def propose(self, rows: Sequence[Row], budgets: Budgets, noise: Noise) -> Draft:
        if not budgets.longest:
            return _no_chains(len(rows), self.vocab_size, self.runtime.device, noise.all_greedy)
        limits = [min(limit, self._room(row)) for row, limit in zip(rows, budgets.lengths, strict=True)]
        active = [index for index, limit in enumerate(limits) if limit > 0]
        certain = all(row.params.temperature == 0 for row in rows)
        edits = any(row.params.edits_logits for row in rows)
        plain = certain and not edits
        own_laws = all(row.params.keeps_laws for row in rows)
        chains: list[list[int]] = [[] for _ in rows]
        drawn: list[Tensor] = []
        laws: list[Tensor] = []
        while active:
            depth = len(drawn)
            logits = self._next_logits(rows, active)
            if plain:
                tokens = logits.max(-1).indices  # half the time of argmax on a CPU, the same answer
            else:
                try:
                    law = drafter_laws(
                        logits, rows, _beside(drawn if edits else [], len(rows), logits.device)
                    )
                except BadInputError:
                    # A narrower vocabulary may hold nothing that a row's settings allow: nothing to guess then.
                    break
                tokens = noise.draft(law, depth)
                laws.append(law)
            drawn.append(tokens)
            self._extend(rows, chains, active, tokens.tolist())
            active = [index for index in active if depth + 1 < limits[index]]
            if active and budgets.reads_laws:
                going_on = budgets.go_on(law if own_laws else logits.softmax(-1), depth)
                active = [index for index in active if going_on[index]]
        return Draft.chains(chains, None if certain else self._probs(laws, len(rows)), self.runtime.device)

    def end(self, row: Row) -> None:
        shadow = self._shadows.pop(row, None)
        if shadow is not None:
            self.runtime.end(shadow.row)

    def _room(self, row: Row) -> int:
        """How many nodes the draft model's context allows; its last node need not be forwarded."""
        return max(0, self.runtime.context_length - len(row.tokens) + 1)

    def _next_logits(self, rows: Sequence[Row], active: list[int]) -> Tensor:
        """`[row, vocab]` behind each shadow in one forward of the active rows; the others get zeros."""
        shadows = [self._shadows[rows[index]].row for index in active]
        scores = self.runtime.score(shadows, _nothing(len(active), self.runtime.device))
        logits = scores.logits[:, 0, : self.vocab_size]
        if len(active) == len(rows):
            return logits
        everybody = logits.new_zeros(len(rows), logits.shape[1])
        everybody[active] = logits
        return everybody

    def _extend(
        self, rows: Sequence[Row], chains: list[list[int]], active: list[int], tokens: list[int]
    ) -> None:
        for index in active:
            chains[index].append(tokens[index])
            self._shadows[rows[index]].row.tokens.append(tokens[index])

    def _probs(self, laws: list[Tensor], num_rows: int) -> Tensor:
        """The laws as `[row, node, vocab]` of the target's width."""
        if not laws:
            return torch.empty(num_rows, 0, self.vocab_size, device=self.runtime.device)
        probs = torch.stack(laws, 1)
        missing = self.vocab_size - probs.shape[-1]
        return pad(probs, (0, missing)) if missing else probs

    def _agree(self, shadow: Shadow, tokens: list[int]) -> None:
        """Replace what a shadow believed by `tokens`, counting how far it was right."""
        believed = shadow.row.tokens
        agreed = shadow.num_agreed
        # The last token is always left to be forwarded: its logits open the next draft. A correction may
        # equal the token it corrects (block verification), so the comparison alone would not see to that.
        last = min(len(believed), len(tokens) - 1)
        while agreed < last and believed[agreed] == self._readable(tokens[agreed]):
            agreed += 1
        believed[agreed:] = [self._readable(token) for token in tokens[agreed:]]
        shadow.num_agreed = agreed

    def _readable(self, token: int) -> int:
        return token if token < self.runtime.vocab_size else UNREADABLE


def _beside(drawn: list[Tensor], num_rows: int, device: torch.device) -> Tensor:
    """`[row, i]` from i tensors `[row]`."""
    return torch.stack(drawn, 1) if drawn else _nothing(num_rows, device).tokens


@lru_cache(maxsize=1024)
def _make_prospect(longest: int, unread: int) -> Prospect:
    return Prospect(longest=longest, unread=unread)


@lru_cache(maxsize=64)
def _no_chains(num_rows: int, vocab_size: int, device: torch.device, certain: bool) -> Draft:
    """A round's empty draft.

    It has laws like any other, for no nodes: whether a draft is certain decides which rule judges it, and a
    row's text must not depend on whether another row of its batch had room to draft.
    """
    empty = Draft.empty(num_rows, device)
    return empty if certain else replace(empty, probs=torch.empty(num_rows, 0, vocab_size, device=device))


@lru_cache(maxsize=64)
def _nothing(num_rows: int, device: torch.device) -> Draft:
    """The empty draft of a draft step, made once."""
    return Draft.empty(num_rows, device)
