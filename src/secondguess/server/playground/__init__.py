"""Playground: a static page at `/` that calls the API of the server which serves it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib.resources import files

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

CONTENT_TYPES = {
    "index.html": "text/html",
    "playground.css": "text/css",
    "playground.js": "text/javascript",
}

HEADERS = {
    # The page needs its own files and the API, nothing else; no text can become a script.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    # A new version of the server must not meet the script of an old one.
    "Cache-Control": "no-cache",
}

PATHS = {"/": "index.html"} | {f"/playground/{name}": name for name in CONTENT_TYPES if name != "index.html"}
"""Files by path. They need no API key: a browser sends none with a page, and they show no data."""


def playground_routes() -> APIRouter:
    """Return the routes of the page and its assets."""
    router = APIRouter()
    for path, name in PATHS.items():
        router.add_route(path, _endpoint(name), methods=["GET"])
    return router


def _endpoint(name: str) -> Callable[[Request], Awaitable[Response]]:
    content = files(__name__).joinpath(name).read_bytes()

    async def serve_file(request: Request) -> Response:
        return Response(content, media_type=CONTENT_TYPES[name], headers=HEADERS)

    return serve_file
