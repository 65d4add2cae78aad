"""A drafter's name, understood whole without loading anything: for whoever only wants to know what would take part."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NoReturn

from secondguess.drafters import make_drafter, parse_drafter_name


@dataclass(frozen=True)
class NamedDrafter:
    """What a name asks for.

    Args:
        name: as the user wrote it.
        kind: `none`, `model`, `ngram`, ...
        draft_model: the model that it would load, if any.
        options: values of all its options.
        given: those that the name gives, as they were written.
    """

    name: str
    kind: str
    draft_model: str | None = None
    options: Mapping[str, float] = field(default_factory=dict)
    given: Mapping[str, str] = field(default_factory=dict)


class _Asked(Exception):
    """A drafter asked for a draft model; stops its making before anything is loaded."""


def understand_drafter(name: str) -> NamedDrafter:
    """Check a drafter's name, argument and options as `load` would, and say what they are.

    Raises:
        BadInputError: a kind, an argument, an option or a value that does not exist.
    """
    parts = parse_drafter_name(name)
    # Drafters that take turns are of a kind of their own, which no engine has.
    kind = "+".join(part.kind for part in parts)
    given = {key: value for part in parts for key, value in part.options.items()}

    def tell(path: str) -> NoReturn:
        raise _Asked(path)

    try:
        drafter = make_drafter(name, target_vocab_size=1, load_draft_model=tell)
    except _Asked as asked:
        return NamedDrafter(name, kind, draft_model=str(asked), given=given)
    options = getattr(drafter, "options", None)
    values = dataclasses.asdict(options) if options is not None else {}
    return NamedDrafter(name, kind, options=values, given=given)
