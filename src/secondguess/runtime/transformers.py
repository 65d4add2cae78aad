"""Runtime for Transformers decoders with the attention interface, with unmodified modules."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import cached_property
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from secondguess.core import Draft, ImageInputs, Row
from secondguess.errors import UnsupportedModelError
from secondguess.images import MODELS_WITH_IMAGES
from secondguess.runtime import attention
from secondguess.runtime.attention import current
from secondguess.runtime.base import EmbeddingAndHead, ForwardOutput, HiddenStates, QuantisedCopy
from secondguess.runtime.cached import CachedRuntime, build_queries
from secondguess.runtime.exclusive import exclusive
from secondguess.runtime.machine import without_gradients
from secondguess.runtime.packing import copy_quantised, why_not_copied
from secondguess.runtime.slots import CachedRow
from secondguess.runtime.step import ForwardStep
from secondguess.runtime.support import cache_parameter, check_supported, context_length_of, takes_masks
from secondguess.runtime.weight_format import WeightFormat


class TransformersRuntime(CachedRuntime):
    """Runtime over a Transformers module.

    The model's attention implementation is replaced by `attention.IMPLEMENTATION` until `close()`.
    The runtime is a context manager.

    Attributes:
        autocast_dtype: dtype of the `torch.autocast` under which the module is called; None for none.

    Args:
        model: a causal language model with the attention interface; put into evaluation mode.

    Raises:
        UnsupportedModelError: if the model cannot be rolled back or masked.
    """

    kind = "transformers"

    def __init__(self, model: Any) -> None:
        check_supported(model)
        config = model.config.get_text_config()
        if model.device.type == "meta":
            raise UnsupportedModelError(
                f"expected a {type(model).__name__} whose weights are in memory, got one that is offloaded; load it without "
                "offloading of its first layers"
            )
        # Heads that were quantised or replaced have no matrix of their own.
        head = getattr(model.get_output_embeddings(), "weight", None)
        super().__init__(
            vocab_size=head.shape[0] if isinstance(head, Tensor) else config.vocab_size,
            context_length=context_length_of(config),
            num_layers=config.num_hidden_layers,
            device=model.device,
        )
        self.model = self.module = self._active_model = model
        self.autocast_dtype: torch.dtype | None = None
        parameters = inspect.signature(type(model).forward).parameters
        self._can_skip_logits = "logits_to_keep" in parameters
        self.takes_images = model.config.model_type in MODELS_WITH_IMAGES
        self._position_offsets: Tensor | None = None
        self._cache_parameter = cache_parameter(type(model))
        self._restore_model = remember(model)
        try:
            self._set_up_attention()
            model.eval()
        except BaseException:
            self._restore_model()
            raise

    @property
    def num_input_tokens(self) -> int:
        return int(self.model.get_input_embeddings().weight.shape[0])

    def _set_up_attention(self) -> None:
        """Make the module use our masks."""
        if not takes_masks(type(self.model), self.model.config):
            raise UnsupportedModelError(
                f"expected a module with the attention interface of Transformers, got a {type(self.model).__name__}; "
                "use RowByRowRuntime"
            )
        attention.register()
        self.model.set_attn_implementation(attention.IMPLEMENTATION)

    def close(self) -> None:
        """Restore the model's attention implementations and modes, and release the cache."""
        try:
            self._restore_model()
        except BaseException:  # such as Ctrl-C
            self._restore_model()
            raise
        finally:
            self.free()

    def __enter__(self) -> TransformersRuntime:
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

    @cached_property
    def why_not_copied(self) -> str:
        reason = why_not_copied(self.model)
        return reason and f"a {type(self.model).__name__}, {reason}"

    def _make_copy(self, weight_format: WeightFormat) -> QuantisedCopy:
        return QuantisedCopy(self, copy_quantised(self.model, weight_format))

    @exclusive
    def run_copy(self, model: Any, rows: Sequence[Row], draft: Draft, num_known: int) -> Tensor:
        states = [self.slots[row] for row in rows]
        num_uncached = self._catch_up(states)
        self._active_model = model
        try:
            with without_gradients():
                logits = self._run_new_queries(states, num_uncached, draft, num_known)
        finally:
            self._active_model = self.model
        self._hold_nodes(states, [draft.num_nodes + 1] * len(states))
        return logits if logits.dtype == torch.float64 else logits.float()

    def _run_new_queries(
        self, states: Sequence[CachedRow], num_uncached: Sequence[int], draft: Draft, num_known: int
    ) -> Tensor:
        """Return logits of the queries after the first `num_known`, whose cache entries are those of the last call."""
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
            return self._call(
                tokens, positions if offsets is None else positions + offsets, num_logits, with_hidden
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
        output = self._call(tokens, None, self.min_logits, with_hidden, images)
        deltas = getattr(self.model.base_model, "rope_deltas", None)
        state.position_offset = 0 if deltas is None else int(deltas[0])
        return {layer: hidden[0] for layer, hidden in output.hidden.items()}

    def _call(
        self,
        tokens: Tensor,
        positions: Tensor | None,
        num_logits: int,
        with_hidden: bool,
        images: ImageInputs | None = None,
    ) -> ForwardOutput:
        """Call the module with the cache as it is placed."""
        options: dict[str, Any] = {self._cache_parameter: self.cache, **(images or {})}
        if num_logits < tokens.shape[1] and self._can_skip_logits:
            options["logits_to_keep"] = num_logits
        if positions is not None:
            options["position_ids"] = positions.expand_as(tokens)
        if with_hidden:
            options["output_hidden_states"] = True
        if self.autocast_dtype is None:
            output = self._active_model(input_ids=tokens, use_cache=True, **options)
        else:
            with torch.autocast(self.device.type, self.autocast_dtype):
                output = self._active_model(input_ids=tokens, use_cache=True, **options)
        hidden = {layer: output.hidden_states[layer] for layer in self.hidden_layers} if with_hidden else {}
        if self.autocast_dtype is not None:  # drafters run without autocast, in the dtype of the weights
            hidden = {layer: states.to(self.model.dtype) for layer, states in hidden.items()}
        return ForwardOutput(output.logits, hidden)


def remember(model: Any) -> Callable[[], None]:
    """Return a function that restores the present attention implementations and modes of a model."""
    attentions = [(each, each._attn_implementation) for each in configurations(model)]
    modes = [(each, each.training) for each in model.modules()]

    def restore() -> None:
        for config, implementation in attentions:
            config._attn_implementation = implementation
        for module, training in modes:
            module.training = training

    return restore


def configurations(model: Any) -> list[Any]:
    """Return the configurations of a model and its parts, each after the one that contains it."""
    found: dict[int, Any] = {}
    waiting = [each.config for each in model.modules() if isinstance(each, PreTrainedModel)]
    while waiting:
        config = waiting.pop(0)
        if id(config) not in found:
            found[id(config)] = config
            parts = [getattr(config, name, None) for name in config.sub_configs]
            waiting[:0] = [each for each in parts if each is not None]
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
