"""HTTP request from its conversion to its last event, as the engine and the event loop see it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

from secondguess.core import ImageInputs
from secondguess.engine import Event, Failed, NewPiece, Output, Request
from secondguess.prompts import EncodedPrompt
from secondguess.sampling import SamplingParams
from secondguess.sampling.text import Piece
from secondguess.server.calls.parsers import Delta, ReplyParser
from secondguess.server.errors import RETRY_SECONDS, ApiError
from secondguess.server.metrics import Observer

FINISH_REASONS = {"stop": "stop", "length": "length", "context": "length"}
"""Finish reason -> that of OpenAI's API; others are of texts that were cut."""


class Job(Request):
    """One HTTP request: made on a worker thread, received on the engine's thread, read on the event loop.

    `token_ids` has one list per prompt, each of which gives `params.n` choices; `echo` has the texts that precede their
    outputs. `images` are those of the one prompt of a chat, and `make_parser` returns a parser for one of its choices.
    """

    def __init__(
        self,
        token_ids: list[list[int]],
        params: SamplingParams,
        *,
        images: ImageInputs | None = None,
        echo: Sequence[str] = (),
        make_parser: Callable[[], ReplyParser] | None = None,
    ) -> None:
        super().__init__(token_ids if images is None else [EncodedPrompt(token_ids[0], images)], params)
        self.token_ids = token_ids
        self.echo = echo
        self.parsers: list[ReplyParser] = []
        self._make_parser = make_parser
        self.outputs: list[Output] = []
        self._events: asyncio.Queue[Event] = asyncio.Queue()

    @property
    def num_choices(self) -> int:
        return len(self.token_ids) * self.params.n

    def attach(self, observer: Observer, owner: str, seconds: float | None) -> None:
        """Send events to the running event loop; the request ends `seconds` after the observer was made."""
        self._observer, self._loop = observer, asyncio.get_running_loop()
        self.owner = owner
        self.deadline = None if seconds is None else observer.start + seconds

    def receive(self, event: Event) -> None:
        if not isinstance(event, NewPiece):
            self._observer.on_end(event, self.num_choices)
        try:
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)
        except RuntimeError:  # the loop was closed while the engine still ran
            self.cancel()

    async def pieces(self) -> AsyncIterator[NewPiece]:
        """Yield the text of all choices as it is committed, and keep the outputs; raise the error that ended the request."""
        while isinstance(event := await self._events.get(), NewPiece):
            self._observer.on_piece(event)
            yield event
        if isinstance(event, Failed):
            raise event.error
        self.outputs = event.outputs
        for output in self.outputs:
            _check_finished(output)

    def make_parsers(self) -> None:
        """Make the parsers of a chat, which read its prompt: best while it is prefilled."""
        if self._make_parser is not None:
            self.parsers = [self._make_parser() for _ in range(self.num_choices)]

    async def finish(self) -> None:
        """Wait for the outputs."""
        async for _ in self.pieces():
            pass

    def parse(self, index: int) -> list[Delta]:
        """Return the parts of a whole reply."""
        output, parser = self.outputs[index], self.parsers[index]
        deltas = parser.feed(Piece(output.text, output.token_ids, output.drafted, []))
        return deltas + parser.finish(output.finish_reason == "stop")

    @property
    def num_reasoning_tokens(self) -> int:
        return sum(parser.num_reasoning_tokens for parser in self.parsers)


def _check_finished(output: Output) -> None:
    if output.finish_reason == "grammar":
        message = (
            f"cannot continue the reply: after {len(output.token_ids) - 1} tokens, the grammar or llguidance's limits leave "
            "no token. Simplify the grammar."
        )
        raise ApiError(400, message, code="grammar_limit")
    if output.finish_reason not in FINISH_REASONS:
        message = "cannot finish the reply: the server is shutting down. Send the request again."
        raise ApiError(503, message, code="cancelled", retry_after=RETRY_SECONDS)
