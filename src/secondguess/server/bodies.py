"""Parsing of requests' bodies, bounded in the time that it takes on the event loop."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import numpy
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from secondguess.server.errors import ApiError

MAX_VALUES = 2**16
"""Values and keys in a body, besides one per token of the context; parsing takes a microsecond for each."""

_ESCAPED_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_BEGINS_VALUE = numpy.zeros(256, numpy.bool_)
_BEGINS_VALUE[[*b",:[{"]] = True


class BoundedRequest(HttpRequest):
    """Request whose body may hold a bounded number of JSON values.

    The size of a body bounds the time to parse its texts, but not that of `[[],[],[],...]`. A thread
    would not help: the parser holds the interpreter's lock.
    """

    async def json(self) -> Any:
        body = await self.body()
        limit = MAX_VALUES + self.app.state.service.target.context_length
        if len(body) > limit and (count := count_values(body)) > limit:
            message = (
                f"expected a body of at most {limit} JSON values, got about {count}; send several requests"
            )
            raise _refused(ApiError(413, message))
        try:
            # In another encoding than JSON's own, the bytes would be counted wrongly.
            text = body.decode()
            value = json.loads(text)
            if _ESCAPED_SURROGATE.search(text):
                _check_unicode(value)
        except json.JSONDecodeError:
            raise
        except (ValueError, RecursionError) as error:
            reason = str(error).partition(";")[0]  # Python's own advice follows
            message = f"expected a body in JSON, got text that cannot be read: {reason}"
            raise _refused(ApiError(400, message, None, "invalid_json")) from None
        return value


class BoundedRoute(APIRoute):
    """Route that parses bodies as `BoundedRequest` does."""

    def get_route_handler(self) -> Callable[[HttpRequest], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def handle(request: HttpRequest) -> Response:
            return await handler(BoundedRequest(request.scope, request.receive))

        return handle


def _check_unicode(value: Any) -> None:
    """Refuse half of a surrogate pair, which no text is that a model can read; the error names the field."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        path = next(_paths_of(value, error.object[error.start]))
        got = f"got the lone surrogate {error.object[error.start]!r}; remove it"
        message = f"expected {path or 'a body'} in valid Unicode, {got}"
        raise _refused(ApiError(400, message, path or None, "invalid_value")) from None


def _paths_of(value: Any, character: str) -> Iterator[str]:
    """Yield where in a body a character is: names of fields and indices, joined by points."""
    waiting = [("", value)]
    while waiting:
        path, found = waiting.pop()
        if isinstance(found, str) and character in found:
            yield path.lstrip(".")
        children = (
            found.items() if isinstance(found, dict) else enumerate(found) if isinstance(found, list) else ()
        )
        for key, child in children:
            waiting += [(path, key), (f"{path}.{key}", child)]


def _refused(error: ApiError) -> HTTPException:
    """Return an error in the form that FastAPI passes on while it reads a body."""
    return HTTPException(error.status, error)  # type: ignore[arg-type]


def count_values(body: bytes) -> int:
    """Return the number of separators and opening brackets outside of strings."""
    text = numpy.frombuffer(body.replace(b"\\\\", b"").replace(b'\\"', b""), numpy.uint8)
    is_inside = numpy.logical_xor.accumulate(text == ord('"'))
    return int(numpy.count_nonzero(_BEGINS_VALUE[text] & ~is_inside))
