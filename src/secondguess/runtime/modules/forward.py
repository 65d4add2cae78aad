"""Calls of a Transformers module, and forward passes with our masks."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Sequence
from copy import copy
from typing import Any, Self

import torch
from torch import Tensor

from secondguess.core import ImageInputs
from secondguess.runtime.base import ForwardOutput
from secondguess.runtime.cache import KeyValueCache
from secondguess.runtime.modules import attention
from secondguess.runtime.modules.support import cache_parameter
from secondguess.runtime.step import ForwardStep


class ModuleCall:
    """Calls of a Transformers module with a cache.

    Args:
        model: the module.

    Attributes:
        autocast_dtype: dtype of the `torch.autocast` under which the module is called; None for none.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.autocast_dtype: torch.dtype | None = None
        parameters = inspect.signature(type(model).forward).parameters
        self._can_skip_logits = "logits_to_keep" in parameters
        self._cache_parameter = cache_parameter(type(model))

    def __call__(
        self,
        tokens: Tensor,
        positions: Tensor | None,
        num_logits: int,
        cache: KeyValueCache,
        hidden_layers: Sequence[int],
        images: ImageInputs | None = None,
    ) -> ForwardOutput:
        """Run tokens `[row, query]` at these positions, or the module's own; return the last logits and hidden states."""
        options: dict[str, Any] = {self._cache_parameter: cache, **(images or {})}
        if num_logits < tokens.shape[1] and self._can_skip_logits:
            options["logits_to_keep"] = num_logits
        if positions is not None:
            options["position_ids"] = positions.expand_as(tokens)
        if hidden_layers:
            options["output_hidden_states"] = True
        if self.autocast_dtype is None:
            output = self.model(input_ids=tokens, use_cache=True, **options)
        else:
            with torch.autocast(tokens.device.type, self.autocast_dtype):
                output = self.model(input_ids=tokens, use_cache=True, **options)
        hidden = {layer: output.hidden_states[layer] for layer in hidden_layers}
        if self.autocast_dtype is not None:  # drafters run without autocast, in the dtype of the weights
            hidden = {layer: states.to(self.model.dtype) for layer, states in hidden.items()}
        return ForwardOutput(output.logits, hidden)


class ModuleForward(ABC):
    """Forward passes of a Transformers module over a cache.

    Args:
        model: the module.

    Attributes:
        call: calls of the module.
        cache: set by the runtime, a `cache_class`.
    """

    cache_class: type[KeyValueCache] = KeyValueCache
    cache: KeyValueCache

    def __init__(self, model: Any) -> None:
        self.call = ModuleCall(model)

    @property
    @abstractmethod
    def description(self) -> str:
        """Way in which rows are run, if it is special."""

    def with_model(self, model: Any) -> Self:
        """Return the same forward passes of another module of the same class."""
        changed = copy(self)
        changed.call = copy(self.call)
        changed.call.model = model
        return changed

    @abstractmethod
    def set_up(self, vocab_size: int) -> None:
        """Prepare the module for these passes, with an empty cache that is cleared afterwards.

        Raises:
            UnsupportedModelError: if the module cannot run them.
        """

    @abstractmethod
    def run(
        self, tokens: Tensor, step: ForwardStep, num_logits: int, hidden_layers: Sequence[int]
    ) -> ForwardOutput:
        """Run tokens `[row, query]` that are placed in the cache; return their last logits and hidden states."""


class MaskedForward(ModuleForward):
    """Forward passes of a module that takes our masks, each over ragged rows and trees."""

    description = ""

    def set_up(self, vocab_size: int) -> None:
        attention.register()
        self.call.model.set_attn_implementation(attention.IMPLEMENTATION)

    def run(
        self, tokens: Tensor, step: ForwardStep, num_logits: int, hidden_layers: Sequence[int]
    ) -> ForwardOutput:
        positions, offsets = step.query_positions, step.position_offsets
        positions = positions if offsets is None else positions + offsets
        attention.current.step = step
        try:
            return self.call(tokens, positions, num_logits, self.cache, hidden_layers)
        finally:
            attention.current.step = None
