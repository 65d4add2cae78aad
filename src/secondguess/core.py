"""Data types shared by all modules: rows, drafts, verdicts and commits.

Glossary:

    target      model whose output distribution is preserved
    drafter     proposes draft tokens, which the target verifies
    row         one sequence of the batch
    slot        place of a row in a KV cache
    pending     last committed token of a row: not in the target's KV cache yet, first input of the
                next forward pass
    node        one draft token
    draft       tree of nodes below `pending`; a chain is a tree with a single path
    level       nodes of equal depth; draft lengths count levels, which in a chain are nodes
    round       draft, score, verify, commit
    path        accepted nodes, from a child of `pending` downwards
    correction  token sampled after a rejection
    bonus       token sampled after all nodes of a path to a leaf were accepted
    commit      tokens that a row gains in one round
    room        number of tokens that a row can still gain

Index conventions. The target is evaluated at the `num_nodes + 1` *queries* of a draft.
`target_probs[row, 0]` is the distribution after `pending`, `target_probs[row, i + 1]` the
distribution after node `i`. A node at depth `d` (children of `pending` have depth 0) is a
candidate for absolute position `len(row.tokens) + d`.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, Literal, NamedTuple, Protocol

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from secondguess.params import MAX_DRAFT_LENGTH as MAX_DRAFT_LENGTH
from secondguess.params import SamplingParams
from secondguess.tensors import ancestor_closure, padded, padded_tensor, token_tensor
from secondguess.tensors import within_vocabulary as within_vocabulary

FinishReason = Literal["stop", "length", "context", "grammar"]
"""Reason why a row ended.

`stop`: an end token, a stop string, or the end of the grammar. `length`: `max_tokens` tokens were
generated. `context`: the model's context is full. `grammar`: the grammar left no token that may follow,
so the text is incomplete.
"""


ImageInputs = Mapping[str, Any]
"""Inputs of a vision-language model in addition to the tokens of a prompt: tensors that its processor makes, or the
outputs of its image encoder."""


@dataclass(eq=False)
class Row:
    """One sequence of the batch.

    Args:
        tokens: prompt token ids, at least one; committed tokens are appended.
        params: the request's sampling settings.
        seed: key of the row's noise: the request's seed, or random bits if it has none.
        sample_index: index among the samples of one request; second part of the noise key.
        coupled: draw draft tokens and output tokens from the same exponential race (Gumbel-max
            coupling), so that the text depends on the seed alone.
        end_tokens: tokens that end the row: the request's stop tokens and, unless it ignores them,
            the model's end tokens.
        context_length: number of positions that the target supports.
        stop_checker: detects stop strings, if the request has any.
        grammar: position in the request's grammar, if it has one.
        finish_reason: None until the row is finished.
        sources: the row's own draft sources, in addition to the drafter, in order of preference.
        parts: parts of the drafter (`Candidate.part`) that may draft for the row; None for all.
        history: owner of the recent outputs that the row drafts from and adds its own to (an API
            key, or empty for the process); None to use no other text than its own.
        images: inputs of the target for the images of the prompt; None for a prompt of text.
        prompt_logprobs: log-probabilities of the prompt's tokens from the second on, as far as it is
            prefilled; None for a row that needs none.
    """

    tokens: list[int]
    params: SamplingParams
    # its noise
    seed: int = 0
    sample_index: int = 0
    coupled: bool = False
    # its end
    end_tokens: frozenset[int] = frozenset()
    context_length: int = 2**31
    stop_checker: StopChecker | None = None
    grammar: GrammarState | None = None
    finish_reason: FinishReason | None = None
    # its drafts
    sources: tuple[DraftSource, ...] = ()
    parts: frozenset[int] | None = None
    history: str | None = None
    # its prompt
    images: ImageInputs | None = None
    prompt_logprobs: list[TokenLogprob] | None = None
    num_prompt: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_prompt = len(self.tokens)

    @property
    def pending(self) -> int:
        """Last committed token, not in the target's KV cache yet."""
        return self.tokens[-1]

    @property
    def output(self) -> list[int]:
        """Token ids generated so far."""
        return self.tokens[self.num_prompt :]

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def room(self) -> int:
        """Number of tokens that this row can still gain."""
        return min(self.params.max_tokens - self.num_output, self.context_length - len(self.tokens))

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def commit(self, accepted: Sequence[int], next_token: int, rejected: Sequence[int] = ()) -> Commit:
        """Append the accepted tokens and the next token, up to the token that ends the row.

        Tokens are dropped only when the row finishes, so the KV cache of an unfinished row always
        matches its tokens.
        """
        tokens = []
        for token in (*accepted, next_token):
            self.tokens.append(token)
            tokens.append(token)
            self.finish_reason = self._finish_reason_after(token)
            if self.finished:
                break
        return Commit(self, tokens, min(len(accepted), len(tokens)), rejected=rejected)

    def commit_nothing(self) -> Commit:
        """Finish a row that may gain no tokens."""
        self.finish_reason = "length"
        return Commit(self, [], 0)

    def _finish_reason_after(self, token: int) -> FinishReason | None:
        met_stop_string = self.stop_checker is not None and self.stop_checker.push(token)
        if self.grammar is not None:
            if self.grammar.push(token):
                return "stop"
            if self.grammar.has_failed:
                return "grammar"
        if self.num_output >= self.params.min_tokens and (met_stop_string or token in self.end_tokens):
            return "stop"
        if self.num_output >= self.params.max_tokens:
            return "length"
        return "context" if len(self.tokens) >= self.context_length else None


@dataclass(frozen=True)
class Commit:
    """Tokens that one row gained in one round.

    Args:
        row: the row, already extended.
        tokens: accepted draft tokens, then the token sampled by the verifier (absent if the row
            ended before it).
        num_accepted: number of accepted draft tokens in `tokens`.
        logprobs: per token, its log-probability and the requested alternatives; empty unless the
            request asks for them.
        rejected: draft tokens that would have followed the accepted ones; in a tree, along the first
            child of each.
    """

    row: Row
    tokens: list[int]
    num_accepted: int
    logprobs: list[TokenLogprob] = field(default_factory=list)
    rejected: Sequence[int] = ()

    @property
    def drafted(self) -> list[bool]:
        """Per token, True if a drafter proposed it."""
        return [index < self.num_accepted for index in range(len(self.tokens))]


@dataclass(frozen=True)
class TokenLogprob:
    """Natural log-probability of a token under the target, before any sampling setting.

    Attributes:
        token: token id.
        logprob: its log-probability.
        alternatives: log-probability by token id of the most probable tokens, in descending order.
        text: the token decoded on its own, special tokens and leading spaces included. A token
            that is only part of a character gives the replacement character U+FFFD. Empty in a
            `Commit`, which has no tokenizer.
        alternative_texts: the same for each of `alternatives`.
    """

    token: int
    logprob: float
    alternatives: dict[int, float]
    text: str = ""
    alternative_texts: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Draft:
    """Draft tokens of a batch of rows, padded to the same number of nodes.

    Args:
        tokens: `[row, node]` int64.
        parents: `[row, node]` int64, index of the parent node, -1 for a child of `pending`. A
            parent precedes its children; padding nodes have parent -1.
        lengths: `[row]` int64, number of real nodes of each row.
        probs: `[row, node, vocab]`, distribution that each node was drawn from. None for a
            deterministic drafter, whose distribution is one-hot on the draft token. Sampled
            siblings share their parent's distribution as it was before any of them was drawn.
        without_replacement: True if siblings were drawn without replacement: each from the parent's
            distribution with its earlier siblings removed, renormalised. False if they were drawn
            independently, so that equal siblings can occur. Siblings are drawn, and must be
            verified, in the order of their indices.
    """

    tokens: Tensor
    parents: Tensor
    lengths: Tensor
    probs: Tensor | None = None
    without_replacement: bool = True

    @staticmethod
    @lru_cache(maxsize=256)
    def empty(num_rows: int, device: torch.device | str = "cpu", vocab_size: int | None = None) -> Draft:
        """Return a draft without nodes, which makes the round plain decoding.

        `vocab_size` is that of `probs`; None for a deterministic draft, without `probs`. It selects
        the verification rule, and a row's text must not depend on whether another row had room to
        draft. Cached, because all plain rounds use the same one.
        """
        probs = (
            None
            if vocab_size is None
            else torch.empty(num_rows, 0, vocab_size, dtype=torch.float32, device=device)
        )
        return Draft.chains([()] * num_rows, probs, device)

    @classmethod
    def chains(
        cls,
        chains: Sequence[Sequence[int]],
        probs: Tensor | None = None,
        device: torch.device | str = "cpu",
    ) -> Draft:
        """Build a draft with one path per row from lists of token ids of any lengths.

        >>> Draft.chains([[5, 6], [7]]).parents.tolist()
        [[-1, 0], [-1, -1]]
        """
        shapes, parents, lengths = _structure_of_chains(tuple(map(len, chains)), torch.device(device))
        token_lists = padded(chains, 0)
        tokens = token_tensor(token_lists, parents.device).reshape(parents.shape)
        draft = cls(tokens, parents, lengths, probs)
        # Known here; reading them from a device would wait for it.
        vars(draft).update(token_lists=token_lists, shapes=shapes)
        return draft

    def with_probs(self, probs: Tensor | None) -> Draft:
        """Return the same nodes with other distributions; the cached properties are kept."""
        draft = object.__new__(Draft)
        vars(draft).update(vars(self), probs=probs)
        return draft

    @property
    def num_rows(self) -> int:
        return self.tokens.shape[0]

    @property
    def num_nodes(self) -> int:
        """Number of nodes per row, padding included."""
        return self.tokens.shape[1]

    @cached_property
    def token_lists(self) -> list[list[int]]:
        """`tokens` as lists."""
        tokens: list[list[int]] = self.tokens.tolist()
        return tokens

    @cached_property
    def mask(self) -> Tensor:
        """`[row, node]` bool, True for real nodes."""
        return torch.arange(self.num_nodes, device=self.tokens.device) < self.lengths[:, None]

    @cached_property
    def shapes(self) -> list[tuple[int, ...]]:
        """Parents of the real nodes of each row; rows of equal shape can be verified together."""
        lengths = self.lengths.tolist()
        return [tuple(row[:length]) for row, length in zip(self.parents.tolist(), lengths, strict=True)]

    @cached_property
    def is_branching(self) -> list[bool]:
        """Per row, True if its draft is not a single path."""
        chain = tuple(range(-1, self.num_nodes - 1))
        return [shape != chain[: len(shape)] for shape in self.shapes]

    @cached_property
    def is_chain(self) -> bool:
        """True if the draft of every row is a single path."""
        return not any(self.is_branching)

    @cached_property
    def num_levels(self) -> list[int]:
        """Per row, the number of nodes on the longest path; in a chain, its length."""
        if self.is_chain:
            return [len(shape) for shape in self.shapes]
        levels: list[int] = (self.ancestors().sum(-1) * self.mask).amax(1).tolist()
        return levels

    def following(self, row: int, path: Sequence[int]) -> list[int]:
        """Return the tokens below a path of a row's draft, along the first child of each node."""
        last, tokens = path[-1] if path else -1, []
        for node, parent in enumerate(self.shapes[row]):
            if parent == last:
                tokens.append(self.token_lists[row][node])
                last = node
        return tokens

    def ancestors(self) -> Tensor:
        """Return `[row, node, node]` bool, True where the second is the first or its ancestor."""
        return ancestor_closure(self.parents)

    def select(self, rows: Tensor) -> Draft:
        """Return the drafts of some rows, in the given order (`[n]` int64 indices)."""
        probs = None if self.probs is None else self.probs[rows]
        return Draft(
            self.tokens[rows], self.parents[rows], self.lengths[rows], probs, self.without_replacement
        )


@dataclass(frozen=True)
class Verdict:
    """Result of verification: accepted path and next token of each row.

    Args:
        paths: per row, indices of the accepted nodes from a child of `pending` downwards.
        next_tokens: per row, the correction or bonus token.
        samples: per row, the token sampled at each query, from verifiers that sample at all of them
            (`Verifier.reports_samples`). Those after a mismatch are not part of the text.
    """

    paths: Sequence[Sequence[int]]
    next_tokens: Sequence[int]
    samples: Sequence[Sequence[int]] = ()

    @classmethod
    def from_chain(cls, lengths: Sequence[int], next_tokens: Sequence[int]) -> Verdict:
        """Return the verdict that accepts the first `lengths` nodes of each chain."""
        return cls([list(range(length)) for length in lengths], next_tokens)

    @classmethod
    def merged(cls, parts: Sequence[tuple[Sequence[int], Verdict]], num_rows: int) -> Verdict:
        """Combine the verdicts of disjoint groups of rows, each with the indices of its rows."""
        paths: list[Sequence[int]] = [()] * num_rows
        next_tokens, samples = [0] * num_rows, list(paths)
        for rows, verdict in parts:
            all_samples = verdict.samples or [()] * len(rows)
            members = zip(rows, verdict.paths, verdict.next_tokens, all_samples, strict=True)
            for row, path, token, own in members:
                paths[row], next_tokens[row], samples[row] = path, token, own
        return cls(paths, next_tokens, samples)

    @property
    def lengths(self) -> list[int]:
        """Number of accepted nodes, per row."""
        return [len(path) for path in self.paths]


class Candidate(NamedTuple):
    """Candidate source of a row's next draft, as known before drafting.

    Args:
        part: index of the component drafter; 0 for a drafter without components. Negative for a
            source of the row's own.
        kind: property of the draft known in advance, such as the match length of a suffix lookup.
            Drafts of one kind have similar acceptance rates, so statistics are kept per kind.
        longest: largest number of levels that it can provide.
        deterministic: True if its drafts are deterministic, without `probs`; `keep_drafting` is not called.
        num_uncached: number of tokens to prefill before the first level can be drafted.
        certain: True if all its nodes will be accepted, so that it is drafted whatever the
            controller plans.
        length_factor: factor by which its drafts may be longer than those of other candidates.
        expected: acceptance probability of the first node that is expected before any draft of this kind was
            verified; None if nothing is known.
    """

    part: int = 0
    kind: Hashable = ""
    longest: int = MAX_DRAFT_LENGTH
    deterministic: bool = False
    num_uncached: int = 0
    certain: bool = False
    length_factor: int = 1
    expected: float | None = None


class Plan(NamedTuple):
    """Draft plan of a row: component drafter and largest number of levels (0: plain decoding)."""

    part: int
    length: int


class KeepDrafting(Protocol):
    """Callback that decides per row whether to draft another level; see `Budgets.keep_drafting`."""

    def __call__(
        self,
        logits: Tensor,
        depth: int,
        acceptance_probs: Sequence[float] | None = None,
        confidences: Sequence[float] | None = None,
        /,
    ) -> list[bool]: ...


class Budgets(NamedTuple):
    """Draft lengths of a round, chosen without access to the tokens that will be drawn.

    Args:
        lengths: per row, the largest number of levels, which in a chain are nodes. The drafter
            chooses the number of nodes per level of a tree.
        keep_drafting: callback to call after each level. It receives the drafter's logits `[row, vocab]`
            from which the nodes of the level were drawn, before sampling settings (in a tree, the
            logits after the most probable parent), and the depth of these nodes. It returns per
            row whether to draft another level *after* them. It never receives the drawn tokens:
            this is the non-anticipation rule (docs/controllers.md, "Why a controller may not see
            the tokens"). Entries of rows that drew no node at this depth are meaningless. A
            drafter trained to predict acceptance probabilities can pass them as third argument,
            and one that has computed the largest probability per row can pass it as fourth.
        uses_probs: False if `keep_drafting` always returns True, so that drafters can skip the call.
        parts: per row, the component drafter or, if negative, the row's own source to use
            (`Candidate.part`). Drafters without components ignore it.
    """

    lengths: list[int]
    keep_drafting: KeepDrafting
    uses_probs: bool = True
    parts: Sequence[int] = ()

    @staticmethod
    @lru_cache(maxsize=256)
    def empty(num_rows: int) -> Budgets:
        """Return the budgets of a round without drafts; cached like `Draft.empty`."""
        return Budgets([0] * num_rows, lambda *_: [True] * num_rows, uses_probs=False, parts=[0] * num_rows)

    @property
    def longest(self) -> int:
        """Largest draft length of all rows."""
        return max(self.lengths, default=0)


@dataclass(frozen=True)
class RoundTime:
    """Seconds of a round.

    Args:
        prefill: to prepare the drafter (its prefill).
        draft: to draft.
        total: of the round, and to learn from the round before.
        plan: to choose draft lengths, and to learn from the round before; included in `total`.
    """

    prefill: float
    draft: float
    total: float
    plan: float = 0.0


class StopChecker(Protocol):
    """Detector of stop strings in a row's output."""

    def push(self, token: int) -> bool:
        """Add the next output token; return True if the text now contains a stop string."""
        ...


class GrammarState(Protocol):
    """Position of a row's output in its grammar; see `sampling.grammar.GrammarMatcher`."""

    @property
    def has_failed(self) -> bool:
        """True if the last token was not one that the grammar allowed: no token was, and the text ends."""
        ...

    def push(self, token: int) -> bool:
        """Add the next output token; return True if the text is complete and nothing can follow."""
        ...

    def allowed(self, path: tuple[int, ...]) -> NDArray[numpy.bool_] | None:
        """Return the tokens `[vocab]` that may follow the output and a drafted path; None for all."""
        ...


class DraftSource(Protocol):
    """Source of deterministic drafts that belongs to one row; see `drafters.row_sources`."""

    part: int
    """Part number of its candidates (`Candidate.part`), which is negative."""

    def candidate(self, row: Row) -> Candidate:
        """Return the candidate after the row's tokens; of length 0 if there is none."""
        ...

    def chain(self, limit: int) -> list[int]:
        """Return at most `limit` draft tokens of the last candidate."""
        ...


@lru_cache(maxsize=256)
def _structure_of_chains(
    num_nodes: tuple[int, ...], device: torch.device
) -> tuple[list[tuple[int, ...]], Tensor, Tensor]:
    """Return `shapes`, `parents` and `lengths` of chains; cached, because the same few numbers of nodes recur."""
    shapes = [tuple(range(-1, length - 1)) for length in num_nodes]
    return shapes, padded_tensor(shapes, -1, device), token_tensor(num_nodes, device)
