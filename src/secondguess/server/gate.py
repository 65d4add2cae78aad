"""Checks before a request's body is read: API key and size; and the request's identifier."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
from collections.abc import Callable, Sequence
from hashlib import sha256
from hmac import compare_digest

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from secondguess.engine import DrainingError
from secondguess.server import playground
from secondguess.server.errors import ApiError, api_error
from secondguess.server.metrics import Metrics
from secondguess.server.replies import error_response

OPEN_PATHS = ("/health", "/ready", "/metrics", "/docs", "/openapi.json", *playground.PATHS)
"""Paths that need no key: probes, scrapers and pages of a browser; they show no text."""

REQUEST_ID = "x-request-id"

logger = logging.getLogger(__name__)


class KeyRing:
    """API keys, of which only digests are kept; compared in constant time."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [sha256(key.encode()).digest() for key in keys]

    def owner(self, authorization: str) -> str | None:
        """Return the digest of the key in an `Authorization` header, empty if none is needed; None for no valid one."""
        scheme, _, key = authorization.partition(" ")
        given = sha256(key.strip().encode("utf-8", "surrogatepass")).digest()
        # Every key is compared, so that the time does not show which one is close.
        matches = [compare_digest(given, digest) for digest in self._digests]
        if not self._digests:
            return ""
        return given.hex() if scheme.lower() == "bearer" and any(matches) else None


class Gate:
    """ASGI middleware: refuses requests without a key or with a large body, and counts replies.

    Requests that are cancelled while the server drains get a reply.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: KeyRing,
        max_body_bytes: int,
        metrics: Metrics,
        is_draining: Callable[[], bool],
    ) -> None:
        self._app = app
        self._keys = keys
        self._max_body_bytes = max_body_bytes
        self._metrics = metrics
        self._is_draining = is_draining

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_id = _request_id(headers.get(REQUEST_ID))
        owner = self._keys.owner(headers.get("authorization", ""))
        scope.setdefault("state", {}).update(request_id=request_id, owner=owner)

        has_begun = False

        async def send_with_id(message: Message) -> None:
            nonlocal has_begun
            if message["type"] == "http.response.start":
                has_begun = True
                MutableHeaders(scope=message)[REQUEST_ID] = request_id
                route = getattr(scope.get("route"), "path", "other")
                self._metrics.http_requests(route, str(message["status"])).inc()
            await send(message)

        if (error := self._refusal(_route_path(scope), headers, owner)) is not None:
            await error_response(error)(scope, receive, send_with_id)
            return
        try:
            await self._app(scope, self._bounded(receive), send_with_id)
        except asyncio.CancelledError:
            if not self._is_draining():  # a time limit of an application that this one is mounted in
                raise
            if not has_begun:
                draining = DrainingError("the server is shutting down; retry at another one")
                await error_response(api_error(draining))(scope, receive, send_with_id)
        except Exception as unexpected:
            logger.exception("request %s failed", request_id)
            if has_begun:
                raise
            await error_response(api_error(unexpected))(scope, receive, send_with_id)

    def _refusal(self, path: str, headers: Headers, owner: str | None) -> ApiError | None:
        if path not in OPEN_PATHS and owner is None:
            message = "expected an API key of this server in the header Authorization: Bearer KEY, got none or another one"
            return ApiError(401, message, code="invalid_api_key")
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length) > self._max_body_bytes:
            return self._too_large()
        return None

    def _bounded(self, receive: Receive) -> Receive:
        """Return `receive`, which raises once a body that gave no length is too large."""
        num_bytes = 0

        async def receive_bounded() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_body_bytes:
                raise HTTPException(413, self._too_large().message)
            return message

        return receive_bounded

    def _too_large(self) -> ApiError:
        message = f"expected a body of at most {self._max_body_bytes} bytes, got more; shorten the prompt"
        return ApiError(413, message, code="request_too_large")


def _route_path(scope: Scope) -> str:
    """Return the path of a request without the prefix that the application is mounted at."""
    path: str = scope["path"]
    rest = path.removeprefix(scope.get("root_path", ""))
    return rest if rest.startswith("/") else path


def _request_id(given: str | None) -> str:
    """Return the client's identifier if it is safe to log and to repeat, else a new one."""
    return (
        given
        if given and re.fullmatch(r"[\w.:-]{1,128}", given, re.ASCII)
        else f"req_{secrets.token_hex(12)}"
    )
