"""Base class of runtimes over Transformers modules, and the forward pass of such a module."""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor
from transformers import PreTrainedModel

from secondguess.core import Draft, ImageInputs, Row
from secondguess.errors import UnsupportedModelError
from secondguess.runtime.base import CachedLayer, EmbeddingAndHead, ForwardOutput, QuantisedCopy
from secondguess.runtime.cache import KeyValueCache
from secondguess.runtime.cached import CachedRuntime
from secondguess.runtime.modules.packing import copy_quantised, why_not_copied
from secondguess.runtime.modules.support import cache_parameter, check_supported, context_length_of
from secondguess.runtime.slots import CachedRow
from secondguess.runtime.system.exclusive import exclusive
from secondguess.runtime.system.machine import without_gradients
from secondguess.runtime.weight_format import WeightFormat


class ModuleForward:
    """Forward pass of a Transformers module over the placement of a cache.

    Args:
        model: the module. A copy of it may take its place for some passes.

    Attributes:
        autocast_dtype: dtype of the `torch.autocast` under which the module is called; None for none.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.autocast_dtype: torch.dtype | None = None
        self._can_skip_logits = "logits_to_keep" in inspect.signature(type(model).forward).parameters
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


class ModuleRuntime(CachedRuntime):
    """Runtime over a Transformers module, which is a context manager: `close` restores the module.

    Args:
        model: a causal language model; put into evaluation mode.

    Attributes:
        forward: the module's forward pass.

    Raises:
        UnsupportedModelError: if the model cannot be rolled back.
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
        self.model = self.module = model
        self.forward = ModuleForward(model)
        self._restore_model = remember(model)
        try:
            model.eval()
        except BaseException:
            self._restore_model()
            raise

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

    def _make_copy(self, weight_format: WeightFormat) -> QuantisedCopy:
        return QuantisedCopy(self, copy_quantised(self.model, weight_format))

    @exclusive
    def run_copy(self, model: Any, rows: Sequence[Row], draft: Draft, num_known: int) -> Tensor:
        states = [self.slots[row] for row in rows]
        num_uncached = self._catch_up(states)
        self.forward.model = model
        try:
            with without_gradients():
                logits = self._run_new_queries(states, num_uncached, draft, num_known)
        finally:
            self.forward.model = self.model
        self._hold_nodes(states, [draft.num_nodes + 1] * len(states))
        return logits if logits.dtype == torch.float64 else logits.float()

    @abstractmethod
    def _run_new_queries(
        self, states: Sequence[CachedRow], num_uncached: Sequence[int], draft: Draft, num_known: int
    ) -> Tensor:
        """Return logits of the queries after the first `num_known`, whose cache entries are those of the last call."""


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
