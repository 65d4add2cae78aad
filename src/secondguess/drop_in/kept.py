"""State that calls of the drop-in keep for later calls: of each model, and of the last draft model."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from threading import RLock
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from secondguess.api import choose_controller
from secondguess.checkpoint.loaded import LoadedModel
from secondguess.checkpoint.loader import load_model
from secondguess.checkpoint.memory import available_memory
from secondguess.checkpoint.plan import Checkpoint
from secondguess.controllers.base import Controller
from secondguess.drafters import draft_model_paths, parse_drafter_name
from secondguess.drafters.base import Drafter
from secondguess.drafters.spec import DrafterSpec
from secondguess.drafters.vocabulary.pair import VocabularyPair
from secondguess.errors import BadInputError, CheckpointError
from secondguess.pairing import COPY_DRAFTER, LOOKUP_DRAFTER, pair_vocabularies
from secondguess.runtime.modules.packing import copy_quantised, count_linears, forget_copies, why_not_copied
from secondguess.runtime.weight_format import INT4


class Weights(NamedTuple):
    """State of a model's weights: id, device and dtype of each, and their changes in place as far as torch counts."""

    parameters: tuple[tuple[int, torch.device, torch.dtype], ...]
    num_changes: int

    @classmethod
    def of(cls, model: Any) -> Weights:
        weights = list(model.parameters())
        return cls(
            tuple([(id(weight), weight.device, weight.dtype) for weight in weights]),
            sum([0 if weight.is_inference() else weight._version for weight in weights]),
        )


class ModelState:
    """State of one model, which it does not refer to, so that it ends with the model.

    A call holds `lock` while it decodes; it is reentrant, as a streamer may call `generate`.
    """

    def __init__(self) -> None:
        self.lock = RLock()
        self._controllers: dict[tuple[str | None, str], Controller] = {}
        self._weights: Weights | None = None
        self._default: str | None = None
        self._copies: list[Any] = []

    def controller(self, name: str | None, drafter: Drafter) -> Controller:
        """Return the controller of this name that earlier calls with the drafter had, or a new one."""
        key = (name, drafter.name)
        if key not in self._controllers:
            self._controllers[key] = choose_controller(name, drafter)
        return self._controllers[key]

    def update_weights(self, model: Any) -> None:
        """Drop what earlier calls derived from the model's weights, if these have changed.

        A model whose weights change in place is in training, and making a copy for each of its states would take
        longer than the copy saves.
        """
        before, self._weights = self._weights, Weights.of(model)
        if before is None or before == self._weights:
            return
        self._copies = []
        forget_copies(model)
        self._default = LOOKUP_DRAFTER if self._weights.parameters == before.parameters else None

    def default_drafter(self, model: Any) -> str:
        """Return the name of the default drafter: with a copy if it can be made and memory holds it.

        As in `Checkpoint.has_room_for_copy`, the copy must leave as much memory as it takes.
        """
        if self._default is None:
            available = available_memory(model.device)
            if available is not None and 2 * count_linears(model).copy_bytes(INT4) > available:
                return LOOKUP_DRAFTER
            self._default = LOOKUP_DRAFTER if why_not_copied(model) else COPY_DRAFTER
        return self._default

    def keep_copies(self, model: Any, drafter: str) -> None:
        """Keep the quantised copies that a drafter has made of the model."""
        formats = DrafterSpec.parse(drafter).target_copies
        if copies := [copy_quantised(model, weight_format) for weight_format in formats]:
            self._copies = copies


_states: WeakKeyDictionary[Any, ModelState] = WeakKeyDictionary()
_draft_lock = RLock()
"""Lock of the draft model, which calls on several models may share."""


@contextmanager
def locked_state(model: Any, drafter: str | None) -> Iterator[ModelState]:
    """Return the state of a model, and hold the locks of the models that a call uses."""
    state = _states.setdefault(model, ModelState())
    with ExitStack() as held:
        held.enter_context(state.lock)
        if drafter is not None and draft_model_paths(drafter):
            held.enter_context(_draft_lock)
        yield state


def _reset_after_fork() -> None:
    """Replace locks that other threads of the parent process held."""
    global _draft_lock
    _draft_lock = RLock()
    for state in _states.values():
        state.lock = RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_after_fork)


@lru_cache(maxsize=1)
def loaded_draft_model(path: str, dtype: str, device: str) -> LoadedModel:
    """Load a draft model, cached until another one is requested.

    `generate` is typically called once per prompt.
    """
    return load_model(Checkpoint.resolve(path, dtype=dtype, device=device, drafts=True))


@lru_cache(maxsize=1)
def vocabularies(target: str, drafter: str) -> VocabularyPair | None:
    """Compare the tokenizers of a target and a draft model; cached like the draft model."""
    (name,) = parse_drafter_name(drafter)
    draft_model = Checkpoint.resolve(name.argument or "")
    try:
        found = Checkpoint.resolve(target)
    except CheckpointError as error:
        raise BadInputError(
            f"cannot compare the tokenizer of {target or 'a model without files'} with that of {name.argument}: there is none on "
            "disk. Save model and tokenizer with save_pretrained and load them from there, or draft with "
            "suffix or self:int4."
        ) from error
    return pair_vocabularies(found, draft_model, name)
