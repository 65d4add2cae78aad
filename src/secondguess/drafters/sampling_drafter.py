"""Base classes of drafters that sample their nodes, as chains or trees, from logits."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from secondguess.core import MAX_DRAFT_LENGTH, Budgets, Candidate, Draft, Row, Verdict
from secondguess.drafters.base import Drafter, DrafterResources, Requirements, single_candidate
from secondguess.drafters.trees import TreeShape, draft_trees, read_tree_options
from secondguess.errors import MismatchWarning
from secondguess.heads.base import LoadedHead, TargetModel
from secondguess.names import Name
from secondguess.runtime.base import HiddenStates, Runtime
from secondguess.runtime.chains import ChainDecision, ChainRequest, DrawnChains, KernelSettings, VocabularyMap
from secondguess.sampling.kernels import with_confidences
from secondguess.sampling.noise import Noise
from secondguess.sampling.probs import compute_draft_probs
from secondguess.sampling.truncation import kernel_settings, most_likely

HeadT = TypeVar("HeadT", bound=LoadedHead)

PREFILL_THRESHOLD = 16
"""Number of uncached tokens above which a row is prefilled before the draft.

Up to this many are forwarded in the first draft step. Candidates report the number of uncached
tokens in multiples of it.
"""
NUM_WATCHED, MOST_BY_CHANCE = 32, 0.04
"""Number of rounds after which a trained drafter is compared with chance, and the largest share accepted by chance.

At most one of 32 rounds of one row has an accepted token with a probability of 0.7 % if a fifth of first tokens is accepted.
"""


class SamplingDrafter(Drafter):
    """Base class of drafters that sample chains, or trees of one shape, from logits.

    It applies each row's sampling settings, the budgets, and the width of the target's vocabulary.
    Subclasses supply logits: after a chain that is extended token by token, and after every node of a
    tree.

    Args:
        name: as given to `--drafter`.
        vocab_size: width of the target's logits. The drafter's may be wider (the extra tokens are
            never drafted) or narrower (the missing tokens get probability zero).
        device: device of the logits.
        shape: shape of the trees; None for chains.

    Attributes:
        chains: tokens drafted so far in this round, per row, unless trees are drafted.
    """

    deterministic = False

    def __init__(
        self, name: str, vocab_size: int, device: torch.device, shape: TreeShape | None = None
    ) -> None:
        self.name = name
        self.vocab_size = vocab_size
        self.device = device
        self.shape = shape
        self.can_draft_trees = shape is not None
        self.chains: list[list[int]] = []
        self._unfinished: dict[Row, None] = {}

    def room(self, row: Row) -> int:
        """Return the largest number of levels that can be drafted for a row."""
        return MAX_DRAFT_LENGTH

    def num_uncached(self, row: Row) -> int:
        """Return the number of tokens to prefill before the first level can be drafted."""
        return 0

    def catch_up(self, rows: Sequence[Row], max_tokens: int | None = None) -> None:
        """Prefill rows that are about to be drafted for, by at most `max_tokens` tokens in all."""

    def start(self, rows: Sequence[Row], longest: int) -> None:
        """Start a round of at most `longest` levels for a batch of prepared rows."""

    @abstractmethod
    def chain_logits(self, rows: Sequence[Row], active: list[int]) -> Tensor:
        """Return logits `[row, vocab]` after the last token of each row's chain (`chains`).

        That token is pending if the chain is empty. Logits of inactive rows are finite numbers
        without meaning.
        """

    def extend(self, rows: Sequence[Row], active: list[int], tokens: list[int]) -> None:
        """Process `tokens` `[row]`, which were appended to the chains of the active rows."""

    @abstractmethod
    def tree_logits(self, rows: Sequence[Row], active: list[int], tree: Draft) -> Tensor:
        """Return logits `[row, node + 1, vocab]` after pending and after each node.

        Only those of the last level of the active rows are used; the others are finite numbers
        without meaning.
        """

    def whole_chains(
        self, rows: Sequence[Row], requests: Sequence[ChainRequest], decision: ChainDecision
    ) -> DrawnChains | None:
        """Draw chains of rows at once, extended as by `extend`; arguments as of `Runtime.draft_chains`.

        None to draw them token by token.
        """
        return None

    def acceptance_probs(self, depth: int) -> list[float] | None:
        """Return per row the acceptance probability of the node at this depth of its chain.

        It is conditional on the acceptance of the nodes before. None for drafters that were not
        trained to predict it. The node has already been drawn, but the prediction must not depend
        on its token.
        """
        return None

    def candidates(self, rows: Sequence[Row]) -> list[tuple[Candidate]]:
        """Return one candidate per row, of length 0 if there is no room to draft for it."""
        return [self._candidate(row) for row in rows]

    def _candidate(self, row: Row) -> tuple[Candidate]:
        num_uncached = self.num_uncached(row)
        # Rounded, so that few values occur and the cache of `single_candidate` is hit.
        coarse = num_uncached // PREFILL_THRESHOLD * PREFILL_THRESHOLD
        max_depth = MAX_DRAFT_LENGTH if self.shape is None else self.shape.depth
        longest = 0 if row in self._unfinished else min(self.room(row), max_depth)
        return single_candidate(longest, coarse if num_uncached > PREFILL_THRESHOLD else 0)

    def prepare(self, rows: Sequence[Row], parts: Sequence[int], max_tokens: int | None = None) -> list[bool]:
        if max_tokens is not None:
            limit = max(max_tokens, PREFILL_THRESHOLD)
            self._unfinished.update((row, None) for row in rows if self.num_uncached(row) > limit)
        is_ready = [row not in self._unfinished for row in rows]
        self.catch_up(
            [row for row, ready in zip(rows, is_ready, strict=True) if ready and self.room(row) > 0]
        )
        return is_ready

    @property
    def unfinished(self) -> list[Row]:
        return list(self._unfinished)

    def prefill(self, rows: Sequence[Row], max_tokens: int) -> None:
        self.catch_up(rows, max_tokens)
        for row in rows:
            if self.num_uncached(row) <= PREFILL_THRESHOLD:
                del self._unfinished[row]

    def release(self, row: Row) -> None:
        self._unfinished.pop(row, None)

    def propose(self, rows: Sequence[Row], budgets: Budgets, noise: Noise) -> Draft:
        limits = [min(limit, self.room(row)) for row, limit in zip(rows, budgets.lengths, strict=True)]
        self.chains = [[] for _ in rows]
        self.start(rows, budgets.longest)
        if self.shape is None:
            return self._draw_chains(rows, limits, budgets, noise)
        return self._draw_trees(rows, self.shape, limits, budgets, noise)

    def _draw_chains(self, rows: Sequence[Row], limits: list[int], budgets: Budgets, noise: Noise) -> Draft:
        active = [index for index, limit in enumerate(limits) if limit > 0]
        edits = any(row.params.edits_logits for row in rows)
        if active and not edits:
            settings = [kernel_settings(row.params) for row in rows]
            drawn = self._draw_at_once(rows, limits, self.vocab_size, settings, budgets, noise)
            if drawn is not None:
                return self._draft_of(drawn, len(rows), active, noise)
        dists: list[Tensor] = []
        drafted = Draft.empty(len(rows), self.device).tokens  # so far, if settings depend on them
        while active:
            depth = max(map(len, self.chains))
            logits = self._of_target_width(self.chain_logits(rows, active))
            confidences = None
            if edits or not noise.all_greedy:
                dist, banned = compute_draft_probs(logits, rows, drafted)
                if banned is not None:
                    active = [index for index in active if not banned[index]]
                    if not active:
                        break
                nodes = noise.draft(dist, depth)
                dists.append(dist)
                if edits:
                    drafted = torch.cat((drafted, nodes[:, None]), 1)
                tokens = nodes.tolist()
            elif budgets.uses_probs:
                tokens, confidences = with_confidences(logits)
            else:
                tokens = most_likely(logits).tolist()
            for index in active:
                self.chains[index].append(tokens[index])
            self.extend(rows, active, tokens)
            active = [index for index in active if depth + 1 < limits[index]]
            if active and budgets.uses_probs:
                kept = budgets.keep_drafting(logits, depth, self.acceptance_probs(depth), confidences)
                active = [index for index in active if kept[index]]
        probs = None if noise.all_greedy else self._probs(dists, len(rows))
        return Draft.chains(self.chains, probs, self.device)

    def _draw_at_once(
        self,
        rows: Sequence[Row],
        limits: Sequence[int],
        vocab_size: int,
        settings: Sequence[KernelSettings],
        budgets: Budgets,
        noise: Noise,
        vocabulary: VocabularyMap | None = None,
    ) -> DrawnChains | None:
        """Return the chains of the rows with a limit above 0; None if they must be drawn token by token."""
        row_noises, active = noise.of_rows(), [index for index, limit in enumerate(limits) if limit > 0]
        if row_noises is None:
            return None
        requests = [
            ChainRequest(limits[index], vocab_size, settings[index], row_noises[index], vocabulary)
            for index in active
        ]

        def keep_drafting(
            which: Sequence[int], logits: Tensor, depth: int, confidences: Sequence[float]
        ) -> list[bool]:
            asked = [active[index] for index in which]
            row_confidences = [0.0] * len(rows)
            for index, confidence in zip(asked, confidences, strict=True):
                row_confidences[index] = confidence
            logits = expand_to_batch(logits, len(rows), asked)
            kept = budgets.keep_drafting(logits, depth, None, row_confidences)
            return [kept[index] for index in asked]

        decision = keep_drafting if budgets.uses_probs else None
        return self.whole_chains([rows[index] for index in active], requests, decision)

    def _draft_of(self, drawn: DrawnChains, num_rows: int, active: list[int], noise: Noise) -> Draft:
        """Return the draft of chains that were drawn at once for the active rows."""
        for index, chain in zip(active, drawn.tokens, strict=True):
            self.chains[index] = chain
        if noise.all_greedy:
            return Draft.chains(self.chains, None, self.device)
        if drawn.probs is not None:
            return Draft.chains(self.chains, expand_to_batch(drawn.probs, num_rows, active), self.device)
        # All of these rows are at temperature 0.
        shape = (num_rows, max(map(len, drawn.tokens)), self.vocab_size)
        probs = torch.zeros(shape, dtype=torch.float32, device=self.device)
        for index, chain in zip(active, drawn.tokens, strict=True):
            probs[index, range(len(chain)), chain] = 1.0
        return Draft.chains(self.chains, probs, self.device)

    def _draw_trees(
        self, rows: Sequence[Row], shape: TreeShape, limits: list[int], budgets: Budgets, noise: Noise
    ) -> Draft:
        def level_logits(active: list[int], tree: Draft) -> Tensor:
            return self._of_target_width(self.tree_logits(rows, active, tree))

        keep_drafting = budgets.keep_drafting if budgets.uses_probs else None
        draft = draft_trees(rows, shape, limits, noise, level_logits, keep_drafting)
        if noise.all_greedy:
            return draft
        if draft.probs is None:
            return draft.with_probs(self._probs([], len(rows)))
        return draft.with_probs(self._padded(draft.probs))

    def _of_target_width(self, logits: Tensor) -> Tensor:
        return logits[..., : self.vocab_size] if logits.shape[-1] > self.vocab_size else logits

    def _probs(self, dists: list[Tensor], num_rows: int) -> Tensor:
        """Stack distributions to `[row, node, vocab]` at the target's vocabulary width."""
        if not dists:
            return torch.empty(num_rows, 0, self.vocab_size, dtype=torch.float32, device=self.device)
        return self._padded(torch.stack(dists, 1))

    def _padded(self, probs: Tensor) -> Tensor:
        missing = self.vocab_size - probs.shape[-1]
        return pad(probs, (0, missing)) if missing else probs


class FirstTokens:
    """Acceptance of the first tokens of a trained drafter's drafts; warns once if it is that of chance.

    Args:
        name: name of the drafter.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._drafted: Sequence[bool] = ()
        self._num_drafted = self._num_accepted = 0

    def propose(self, draft: Draft) -> None:
        """Note which rows of the round have drafts."""
        if self._num_drafted < NUM_WATCHED:
            self._drafted = [length > 0 for length in draft.num_levels]

    def observe(self, verdict: Verdict) -> None:
        """Count the drafts of the round that `propose` noted."""
        drafted, self._drafted = self._drafted, ()
        if not any(drafted) or len(drafted) != len(verdict.paths):  # other rows, if the round was interrupted
            return
        # Rows of a batch may have the same text: a round counts as one draft, accepted if any of its rows' is.
        self._num_drafted += 1
        self._num_accepted += any(
            is_drafted and path for is_drafted, path in zip(drafted, verdict.paths, strict=True)
        )
        if self._num_drafted >= NUM_WATCHED and self._num_accepted <= MOST_BY_CHANCE * self._num_drafted:
            warnings.warn(
                f"the drafter {self._name} is no better than chance: in {self._num_accepted} of its first {self._num_drafted} "
                "rounds a token was accepted; the output stays correct. It was trained for another target, or its "
                "layers, its tokenizer or the target's weights are others than in training; `secondguess inspect` lists "
                "drafters that fit",
                MismatchWarning,
                stacklevel=2,
            )


class HeadDrafter(SamplingDrafter):
    """Base class of drafters with a trained head.

    Args:
        head: on the target's device and in its dtype.
        target: target that the head was trained for.
        name, shape: as in `SamplingDrafter`.

    Attributes:
        load_head: reads the head in a folder.
    """

    load_head: Callable[[Path, TargetModel], LoadedHead]

    def __init__(self, head: Any, target: Runtime, name: str, shape: TreeShape | None = None) -> None:
        super().__init__(name, target.vocab_size, target.device, shape)
        self.head = head.eval().requires_grad_(False)
        self.hidden_layers = head.hidden_layers
        self._first_tokens = FirstTokens(name)

    def propose(self, rows: Sequence[Row], budgets: Budgets, noise: Noise) -> Draft:
        draft = super().propose(rows, budgets, noise)
        self._first_tokens.propose(draft)
        return draft

    def observe(self, rows: Sequence[Row], verdict: Verdict, hidden: HiddenStates) -> None:
        self._first_tokens.observe(verdict)

    @classmethod
    def requirements(cls, name: Name, head: Path | None = None) -> Requirements:
        """Accept the options of trees, and require a trained head."""
        read_tree_options(name)
        return Requirements(head=True)

    @classmethod
    def build(cls, name: Name, resources: DrafterResources) -> Self:
        """Build the drafter for a name whose argument, if any, is the folder of a trained head."""
        full_name, shape = read_tree_options(name)
        return cls(*load_trained(cls.load_head, name, resources), full_name, shape)


def load_trained(
    load_head: Callable[[Path, TargetModel], HeadT], name: Name, resources: DrafterResources
) -> tuple[HeadT, Runtime]:
    """Return the trained head for a name, on the target's device and in its dtype, and the target."""
    folder = resources.find_head_folder(name)
    target = resources.require_target(name)
    model = TargetModel.from_runtime(target)
    with torch.random.fork_rng(devices=[]):  # initial values, which loading replaces, are drawn on the CPU
        head = load_head(folder, model)
    return head.to(target.device, model.dtype), target


def expand_to_batch(values: Tensor, num_rows: int, active: list[int]) -> Tensor:
    """Expand values of the active rows to `[row, ...]` for the whole batch, zeros elsewhere."""
    if len(active) == num_rows:
        return values
    expanded = values.new_zeros(num_rows, *values.shape[1:])
    expanded[active] = values
    return expanded
