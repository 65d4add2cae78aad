"""Choice of the runtime for a Transformers module."""

from __future__ import annotations

from typing import Any

from secondguess.runtime.modules.module_runtime import ModuleRuntime
from secondguess.runtime.modules.recurrent import RecurrentRuntime
from secondguess.runtime.modules.row_by_row import RowByRowRuntime
from secondguess.runtime.modules.support import is_recurrent, takes_masks
from secondguess.runtime.modules.transformers import TransformersRuntime


def wrap_module(model: Any) -> ModuleRuntime:
    """Return a runtime for a Transformers module: over whole batches if the module takes our masks."""
    if takes_masks(type(model), model.config):
        return TransformersRuntime(model)
    kind = RecurrentRuntime if is_recurrent(model.config) else RowByRowRuntime
    return kind(model)
