"""State of the application: the engine, the model's conversions, and a few threads for slow work."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, TypeVar

from fastapi import Depends
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from secondguess.server.conversations import ChatTemplate
from secondguess.server.convert import Converter
from secondguess.server.errors import ApiError
from secondguess.server.jobs import Job
from secondguess.server.metrics import Metrics, Observer
from secondguess.server.replies import JsonReply, streamed, unless_disconnected
from secondguess.server.responses.schemas import ResponseRequest
from secondguess.server.schemas import Sampling
from secondguess.server.served_model import ServedModel
from secondguess.server.settings import ServerSettings
from secondguess.server.sleep import ServerEngine

Result = TypeVar("Result")
CLIENT_CLOSED_REQUEST = 499
MAX_IMAGE_BYTES = 2**23
"""Room for images in a body by default; more would be parsed for too long on the event loop."""
SENDER_FIELDS = ("user", "safety_identifier")

logger = logging.getLogger(__name__)


class Service:
    """One engine behind HTTP."""

    def __init__(self, engine: ServerEngine, settings: ServerSettings) -> None:
        self.engine = engine
        self.settings = settings
        self.target = ServedModel.from_llm(engine.llm, next(iter(settings.model_names), None))
        self.model_names = settings.model_names or (self.target.name,)
        self.template = ChatTemplate(self.target, settings.chat_template)
        self.convert = Converter(self.target, settings, self.template)
        self.metrics = Metrics(engine, self.model_names[0])
        default = 2**20 + 16 * self.target.context_length + self.target.takes_images * MAX_IMAGE_BYTES
        self.max_body_bytes = settings.max_body_bytes or default
        self._pools: dict[int, ThreadPoolExecutor] = {}
        """Worker threads of this process, by its id: a forked process has none of its parent's threads."""

    def check_model(self, name: str | None) -> None:
        """Refuse a model that is not served; the message has the valid names."""
        if name is not None and name not in self.model_names:
            served = ", ".join(self.model_names)
            raise ApiError(
                404,
                f"expected a model that this server has ({served}), got {name!r:.60}; use one of its names",
                "model",
                "model_not_found",
            )

    def admit(self, request: Sampling | ResponseRequest, http: HttpRequest) -> str:
        """Check a request's model, and log who sent it, as far as the request says; return the model's name."""
        self.check_model(request.model)
        sender = {
            name: value for name in SENDER_FIELDS if (value := getattr(request, name, None)) is not None
        }
        if sender:
            logger.info("request %s: %r", http.state.request_id, sender)
        return request.model or self.model_names[0]

    async def run(self, work: Callable[[], Result]) -> Result:
        """Return the result of slow work, computed on a worker thread."""
        if os.getpid() not in self._pools:
            self._pools = {os.getpid(): ThreadPoolExecutor(self.settings.num_threads, "secondguess-server")}
        return await asyncio.get_running_loop().run_in_executor(self._pools[os.getpid()], work)

    async def answer(
        self,
        http: HttpRequest,
        request: Sampling | ResponseRequest,
        convert: Callable[[], Job],
        build: Callable[[Job], object],
        events: Callable[[Job], AsyncIterator[bytes]],
        ends_with_done: bool = True,
    ) -> Response:
        """Return the reply to a request, which `build` makes of a finished job, or its `events` if it asks for a stream."""
        if not request.stream:
            return await self._whole_reply(http, convert, build)
        job = await self._start(http, convert)
        return streamed(job, events(job), ends_with_done)

    async def _start(self, http: HttpRequest, convert: Callable[[], Job]) -> Job:
        """Convert a request and give it to the engine."""
        observer = Observer(self.metrics)
        job = await self.run(convert)
        job.attach(observer, http.state.owner, self.settings.request_seconds)

        def submit() -> None:
            self.engine.submit(job)
            job.make_parsers()

        try:
            await self.run(submit)
        except BaseException:
            job.cancel()
            raise
        for prompt in job.token_ids:
            observer.on_prompt(len(prompt))
        return job

    async def _whole_reply(
        self, http: HttpRequest, convert: Callable[[], Job], build: Callable[[Job], object]
    ) -> JsonReply:
        """Return the whole reply, or cancel the request when the client disconnects."""

        async def work() -> JsonReply:
            job = await self._start(http, convert)
            try:
                await job.finish()
            finally:
                job.cancel()
            return await self.run(lambda: JsonReply(build(job)))

        reply = await unless_disconnected(http, asyncio.create_task(work()))
        return reply or JsonReply(None, CLIENT_CLOSED_REQUEST)


async def _service_of(http: HttpRequest) -> Service:
    service: Service = http.app.state.service
    return service


ServiceOf = Annotated[Service, Depends(_service_of)]
"""Parameter of a route: the service of its application."""
