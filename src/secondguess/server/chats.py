"""Route `/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from functools import partial

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from secondguess.core import TokenLogprob
from secondguess.engine import Output
from secondguess.server.bodies import BoundedRoute
from secondguess.server.convert import Job
from secondguess.server.parsing import Delta, ReplyParser
from secondguess.server.replies import (
    Head,
    Json,
    chat_logprobs,
    delta_fields,
    finish_reason,
    message,
    origin,
    report,
    usage,
)
from secondguess.server.schemas import ChatRequest
from secondguess.server.service import Service, check_finished
from secondguess.server.streams import Generation, streamed, to_event

router = APIRouter(tags=["chat"], route_class=BoundedRoute)


@router.post("/v1/chat/completions")
async def create_chat_completion(request: ChatRequest, http: HttpRequest) -> Response:
    """Answer a conversation."""
    service: Service = http.app.state.service
    service.admit(request, http)
    convert = partial(service.convert.chat, request)
    if request.stream:
        head = Head("chat.completion.chunk", request.model, "chatcmpl")
        job, generation = await service.start(convert)
        parsers = await service.parsers(job, generation)
        return streamed(generation, _Chunks(request, head, job, parsers).run(generation))
    head = Head("chat.completion", request.model, "chatcmpl")
    return await service.reply(http, convert, partial(_chat_completion, service, request, head))


def _chat_completion(
    service: Service, request: ChatRequest, head: Head, job: Job, outputs: Sequence[Output]
) -> Json:
    choices, num_reasoning = [], 0
    for index, output in enumerate(outputs):
        deltas, count = service.parse(job, output)
        num_reasoning += count
        found = message(deltas)
        choice = {
            "index": index,
            "message": found,
            "finish_reason": finish_reason(output, "tool_calls" in found),
        }
        choices.append(choice | {"logprobs": chat_logprobs(output.logprobs) if request.logprobs else None})
    more = report(outputs) if request.report else {}
    if request.metadata is not None:
        more["metadata"] = request.metadata
    return head.reply(choices, usage=usage(job.prompts, outputs, num_reasoning), **more)


class _Chunks:
    """Chunks of a streamed chat."""

    def __init__(self, request: ChatRequest, head: Head, job: Job, parsers: Sequence[ReplyParser]) -> None:
        options = request.stream_options
        self._no_usage = {"usage": None} if options and options.include_usage else {}
        self._request = request
        self._head = head
        self._job = job
        self._parsers = parsers
        self._has_begun = [False] * len(parsers)
        self._num_calls = [0] * len(parsers)

    async def run(self, generation: Generation) -> AsyncIterator[bytes]:
        """Yield one or several chunks per committed piece, then the ends, then usage and report."""
        async for _, event in generation.pieces():
            deltas = self._parsers[event.index].feed(event.piece)
            is_content = deltas == [Delta("content", event.piece.text)]
            more = origin(event.piece) if self._request.report and is_content else {}
            for chunk in self._deltas(event.index, deltas, event.logprobs, more):
                yield chunk
        outputs = generation.outputs()
        check_finished(outputs)
        for index, output in enumerate(outputs):
            for chunk in self._deltas(index, self._parsers[index].finish(output.finish_reason == "stop"), ()):
                yield chunk
            yield self._chunk(index, {}, finish_reason(output, self._num_calls[index] > 0))
        last = report(outputs) if self._request.report else {}
        if self._no_usage:
            num_reasoning = sum(parser.num_reasoning_tokens for parser in self._parsers)
            last["usage"] = usage(self._job.prompts, outputs, num_reasoning)
        if last:
            yield to_event(self._head.reply([], **last))

    def _deltas(
        self, index: int, deltas: Sequence[Delta], logprobs: Sequence[TokenLogprob], more: Json | None = None
    ) -> list[bytes]:
        """Return the chunks of some additions; the first has all log-probabilities of the piece."""
        given = [delta for delta in deltas if delta.text or delta.kind == "tool_call"]
        if not given and logprobs:
            given = [Delta("content", "")]
        chunks = []
        for place, delta in enumerate(given):
            first = place == 0
            found = chat_logprobs(logprobs) if first and self._request.logprobs else None
            fields = delta_fields(delta, self._num_calls[index])
            self._num_calls[index] += delta.kind == "tool_call"
            chunks.append(self._chunk(index, fields, None, found, more if first else None))
        return chunks

    def _chunk(
        self,
        index: int,
        delta: Json,
        reason: str | None,
        logprobs: Json | None = None,
        more: Json | None = None,
    ) -> bytes:
        if not self._has_begun[index]:
            self._has_begun[index] = True
            delta = {"role": "assistant", **delta}
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": reason,
            **(more or {}),
        }
        return to_event(self._head.reply([choice], **self._no_usage))
