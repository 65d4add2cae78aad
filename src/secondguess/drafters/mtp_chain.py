"""Drafter with a chain of MTP modules, of which each drafts one token (`MtpChain`).

Module k runs over the row without its first k + 1 tokens, in a KV cache of its own. Its features of
committed tokens are outputs of module k - 1, or the target's states; those of draft nodes are the
outputs of module k - 1 at their parents. So no draft is longer than the chain.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from secondguess.core import Draft, Row, Verdict
from secondguess.drafters.hidden_states import HiddenStateBuffer
from secondguess.drafters.sampling_drafter import HeadDrafter, expand_to_batch
from secondguess.drafters.trees import TreeShape
from secondguess.heads.learning import LAST_HIDDEN
from secondguess.heads.mtp_chain import MtpChain
from secondguess.heads.runtime import FEATURE_KEY, FeatureRuntime
from secondguess.runtime.base import HiddenStates, Runtime


class MtpChainDrafter(HeadDrafter):
    """Drafter that uses each module of a chain once per draft."""

    is_of_package = True
    load_head = staticmethod(MtpChain.load)
    head: MtpChain

    def __init__(self, head: MtpChain, target: Runtime, name: str, shape: TreeShape | None = None) -> None:
        super().__init__(head, target, name, shape)
        self._context_length = target.context_length
        self._runtimes = [
            FeatureRuntime(module, target.context_length, target.device) for module in head.heads
        ]
        self._links: dict[Row, list[Row]] = {}
        """The committed tokens that each module reads, by row."""
        self._nums_features: dict[Row, int] = {}
        """Number of the target's states that the first module has got."""
        self._hidden_buffer = HiddenStateBuffer(head.hidden_layers)

    def room(self, row: Row) -> int:
        """Return how many levels there are modules for; a text shorter than the chain has fewer."""
        fitting = self._context_length - len(row.tokens) + 1
        return max(0, min(len(self._runtimes), len(row.tokens) - 1, fitting))

    def num_uncached(self, row: Row) -> int:
        links = self._links.get(row)
        if links is None:
            return len(row.tokens)
        known = [
            runtime.num_to_prefill(link)
            for runtime, link in zip(self._runtimes, links, strict=True)
            if link in runtime.slots
        ]
        return len(row.tokens) - 1 - len(links[0].tokens) + max(known, default=0)

    def admit(self, rows: Sequence[Row]) -> list[int | None]:
        try:
            return [self._reuse(row) for row in rows]
        except BaseException:
            for row in rows:
                self._release_links(row)
            raise

    def _reuse(self, row: Row) -> int:
        """Admit a row; return the number of leading tokens whose entries all modules reuse.

        A module needs the outputs of the one before it from its first uncached token on.
        """
        links = self._make_links(row)
        nums = [
            runtime.admit([link])[0] if link.tokens else 0
            for runtime, link in zip(self._runtimes, links, strict=True)
        ]
        self._rewind(row, min(nums))
        return min(nums)

    def _make_links(self, row: Row) -> list[Row]:
        self._links[row] = [Row(row.tokens[1 + depth :], row.params) for depth in range(len(self._runtimes))]
        return self._links[row]

    def _rewind(self, row: Row, length: int) -> None:
        for runtime, link in zip(self._runtimes, self._links[row], strict=True):
            if link in runtime.slots:
                runtime.rewind([link], [length])

    def begin(self, rows: Sequence[Row], hidden: Sequence[HiddenStates] = ()) -> None:
        for row, row_hidden in zip(rows, hidden, strict=True):
            self._hidden_buffer.begin(row, row_hidden)
            if row_hidden and row in self._links:
                num_reused = len(row.tokens) - 1 - len(row_hidden[LAST_HIDDEN])
                self._rewind(row, num_reused)
                self._nums_features[row] = num_reused

    def observe(self, rows: Sequence[Row], verdict: Verdict, hidden: HiddenStates) -> None:
        super().observe(rows, verdict, hidden)
        self._hidden_buffer.observe(rows, verdict, hidden)

    def release(self, row: Row) -> None:
        super().release(row)
        self._release_links(row)
        self._nums_features.pop(row, None)
        self._hidden_buffer.release(row)

    def _release_links(self, row: Row) -> None:
        for runtime, link in zip(self._runtimes, self._links.pop(row, ()), strict=False):
            runtime.release(link)

    def reset_prefix_cache(self) -> None:
        for runtime in self._runtimes:
            runtime.reset_prefix_cache()

    def catch_up(self, rows: Sequence[Row], max_tokens: int | None = None) -> None:
        """Let the modules read what was committed, one after the other, except the last token of each."""
        for row in rows:
            self._update(row)
        for depth in range(len(self._runtimes)):
            if not self._prefill(depth, rows, max_tokens):
                return  # the following modules need these outputs

    def _update(self, row: Row) -> None:
        """Take over a row's new tokens, and the target's states for them."""
        links = self._links[row] if row in self._links else self._make_links(row)
        for depth, (runtime, link) in enumerate(zip(self._runtimes, links, strict=True)):
            link.tokens[:] = row.tokens[1 + depth :]
            if link in runtime.slots:
                runtime.rewind([link], [len(link.tokens)])
            elif link.tokens:
                runtime.admit([link], [0])
        if self._hidden_buffer.has(row):
            features = self._runtimes[0].features(self._hidden_buffer.take(row))
            start = self._nums_features.get(row, 0)
            self._runtimes[0].set_features(links[0], start, features)
            self._nums_features[row] = start + len(features)

    def _prefill(self, depth: int, rows: Sequence[Row], max_tokens: int | None) -> bool:
        """Run tokens of a module, whose outputs the next one reads; return whether none is left but the last of each row."""
        runtime = self._runtimes[depth]
        links = [self._links[row] for row in rows]
        far = [link for link in links if link[depth].tokens and runtime.num_to_prefill(link[depth]) > 0]
        starts = [runtime.slots[link[depth]].length for link in far]
        hidden = runtime.prefill([link[depth] for link in far], max_tokens) if far else []
        for link, start, states in zip(far, starts, hidden, strict=True):
            if states:
                self._pass_on(link, depth, start, states[FEATURE_KEY])
        return not any(runtime.num_to_prefill(link[depth]) for link in far)

    def _pass_on(self, link: Sequence[Row], depth: int, start: int, outputs: Tensor) -> None:
        """Give outputs of committed tokens from index `start` on to the following module, if there is one."""
        if depth + 1 < len(self._runtimes):
            self._runtimes[depth + 1].set_features(link[depth + 1], start, outputs)

    def chain_logits(self, rows: Sequence[Row], active: list[int]) -> Tensor:
        chains = Draft.chains([self.chains[index] for index in active], device=self.device)
        logits = self._score(rows, active, len(self.chains[active[0]]), chains)
        return expand_to_batch(logits[:, -1], len(rows), active)

    def tree_logits(self, rows: Sequence[Row], active: list[int], tree: Draft) -> Tensor:
        members = tree.select(tree.lengths.new_tensor(active))
        logits = self._score(rows, active, max(members.num_levels), members)
        return expand_to_batch(logits, len(rows), active)

    def _score(self, rows: Sequence[Row], active: list[int], depth: int, draft: Draft) -> Tensor:
        """Return the logits `[active row, node + 1, vocab]` of the module for the level after a draft."""
        runtime, links = self._runtimes[depth], [self._links[rows[index]] for index in active]
        if depth:
            for link in links:
                runtime.read_outputs(link[depth], self._runtimes[depth - 1].outputs(link[depth - 1]))
        logits = runtime.score([link[depth] for link in links], draft).logits
        for link in links:
            self._pass_on(link, depth, len(link[depth].tokens) - 1, runtime.outputs(link[depth])[:1])
        return logits
