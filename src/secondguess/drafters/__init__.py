"""Drafters by name; docs/adding-a-drafter.md describes how to add one."""

from __future__ import annotations

import re
from importlib import import_module
from os.path import isdir
from typing import TYPE_CHECKING, Any

from secondguess.errors import BadInputError, suggestion
from secondguess.names import Name, parse_name

if TYPE_CHECKING:
    from secondguess.core import DraftSource
    from secondguess.drafters.base import Drafter

DRAFTERS = {
    "none": "secondguess.drafters.none:NoDrafter",
    "model": "secondguess.drafters.model:ModelDrafter",
    "early-exit": "secondguess.drafters.early_exit:EarlyExitDrafter",
    "self": "secondguess.drafters.self:SelfDrafter",
    "layer-skip": "secondguess.drafters.layer_skip:LayerSkipDrafter",
    "ngram": "secondguess.drafters.ngram:NgramDrafter",
    "suffix": "secondguess.drafters.suffix:SuffixDrafter",
    "grid": "secondguess.beyond.images.grid:GridDrafter",
    "jacobi": "secondguess.beyond.images.jacobi:JacobiDrafter",
    "eagle": "secondguess.drafters.eagle:EagleDrafter",
    "medusa": "secondguess.drafters.medusa:MedusaDrafter",
    "mtp": "secondguess.drafters.mtp:MtpDrafter",
    "dspark": "secondguess.drafters.dspark:DsparkDrafter",
    "gemma4-assistant": "secondguess.drafters.gemma_assistant:GemmaAssistantDrafter",
}
"""Import path of the class of each kind of drafter; imported on first use."""

SOURCES = {"ngram": "secondguess.drafters.ngram:NgramSource"}
"""The same for drafters that need nothing but the row's text, which a request can name at any time."""


def parse_drafter_name(text: str) -> list[Name]:
    """Split a drafter name such as `model:PATH,key=value` or `suffix+model:PATH` into its parts.

    Raises:
        BadInputError: an unknown kind, or options that are not `key=value`.
    """
    # A plus sign may be part of a path: split only where the name of a kind follows.
    pieces = re.split(rf"\+(?=(?:{'|'.join(DRAFTERS)})(?:[:,+]|$))", text.strip())
    for piece in pieces:
        parts = re.split("[,:]", piece)[0].split("+")
        unknown = next((part for part in parts if part not in DRAFTERS), None)
        if unknown is not None:
            is_folder = bool(unknown) and isdir(unknown)
            hint = f"; did you mean 'model:{unknown}'?" if is_folder else suggestion(unknown, DRAFTERS)
            raise BadInputError(
                f"expected a drafter among {', '.join(DRAFTERS)}, or some joined by +, got {text!r}{hint}"
            )
    return [parse_name(piece, "drafter", DRAFTERS) for piece in pieces]


def draft_model_paths(text: str) -> list[str]:
    """Return the paths of the draft models in a drafter name."""
    return [name.argument for name in parse_drafter_name(text) if name.kind == "model" and name.argument]


def select_parts(drafter: Drafter, text: str) -> tuple[frozenset[int], tuple[DraftSource, ...]]:
    """Return the parts of a drafter that a request names, and draft sources for names that it lacks.

    Args:
        text: kinds joined by `+`, or `none`.

    Raises:
        BadInputError: other names; the message has the available ones.
    """
    kinds, wanted = drafter.kinds, text.split("+")
    available = list(dict.fromkeys(("none", *kinds, *SOURCES)))
    is_valid = set(wanted) <= {*available} and len(set(wanted)) == len(wanted)
    if not is_valid or ("none" in wanted and len(wanted) > 1):
        raise BadInputError(
            f"expected draft_with to be {', '.join(available)}, or several of them joined by +, got {text!r:.60}; "
            "others must be named when the model is loaded"
        )
    sources = [_imported(SOURCES[kind])() for kind in wanted if kind in SOURCES and kind not in kinds]
    return frozenset(kinds.index(kind) for kind in wanted if kind in kinds), tuple(sources)


def drafter_class(kind: str) -> type[Drafter]:
    """Import and return the class of a kind of drafter."""
    found: type[Drafter] = _imported(DRAFTERS[kind])
    return found


def _imported(path: str) -> Any:
    module, _, class_name = path.partition(":")
    return getattr(import_module(module), class_name)
