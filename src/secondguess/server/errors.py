"""Errors in OpenAI's form: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel

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

_UNION_MEMBERS = {"str", "int", "list", "bool", "float", "literal"}


class ApiError(Exception):
    """An error that a client receives.

    Args:
        status: HTTP status.
        message: what was expected, what was found and how to fix it.
        param: name of the request's field.
        code: OpenAI's short name of the error.
        retry_after: seconds after which the client may try again.
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


def refused(param: str, message: str, code: str = "unsupported_value") -> ApiError:
    """Return the error of a field that cannot be honoured."""
    return ApiError(400, message, param, code)


def check_limit(param: str, got: int, most: int, unit: str) -> None:
    """Refuse a field that is larger than this server allows.

    Raises:
        ApiError: `got` is more than `most`.
    """
    if got > most:
        raise refused(
            param, f"expected at most {most} {unit} per request, got {got}; send less", "invalid_value"
        )


def api_error(error: Exception, fields: Mapping[str, object] | None = None) -> ApiError:
    """Return an exception of the package as the client's error.

    Args:
        fields: names of the request's fields, to find the one that a message is about.
    """
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
        return ApiError(400, str(error), param, "invalid_value")
    return ApiError(
        500, "the server failed to process the request; its log has the cause", code="internal_error"
    )


def validation_error(errors: Sequence[Mapping[str, Any]], body: type[BaseModel] | None) -> ApiError:
    """Return the first of pydantic's error records, with the advice of the field it is about.

    Args:
        body: the model of the request's body, if it has one.
    """
    fields = {} if body is None else body.model_fields
    first = dict(errors[0])
    if first["type"] == "json_invalid":
        reason = first.get("ctx", {}).get("error", "it cannot be parsed")
        return ApiError(400, f"expected a body in JSON, got text that is not: {reason}", None, "invalid_json")
    # FastAPI puts "body" first; unions add the names of their members, which are types.
    first["loc"] = [
        part for part in first["loc"][1:] if isinstance(part, int) or re.fullmatch(r"[a-z_]+", part)
    ]
    first["loc"] = [part for part in first["loc"] if part not in _UNION_MEMBERS] or ["body"]
    param = ".".join(map(str, first["loc"]))
    message = describe_first([first], fields)
    if first["type"] == "none_required" and param in fields:
        message = f"expected no {param}: {fields[param].description}; leave it out"
    return ApiError(400, message, param, _CODES.get(first["type"], "invalid_value"))
