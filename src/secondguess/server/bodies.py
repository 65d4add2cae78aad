"""Parsing of requests' bodies, bounded in the time that it takes on the event loop."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Any

import numpy
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

MAX_VALUES = 2**16
"""Values and keys in a body, besides one per token of the context; parsing takes a microsecond for each."""

_BEGINS_VALUE = numpy.zeros(256, numpy.bool_)
_BEGINS_VALUE[[*b",:[{"]] = True


class BoundedRequest(HttpRequest):
    """Request whose body may hold a bounded number of JSON values.

    The size of a body bounds the time to parse its texts, but not that of `[[],[],[],...]`. A thread
    would not help: the parser holds the interpreter's lock.
    """

    async def json(self) -> Any:
        body = await self.body()
        most = MAX_VALUES + self.app.state.service.target.context_length
        if len(body) > most and (count := count_values(body)) > most:
            message = (
                f"expected a body of at most {most} JSON values, got about {count}; send several requests"
            )
            raise HTTPException(413, message)
        # In another encoding than JSON's own, the bytes would be counted wrongly.
        return json.loads(body.decode("utf-8", "surrogatepass"))


class BoundedRoute(APIRoute):
    """Route that parses bodies as `BoundedRequest` does."""

    def get_route_handler(self) -> Callable[[HttpRequest], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def handle(request: HttpRequest) -> Response:
            return await handler(BoundedRequest(request.scope, request.receive))

        return handle


def count_values(body: bytes) -> int:
    """Return the number of separators and opening brackets outside of strings."""
    text = numpy.frombuffer(body.replace(b"\\\\", b"").replace(b'\\"', b""), numpy.uint8)
    is_inside = numpy.logical_xor.accumulate(text == ord('"'))
    return int(numpy.count_nonzero(_BEGINS_VALUE[text] & ~is_inside))
