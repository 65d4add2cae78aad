"""Drafters by name; docs/adding-a-drafter.md describes how to add one."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import import_module
from os.path import isdir
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from secondguess.errors import BadInputError, suggestion
from secondguess.names import Name, parse_name

if TYPE_CHECKING:
    from secondguess.core import DraftSource
    from secondguess.drafters.base import Drafter
    from secondguess.drafters.spec import DrafterSpec
    from secondguess.drafters.vocabulary.pair import VocabularyPair
    from secondguess.runtime.base import Runtime

DRAFTERS = {
    "none": "secondguess.drafters.none:NoDrafter",
    "model": "secondguess.drafters.model:ModelDrafter",
    "early-exit": "secondguess.drafters.early_exit:EarlyExitDrafter",
    "self": "secondguess.drafters.self:SelfDrafter",
    "layer-skip": "secondguess.drafters.layer_skip:LayerSkipDrafter",
    "ngram": "secondguess.drafters.ngram:NgramDrafter",
    "suffix": "secondguess.drafters.suffix:SuffixDrafter",
    "grid": "secondguess.drafters.grid:GridDrafter",
    "jacobi": "secondguess.drafters.jacobi:JacobiDrafter",
    "eagle": "secondguess.drafters.eagle:EagleDrafter",
    "medusa": "secondguess.drafters.medusa:MedusaDrafter",
    "mtp": "secondguess.drafters.mtp:MtpDrafter",
    "dspark": "secondguess.drafters.dspark:DsparkDrafter",
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


class Target(Protocol):
    """Loaded target: its runtime, the name given by the user, and the folder of its files."""

    @property
    def runtime(self) -> Runtime: ...
    @property
    def name(self) -> str: ...
    @property
    def path(self) -> str: ...


def make_drafter(
    drafter: str | DrafterSpec,
    *,
    target_vocab_size: int,
    load_draft_model: Callable[[str], Runtime],
    pair_vocabularies: Callable[[Name], VocabularyPair | None] = lambda name: None,
    target: Target | None = None,
) -> Drafter:
    """Build the drafter for a name.

    Args:
        drafter: the name, such as `none`, `ngram,max=4`, `model:PATH` or `suffix+model:PATH`, or what it specifies.
        target_vocab_size: width of the target's logits.
        load_draft_model: returns the runtime of the model at a path; called only by drafters that
            use a draft model.
        pair_vocabularies: compares the target's tokenizer with that of the draft model for a name; None
            if it is the same.
        target: target to draft for; required by drafters that use its weights or hidden states.

    Raises:
        BadInputError: an unknown kind, argument, option or value, or parts that do not combine.
        CheckpointError: a folder of a trained head that is missing, broken, or of another kind.
    """
    # Imported here because they import torch, which parsing names must not require.
    from secondguess.drafters.base import DrafterResources
    from secondguess.drafters.combined import CombinedDrafter
    from secondguess.drafters.spec import DrafterSpec
    from secondguess.heads.files import warn_of_mismatch

    spec = DrafterSpec.parse(drafter) if isinstance(drafter, str) else drafter
    resources = DrafterResources(target_vocab_size, load_draft_model, pair_vocabularies)
    heads: dict[str, Path] = {}
    if target is not None:
        find_head_folder = partial(_find_head, target, heads)
        resources = replace(resources, find_head_folder=find_head_folder, target=target.runtime)
    parts = [part.drafter.build(part.name, resources) for part in spec.parts]
    made = parts[0] if len(parts) == 1 else CombinedDrafter(parts, target_vocab_size)
    if target is not None:
        # Fail now, rather than in the first round, if the target lacks these layers.
        target.runtime.request_hidden_states(made.hidden_layers)
        for kind, folder in heads.items():
            warn_of_mismatch(folder, kind, target.name, target.path)
    return made


def _find_head(target: Target, found: dict[str, Path], name: Name) -> Path:
    """Return the folder of the trained head for a name, and record it by kind in `found`."""
    from secondguess.heads.files import find_head_folder

    found[name.kind] = find_head_folder(name, target.name, target.path)
    return found[name.kind]


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
