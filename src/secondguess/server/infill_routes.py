"""Route `/infill` of llama.cpp, which plugins of editors call: the text between a prefix and a suffix."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from secondguess.sampling.text import text_of_token
from secondguess.server.bodies import BoundedRoute
from secondguess.server.jobs import Job
from secondguess.server.replies import to_event
from secondguess.server.reply_fields import Json, finish_reason, timings
from secondguess.server.schemas import InfillRequest
from secondguess.server.service import Service, ServiceOf

router = APIRouter(tags=["completions"], route_class=BoundedRoute)


@router.post("/infill")
async def create_infill(request: InfillRequest, http: HttpRequest, service: ServiceOf) -> Response:
    """Write the text between a prefix and a suffix."""
    build = partial(_reply, service, request, service.admit(request, http))
    return await service.answer(
        http,
        request,
        partial(service.convert.infill, request),
        build,
        partial(_events, build),
        ends_with_done=False,
    )


async def _events(build: Callable[[Job], Json], job: Job) -> AsyncIterator[bytes]:
    """Yield the pieces of a middle, then the reply without its text."""
    async for event in job.pieces():
        if event.piece.text:
            yield to_event({"index": 0, "content": event.piece.text, "stop": False})
    yield to_event({**build(job), "content": ""})


def _reply(service: Service, request: InfillRequest, model: str, job: Job) -> Json:
    """Return the reply in llama.cpp's form, or the fields of it that the request names."""
    (output,) = job.outputs
    word = output.stop_string
    if not word and output.token_ids:  # the text lacks special tokens
        last = text_of_token(service.target.tokenizer, output.token_ids[-1])
        word = last if last in job.params.stop else ""
    is_cut = finish_reason(output) == "length"
    reply = {
        "index": 0,
        "content": output.text,
        "stop": True,
        "model": model,
        "stop_type": "limit" if is_cut else "word" if word else "eos",
        "stopping_word": "" if is_cut else word,
        "tokens_predicted": len(output.token_ids),
        "tokens_evaluated": len(job.token_ids[0]),
        "tokens_cached": output.stats.num_reused,
        "truncated": False,
        "timings": timings(job),
    }
    if not request.response_fields:
        return reply
    found = ((name, _at(reply, name.split("/"))) for name in request.response_fields)
    return {name: value for name, value in found if value is not None}


def _at(reply: Json, path: Sequence[str]) -> object:
    """Return a field of a reply; None if it has none of this name."""
    value: object = reply
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return value
