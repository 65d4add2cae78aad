"""A drafter's name, understood whole without loading anything: for whoever only wants to know what would take part, and for
whoever loads, so that what cannot be is refused before weights are read."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import NoReturn

import torch

from secondguess.core import Draft, Row
from secondguess.drafters import build_drafter, parse_drafter_name
from secondguess.drafters.alternating import check_parts
from secondguess.drafters.base import Supplies
from secondguess.errors import BadInputError
from secondguess.heads.files import find_head_folder
from secondguess.names import Name
from secondguess.runtime.base import Ends, Hidden, Runtime, Scores
from secondguess.runtime.fingerprint import weight_files
from secondguess.runtime.layered import layers_without


@dataclass(frozen=True)
class NamedDrafter:
    """What a name asks for.

    Args:
        name: as the user wrote it.
        kind: `none`, `model`, `ngram`, ...
        draft_model: the model that it would load, if any.
        needs_target: whether it borrows from the target: only when that is loaded can the rest be checked.
        trained: folder of what was trained for the target, where the name says one.
        head_bytes: weights of what was trained for the target, where that is known.
        options: values of all its options.
        given: those that the name gives, as they were written.
        parts: what takes turns where the name joins several drafters, each understood on its own; else nothing.
    """

    name: str
    kind: str
    draft_model: str | None = None
    needs_target: bool = False
    trained: str | None = None
    head_bytes: int = 0
    options: Mapping[str, float] = field(default_factory=dict)
    given: Mapping[str, str] = field(default_factory=dict)
    parts: tuple[NamedDrafter, ...] = ()


class _Asked(Exception):
    """A drafter asked for a draft model; stops its making before anything is loaded."""


class _Borrows(Exception):
    """A drafter asked for its target, or for what was trained for it; stops its making likewise."""


class UnloadedTarget(Runtime):
    """What is known of a target before it is loaded: whoever wants more of it has said all that could be refused.

    Args:
        name: what the user calls it.
        path: its folder.
        num_layers: how deep it is.
        runs_layers_apart: whether it will be able to.
    """

    device = torch.device("meta")

    def __init__(self, name: str, path: str, num_layers: int, runs_layers_apart: bool = True) -> None:
        self.name = name
        self.path = path
        self.num_layers = num_layers
        self.runs_layers_apart = runs_layers_apart

    def ends(self) -> Ends:
        raise _Borrows

    def without_layers(self, skipped: Sequence[int]) -> Runtime:
        self.require_layers_apart()
        layers_without(skipped, self.num_layers)
        raise _Borrows

    def begin(self, rows: Sequence[Row]) -> Sequence[Hidden]:
        raise _Borrows

    def read_up(self, rows: Sequence[Row]) -> None:
        raise _Borrows

    def score(self, rows: Sequence[Row], draft: Draft) -> Scores:
        raise _Borrows

    def keep(self, rows: Sequence[Row], paths: Sequence[Sequence[int]]) -> None:
        raise _Borrows

    def rewind(self, rows: Sequence[Row], lengths: Sequence[int]) -> None:
        raise _Borrows

    def end(self, row: Row) -> None:
        raise _Borrows


def understand_drafter(name: str, target: UnloadedTarget | None = None) -> NamedDrafter:
    """Check a drafter's name, argument and options as `load` would, and say what they are.

    Args:
        name: as the user wrote it.
        target: whom it would draft for. Without one a drafter that borrows is understood only so far.

    Raises:
        BadInputError: a kind, an argument, an option or a value that does not exist, or layers that the target lacks.
        CheckpointError: a folder that is missing, or one of a drafter of another kind.
        UnsupportedModelError: a target that cannot lend what the drafter borrows.
    """
    parts = tuple(_understand(part, target) for part in parse_drafter_name(name))
    if len(parts) == 1:
        return replace(parts[0], name=name)
    check_parts([part.kind for part in parts])
    draft_model = next((part.draft_model for part in parts if part.draft_model), None)
    needs_target = any(part.needs_target for part in parts)
    kinds = "+".join(part.kind for part in parts)
    head_bytes = sum(part.head_bytes for part in parts)
    return NamedDrafter(name, kinds, draft_model, needs_target, head_bytes=head_bytes, parts=parts)


def require_model_to_quantize(drafter_quantize: str | None, drafter: str, has_model: bool) -> None:
    """Refuse 8 bits for a draft model where the drafter has none.

    Raises:
        BadInputError: naming the drafter.
    """
    if drafter_quantize is not None and not has_model:
        raise BadInputError(
            f"expected a drafter with a model for drafter_quantize={drafter_quantize!r}, got {drafter}; leave it out"
        )


def _understand(name: Name, target: UnloadedTarget | None) -> NamedDrafter:
    heads: list[Path] = []

    def tell(path: str) -> NoReturn:
        raise _Asked(path)

    def tell_of_target(name: Name) -> NoReturn:
        raise _Borrows

    supplies = Supplies(target_vocab_size=1, load_draft_model=tell, find_head=tell_of_target)
    if target is not None:
        supplies = replace(supplies, find_head=partial(_find_head, target, heads), target=target)
    try:
        drafter = build_drafter(name, supplies)
    except _Borrows:
        return NamedDrafter(
            str(name),
            name.kind,
            needs_target=True,
            trained=name.argument,
            head_bytes=sum(file.stat().st_size for folder in heads for file in weight_files(folder)),
            given=name.options,
        )
    except _Asked as asked:
        return NamedDrafter(str(name), name.kind, draft_model=str(asked), given=name.options)
    options = getattr(drafter, "options", None)
    values = dataclasses.asdict(options) if options is not None else {}
    return NamedDrafter(str(name), name.kind, options=values, given=name.options)


def _find_head(target: UnloadedTarget, found: list[Path], name: Name) -> Path:
    """The folder that `load` would read, noted in `found` unless it is the target's own, which is counted there."""
    folder = find_head_folder(name, target.name, target.path)
    if folder != Path(target.path):
        found.append(folder)
    return folder
