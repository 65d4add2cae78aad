"""Replies as JSON and as server-sent events."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from secondguess.server.errors import ApiError, api_error
from secondguess.server.jobs import Job

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"


async def unless_disconnected(http: HttpRequest, work: asyncio.Task[Any]) -> Any:
    """Return the result of some work, or cancel it when the client disconnects and return None."""

    async def wait_for_disconnect() -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass

    watcher = asyncio.create_task(wait_for_disconnect())
    try:
        await asyncio.wait((work, watcher), return_when=asyncio.FIRST_COMPLETED)
        return work.result() if work.done() else None
    finally:
        for task in (work, watcher):
            task.cancel()


class EventStream(StreamingResponse):
    """Server-sent events that call `on_end` however they end; a disconnect ends them, too."""

    def __init__(self, content: AsyncIterator[bytes], on_end: Callable[[], None]) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(content, media_type="text/event-stream", headers=headers)
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_end()


def streamed(job: Job, events: AsyncIterator[bytes], ends_with_done: bool = True) -> EventStream:
    """Return the events of a request as a reply that ends with `[DONE]`; an error becomes an event."""

    async def content() -> AsyncIterator[bytes]:
        try:
            async for event in events:
                yield event
        except Exception as error:
            found = api_error(error)
            if found.status == 500:
                logger.exception("a stream failed")
            yield to_event(found.body())
        if ends_with_done:
            yield DONE

    return EventStream(content(), job.cancel)


def to_json(value: object) -> bytes:
    """Return a value as JSON; a lone surrogate becomes its escape, which JSON allows."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "backslashreplace")


def to_event(value: object, name: str | None = None) -> bytes:
    """Return a value as a server-sent event."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + to_json(value) + b"\n\n"


class JsonReply(Response):
    """Reply whose body is JSON, in any text that a model can write."""

    media_type = "application/json"

    def render(self, content: object) -> bytes:
        return to_json(content)


def error_response(error: ApiError) -> JsonReply:
    """Return an error as a reply."""
    return JsonReply(error.body(), error.status, error.headers())
