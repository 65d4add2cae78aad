"""A drafter's name, understood whole without loading anything: for whoever only wants to know what would take part."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NoReturn

from secondguess.drafters import build_drafter, parse_drafter_name
from secondguess.drafters.alternating import check_parts
from secondguess.drafters.base import Supplies
from secondguess.errors import BadInputError
from secondguess.names import Name


@dataclass(frozen=True)
class NamedDrafter:
    """What a name asks for.

    Args:
        name: as the user wrote it.
        kind: `none`, `model`, `ngram`, ...
        draft_model: the model that it would load, if any.
        needs_target: whether it borrows from the target: only when that is loaded can the rest be checked.
        trained: folder of what was trained for the target, where the name says one.
        options: values of all its options.
        given: those that the name gives, as they were written.
        parts: what takes turns where the name joins several drafters, each understood on its own; else nothing.
    """

    name: str
    kind: str
    draft_model: str | None = None
    needs_target: bool = False
    trained: str | None = None
    options: Mapping[str, float] = field(default_factory=dict)
    given: Mapping[str, str] = field(default_factory=dict)
    parts: tuple[NamedDrafter, ...] = ()


class _Asked(Exception):
    """A drafter asked for a draft model; stops its making before anything is loaded."""


class _Borrows(Exception):
    """A drafter asked for its target, or for what was trained for it; stops its making likewise."""


def understand_drafter(name: str) -> NamedDrafter:
    """Check a drafter's name, argument and options as `load` would, and say what they are.

    Raises:
        BadInputError: a kind, an argument, an option or a value that does not exist.
    """
    parts = tuple(_understand(part) for part in parse_drafter_name(name))
    if len(parts) == 1:
        return replace(parts[0], name=name)
    check_parts([part.kind for part in parts])
    draft_model = next((part.draft_model for part in parts if part.draft_model), None)
    needs_target = any(part.needs_target for part in parts)
    kinds = "+".join(part.kind for part in parts)
    return NamedDrafter(name, kinds, draft_model, needs_target, parts=parts)


def require_model_to_quantize(drafter_quantize: str | None, drafter: str, has_model: bool) -> None:
    """Refuse 8 bits for a draft model where the drafter has none.

    Raises:
        BadInputError: naming the drafter.
    """
    if drafter_quantize is not None and not has_model:
        raise BadInputError(
            f"expected a drafter with a model for drafter_quantize={drafter_quantize!r}, got {drafter}; leave it out"
        )


def _understand(name: Name) -> NamedDrafter:
    def tell(path: str) -> NoReturn:
        raise _Asked(path)

    def tell_of_target(name: Name) -> NoReturn:
        raise _Borrows

    supplies = Supplies(target_vocab_size=1, load_draft_model=tell, find_head=tell_of_target)
    try:
        drafter = build_drafter(name, supplies)
    except _Borrows:
        return NamedDrafter(
            str(name), name.kind, needs_target=True, trained=name.argument, given=name.options
        )
    except _Asked as asked:
        return NamedDrafter(str(name), name.kind, draft_model=str(asked), given=name.options)
    options = getattr(drafter, "options", None)
    values = dataclasses.asdict(options) if options is not None else {}
    return NamedDrafter(str(name), name.kind, options=values, given=name.options)
