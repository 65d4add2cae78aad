"""Runtimes of the heads with a KV cache: of features (EAGLE, MTP), and of blocks (DSpark, DFlash)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from secondguess.core import Draft, Row
from secondguess.heads.block_layers import BlockAttention
from secondguess.heads.dspark import DsparkHead
from secondguess.heads.feature import FeatureHead
from secondguess.heads.layer import AttentionFunction, attention
from secondguess.runtime.base import ForwardOutput, HiddenStates
from secondguess.runtime.cache import KeyValueCache
from secondguess.runtime.cached import CachedRuntime
from secondguess.runtime.slots import CachedRow, SlotTable
from secondguess.runtime.step import ForwardStep, in_window

FEATURE_KEY = 0
"""Key of the drafter head's output in `ForwardOutput.hidden`: the feature of the next node."""


class FeatureRuntime(CachedRuntime):
    """Runtime of a head that reads a *feature* with each token, with rows, slots, rollback and trees.

    A feature is the target's hidden state at the previous token, or, after a draft node, the head's
    own output at that node. Those of committed tokens come from `set_features`; those of draft nodes
    and of tokens appended after a pass are the outputs at the tokens before them. The head's rows are
    the target's rows without their first token, so that a token and its feature share one index.

    The head is in evaluation mode, on the target's device and in its dtype.
    """

    def __init__(self, head: FeatureHead, context_length: int, device: torch.device) -> None:
        super().__init__(
            vocab_size=head.target.vocab_size,
            context_length=context_length,
            num_layers=head.num_layers,
            device=device,
        )
        self.head = head
        self.request_hidden_states((FEATURE_KEY,))
        self._features: dict[Row, Tensor] = {}
        self._outputs: dict[Row, Tensor] = {}
        self._forward_features = torch.empty(0)

    def features(self, hidden: HiddenStates) -> Tensor:
        """Return features `[..., feature]` of the target's states `[..., width]` by layer."""
        # Some targets keep their states in float32 whatever their dtype, such as Mamba 2.
        dtype = next(self.head.parameters()).dtype
        return self.head.features({layer: hidden[layer].to(dtype) for layer in self.head.hidden_layers})

    def run(self, tokens: Tensor, step: ForwardStep, num_logits: int, with_hidden: bool) -> ForwardOutput:
        masks = {
            window: step.mask if window is None else step.visible(partial(in_window, window), window)
            for window in set(self.head.windows)
        }

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            keys, values = self.cache.update(key, value, layer)
            mask = masks[self.head.windows[layer]]
            return attention(query, keys, values, mask, is_causal=mask is None and query.shape[2] > 1)

        embedded = self.head.embed(tokens)
        cos_sin = self.head.rotary(step.query_positions, embedded.dtype)
        output = self.head(embedded, self._forward_features, cos_sin, attend)
        logits = self.head.logits(output[:, -num_logits:])
        return ForwardOutput(logits, {FEATURE_KEY: output} if with_hidden else {})

    def probe_with_features(self, tokens: Tensor, features: Tensor) -> ForwardOutput:
        """Run one forward pass over whole sequences `[row, query]` without keeping them, for probes."""
        self._forward_features = features
        return self.probe(tokens)

    def set_features(self, row: Row, start: int, features: Tensor) -> None:
        """Set the features `[position, width]` of a row's tokens from index `start` on."""
        table = self._features.get(row)
        needed = start + len(features)
        if table is None or needed > len(table):
            larger = features.new_zeros(2 * needed, features.shape[-1])
            if table is not None:
                larger[: len(table)] = table
            table = self._features[row] = larger
        table[start:needed] = features

    def score(self, rows: Sequence[Row], draft: Draft) -> ForwardOutput:
        if draft.num_nodes:
            for row, parents in zip(rows, draft.shapes, strict=True):
                # Parents were outputs of the previous pass: query 0 is pending, query i + 1 node i.
                outputs = self._outputs[row][[parent + 1 for parent in parents]]
                self.set_features(row, len(row.tokens), outputs)
        output = super().score(rows, draft)
        for row, outputs in zip(rows, output.hidden[FEATURE_KEY], strict=True):
            self._outputs[row] = outputs
            if not draft.num_nodes:
                self.set_features(row, len(row.tokens), outputs)
        return output

    def score_masks(self, rows: Sequence[Row], counts: Sequence[int]) -> Tensor:
        """Return the logits `[row, draft token, vocab]` of `counts[i]` draft tokens of row i, for a parallel head."""
        token = self.head.mask_token
        assert token is not None
        features = self.features(self.head.mask_states())
        for row in rows:
            self.set_features(row, len(row.tokens), features.expand(max(counts) - 1, -1))
        masks = Draft.chains([[token] * (count - 1) for count in counts], None, self.device)
        return super().score(rows, masks).logits

    def release(self, row: Row) -> None:
        super().release(row)
        self._features.pop(row, None)
        self._outputs.pop(row, None)

    def _place(self, states: Sequence[CachedRow], starts: Sequence[int], width: int, num_keys: int) -> None:
        super()._place(states, starts, width, num_keys)
        # Padding may extend beyond the features that were set; `set_features` grows the table.
        for state, start in zip(states, starts, strict=True):
            missing = start + width - len(self._features[state.row])
            if missing > 0:
                self.set_features(state.row, start + width, self._features[state.row][:0])
        self._forward_features = torch.stack(
            [
                self._features[state.row][start : start + width]
                for state, start in zip(states, starts, strict=True)
            ]
        )


class Block(NamedTuple):
    """Output of the backbone for one block per row.

    The states are those of all positions of the block, `[row, position, width]`; the logits are those of draft
    positions before the bias by the preceding tokens, `[row, depth, draft_vocab]`.
    """

    states: Tensor
    base: Tensor


class BlockRuntime:
    """Runtime of a head that drafts blocks, over a KV cache of the target's features of committed tokens.

    Only committed tokens are appended, so rounds need no rollback. A draft block writes its own keys and
    values after them; the next append or the next block overwrites these.
    """

    def __init__(self, head: DsparkHead, device: torch.device) -> None:
        self.head, self.config, self.hidden_layers = head, head.config, head.hidden_layers
        self.device = device
        self.forget()

    def forget(self) -> None:
        """Remove every row and free the cache."""
        self.cache = KeyValueCache(self.device)
        self.slots = SlotTable(self.cache)

    def length(self, row: Row) -> int:
        """Return the number of cached tokens of a row; 0 for an unknown row."""
        return self.slots[row].length if row in self.slots else 0

    def append(self, rows: Sequence[Row], received: Sequence[HiddenStates]) -> None:
        """Cache the target's states `[position, width]` by layer at each row's next tokens."""
        layers = self.hidden_layers
        counts = [len(states[layers[0]]) for states in received]
        together = {layer: pad_sequence([states[layer] for states in received], True) for layer in layers}
        starts = torch.tensor([self.length(row) for row in rows], device=self.device)
        positions = starts[:, None] + torch.arange(max(counts), device=self.device)
        keys_values = self.head.context(self.head.features(together), positions)
        self._place_new(rows, max(counts))
        for layer, (keys, values) in enumerate(keys_values):
            self.cache.update(keys, values, layer)
        self._advance(rows, counts)

    def run(self, rows: Sequence[Row], longest: int) -> Block:
        """Run the backbone for one block per row, whose other tokens are cached; return `longest` draft positions."""
        attend = self._attend(rows, self.config.block_size)
        anchors = torch.tensor([row.pending for row in rows], device=self.device)
        positions = torch.tensor([len(row.tokens) - 1 for row in rows], device=self.device)
        states = self.head.run_backbone(anchors[:, None], positions[:, None], attend)[:, 0]
        first = self.config.first_drafted
        return Block(states, self.head.base_logits(states[:, first : first + longest]))

    def logits(self, block: Block, previous: Tensor) -> Tensor:
        """Return draft logits `[row, draft_vocab]`, or `[row, path, draft_vocab]` for several paths.

        Args:
            block: output of `run`.
            previous: token before each position of the block, up to that of the logits, `[row, position]`
                or `[row, path, position]`.
        """
        depth = previous.shape[-1] - 1 - self.config.first_drafted
        base, states = block.base[:, depth], block.states
        if previous.dim() > 2:
            base, states = base[:, None].expand(*previous.shape[:2], -1), states[:, None]
            states = states.expand(*previous.shape[:2], *states.shape[2:])
        if self.head.markov_head is None:
            return base
        return self._biased(base, self.head.markov_head.last_latent(states, previous))

    def confidence(self, block: Block, previous: Tensor) -> Tensor:
        """Return the logits `[row]` of acceptance probabilities, with arguments as of `logits`."""
        last = previous.shape[-1] - 1
        return self._confidence_of(self.head.confidence_inputs(block.states[:, last], previous[:, last]))

    def _biased(self, base: Tensor, latents: Tensor) -> Tensor:
        markov_head = self.head.markov_head
        assert markov_head is not None
        return markov_head.biased(base, latents)

    def _confidence_of(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.head.confidence_head.proj(inputs)
        return logits[..., 0]

    def _attend(self, rows: Sequence[Row], width: int) -> AttentionFunction:
        """Return the attention function of blocks, whose positions attend to the cached tokens and to their block.

        Layers with a window read no keys before those of the row whose window begins first.
        """
        starts, num_keys = self._place(rows, width)
        anchors = torch.tensor(starts, device=self.device)[:, None, None]
        queries = anchors + torch.arange(width, device=self.device)[:, None]
        kinds: dict[BlockAttention, tuple[int, Tensor | None]] = {}
        for kind in set(self.config.layer_attention):
            oldest = max(0, min(starts) - kind.window) if kind.window else 0
            positions = torch.arange(oldest, num_keys, device=self.device)
            mask = kind.mask(anchors, queries, positions)
            if min(starts) + width < num_keys:
                cached = positions < anchors + width
                mask = cached if mask is None else cached & mask
            kinds[kind] = oldest, None if mask is None else mask[:, None]

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            keys, values = self.cache.update(key, value, layer)
            oldest, mask = kinds[self.config.layer_attention[layer]]
            return attention(query, keys[:, :, oldest:], values[:, :, oldest:], mask)

        return attend

    def _place(self, rows: Sequence[Row], width: int) -> tuple[list[int], int]:
        """Place the next cache update after each row's cached tokens; return their numbers, and that of keys to read."""
        states = [self.slots[row] for row in rows]
        starts = [state.length for state in states]
        num_keys = max(starts) + width
        self.cache.place(starts, width, [state.slot for state in states], num_keys)
        return starts, num_keys

    def _place_new(self, rows: Sequence[Row], width: int) -> tuple[list[int], int]:
        """Place the next cache update as `_place` does; new rows are admitted."""
        new = [row for row in rows if row not in self.slots]
        self.slots.admit(new, [0] * len(new))
        return self._place(rows, width)

    def _advance(self, rows: Sequence[Row], counts: Sequence[int]) -> None:
        """Count `counts[i]` tokens that have been written for row i."""
        for row, count in zip(rows, counts, strict=True):
            self.slots[row].length += count
