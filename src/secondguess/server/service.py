"""State of the application: the engine, the model's conversions, and a few threads for slow work."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from starlette.requests import Request as HttpRequest

from secondguess.engine import Output
from secondguess.sampling.text import Piece
from secondguess.server.chat import ChatTemplate
from secondguess.server.convert import Converter
from secondguess.server.errors import ApiError
from secondguess.server.jobs import Job
from secondguess.server.metrics import Metrics, Observer
from secondguess.server.model import ServedModel
from secondguess.server.parsing import (
    Delta,
    ForcedCallParser,
    PlainParser,
    ReplyParser,
    SingleCallParser,
    TemplateParser,
)
from secondguess.server.response_schemas import ResponseRequest
from secondguess.server.schemas import Sampling
from secondguess.server.settings import ServerSettings
from secondguess.server.sleep import ServerEngine
from secondguess.server.streams import JsonReply, unless_disconnected

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
        """Refuse a model that is not served.

        Raises:
            ApiError: another name; the message has the valid ones.
        """
        if name is not None and name not in self.model_names:
            served = ", ".join(self.model_names)
            raise ApiError(
                404,
                f"expected a model that this server has ({served}), got {name!r:.60}; use one of its names",
                "model",
                "model_not_found",
            )

    def admit(self, request: Sampling | ResponseRequest, http: HttpRequest) -> str:
        """Check a request's model, and log who sent it, as far as the request says; return the model's name.

        Raises:
            ApiError: another model.
        """
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

    async def start(self, http: HttpRequest, convert: Callable[[], Job]) -> Job:
        """Convert a request and give it to the engine."""
        observer = Observer(self.metrics)
        job = await self.run(convert)
        job.attach(observer, http.state.owner, self.settings.request_seconds)
        try:
            await self.run(lambda: self.engine.submit(job))
        except BaseException:
            job.cancel()
            raise
        for prompt in job.token_ids:
            observer.on_prompt(len(prompt))
        return job

    async def reply(
        self, http: HttpRequest, convert: Callable[[], Job], build: Callable[[Job], object]
    ) -> JsonReply:
        """Return the whole reply to a request, or cancel it when the client disconnects."""

        async def work() -> JsonReply:
            job = await self.start(http, convert)
            try:
                await job.finish()
            finally:
                job.cancel()
            return await self.run(lambda: JsonReply(build(job)))

        reply = await unless_disconnected(http, asyncio.create_task(work()))
        return reply or JsonReply(None, CLIENT_CLOSED_REQUEST)

    async def parsers(self, job: Job) -> list[ReplyParser]:
        """Return the parsers of a stream, made on a worker thread; cancel it if that fails."""
        try:
            return await self.run(lambda: [self.parser(job) for _ in range(job.num_choices)])
        except BaseException:
            job.cancel()
            raise

    def parser(self, job: Job) -> ReplyParser:
        """Return a parser for one sample of a chat."""
        if job.forces_call:
            return ForcedCallParser()
        template = self.template.response_template
        if template is None:
            return PlainParser()
        if not job.tools or job.params.grammar is not None:  # text that looks like a call is none
            fields = {name: field for name, field in template["fields"].items() if name != "tool_calls"}
            template = {**template, "fields": fields}
        parser = TemplateParser(
            self.target.tokenizer,
            template,
            job.token_ids[0],
            job.tools,
            job.params.stop,
            job.params.include_stop_str_in_output,
        )
        return SingleCallParser(parser) if job.single_call else parser

    def parse(self, job: Job, output: Output) -> tuple[list[Delta], int]:
        """Return the parts of a whole reply, and the number of tokens that are reasoning."""
        parser = self.parser(job)
        deltas = parser.feed(Piece(output.text, output.token_ids, output.drafted, []))
        deltas += parser.finish(output.finish_reason == "stop")
        return deltas, parser.num_reasoning_tokens
