"""Errors in OpenAI's form: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from secondguess.engine import DeadlineError, DrainingError, QueueFullError
from secondguess.errors import BadInputError, OutOfMemoryError
from secondguess.validation import describe_first

RETRY_SECONDS = 5.0
"""Value of `Retry-After` where the engine names none."""

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
_CODES = {
    "missing": "missing_required_parameter",
    "extra_forbidden": "unknown_parameter",
    "none_required": "unsupported_parameter",
    "literal_error": "unsupported_value",
}
SPECULATION = {
    "draft_with": "speculation.drafter",
    "draft_length": "speculation.draft_length",
    "max_draft_length": "speculation.max_draft",
}
"""Setting -> the field of a request that it comes from."""


class ApiError(Exception):
    """Error that a client receives: what was expected, what was found and how to fix it.

    `code` is OpenAI's short name of it, `retry_after` is in seconds.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after = retry_after

    def body(self) -> dict[str, Any]:
        """Return the reply's body."""
        default = "invalid_request_error" if self.status < 500 else "server_error"
        kind = _TYPES.get(self.status, default)
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        """Return the reply's headers; `Retry-After` is in whole seconds."""
        headers = {"WWW-Authenticate": "Bearer"} if self.status == 401 else {}
        if self.retry_after is not None:
            headers["Retry-After"] = str(max(1, round(self.retry_after)))
        return headers


SYNONYMS = {
    "max_tokens": ("n_predict", "max_output_tokens"),
    **dict.fromkeys(
        ("n_predict", "num_predict", "max_new_tokens"), ("max_tokens", "max_output_tokens", "n_predict")
    ),
    "repeat_penalty": ("repetition_penalty",),
}
"""Field of other servers -> names that it may have here."""


def refused(param: str, message: str, code: str = "unsupported_value") -> ApiError:
    """Return the error of a field that is refused."""
    return ApiError(400, message, param, code)


def check_limit(param: str, got: int, limit: int, unit: str) -> None:
    """Refuse a field of which `got` is more than this server's limit."""
    if got > limit:
        raise refused(
            param, f"expected at most {limit} {unit} per request, got {got}; send less", "invalid_value"
        )


def api_error(error: Exception, fields: Mapping[str, object] | None = None) -> ApiError:
    """Return an exception of the package as the client's error; `fields` are those of the request that it may be about."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFullError):
        return ApiError(429, str(error), code="rate_limit_exceeded", retry_after=error.retry_after)
    if isinstance(error, DrainingError):
        return ApiError(503, str(error), code="draining", retry_after=RETRY_SECONDS)
    if isinstance(error, DeadlineError):
        return ApiError(504, str(error), code="deadline_exceeded")
    if isinstance(error, OutOfMemoryError):
        return ApiError(503, str(error), code="out_of_memory", retry_after=RETRY_SECONDS)
    if isinstance(error, BadInputError):
        named = re.match(r"expected (\w+)", str(error))
        name = named[1] if named and fields else ""
        param = SPECULATION.get(name, name if fields and name in fields else None)
        message = str(error).replace(name, param, 1) if name and param else str(error)
        return ApiError(400, message, param, "invalid_value")
    return ApiError(
        500, "the server failed to process the request; its log has the cause", code="internal_error"
    )


def validation_error(errors: Sequence[Mapping[str, Any]], body: type[BaseModel] | None) -> ApiError:
    """Return the first of pydantic's error records on a body, with the advice of the field it is about."""
    fields = {} if body is None else body.model_fields
    # A value of no member of a union has an error for each: one within a field is about the member that it resembles.
    located = [
        (_resolve(body, error["loc"][1:], error["type"] == "extra_forbidden"), error) for error in errors
    ]
    (path, known), found = max(located, key=_num_fields)
    first = dict(found)
    if first["type"] == "json_invalid":
        reason = first.get("ctx", {}).get("error", "it cannot be parsed")
        return ApiError(400, f"expected a body in JSON, got text that is not: {reason}", None, "invalid_json")
    first["loc"] = path or ["body"]
    param = ".".join(map(str, first["loc"]))
    message = describe_first([first], known)
    meant = next((name for name in SYNONYMS.get(param, ()) if name in known), None)
    if first["type"] == "extra_forbidden" and meant:
        message = f"expected no {param}; did you mean {meant!r}?"
    if first["type"] == "none_required" and param in fields:
        message = f"expected no {param}: {fields[param].description}; leave it out"
    return ApiError(400, message, param, _CODES.get(first["type"], "invalid_value"))


def _num_fields(located: tuple[tuple[Sequence[int | str], Sequence[str]], Mapping[str, Any]]) -> int:
    """Return the number of fields in which an error lies; a wrong tag is one of them."""
    (path, _), error = located
    return sum(isinstance(part, str) for part in path) + str(error["type"]).startswith("union_tag")


def _resolve(
    body: type[BaseModel] | None, location: Sequence[int | str], is_unknown: bool
) -> tuple[list[int | str], list[str]]:
    """Return the names and indices of a location in a body, and the fields that are known there.

    pydantic's location also has the names and tags of members of unions. `is_unknown`: the last part is no field.
    """
    models = [] if body is None else [body]
    path: list[int | str] = []
    for part in location[:-1] if is_unknown else location:
        if len(models) > 1 and (chosen := [model for model in models if _is_named(model, part)]):
            models = chosen
            continue
        fields = [field for model in models if (field := _fields(model).get(part)) is not None]
        if fields or isinstance(part, int):
            path.append(part)
        models = [model for field in fields for model in _models_in(field.annotation)] or models
    known = [str(name) for name in _fields(models[0])] if is_unknown and len(models) == 1 else []
    return [*path, *location[len(location) - is_unknown :]], known


def _fields(model: type[BaseModel]) -> dict[int | str, FieldInfo]:
    return {field.alias or name: field for name, field in model.model_fields.items()}


def _is_named(model: type[BaseModel], part: int | str) -> bool:
    """Return whether a part of a location is the name or the tag of a member of a union."""
    fields = model.model_fields.values()
    return part == model.__name__ or any(part in get_args(field.annotation) for field in fields)


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    """Return the models among the members of a type."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in _models_in(part)]
