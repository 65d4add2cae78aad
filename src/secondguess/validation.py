"""Base class of settings that pydantic checks, with errors in one line."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from secondguess.errors import BadInputError, suggestion

MAX_CHARACTERS = 60
"""Characters of a refused value that an error message shows."""

Item = TypeVar("Item")


def _refuse_repeated(values: tuple[Item, ...]) -> tuple[Item, ...]:
    if len(set(values)) < len(values):
        raise ValueError("should have different values")
    return values


Text = Annotated[str, Field(min_length=1)]
Seed = Annotated[int, Field(ge=0, le=2**63 - 1)]
Temperature = Annotated[float, Field(ge=0, le=100)]
Count = Annotated[int, Field(ge=1)]
Different = Annotated[tuple[Item, ...], AfterValidator(_refuse_repeated)]
"""Values of which no two are equal."""


class Settings(BaseModel):
    """Immutable values that are checked on construction.

    Types are strict (a number in quotes is no number); NaN, infinities and unknown names are refused.

    Raises:
        BadInputError: an unknown, missing or invalid value.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    def __init__(self, /, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise BadInputError(describe(error, type(self).model_fields)) from None


def describe(error: ValidationError, known: Iterable[str] = ()) -> str:
    """Return the first error of a validation as `expected ..., got ...`.

    Args:
        known: valid names, of which the one that an unknown name resembles is suggested.
    """
    return describe_first(error.errors(include_url=False), known)


def describe_first(errors: Sequence[Mapping[str, Any]], known: Iterable[str] = ()) -> str:
    """Return the first of pydantic's error records as in `describe`."""
    first = errors[0]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, BadInputError):
        return str(cause)
    name = ".".join(str(part) for part in first["loc"] if part != "[key]")
    if first["type"] == "missing":
        return f"expected a value for {name}, got none; add it"
    if first["type"] == "extra_forbidden":
        listed = f" (known: {', '.join(known)})" if known else ""
        hint = suggestion(str(first["loc"][-1]), known) or f"; take it out{listed}"
        return f"expected no {_shorten(name)}{hint}"
    if first["type"] in ("union_tag_invalid", "union_tag_not_found"):
        context = first["ctx"]
        field = context["discriminator"].strip("'")
        name = name if field.endswith("()") else f"{name}.{field}"  # a function, not a field
        if "tag" not in context:
            return f"expected a value for {name}, got none; add it"
        return f"expected {name} to be one of {context['expected_tags']}, got {_shorten(context['tag'])}"
    # pydantic says "Input should be ...", "String should match ..." or, for our own, "Value error, should ...".
    wanted, found = re.subn(r"^(\w+|Value error,) should ", "", first["msg"])
    if not found:
        return str(first["msg"])
    return f"expected {name or 'the content'} to {wanted}, got {_shorten(first['input'])}"


def _shorten(value: object) -> str:
    text = repr(value)
    return text if len(text) <= MAX_CHARACTERS else f"{text[: MAX_CHARACTERS - 3]}..."
