"""Runtime for Transformers decoders with the attention interface, with unmodified modules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from secondguess.core import Draft
from secondguess.errors import UnsupportedModelError
from secondguess.images import MODELS_WITH_IMAGES
from secondguess.runtime.base import ForwardOutput, HiddenStates
from secondguess.runtime.cached import build_queries
from secondguess.runtime.modules import attention
from secondguess.runtime.modules.attention import current
from secondguess.runtime.modules.module_runtime import ModuleRuntime
from secondguess.runtime.modules.support import takes_masks
from secondguess.runtime.slots import CachedRow
from secondguess.runtime.step import ForwardStep


class TransformersRuntime(ModuleRuntime):
    """Runtime over a Transformers module that takes our masks, in one pass for ragged rows and trees.

    The model's attention implementation is replaced by `attention.IMPLEMENTATION` until `close()`.

    Args:
        model: a causal language model with the attention interface; put into evaluation mode.

    Raises:
        UnsupportedModelError: if the model cannot be rolled back or masked.
    """

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.takes_images = model.config.model_type in MODELS_WITH_IMAGES
        self._position_offsets: Tensor | None = None
        try:
            self._set_up_attention()
        except BaseException:
            self._restore_model()
            raise

    def _set_up_attention(self) -> None:
        """Make the module use our masks."""
        if not takes_masks(type(self.model), self.model.config):
            raise UnsupportedModelError(
                f"expected a module with the attention interface of Transformers, got a {type(self.model).__name__}; "
                "use RowByRowRuntime"
            )
        attention.register()
        self.model.set_attn_implementation(attention.IMPLEMENTATION)

    def _run_new_queries(
        self, states: Sequence[CachedRow], num_uncached: Sequence[int], draft: Draft, num_known: int
    ) -> Tensor:
        if not num_known or max(num_uncached) > 1:
            return self._run_queries(states, num_uncached, draft)[0][:, num_known:]
        starts, num_queries = [state.length for state in states], draft.num_nodes + 1
        num_keys, num_new = self._pad_keys(max(starts) + num_queries), num_queries - num_known
        queries = build_queries(states, num_uncached, draft)
        self._place(states, [start + num_known for start in starts], num_new, num_keys)
        step = self._step(starts, queries, num_keys).drop_first(num_known)
        return self.run(queries.tokens[:, num_known:], step, num_new, with_hidden=False).logits[:, -num_new:]

    def _place(self, states: Sequence[CachedRow], starts: Sequence[int], width: int, num_keys: int) -> None:
        super()._place(states, starts, width, num_keys)
        offsets = [state.position_offset for state in states]
        self._position_offsets = torch.tensor(offsets, device=self.device)[:, None] if any(offsets) else None

    def run(self, tokens: Tensor, step: ForwardStep, num_logits: int, with_hidden: bool) -> ForwardOutput:
        positions, offsets = step.query_positions, self._position_offsets
        self._position_offsets = None  # of this pass only
        current.step = step
        try:
            return self.forward(
                tokens,
                positions if offsets is None else positions + offsets,
                num_logits,
                self.cache,
                self.hidden_layers if with_hidden else (),
            )
        finally:
            current.step = None

    def _prefill_images(self, state: CachedRow, with_hidden: bool) -> HiddenStates:
        """Run a prompt with images with the module's own masks and positions."""
        assert state.row.images is not None
        num_prompt = state.row.num_prompt
        width = num_prompt - 1
        self._place([state], [0], width, width)
        self._position_offsets = None
        images = dict(state.row.images)
        for name, value in images.items():
            if isinstance(value, Tensor):
                # types and positions are as many as the prompt's tokens, of which the first round runs the last
                is_per_token = value.shape[-2:] == (1, num_prompt)
                images[name] = (value[..., :width] if is_per_token else value).to(self.device)
        tokens = torch.tensor([state.row.tokens[:width]], device=self.device)
        hidden_layers = self.hidden_layers if with_hidden else ()
        output = self.forward(tokens, None, self.min_logits, self.cache, hidden_layers, images)
        deltas = getattr(self.model.base_model, "rope_deltas", None)
        state.position_offset = 0 if deltas is None else int(deltas[0])
        return {layer: hidden[0] for layer, hidden in output.hidden.items()}
