"""Route `/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from secondguess.engine import NewPiece, Output
from secondguess.server.bodies import BoundedRoute
from secondguess.server.chunks import ChunkStream
from secondguess.server.jobs import Job
from secondguess.server.parsing import Delta, ReplyParser
from secondguess.server.replies import (
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
from secondguess.server.service import Service
from secondguess.server.streams import streamed

router = APIRouter(tags=["chat"], route_class=BoundedRoute)


@router.post("/v1/chat/completions")
async def create_chat_completion(request: ChatRequest, http: HttpRequest) -> Response:
    """Answer a conversation."""
    service: Service = http.app.state.service
    model = service.admit(request, http)
    convert = partial(service.convert.chat, request)
    if request.stream:
        head = Head("chat.completion.chunk", model, "chatcmpl")
        job = await service.start(http, convert)
        parsers = await service.parsers(job)
        return streamed(job, _Chunks(service, request, head, job, parsers).run())
    head = Head("chat.completion", model, "chatcmpl")
    return await service.reply(http, convert, partial(_chat_completion, service, request, head))


def _chat_completion(service: Service, request: ChatRequest, head: Head, job: Job) -> Json:
    choices, num_reasoning = [], 0
    for index, output in enumerate(job.outputs):
        deltas, count = service.parse(job, output)
        num_reasoning += count
        found = message(deltas)
        choice = {
            "index": index,
            "message": found,
            "finish_reason": finish_reason(output, "tool_calls" in found),
        }
        choices.append(choice | {"logprobs": chat_logprobs(output.logprobs) if request.logprobs else None})
    more = requested_statistics(request, job)
    if request.metadata is not None:
        more["metadata"] = request.metadata
    return head.reply(choices, usage=usage(job, num_reasoning), **more)


class _Chunks(ChunkStream[ChatRequest]):
    """Chunks of a streamed chat: one or several per committed piece."""

    def __init__(
        self, service: Service, request: ChatRequest, head: Head, job: Job, parsers: Sequence[ReplyParser]
    ) -> None:
        super().__init__(service, request, head, job)
        self._parsers = parsers
        self._has_begun = [False] * len(parsers)
        self._num_calls = [0] * len(parsers)

    @property
    def num_reasoning_tokens(self) -> int:
        return sum(parser.num_reasoning_tokens for parser in self._parsers)

    def add(self, event: NewPiece, more: Json) -> Iterator[Json]:
        """Yield the choices of a piece; the first has its log-probabilities and, if it is content, `more`."""
        index = event.index
        deltas = self._parsers[index].feed(event.piece)
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
        for delta in self._parsers[index].finish(output.finish_reason == "stop"):
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
