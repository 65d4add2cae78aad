"""Route `/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from secondguess.engine import NewPiece, Output
from secondguess.server.bodies import BoundedRoute
from secondguess.server.calls.parsers import Delta
from secondguess.server.chunks import ChunkStream
from secondguess.server.jobs import Job
from secondguess.server.reply_fields import (
    Head,
    Json,
    chat_logprobs,
    delta_fields,
    finish_reason,
    message,
    requested_statistics,
    usage,
)
from secondguess.server.schemas import ChatRequest
from secondguess.server.service import ServiceOf

router = APIRouter(tags=["chat"], route_class=BoundedRoute)


@router.post("/v1/chat/completions")
async def create_chat_completion(request: ChatRequest, http: HttpRequest, service: ServiceOf) -> Response:
    """Answer a conversation."""
    name = "chat.completion.chunk" if request.stream else "chat.completion"
    head = Head(name, service.admit(request, http), "chatcmpl")
    return await service.answer(
        http,
        request,
        partial(service.convert.chat, request),
        partial(_chat_completion, request, head),
        lambda job: _Chunks(service, request, head, job).run(),
    )


def _chat_completion(request: ChatRequest, head: Head, job: Job) -> Json:
    choices = []
    for index, output in enumerate(job.outputs):
        found = message(job.parse(index))
        choice = {
            "index": index,
            "message": found,
            "finish_reason": finish_reason(output, "tool_calls" in found),
        }
        choices.append(choice | {"logprobs": chat_logprobs(output.logprobs) if request.logprobs else None})
    more = requested_statistics(request, job)
    if request.metadata is not None:
        more["metadata"] = request.metadata
    return head.reply(choices, usage=usage(job), **more)


class _Chunks(ChunkStream[ChatRequest]):
    """Chunks of a streamed chat: one or several per committed piece."""

    def begin(self) -> Iterable[Json]:
        self._has_begun = [False] * self.job.num_choices
        self._num_calls = [0] * self.job.num_choices
        return ()

    def add(self, event: NewPiece, more: Json) -> Iterator[Json]:
        """Yield the choices of a piece; the first has its log-probabilities and, if it is content, `more`."""
        index = event.index
        deltas = self.job.parsers[index].feed(event.piece)
        if {delta.field for delta in deltas} == {"content"}:  # parsers may return one per token
            deltas = [Delta("content", "".join(delta.text for delta in deltas))]
        is_content = deltas == [Delta("content", event.piece.text)]
        given = [delta for delta in deltas if delta.text or delta.field == "tool_call"]
        if not given and event.logprobs:
            given = [Delta("content", "")]
        fields = {"logprobs": chat_logprobs(event.logprobs)} if self.request.logprobs else {}
        for delta in given:
            yield self._choice(index, delta) | fields | (more if is_content else {})
            fields = {}

    def end(self, index: int, output: Output) -> Iterator[Json]:
        for delta in self.job.parsers[index].finish(output.finish_reason == "stop"):
            if delta.text or delta.field == "tool_call":
                yield self._choice(index, delta)
        yield self._choice(index, None) | {"finish_reason": finish_reason(output, self._num_calls[index] > 0)}

    def _choice(self, index: int, delta: Delta | None) -> Json:
        fields: Json = {} if self._has_begun[index] else {"role": "assistant"}
        self._has_begun[index] = True
        if delta is not None:
            fields |= delta_fields(delta, self._num_calls[index])
            self._num_calls[index] += delta.field == "tool_call"
        return {"index": index, "delta": fields, "logprobs": None, "finish_reason": None}
