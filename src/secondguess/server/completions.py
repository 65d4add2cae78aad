"""Route `/v1/completions`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from functools import partial

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from secondguess.engine import NewPiece, Output
from secondguess.server.bodies import BoundedRoute
from secondguess.server.convert import Job
from secondguess.server.replies import (
    Head,
    Json,
    completion_logprobs,
    finish_reason,
    origin,
    report,
    usage,
)
from secondguess.server.schemas import CompletionRequest
from secondguess.server.service import Service, check_finished
from secondguess.server.streams import Generation, streamed, to_event

router = APIRouter(tags=["completions"], route_class=BoundedRoute)


@router.post("/v1/completions")
async def create_completion(request: CompletionRequest, http: HttpRequest) -> Response:
    """Continue one or several prompts."""
    service: Service = http.app.state.service
    service.admit(request, http)
    head = Head("text_completion", request.model, "cmpl")
    convert = partial(service.convert.completion, request)
    if request.stream:
        job, generation = await service.start(convert)
        return streamed(generation, _chunks(request, head, job, generation))
    return await service.reply(http, convert, partial(_completion, request, head))


def _completion(request: CompletionRequest, head: Head, job: Job, outputs: Sequence[Output]) -> Json:
    choices = []
    for index, output in enumerate(outputs):
        echo = job.echo[index // job.params.n] if job.echo else ""
        logprobs = completion_logprobs(output.logprobs, 0) if request.logprobs is not None else None
        choices.append(_choice(index, echo + output.text, logprobs, finish_reason(output)))
    more = report(outputs) if request.report else {}
    return head.reply(choices, usage=usage(job.prompts, outputs), **more)


async def _chunks(
    request: CompletionRequest, head: Head, job: Job, generation: Generation
) -> AsyncIterator[bytes]:
    """Yield one chunk per committed piece, then the ends, then usage and report if requested."""
    options = request.stream_options
    no_usage = {"usage": None} if options and options.include_usage else {}
    offsets = [0] * job.num_choices
    for index in range(job.num_choices if job.echo else 0):
        yield to_event(head.reply([_choice(index, job.echo[index // job.params.n])], **no_usage))
    async for place, event in generation.pieces():
        index = place * job.params.n + event.index
        if event.piece.text or event.logprobs:
            choice = _piece_choice(request, index, event, offsets[index])
            offsets[index] += sum(len(each.text) for each in event.logprobs)
            yield to_event(head.reply([choice], **no_usage))
    outputs = generation.outputs()
    check_finished(outputs)
    ends = [_choice(index, "", None, finish_reason(output)) for index, output in enumerate(outputs)]
    for end in ends:
        yield to_event(head.reply([end], **no_usage))
    last = ({"usage": usage(job.prompts, outputs)} if no_usage else {}) | (
        report(outputs) if request.report else {}
    )
    if last:
        yield to_event(head.reply([], **last))


def _piece_choice(request: CompletionRequest, index: int, event: NewPiece, offset: int) -> Json:
    logprobs = completion_logprobs(event.logprobs, offset) if request.logprobs is not None else None
    choice = _choice(index, event.piece.text, logprobs)
    return choice | (origin(event.piece) if request.report else {})


def _choice(index: int, text: str, logprobs: Json | None = None, reason: str | None = None) -> Json:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
