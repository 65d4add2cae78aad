"""Several replicas of the server behind Ray Serve: autoscaling on queue length, routing by prefix.

    pip install '.[serve,ray]'
    SECONDGUESS_MODEL=Qwen/Qwen3-8B serve run examples.ray_serve:app

The address is http://127.0.0.1:8000 with the same API as `secondguess serve`. Each replica is a process
with its own models, so that it needs its own GPU (`ray_actor_options`) or its own cores. Requests
whose texts begin alike go to the same replica, whose KV cache already has the beginning.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter, OrderedDict, defaultdict
from collections.abc import AsyncIterator, Sequence
from hashlib import blake2b
from typing import Any

from ray import serve
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, ReplicaID, ReplicaResult, RequestRouter, RunningReplica
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

BLOCK = 256
"""Bytes of a body per block; a prefix is compared block by block."""
MAX_BLOCKS = 64
MAX_REMEMBERED = 100_000
"""Blocks remembered per replica, the least recently used of which are forgotten."""

NUM_REPLICAS = int(os.environ.get("SECONDGUESS_REPLICAS", "2"))


class PrefixRouter(RequestRouter):
    """Router that prefers the replica which has seen the longest beginning of a request."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._seen: dict[ReplicaID, OrderedDict[bytes, None]] = defaultdict(OrderedDict)
        self._num_ongoing: Counter[ReplicaID] = Counter()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the replicas, best first; Ray takes the first that accepts another request."""
        blocks = pending_request.args[0] if pending_request is not None else []

        def rank(replica: RunningReplica) -> tuple[int, int]:
            seen = self._seen[replica.replica_id]
            matched = next((i for i, block in enumerate(blocks) if block not in seen), len(blocks))
            return -matched, self._num_ongoing[replica.replica_id]

        return [[replica] for replica in sorted(candidate_replicas, key=rank)]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: ReplicaResult
    ) -> None:
        self._num_ongoing[replica_id] += 1
        seen = self._seen[replica_id]
        for block in pending_request.args[0]:
            seen[block] = None
            seen.move_to_end(block)
        while len(seen) > MAX_REMEMBERED:
            seen.popitem(last=False)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self._num_ongoing[replica_id] -= 1


@serve.deployment(
    max_ongoing_requests=16,
    autoscaling_config=AutoscalingConfig(
        min_replicas=NUM_REPLICAS, max_replicas=2 * NUM_REPLICAS, target_ongoing_requests=8
    ),
    request_router_config=RequestRouterConfig(request_router_class=PrefixRouter),
    health_check_period_s=10,
    graceful_shutdown_timeout_s=30,
)
class Replica:
    """The ASGI application of `secondguess serve`, with models of its own."""

    def __init__(self, model: str, drafter: str | None) -> None:
        from secondguess import load
        from secondguess.engine import Engine
        from secondguess.server.app import create_app

        self._engine = Engine(load(model, drafter))
        self._app = create_app(self._engine)

    async def __call__(
        self, blocks: Sequence[bytes], scope: dict[str, Any], body: bytes
    ) -> AsyncIterator[dict[str, Any]]:
        """Yield the messages of an ASGI response."""
        messages: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        requests: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        requests.put_nowait({"type": "http.request", "body": body, "more_body": False})

        async def run() -> None:
            try:
                await self._app(scope, requests.get, messages.put)
            finally:
                messages.put_nowait(None)

        task = asyncio.create_task(run())
        try:
            while (message := await messages.get()) is not None:
                yield message
            await task
        finally:  # a client that has gone ends its generation
            requests.put_nowait({"type": "http.disconnect"})

    def __del__(self) -> None:
        self._engine.close()


@serve.deployment(max_ongoing_requests=1000)
class Ingress:
    """Entry that reads the body of a request, by which it is routed."""

    def __init__(self, replicas: DeploymentHandle) -> None:
        self._replicas = replicas.options(stream=True)

    async def __call__(self, request: Request) -> Response:
        body = await request.body()
        names = ("type", "method", "path", "raw_path", "query_string", "headers", "http_version", "scheme")
        scope = {name: request.scope[name] for name in names}
        messages = aiter(self._replicas.remote(blocks_of(body), scope, body))
        start = await anext(messages)

        async def content() -> AsyncIterator[bytes]:
            async for message in messages:
                yield message.get("body", b"")

        reply = StreamingResponse(content(), start["status"])
        reply.raw_headers = list(start["headers"])
        return reply


def blocks_of(body: bytes) -> list[bytes]:
    """Return a digest of every beginning of a body that is a whole number of blocks, shortest first."""
    digest, found = blake2b(digest_size=8), []
    for start in range(0, min(len(body) - BLOCK + 1, BLOCK * MAX_BLOCKS), BLOCK):
        digest.update(body[start : start + BLOCK])
        found.append(digest.digest())
    return found


app = Ingress.bind(
    Replica.bind(os.environ.get("SECONDGUESS_MODEL", "builtin"), os.environ.get("SECONDGUESS_DRAFTER"))
)
