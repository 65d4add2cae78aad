"""Route `/v1/responses`: a chat whose reply consists of items. Nothing is stored between requests."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from secondguess.errors import BadInputError
from secondguess.server.bodies import BoundedRoute
from secondguess.server.calls.parsers import new_id
from secondguess.server.errors import ApiError, api_error
from secondguess.server.jobs import Job
from secondguess.server.replies import to_event
from secondguess.server.reply_fields import Json, finish_reason, report, usage
from secondguess.server.responses.input import to_chat, wants_logprobs, with_response_names
from secondguess.server.responses.output import OutputItems
from secondguess.server.responses.schemas import ResponseRequest
from secondguess.server.schemas import ChatRequest
from secondguess.server.service import Service, ServiceOf

logger = logging.getLogger(__name__)

router = APIRouter(tags=["responses"], route_class=BoundedRoute)


@router.post("/v1/responses")
async def create_response(request: ResponseRequest, http: HttpRequest, service: ServiceOf) -> Response:
    """Answer a conversation with items: reasoning, messages and function calls."""
    request = service.convert.with_defaults(request)
    model = service.admit(request, http)
    return await service.answer(
        http,
        request,
        partial(_convert, service, request),
        partial(_response, request, model),
        lambda job: _Events(request, model).run(job),
        ends_with_done=False,
    )


def _convert(service: Service, request: ResponseRequest) -> Job:
    try:
        return service.convert.chat(to_chat(request))
    except (ApiError, BadInputError) as error:
        raise with_response_names(api_error(error, ChatRequest.model_fields)) from error


def _response(request: ResponseRequest, model: str, job: Job) -> Json:
    items = OutputItems(wants_logprobs(request))
    for _ in items.add(job.parse(0), job.outputs[0].logprobs):
        pass
    return _Reply(request, model).finished(items, job)[1]


@dataclass(frozen=True)
class _Reply:
    """Reply to one request, in any state."""

    request: ResponseRequest
    model: str
    created: int = field(default_factory=lambda: int(time.time()))
    identifier: str = field(default_factory=lambda: new_id("resp"))

    def object(self, status: str, output: Iterable[Json], **more: Any) -> Json:
        """Return the reply with its status and items."""
        request = self.request
        return {
            "id": self.identifier,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": self.model,
            "output": list(output),
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata or {},
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": request.reasoning.effort if request.reasoning else None, "summary": None},
            "service_tier": "default",
            "store": False,
            "background": False,
            "temperature": request.temperature,
            "text": request.text.model_dump(exclude_none=True, by_alias=True)
            if request.text
            else {"format": {"type": "text"}},
            "tool_choice": request.model_dump(include={"tool_choice"})["tool_choice"] or "auto",
            "tools": [tool.model_dump() for tool in request.tools or ()],
            "top_logprobs": request.top_logprobs or 0,
            "top_p": request.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": request.user,
            **more,
        }

    def finished(self, items: OutputItems, job: Job) -> tuple[list[Json], Json]:
        """Return the last events of the items, and the reply with all of them."""
        is_cut = finish_reason(job.outputs[0]) == "length"
        status = "incomplete" if is_cut else "completed"
        events = list(items.close(status))
        more: Json = {"usage": _usage(job)}
        if is_cut:
            more["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            more["completed_at"] = int(time.time())
        return events, self.object(
            status, items.items, **more, **(report(job.outputs) if self.request.report else {})
        )


class _Events:
    """Events of a streamed response, numbered in order."""

    def __init__(self, request: ResponseRequest, model: str) -> None:
        self._reply = _Reply(request, model)
        self._items = OutputItems(wants_logprobs(request))
        self._number = 0

    async def run(self, job: Job) -> AsyncIterator[bytes]:
        """Yield the events; an error becomes `response.failed`."""
        (parser,) = job.parsers
        for state in ("created", "in_progress"):
            yield self._event_of_state(state, self._reply.object("in_progress", ()))
        try:
            async for event in job.pieces():
                for found in self._items.add(parser.feed(event.piece), event.logprobs):
                    yield self._event(found)
        except Exception as error:
            failed = api_error(error)
            if failed.status == 500:
                logger.exception("a stream failed")
            what = {"code": "server_error", "message": failed.message}
            yield self._event_of_state("failed", self._reply.object("failed", self._items.items, error=what))
            return
        for found in self._items.add(parser.finish(job.outputs[0].finish_reason == "stop")):
            yield self._event(found)
        events, reply = self._reply.finished(self._items, job)
        for found in events:
            yield self._event(found)
        yield self._event_of_state(reply["status"], reply)

    def _event_of_state(self, state: str, reply: Json) -> bytes:
        return self._event({"type": f"response.{state}", "response": reply})

    def _event(self, fields: Json) -> bytes:
        self._number += 1
        return to_event({**fields, "sequence_number": self._number - 1}, fields["type"])


def _usage(job: Job) -> Json:
    counted = usage(job)
    return {
        "input_tokens": counted["prompt_tokens"],
        "input_tokens_details": {**counted["prompt_tokens_details"], "cache_write_tokens": 0},
        "output_tokens": counted["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": job.num_reasoning_tokens},
        "total_tokens": counted["total_tokens"],
    }
