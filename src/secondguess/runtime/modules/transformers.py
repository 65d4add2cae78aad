"""Runtime over Transformers modules, with unmodified modules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor
from transformers import PreTrainedModel

from secondguess.core import Draft, Row
from secondguess.errors import UnsupportedModelError
from secondguess.images import MODELS_WITH_IMAGES
from secondguess.runtime.base import CachedLayer, EmbeddingAndHead, ForwardOutput, HiddenStates
from secondguess.runtime.cached import UNLIMITED, CachedRuntime, build_queries
from secondguess.runtime.modules.forward import MaskedForward, ModuleForward
from secondguess.runtime.modules.packing import copy_quantised, why_not_copied
from secondguess.runtime.modules.recurrent import RecurrentForward
from secondguess.runtime.modules.row_by_row import PathForward, RowByRowForward
from secondguess.runtime.modules.support import (
    check_supported,
    context_length_of,
    is_recurrent,
    takes_masks,
)
from secondguess.runtime.slots import CachedRow
from secondguess.runtime.step import ForwardStep
from secondguess.runtime.system.exclusive import exclusive
from secondguess.runtime.weight_format import WeightFormat


def forward_of(model: Any) -> ModuleForward:
    """Return forward passes of a module: over whole batches if the module takes our masks."""
    if takes_masks(type(model), model.config):
        return MaskedForward(model)
    return RecurrentForward(model) if is_recurrent(model.config) else RowByRowForward(model)


class TransformersRuntime(CachedRuntime):
    """Runtime over a Transformers module, which is a context manager: `close` restores the module.

    Args:
        model: a causal language model; put into evaluation mode. Its attention implementation may be replaced.
        forward: its forward passes; those of `forward_of` by default.

    Raises:
        UnsupportedModelError: if the model cannot be rolled back or masked.
    """

    kind = "transformers"
    forward: ModuleForward

    def __init__(self, model: Any, forward: ModuleForward | None = None) -> None:
        check_supported(model)
        config = model.config.get_text_config()
        if model.device.type == "meta":
            raise UnsupportedModelError(
                f"expected a {type(model).__name__} whose weights are in memory, got one that is offloaded; load it without "
                "offloading of its first layers"
            )
        self.forward = forward or forward_of(model)
        self.cache_class = self.forward.cache_class
        # Heads that were quantised or replaced have no matrix of their own.
        head = getattr(model.get_output_embeddings(), "weight", None)
        super().__init__(
            vocab_size=head.shape[0] if isinstance(head, Tensor) else config.vocab_size,
            context_length=context_length_of(config),
            num_layers=config.num_hidden_layers,
            device=model.device,
        )
        self.model = self.module = model
        self._position_offsets: Tensor | None = None
        self._restore_model = remember(model)
        try:
            model.eval()
            self.forward.cache = self.cache
            with torch.inference_mode():
                self.forward.set_up(self.vocab_size)
        except BaseException:
            self.close()
            raise
        self.free()
        self.description = self.forward.description
        self.takes_images = (
            isinstance(self.forward, MaskedForward) and model.config.model_type in MODELS_WITH_IMAGES
        )
        if isinstance(self.forward, PathForward):
            self._prefills_together = False
            self.max_uncached = self.forward.max_uncached
            if self.forward.single_steps:
                self.prefill_chunk = UNLIMITED  # as a second piece of a prompt would run in single tokens

    @property
    def num_input_tokens(self) -> int:
        return int(self.model.get_input_embeddings().weight.shape[0])

    def close(self) -> None:
        """Restore the model's attention implementations and modes, and release the cache."""
        try:
            self._restore_model()
        except BaseException:  # such as Ctrl-C
            self._restore_model()
            raise
        finally:
            self.free()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def embedding_and_head(self) -> EmbeddingAndHead:
        embedding = self.model.get_input_embeddings()
        norm = last_norm(self.model)
        return EmbeddingAndHead(
            embedding.weight.shape[1],
            self.model.dtype,
            embedding,
            norm,
            self.model.get_output_embeddings(),
        )

    def find_cached_layer(self, kind: str) -> CachedLayer:
        config = self.model.config.get_text_config()
        num_own = config.num_hidden_layers - (getattr(config, "num_kv_shared_layers", None) or 0)
        kinds = (getattr(config, "layer_types", None) or [])[:num_own]
        if kind not in kinds:
            raise UnsupportedModelError(
                f"expected a target with keys and values of the kind {kind}, got a {type(self.model).__name__}; "
                "use a drafter that needs none"
            )
        number = num_own - 1 - kinds[::-1].index(kind)
        return CachedLayer(number, self.model.get_decoder().layers[number].self_attn.head_dim)

    @exclusive
    def keys_and_values(self, rows: Sequence[Row], layer: CachedLayer) -> tuple[Tensor, Tensor]:
        states = [self.slots[row] for row in rows]
        length = max(len(row.tokens) - 1 for row in rows)
        slots = torch.tensor([state.slot for state in states], device=self.device)
        keys, values = (
            blocks[layer.number].narrow(2, 0, length).index_select(0, slots)
            for blocks in (self.cache.keys, self.cache.values)
        )
        return keys, values

    @cached_property
    def why_not_copied(self) -> str:
        reason = why_not_copied(self.model)
        return reason and f"a {type(self.model).__name__}, {reason}"

    def _copied_forward(self, weight_format: WeightFormat) -> ModuleForward:
        return self.forward.with_model(copy_quantised(self.model, weight_format))

    def _run_new_queries(
        self, states: Sequence[CachedRow], num_uncached: Sequence[int], draft: Draft, num_known: int
    ) -> Tensor:
        # Recurrent layers have no states after nodes that ran in another pass.
        if isinstance(self.forward, PathForward) or not num_known or max(num_uncached) > 1:
            return super()._run_new_queries(states, num_uncached, draft, num_known)
        starts, num_queries = [state.length for state in states], draft.num_nodes + 1
        num_keys, num_new = self._pad_keys(max(starts) + num_queries), num_queries - num_known
        queries = build_queries(states, num_uncached, draft)
        self._place(states, [start + num_known for start in starts], num_new, num_keys)
        step = self._step(starts, queries, num_keys).drop_first(num_known)
        return self.run(queries.tokens[:, num_known:], step, num_new, with_hidden=False).logits[:, -num_new:]

    def _run_queries(
        self, states: Sequence[CachedRow], num_uncached: Sequence[int], draft: Draft
    ) -> tuple[Tensor, HiddenStates]:
        if not isinstance(self.forward, PathForward):
            return super()._run_queries(states, num_uncached, draft)
        output = self.forward.run_rows(states, num_uncached, draft, self.hidden_layers)
        return output.logits, output.hidden

    def _prefill_forward(
        self, states: Sequence[CachedRow], tokens: Tensor, with_hidden: bool
    ) -> HiddenStates:
        if not isinstance(self.forward, PathForward):
            return super()._prefill_forward(states, tokens, with_hidden)
        return self.forward.prefill(states[0], tokens[0].tolist(), self.hidden_layers if with_hidden else ())

    def _place(self, states: Sequence[CachedRow], starts: Sequence[int], width: int, num_keys: int) -> None:
        super()._place(states, starts, width, num_keys)
        offsets = [state.position_offset for state in states]
        self._position_offsets = torch.tensor(offsets, device=self.device)[:, None] if any(offsets) else None

    def run(self, tokens: Tensor, step: ForwardStep, num_logits: int, with_hidden: bool) -> ForwardOutput:
        offsets, self._position_offsets = self._position_offsets, None  # of this pass only
        hidden_layers = self.hidden_layers if with_hidden else ()
        step = step if offsets is None else replace(step, position_offsets=offsets)
        return self.forward.run(tokens, step, num_logits, hidden_layers)

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
        output = self.forward.call(tokens, None, self.min_logits, self.cache, hidden_layers, images)
        deltas = getattr(self.model.base_model, "rope_deltas", None)
        state.position_offset = 0 if deltas is None else int(deltas[0])
        return {layer: hidden[0] for layer, hidden in output.hidden.items()}


def remember(model: Any) -> Callable[[], None]:
    """Return a function that restores the present attention implementations and modes of a model."""
    attentions = [(config, config._attn_implementation) for config in configurations(model)]
    modes = [(module, module.training) for module in model.modules()]

    def restore() -> None:
        for config, implementation in attentions:
            config._attn_implementation = implementation
        for module, training in modes:
            module.training = training

    return restore


def configurations(model: Any) -> list[Any]:
    """Return the configurations of a model and its parts, each after the one that contains it."""
    found: dict[int, Any] = {}
    waiting = [part.config for part in model.modules() if isinstance(part, PreTrainedModel)]
    while waiting:
        config = waiting.pop(0)
        if id(config) not in found:
            found[id(config)] = config
            parts = [getattr(config, name, None) for name in config.sub_configs]
            waiting[:0] = [part for part in parts if part is not None]
    return list(found.values())


def last_norm(model: Any) -> Any:
    """Return the final norm: the last among the direct children of the model's body, its text decoder or a part."""
    for body in (model.base_model, model.get_decoder(), *model.children()):
        norms, has_layers = [], False
        for name, module in body.named_children():
            has_layers |= isinstance(module, torch.nn.ModuleList)
            is_norm = "norm" in type(module).__name__.lower()
            # A norm of the embeddings comes before the layers, or is called `layernorm_embedding`; LFM2 calls
            # the one after them `embedding_norm`.
            if is_norm and not name.endswith("embedding") and (has_layers or "embed" not in name):
                norms.append(module)
        if norms:
            return norms[-1]
    raise UnsupportedModelError(
        f"expected a norm after the layers of a {type(model).__name__}, got none; use a drafter that needs none"
    )
