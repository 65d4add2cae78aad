"""The nouns that every other module shares.

Glossary (one word per thing, in code, documentation, command line and metrics):

target      the model whose law we keep           drafter     whoever guesses what it will say
row         one sequence in flight                pending     a row's last committed token, which the target
                                                              has not cached yet; it opens the next forward
draft       guessed nodes, a tree hanging from pending; a chain is the tree with one path
level       the nodes of one depth; a draft's length is counted in levels, which in a chain are its nodes
round       draft, score, judge, keep, commit     path        the accepted nodes, root to leaf
correction  the token drawn after a rejection     bonus       the token drawn after full acceptance
commit      tokens that became part of a row      room        how many tokens a row may still gain

Index conventions. Node `i` of a draft is followed by the law `target_probs[row, i + 1]`;
`target_probs[row, 0]` is the law that follows `pending`. These `num_nodes + 1` places are called *queries*.
A node at depth `d` (children of pending have depth 0) proposes the token at absolute position
`len(row.tokens) + d`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

import numpy
import torch
from torch import Tensor

if TYPE_CHECKING:
    from secondguess.sampling import SamplingParams


FinishReason = Literal["stop", "length", "context"]
"""`stop`: an end token or a stop string. `length`: `max_tokens` tokens. `context`: the model's context is full."""


class StopWatcher(Protocol):
    """Sees every committed token and says when the text has met a stop string."""

    def push(self, token: int) -> bool:
        """Take the next output token; True when the row's text now contains a stop string."""
        ...


@dataclass(eq=False)
class Row:
    """One sequence in flight: its prompt, what was committed to it, and when it ends.

    Args:
        tokens: prompt token ids, at least one; committed tokens are appended.
        params: the request's sampling settings.
        seed: key of this row's noise (the request's seed, or entropy drawn once when it gave none).
        stream: which of several samples of one request this is; the second part of the noise key.
        coupled: draw drafts and verdicts from one race, so that the text depends on the seed alone.
        end_tokens: tokens that end the row (the model's end tokens and the request's stop tokens).
        context_length: positions that the target can hold.
        watcher: looks for stop strings, where the request has any.
    """

    tokens: list[int]
    params: SamplingParams
    seed: int = 0
    stream: int = 0
    coupled: bool = False
    end_tokens: frozenset[int] = frozenset()
    context_length: int = 2**31
    watcher: StopWatcher | None = None
    finish_reason: FinishReason | None = None
    num_prompt: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_prompt = len(self.tokens)

    @property
    def pending(self) -> int:
        return self.tokens[-1]

    @property
    def output(self) -> list[int]:
        """The tokens generated so far."""
        return self.tokens[self.num_prompt :]

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def room(self) -> int:
        """How many more tokens this row may gain."""
        return min(self.params.max_tokens - self.num_output, self.context_length - len(self.tokens))

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def commit(self, accepted: Sequence[int], next_token: int) -> Commit:
        """Append the accepted tokens and the one that follows them, up to wherever the row ends.

        What lies behind an end token, a stop string or the last place is dropped: it is not returned,
        streamed or counted. A cut always finishes the row, so no live row disagrees with its cache.
        """
        tokens = [*accepted, next_token]
        for count, token in enumerate(tokens, start=1):
            self.tokens.append(token)
            self.finish_reason = self._reason_to_end(token)
            if self.finished:
                tokens = tokens[:count]
                break
        return Commit(self, tokens, num_accepted=min(len(accepted), len(tokens)))

    def _reason_to_end(self, token: int) -> FinishReason | None:
        met_stop_string = self.watcher is not None and self.watcher.push(token)
        if self.num_output >= self.params.min_tokens and (met_stop_string or token in self.end_tokens):
            return "stop"
        if self.num_output >= self.params.max_tokens:
            return "length"
        return "context" if len(self.tokens) >= self.context_length else None


@dataclass(frozen=True)
class Commit:
    """What one row gained in one round: first the accepted tokens, then (unless cut) the target's own.

    `logprobs` holds, per token, the log-probability under the target's unmodified law and the
    alternatives that were asked for; it is empty unless the request wanted them.
    """

    row: Row
    tokens: list[int]
    num_accepted: int
    logprobs: list[TokenLogprob] = field(default_factory=list)

    @property
    def drafted(self) -> list[bool]:
        """Per token, whether a drafter wrote it."""
        return [index < self.num_accepted for index in range(len(self.tokens))]


@dataclass(frozen=True)
class TokenLogprob:
    """Natural-log probability of a token under the target's distribution before any sampling setting.

    Args:
        token: its id.
        logprob: its log-probability.
        alternatives: ids of the most probable tokens, most probable first, with their log-probabilities.
        text: the token decoded by itself, special tokens and a leading space included; a token that is only a part of a
            character gives the replacement character U+FFFD. Empty in a `Commit`, which has no tokenizer.
        alternative_texts: the same for each of `alternatives`.
    """

    token: int
    logprob: float
    alternatives: dict[int, float]
    text: str = ""
    alternative_texts: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Draft:
    """Guessed nodes for a batch of rows, padded to the same number of nodes.

    Args:
        tokens: `[row, node]` int64.
        parents: `[row, node]` int64, index of the parent node, -1 for a child of pending; a parent stands
            before its children, and padding nodes have parent -1.
        lengths: `[row]` int64, how many of a row's nodes are real.
        probs: `[row, node, vocab]`, the law each node was drawn from; None when the drafter was certain
            (its law is one-hot on the token it named). Sampled siblings share their parent's law as it was
            before any of them was drawn.
        distinct: siblings were drawn without replacement: each from the parent's law without its earlier
            siblings, renormalised. False: independently, so twins may occur. Siblings are drawn, and have to be
            judged, in the order of their indices.
    """

    tokens: Tensor
    parents: Tensor
    lengths: Tensor
    probs: Tensor | None = None
    distinct: bool = True

    @classmethod
    def empty(cls, num_rows: int, device: torch.device | str = "cpu", law_width: int | None = None) -> Draft:
        """No guess for any row: the round becomes plain decoding.

        Args:
            law_width: tokens in the laws of a drafter that has some; None for certain drafts. Which of the two a draft is
                decides what rule judges it, and a row's text must not depend on whether another row had room to draft.
        """
        return _empty_draft(num_rows, torch.device(device), law_width)

    @classmethod
    def chains(
        cls,
        chains: Sequence[Sequence[int]],
        probs: Tensor | None = None,
        device: torch.device | str = "cpu",
    ) -> Draft:
        """One path per row, from lists of token ids of any lengths.

        >>> Draft.chains([[5, 6], [7]]).parents.tolist()
        [[-1, 0], [-1, -1]]
        """
        lengths = tuple([len(chain) for chain in chains])
        width = max(lengths, default=0)
        tokens = [[*chain, *([0] * (width - len(chain)))] for chain in chains]
        as_tensor = token_tensor(tokens, torch.device(device)).reshape(len(chains), width)
        return cls(as_tensor, *_chain_form(lengths, torch.device(device)), probs)

    @property
    def num_rows(self) -> int:
        return self.tokens.shape[0]

    @property
    def num_nodes(self) -> int:
        """Width of the padded draft."""
        return self.tokens.shape[1]

    @cached_property
    def mask(self) -> Tensor:
        """`[row, node]` bool, True where a node is real."""
        return torch.arange(self.num_nodes, device=self.tokens.device) < self.lengths[:, None]

    @cached_property
    def shapes(self) -> list[tuple[int, ...]]:
        """Per row, the parents of its real nodes; rows of one shape can be judged together."""
        lengths = self.lengths.tolist()
        return [tuple(row[:length]) for row, length in zip(self.parents.tolist(), lengths, strict=True)]

    @cached_property
    def branches(self) -> list[bool]:
        """Per row, whether its draft is more than a single path."""
        chain = tuple(range(-1, self.num_nodes - 1))
        return [shape != chain[: len(shape)] for shape in self.shapes]

    @cached_property
    def is_chain(self) -> bool:
        """Whether every row's draft is a single path."""
        return not any(self.branches)

    @cached_property
    def depths(self) -> Tensor:
        """`[row]` int64, how many nodes the longest path of each row has; of a chain its length."""
        if self.is_chain:
            return self.lengths
        return (self.ancestors().sum(-1) * self.mask).amax(1)

    def ancestors(self) -> Tensor:
        """`[row, node, node]` bool: True where the second node is the first one or an ancestor of it."""
        nodes = torch.arange(self.num_nodes, device=self.tokens.device)
        reach = (self.parents[:, :, None] == nodes) | (nodes[:, None] == nodes)
        # Squaring a reachability doubles the generations that it spans.
        for _ in range(max(self.num_nodes - 1, 0).bit_length()):
            reach = (reach.float() @ reach.float()) > 0
        return reach

    def select(self, rows: Tensor) -> Draft:
        """The drafts of some rows, in the order given (`[n]` int64 indices)."""
        probs = None if self.probs is None else self.probs[rows]
        return Draft(self.tokens[rows], self.parents[rows], self.lengths[rows], probs, self.distinct)


def token_tensor(ids: Sequence[int] | Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """An int64 tensor of lists of one length, in a fraction of `torch.tensor`'s time behind a forward, which empties caches."""
    on_host = torch.from_numpy(numpy.array(ids, numpy.int64))
    return on_host if device.type == "cpu" else on_host.to(device)


@lru_cache(maxsize=256)
def _empty_draft(num_rows: int, device: torch.device, law_width: int | None) -> Draft:
    """Most rounds of a drafter that rests have the same one."""
    nothing = torch.zeros(num_rows, 0, dtype=torch.long, device=device)
    laws = None if law_width is None else torch.empty(num_rows, 0, law_width, device=device)
    return Draft(nothing, nothing, torch.zeros(num_rows, dtype=torch.long, device=device), laws)


@lru_cache(maxsize=256)
def _first_nodes(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """`[row, depth]`, the paths along the first so many nodes of chains, padded with -1."""
    index = numpy.arange(max(lengths, default=0))
    paths = numpy.where(index < numpy.array(lengths, numpy.int64)[:, None], index, -1)
    return torch.from_numpy(paths).to(device)


@lru_cache(maxsize=256)
def _chain_form(lengths: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Parents and lengths of chains so long; the same few forms come back in every round."""
    width = max(lengths, default=0)
    parents = [[*range(-1, length - 1), *([-1] * (width - length))] for length in lengths]
    as_tensor = partial(torch.tensor, dtype=torch.long, device=device)
    return as_tensor(parents).reshape(len(lengths), width), as_tensor(lengths)


@dataclass(frozen=True)
class Verdict:
    """Which nodes were accepted and which token follows them.

    Args:
        paths: `[row, depth]` int64, accepted node indices root to leaf, padded with -1.
        lengths: `[row]` int64, how many nodes each path has.
        next_tokens: `[row]` int64, the correction or the bonus.
    """

    paths: Tensor
    lengths: Tensor
    next_tokens: Tensor

    @classmethod
    def of_chain(cls, lengths: Tensor, next_tokens: Tensor) -> Verdict:
        """A chain's path is its first `lengths` nodes."""
        return cls(_first_nodes(tuple(lengths.tolist()), lengths.device), lengths, next_tokens)

    @classmethod
    def merged(cls, parts: Iterable[tuple[Tensor, Verdict]], num_rows: int) -> Verdict:
        """One verdict from verdicts about disjoint groups of rows, each with its `[n]` row indices."""
        parts = list(parts)
        depth = max((verdict.paths.shape[1] for _, verdict in parts), default=0)
        device = parts[0][1].lengths.device if parts else torch.device("cpu")
        paths = torch.full((num_rows, depth), -1, dtype=torch.long, device=device)
        lengths = torch.zeros(num_rows, dtype=torch.long, device=device)
        next_tokens = torch.zeros(num_rows, dtype=torch.long, device=device)
        for rows, verdict in parts:
            paths[rows, : verdict.paths.shape[1]] = verdict.paths
            lengths[rows] = verdict.lengths
            next_tokens[rows] = verdict.next_tokens
        return cls(paths, lengths, next_tokens)

    def path_lists(self) -> list[list[int]]:
        """The paths as plain lists, one transfer for the whole batch."""
        lengths = self.lengths.tolist()
        return [path[:length] for path, length in zip(self.paths.tolist(), lengths, strict=True)]


MAX_DRAFT_LENGTH = 64
"""No draft is useful beyond this many levels: a larger number is a mistake."""


class Prospect(NamedTuple):
    """One way in which a row could be drafted for, as known before anything is drafted.

    Args:
        part: which of a drafter's parts would guess; 0 for a drafter that is not made of several.
        kind: what is known of the guess beforehand, such as the length of a match. Guesses of one kind are
            expected to be accepted alike, so experience is kept by kind.
        longest: most levels it can give.
        certain: its nodes have no law; nobody is asked whether to go on after them.
        unread: tokens that have to be read before the first level can be drafted.
    """

    part: int = 0
    kind: Hashable = ""
    longest: int = MAX_DRAFT_LENGTH
    certain: bool = False
    unread: int = 0


class Plan(NamedTuple):
    """Which part of the drafter guesses for a row, and how many levels at most; none is plain decoding."""

    part: int
    length: int


class GoOn(Protocol):
    """Decides per row, from the logits `[row, vocab]` of the nodes just drawn, whether to draw another one after them."""

    def __call__(
        self, logits: Tensor, depth: int, foretold: Sequence[float] | None = None, /
    ) -> list[bool]: ...


@dataclass(frozen=True)
class Budgets:
    """How far a drafter may go this round, decided without seeing any token it will draw.

    Args:
        lengths: per row, the largest number of levels; in a chain, nodes. How many nodes a level of a tree has is its
            drafter's affair.
        go_on: given the drafter's logits `[row, vocab]` of the nodes just drawn (of a tree's level, those
            behind its likeliest parent), before sampling settings, and the depth of those nodes, says per row whether
            to draw another level *after* them. It is never shown the drawn tokens: that is the non-anticipation rule
            (docs/controllers.md, "Why a controller may not see the tokens"). Rows that drew no node at this depth have
            a line too; it means nothing. A drafter that was trained to foretell how likely each node is accepted may
            hand these chances in, as third argument.
        reads_laws: False when `go_on` always says yes, so that drafters need not call it.
        parts: per row, which part of a drafter made of several is to guess; empty for the first everywhere.
    """

    lengths: list[int]
    go_on: GoOn
    reads_laws: bool = True
    parts: Sequence[int] = ()

    @property
    def longest(self) -> int:
        return max(self.lengths, default=0)


@dataclass(frozen=True)
class RoundTime:
    """Seconds that a round has taken.

    Args:
        prefill: of them, getting a drafter ready (reading what it had not read yet).
        draft: of them, drafting.
        total: all of them.
    """

    prefill: float
    draft: float
    total: float
