"""An application that speaks the events of the API, whose replies and failures tests of the playground choose."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse

from secondguess.server.playground import playground_routes

REJECTED = " elements\n"
"""Draft that the third segment was sampled instead of."""
ANSWER: list[list[Any]] = [
    ["\n", False],
    ["    if len(items) <= 1:\n        return", True],
    [" items\n", False],
    ["    pivot = items", True],
    ["[0]\n", False],
    ["    smaller = [item for item in items[1:] if item", True],
    [" < pivot]\n", False],
    ["    larger = [item for item in items[1:] if item >= pivot]\n", True],
    ["    return quicksort(smaller) + [pivot]", True],
    [" + quicksort(larger)", False],
]
TEXT = "".join(part for part, _ in ANSWER)
NUM_TOKENS = 64
STATS = {
    "index": 0,
    "exactness": "lossless",
    "num_rounds": 30,
    "num_tokens": NUM_TOKENS,
    "num_drafted": 50,
    "num_accepted": 34,
    "acceptance_rate": 0.68,
    "acceptance_length": 64 / 30,
    "accepted_per_position": [20, 10, 4],
    "drafted_per_position": [26, 16, 8],
    "tokens_per_second": 97.3,
}


@dataclass
class FakeServer:
    """Application with the routes that the page calls; `mood` is the failure that it shows."""

    mood: str = "ready"
    seconds_per_chunk: float = 0.01
    api_key: str | None = None
    has_chat_template: bool = True
    takes_images: bool = False
    finish_reason: str = "stop"
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    """Names and arguments of the calls of tools that reply to a message; a result of a tool gets text."""
    answer: list[list[Any]] = field(default_factory=lambda: ANSWER)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    num_disconnected: int = 0
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def app(self) -> FastAPI:
        app = FastAPI()
        app.add_api_route("/playground/model", self.model)  # in place of the one that asks a real model
        app.include_router(playground_routes())
        app.add_api_route("/ready", self.ready)
        app.add_api_route("/metrics", self.metrics)
        for path in ("/v1/completions", "/v1/chat/completions"):
            app.add_api_route(path, self.generate, methods=["POST"])
        return app

    async def ready(self) -> Any:
        return self._draining() if self.mood == "draining" else {"status": "ready"}

    async def metrics(self) -> Any:
        lines = [
            f'vllm:num_requests_{name}{{model_name="tiny"}} {n}.0'
            for name, n in (("running", 0), ("waiting", 0))
        ]
        return PlainTextResponse("\n".join(lines))

    async def model(self, http: Request) -> Any:
        return self._refusal(http) or {
            "name": "tiny",
            "context_length": 512,
            "has_chat_template": self.has_chat_template,
            "takes_images": self.takes_images,
            "sampling": {"temperature": 0.7, "top_p": 0.8},
            "max_tokens": None,
        }

    async def generate(self, http: Request) -> Any:
        body = await http.json()
        self.bodies.append(body)
        return self._refusal(http) or StreamingResponse(
            self._events(body, http), media_type="text/event-stream"
        )

    def _refusal(self, http: Request) -> JSONResponse | None:
        if self.api_key and http.headers.get("authorization") != f"Bearer {self.api_key}":
            return self._error(401, "expected an API key", "invalid_api_key")
        if http.method == "GET":
            return None
        if self.mood == "busy":
            return self._error(
                429, "expected fewer waiting samples", "rate_limit_exceeded", {"Retry-After": "1"}
            )
        if self.mood == "draining":
            return self._draining()
        if self.mood == "refusing":
            return self._error(400, "expected top_p above 0, got 0; use a share", "invalid_value")
        return None

    def _draining(self) -> JSONResponse:
        return self._error(503, "the server drains", "draining", {"Retry-After": "5"})

    @staticmethod
    def _error(status: int, message: str, code: str, headers: dict[str, str] | None = None) -> JSONResponse:
        error = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
        return JSONResponse({"error": error}, status, headers)

    async def _events(self, body: dict[str, Any], http: Request) -> AsyncIterator[bytes]:
        # Plain decoding has one token per pass: more and shorter chunks.
        segments = (
            self.answer
            if body["speculation"] != "off"
            else [[TEXT[at : at + 6], False] for at in range(0, len(TEXT), 6)]
        )
        key = "messages" in body
        calls = self.calls if key and body["messages"][-1]["role"] != "tool" else []
        try:
            for index, (name, arguments) in enumerate(calls):
                start = {"index": index, "id": f"call-{index}", "function": {"name": name, "arguments": ""}}
                for call in (start, {"index": index, "function": {"arguments": arguments}}):
                    yield self._event({"choices": [{"index": 0, "delta": {"tool_calls": [call]}}]})
            if calls:
                yield self._event({"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]})
                usage = {"completion_tokens": NUM_TOKENS}
                yield self._event(
                    {"choices": [], "usage": usage, "secondguess": {"samples": [self._stats(body)]}}
                )
                yield b"data: [DONE]\n\n"
                return
            if self.reasoning:
                delta = {"role": "assistant", "reasoning_content": self.reasoning}
                yield self._event({"choices": [{"index": 0, "delta": delta}], "usage": None})
            for count, segment in enumerate(segments):
                await asyncio.sleep(self.seconds_per_chunk)
                origin = {"segments": [segment], "rejected": REJECTED if segment is ANSWER[2] else ""}
                choice = {"index": 0, "finish_reason": None, "secondguess": origin}
                choice |= {"delta": {"content": segment[0]}} if key else {"text": segment[0]}
                yield self._event({"choices": [choice], "usage": None})
                if count == 3 and self.mood == "cut":
                    return
                if count == 3 and self.mood == "failing":
                    yield self._event({"error": {"message": "out of memory", "code": "out_of_memory"}})
                    break
            else:
                yield self._event(
                    {
                        "choices": [
                            {"index": 0, "finish_reason": self.finish_reason, "text": "", "delta": {}}
                        ],
                        "usage": None,
                    }
                )
                usage = {"completion_tokens": min(NUM_TOKENS, body.get("max_tokens", NUM_TOKENS))}
                yield self._event(
                    {"choices": [], "usage": usage, "secondguess": {"samples": [self._stats(body)]}}
                )
            yield b"data: [DONE]\n\n"
        except asyncio.CancelledError:
            self.num_disconnected += 1
            raise

    def _stats(self, body: dict[str, Any]) -> dict[str, Any]:
        plain = {"num_drafted": 0, "num_accepted": 0, "acceptance_rate": None, "acceptance_length": 1.0}
        plain |= {"drafted_per_position": [], "accepted_per_position": []}
        return STATS | {"finish_reason": self.finish_reason} | (plain if body["speculation"] == "off" else {})

    @staticmethod
    def _event(value: dict[str, Any]) -> bytes:
        return b"data: " + json.dumps(value).encode() + b"\n\n"


@contextmanager
def serve(app: FastAPI, port: int = 0) -> Iterator[int]:
    """Serve an application on a thread; yields the port."""
    server = uvicorn.Server(
        uvicorn.Config(app, "127.0.0.1", port, log_level="error", timeout_graceful_shutdown=1)
    )
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        deadline = time.monotonic() + 30
        while not server.started and time.monotonic() < deadline:
            time.sleep(0.01)
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        thread.join()
