"""Route `/v1/completions`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from secondguess.engine import NewPiece, Output
from secondguess.engine.generation import with_texts
from secondguess.sampling.text import text_of_token
from secondguess.server.bodies import BoundedRoute
from secondguess.server.chunks import ChunkStream
from secondguess.server.jobs import Job
from secondguess.server.reply_fields import (
    Head,
    Json,
    completion_logprobs,
    echoed_logprobs,
    finish_reason,
    logprobs_by_token,
    requested_statistics,
    usage,
)
from secondguess.server.schemas import CompletionRequest
from secondguess.server.service import Service, ServiceOf

router = APIRouter(tags=["completions"], route_class=BoundedRoute)


@router.post("/v1/completions")
async def create_completion(request: CompletionRequest, http: HttpRequest, service: ServiceOf) -> Response:
    """Continue one or several prompts."""
    head = Head("text_completion", service.admit(request, http), "cmpl")
    return await service.answer(
        http,
        request,
        partial(service.convert.completion, request),
        partial(_completion, service, request, head),
        lambda job: _Chunks(service, request, head, job).run(),
    )


def _completion(service: Service, request: CompletionRequest, head: Head, job: Job) -> Json:
    choices = []
    for index, output in enumerate(job.outputs):
        prompt_index, tokenizer = index // job.params.n, service.target.tokenizer
        echo = job.echo[prompt_index] if job.echo else ""
        of_prompt = [with_texts(token, tokenizer) for token in output.prompt_logprobs]
        logprobs = None
        if request.logprobs is not None and job.echo:
            first = text_of_token(tokenizer, job.token_ids[prompt_index][0])
            logprobs = echoed_logprobs(first, [*of_prompt, *output.logprobs])
        elif request.logprobs is not None:
            logprobs = completion_logprobs(output.logprobs, 0)
        choice = _choice(index, echo + output.text, logprobs, finish_reason(output))
        if request.prompt_logprobs is not None:
            choice["prompt_logprobs"] = [None, *map(logprobs_by_token, of_prompt)]
        choices.append(choice)
    more = requested_statistics(request, job)
    return head.reply(choices, usage=usage(job), **more)


class _Chunks(ChunkStream[CompletionRequest]):
    """Chunks of a streamed completion: one per committed piece with text."""

    def begin(self) -> Iterator[Json]:
        self._offsets = [0] * self.job.num_choices
        for index in range(self.job.num_choices if self.job.echo else 0):
            yield _choice(index, self.job.echo[index // self.job.params.n])

    def add(self, event: NewPiece, more: Json) -> Iterator[Json]:
        if event.piece.text or event.logprobs:
            wanted = self.request.logprobs is not None
            logprobs = completion_logprobs(event.logprobs, self._offsets[event.index]) if wanted else None
            self._offsets[event.index] += sum(len(token.text) for token in event.logprobs)
            yield _choice(event.index, event.piece.text, logprobs) | more

    def end(self, index: int, output: Output) -> Iterator[Json]:
        yield _choice(index, "", None, finish_reason(output))


def _choice(index: int, text: str, logprobs: Json | None = None, reason: str | None = None) -> Json:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
