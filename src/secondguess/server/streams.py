"""Events of the engine as an asynchronous stream, and server-sent events."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable
from functools import partial
from threading import Lock
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from secondguess.engine import Event, Failed, NewPiece, Output, Request, RequestHandle
from secondguess.prompts import EncodedPrompt
from secondguess.server.convert import Job
from secondguess.server.errors import ApiError, api_error
from secondguess.server.metrics import Observer
from secondguess.server.sleep import ServerEngine

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"


class RequestStream:
    """Events and outputs of one HTTP request.

    `submit` is called on a thread, everything else on the event loop.

    Args:
        engine: the engine.
        observer: receives pieces and outputs as they come, for the metrics.
        owner: sender of the request.
    """

    def __init__(self, engine: ServerEngine, observer: Observer, owner: str) -> None:
        self._engine = engine
        self._owner = owner
        self._observer = observer
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self._lock = Lock()
        self._handles: list[RequestHandle] = []
        self._is_cancelled = False
        self._num_prompts = self._num_ended = 0
        self._samples_per_prompt = 1
        self._outputs: dict[int, list[Output]] = {}

    def submit(self, job: Job, deadline: float | None) -> None:
        """Give all prompts of a job to the engine.

        Raises:
            BadInputError: settings that the engine cannot honour.
            QueueFullError: no room for the request.
            DrainingError: the engine accepts no more requests.
        """
        self._num_prompts, self._samples_per_prompt = len(job.prompts), job.params.n
        for prompt_index, prompt in enumerate(job.prompts):
            encoded = prompt if job.images is None else EncodedPrompt(prompt, job.images)
            request = Request(encoded, job.params, deadline, self._owner, follows=prompt_index > 0)
            handle = self._engine.submit(request, partial(self._receive, prompt_index))
            with self._lock:
                self._handles.append(handle)
                is_cancelled = self._is_cancelled
            if is_cancelled:
                self._observer.on_cancelled(self._samples_per_prompt)
                handle.cancel()

    def cancel(self) -> None:
        """Stop what still runs; does nothing to requests that have ended."""
        with self._lock:
            is_first, self._is_cancelled = not self._is_cancelled, True
            handles = list(self._handles)
        if is_first:
            self._observer.on_cancelled((len(handles) - self._num_ended) * self._samples_per_prompt)
        for handle in handles:
            handle.cancel()

    async def pieces(self) -> AsyncIterator[tuple[int, NewPiece]]:
        """Yield `(prompt, piece)` until all prompts are finished.

        Raises:
            Exception: the error of a prompt that failed.
        """
        while self._num_ended < self._num_prompts:
            prompt_index, event = await self._events.get()
            if isinstance(event, NewPiece):
                self._observer.on_piece(event)
                yield prompt_index, event
                continue
            self._num_ended += 1
            if isinstance(event, Failed):
                self._observer.on_failed(self._samples_per_prompt)
                raise event.error
            self._outputs[prompt_index] = event.outputs
            self._observer.on_outputs(event)

    async def finish(self) -> list[Output]:
        """Wait for the end and return the outputs, prompt by prompt."""
        async for _ in self.pieces():
            pass
        return self.outputs()

    def outputs(self) -> list[Output]:
        """Return the outputs of all prompts, once they are finished."""
        return [output for prompt_index in sorted(self._outputs) for output in self._outputs[prompt_index]]

    def _receive(self, prompt_index: int, event: Event) -> None:
        """Pass an event to the loop; called on the engine's thread."""
        try:
            self._loop.call_soon_threadsafe(self._events.put_nowait, (prompt_index, event))
        except RuntimeError:  # the loop was closed while the engine still ran
            self.cancel()


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


def streamed(stream: RequestStream, events: AsyncIterator[bytes], ends_with_done: bool = True) -> EventStream:
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

    return EventStream(content(), stream.cancel)


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
