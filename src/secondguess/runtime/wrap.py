"""Choice of the runtime for a Transformers module."""

from __future__ import annotations

from typing import Any

from secondguess.runtime.module_runtime import ModuleRuntime
from secondguess.runtime.recurrent import RecurrentRuntime
from secondguess.runtime.row_by_row import RowByRowRuntime
from secondguess.runtime.support import is_recurrent, takes_masks
from secondguess.runtime.transformers import TransformersRuntime


def wrap_module(model: Any) -> ModuleRuntime:
    """Return a runtime for a Transformers module: over whole batches if the module takes our masks."""
    if takes_masks(type(model), model.config):
        return TransformersRuntime(model)
    kind = RecurrentRuntime if is_recurrent(model.config) else RowByRowRuntime
    return kind(model)
