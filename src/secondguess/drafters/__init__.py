"""Who guesses, by name. To add one: one file, one line in `DRAFTERS` (docs/adding-a-drafter.md)."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from secondguess.names import Name, parse_name

if TYPE_CHECKING:
    from secondguess.drafters.base import Drafter, Supplies
    from secondguess.runtime.base import Runtime

DRAFTERS = {
    "none": "secondguess.drafters.none:NoDrafter",
    "model": "secondguess.drafters.model:ModelDrafter",
    "early-exit": "secondguess.drafters.early_exit:EarlyExitDrafter",
    "layer-skip": "secondguess.drafters.layer_skip:LayerSkipDrafter",
    "ngram": "secondguess.drafters.ngram:NgramDrafter",
    "suffix": "secondguess.drafters.suffix:SuffixDrafter",
    "eagle": "secondguess.drafters.eagle:EagleDrafter",
    "medusa": "secondguess.drafters.medusa:MedusaDrafter",
    "mtp": "secondguess.drafters.mtp:MtpDrafter",
    "dspark": "secondguess.drafters.dspark:DsparkDrafter",
}
"""Kind of drafter -> where its class is; imported only when it is asked for."""


def parse_drafter_name(text: str) -> list[Name]:
    """Split a drafter's name such as `model:PATH,key=value`, or several joined as in `suffix+model:PATH`.

    Raises:
        BadInputError: a kind that does not exist, or options that are not `key=value`.
    """
    # A plus sign may be part of a path: it joins only where the name of a kind follows.
    pieces = re.split(rf"\+(?=(?:{'|'.join(DRAFTERS)})(?:[:,+]|$))", text.strip())
    return [parse_name(piece, "drafter", DRAFTERS) for piece in pieces]


def draft_model_paths(text: str) -> list[str]:
    """The paths of the draft models that a drafter's name asks for."""
    return [name.argument for name in parse_drafter_name(text) if name.kind == "model" and name.argument]


class Target(Protocol):
    """A loaded target: what decodes, what the user called it, and where it was read from."""

    @property
    def runtime(self) -> Runtime: ...
    @property
    def name(self) -> str: ...
    @property
    def path(self) -> str: ...


def make_drafter(
    text: str,
    *,
    target_vocab_size: int,
    load_draft_model: Callable[[str], Runtime],
    target: Target | None = None,
) -> Drafter:
    """Make the drafter that a name asks for.

    Args:
        text: the name, such as `none`, `ngram,max=4`, `model:PATH` or `suffix+model:PATH`.
        target_vocab_size: width of the target's logits.
        load_draft_model: gives the runtime of the model at a path; called only by drafters that have one.
        target: whom to draft for; drafters that borrow from the target cannot be made without it.

    Raises:
        BadInputError: a kind, an argument, an option or a value that does not exist, or parts that do not mix.
    """
    # Imported here, because they import torch: a name is to be refused without it.
    from secondguess.drafters.alternating import AlternatingDrafter, check_parts
    from secondguess.drafters.base import Supplies
    from secondguess.heads.files import warn_of_stranger

    names = parse_drafter_name(text)
    supplies = Supplies(target_vocab_size, load_draft_model)
    heads: dict[str, Path] = {}
    if target is not None:
        find_head = partial(_find_head, target, heads)
        supplies = replace(supplies, find_head=find_head, target=target.runtime)
    if len(names) > 1:
        check_parts([name.kind for name in names])
    parts = [build_drafter(name, supplies) for name in names]
    made = parts[0] if len(parts) == 1 else AlternatingDrafter(parts, target_vocab_size)
    if target is not None:
        # Layers that the target lacks are refused now, not in the first round.
        target.runtime.request_hidden(made.hidden_layers)
        for kind, folder in heads.items():
            warn_of_stranger(folder, kind, target.name, target.path)
    return made


def _find_head(target: Target, found: dict[str, Path], name: Name) -> Path:
    """The folder of what was trained for the target, noted by kind in `found`."""
    from secondguess.heads.files import find_head_folder

    found[name.kind] = find_head_folder(name, target.name, target.path)
    return found[name.kind]


def build_drafter(name: Name, supplies: Supplies) -> Drafter:
    """Make the one drafter of a name that has been split.

    Raises:
        BadInputError: an argument, an option or a value that does not exist.
    """
    return drafter_class(name.kind).build(name, supplies)


def drafter_class(kind: str) -> type[Drafter]:
    """The class behind a kind of name."""
    module, _, class_name = DRAFTERS[kind].partition(":")
    found: type[Drafter] = getattr(import_module(module), class_name)
    return found
