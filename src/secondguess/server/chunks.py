"""Streams of chunks with choices, which `/v1/completions` and `/v1/chat/completions` have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterable
from typing import Generic, TypeVar

from secondguess.engine import NewPiece, Output
from secondguess.server.jobs import Job
from secondguess.server.replies import to_event
from secondguess.server.reply_fields import Head, Json, origin, requested_statistics, usage
from secondguess.server.schemas import ChatRequest, CompletionRequest
from secondguess.server.service import Service

RequestT = TypeVar("RequestT", bound=CompletionRequest | ChatRequest)


class ChunkStream(ABC, Generic[RequestT]):
    """Chunks of a streamed reply: those of each committed piece, the ends, then usage and report."""

    def __init__(self, service: Service, request: RequestT, head: Head, job: Job) -> None:
        self.request = request
        self.job = job
        self._tokenizer = service.target.tokenizer
        self._head = head
        options = request.stream_options
        self._no_usage = {"usage": None} if options and options.include_usage else {}

    def begin(self) -> Iterable[Json]:
        """Return the choices that precede all pieces."""
        return ()

    @abstractmethod
    def add(self, event: NewPiece, more: Json) -> Iterable[Json]:
        """Return the choices of a committed piece; `more` has its origin, if the request asks for it."""

    @abstractmethod
    def end(self, index: int, output: Output) -> Iterable[Json]:
        """Return the last choices of an output."""

    async def run(self) -> AsyncIterator[bytes]:
        """Yield the chunks as events."""
        for choice in self.begin():
            yield self._chunk(choice)
        async for event in self.job.pieces():
            more = origin(event.piece, self._tokenizer) if self.request.report else {}
            for choice in self.add(event, more):
                yield self._chunk(choice)
        for index, output in enumerate(self.job.outputs):
            for choice in self.end(index, output):
                yield self._chunk(choice)
        last = requested_statistics(self.request, self.job)
        if self._no_usage:
            last["usage"] = usage(self.job)
        if last:
            yield to_event(self._head.reply([], **last))

    def _chunk(self, choice: Json) -> bytes:
        return to_event(self._head.reply([choice], **self._no_usage))
