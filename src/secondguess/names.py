"""Names with options: `kind`, `kind:argument`, `kind:argument,key=value,...`.

Users select drafters and controllers by such names. Options become frozen dataclasses that
validate themselves, so a name with an unknown part is refused, and the error lists the valid ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from os.path import expanduser
from typing import TYPE_CHECKING, TypeVar, get_type_hints

from secondguess.errors import BadInputError, suggestion

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

ALL = "all"
"""Value that stands for all names where a list of names is expected."""
AUTO = "auto"
"""Name of the default drafter, the same as none given."""

OptionsT = TypeVar("OptionsT", bound="DataclassInstance")


@dataclass(frozen=True)
class Name:
    """Parsed name: kind, argument after the colon (None without a colon), and options as text."""

    kind: str
    argument: str | None
    options: Mapping[str, str]

    def __str__(self) -> str:
        """Return the name as a user would write it."""
        argument = "" if self.argument is None else f":{self.argument}"
        return self.kind + argument + "".join(f",{key}={value}" for key, value in self.options.items())


def parse_name(text: str, what: str, kinds: Iterable[str]) -> Name:
    """Split a name and check its kind. A leading `~` of the argument, which no shell expands there, is expanded.

    Args:
        text: name as the user wrote it.
        what: type of the named object, for the error message ("drafter").

    Raises:
        BadInputError: unknown kind, or an option that is not `key=value` or comes twice.

    >>> parse_name("model:some/path,key=1", "drafter", ["model"])
    Name(kind='model', argument='some/path', options={'key': '1'})
    """
    head, *pieces = text.strip().split(",")
    kind, colon, argument = head.partition(":")
    if kind not in kinds:
        raise BadInputError(
            f"expected a {what} among {', '.join(kinds)}, got {text!r}{suggestion(kind, kinds)}"
        )
    options: dict[str, str] = {}
    for piece in pieces:
        key, equals, value = (part.strip() for part in piece.partition("="))
        if not (key and equals and value) or key in options:
            raise BadInputError(
                f"expected key=value options, each once, for the {what} {kind}, got {piece.strip()!r}"
            )
        options[key] = value
    return Name(kind, expanduser(argument) if colon else None, options)


def refuse_options(name: Name, what: str) -> None:
    """Refuse options with a `BadInputError`, for a kind that takes none."""
    if name.options:
        raise BadInputError(f"expected no options for the {what} {name.kind}, got {', '.join(name.options)}")


def refuse_argument(name: Name, what: str) -> None:
    """Refuse an argument after the colon with a `BadInputError`, for a kind that takes none."""
    if name.argument is not None:
        raise BadInputError(f"expected no argument of the {what} {name.kind}, got ':{name.argument}'")


def read_options(options_type: type[OptionsT], options: Mapping[str, str], whose: str) -> OptionsT:
    """Build an options dataclass (fields of type int or float) from text values.

    Args:
        options_type: a frozen dataclass; its `__post_init__` checks the values.
        whose: owner of the options, for the error message ("drafter ngram").

    Raises:
        BadInputError: an unknown option, or a value that is not a number of the option's type.
    """
    types = get_type_hints(options_type)
    known = [field.name for field in dataclasses.fields(options_type)]
    values = {}
    for key, text in options.items():
        if key not in known:
            raise BadInputError(f"expected {_choice(known)} for the {whose}, got the option {key!r}")
        try:
            values[key] = types[key](text)
        except ValueError:
            kind = "a whole number" if types[key] is int else "a number"
            raise BadInputError(f"expected {kind} for {key} of the {whose}, got {text!r}") from None
    return options_type(**values)


def options_with_argument(name: Name, option: str) -> Mapping[str, str]:
    """Return the options of a name, with its argument (if any) as the value of `option`.

    Raises:
        BadInputError: the option was given in both ways.
    """
    if name.argument is None:
        return name.options
    if option in name.options:
        raise BadInputError(f"expected {option} of {name.kind} once, got it after the colon and as option")
    return {option: name.argument, **name.options}


def format_options(options: DataclassInstance) -> str:
    """Return the options that differ from their defaults, as written after a name, each with a leading comma."""
    values = {field.name: getattr(options, field.name) for field in dataclasses.fields(options)}
    defaults = {field.name: field.default for field in dataclasses.fields(options)}
    return "".join(f",{key}={value:g}" for key, value in values.items() if value != defaults[key])


def check_range(what: str, value: float, low: float, high: float) -> None:
    """Refuse a number outside of `[low, high]`, or NaN, with a `BadInputError`."""
    if not low <= value <= high:
        raise BadInputError(f"expected {what} between {low:g} and {high:g}, got {value:g}")


def _choice(known: list[str]) -> str:
    return f"one of the options {', '.join(known)}" if known else "no options"
