"""Jacobi drafter: the last round's own samples at the positions not accepted. Use `jacobi,width=N`.

Speculative Jacobi decoding (arXiv 2410.01699) with coupled noise (arXiv 2510.24211). A pass samples
a token at every query. Those after the first mismatch follow a wrong token and are no output; but
the next round samples these positions with the same noise from distributions that are often
similar, so that it often draws the same tokens. They are its draft. There is no other model.

Exactness. The draft depends on the noise of positions that are not committed yet. For `coupled`
this is allowed, because its text depends on no draft: by induction over positions, token t is the
winner of the race of position t under the target's distribution after the tokens before it, which
is plain decoding's, and a node only saves the pass if it equals that winner. Rules that accept a
node by chance need drafts that are independent of their noise, and they sample at one query alone:
`check_verifier` refuses them. Where `auto` verifies rows without a seed, the noise of a round is
keyed by the round, hence independent of drafts made of earlier samples; fewer of them are then
accepted than with a seed or `coupled`. At temperature 0 this is Jacobi decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from secondguess.core import Row, Verdict
from secondguess.drafters.lookup import LookupDrafter
from secondguess.names import check_range
from secondguess.runtime.base import HiddenStates

MAX_WIDTH = 8192


@dataclass(frozen=True)
class JacobiOptions:
    """Options of `jacobi,width=N`: a new position is drafted as the token `width` positions before it.

    1 is the last token, the tokens per line of a picture the one above.
    """

    width: int = 1

    def __post_init__(self) -> None:
        check_range("width of the drafter jacobi", self.width, 1, MAX_WIDTH)


class SampledAhead:
    """Text of a row, and the tokens that the last rounds sampled after it."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.ahead: list[int] = []

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text."""
        self.tokens += tokens

    def update(self, samples: Sequence[int], num_committed: int) -> None:
        """Replace what was sampled ahead of the old text, whose next tokens are committed now."""
        self.ahead = [*samples, *self.ahead[len(samples) :]][num_committed:]


class JacobiDrafter(LookupDrafter[SampledAhead]):
    """Deterministic drafter that proposes the samples of the last round again."""

    kind = "jacobi"
    options_type = JacobiOptions
    options: JacobiOptions
    needs_samples = True

    def make_index(self, row: Row) -> SampledAhead:
        return SampledAhead()

    def chain(self, index: SampledAhead, limit: int) -> list[int]:
        width = self.options.width
        chain = index.ahead[:limit]
        text = [*index.tokens[-width:], *chain]
        while len(chain) < limit:
            text.append(text[-min(width, len(text))])
            chain.append(text[-1])
        return chain

    def observe(self, rows: Sequence[Row], verdict: Verdict, hidden: HiddenStates) -> None:
        row_samples = verdict.samples or [()] * len(rows)
        for row, path, samples in zip(rows, verdict.paths, row_samples, strict=True):
            self._indices[row].update(samples, len(path) + 1)
