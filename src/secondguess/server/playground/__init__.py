"""Playground: a static page at `/` that calls the API of the server which serves it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib.resources import files

from fastapi import APIRouter
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from secondguess.server.errors import ApiError
from secondguess.server.playground.markdown import MAX_MARKDOWN_BYTES, to_html
from secondguess.server.replies import JsonReply, error_response
from secondguess.server.service import Service

CONTENT_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}

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

NAMES = sorted(
    file.name for file in files(__name__).iterdir() if file.name.rpartition(".")[2] in CONTENT_TYPES
)
PATHS = {("/" if name == "index.html" else f"/playground/{name}"): name for name in NAMES}
"""Files by path. They need no API key: a browser sends none with a page, and they show no data."""


def playground_routes() -> APIRouter:
    """Return the routes of the page, its assets, and the data that only the page asks for."""
    router = APIRouter()
    for path, name in PATHS.items():
        router.add_route(path, _endpoint(name), methods=["GET"])
    router.add_route("/playground/model", describe_model, methods=["GET"])
    router.add_route("/playground/markdown", render_markdown, methods=["POST"])
    return router


def content_type(name: str) -> str:
    """Return the media type of a file of the page."""
    return CONTENT_TYPES[name.rpartition(".")[2]]


def _endpoint(name: str) -> Callable[[Request], Awaitable[Response]]:
    content = files(__name__).joinpath(name).read_bytes()

    async def serve_file(request: Request) -> Response:
        return Response(content, media_type=content_type(name), headers=HEADERS)

    return serve_file


async def describe_model(http: Request) -> Response:
    """Return what the page shows of the model, and which of its controls the model can use."""
    service: Service = http.app.state.service
    return JsonReply(
        {
            "name": service.model_names[0],
            "context_length": service.target.context_length,
            "has_chat_template": service.template.exists,
            "takes_images": service.target.takes_images,
            "sampling": service.convert.defaults,
            "max_tokens": service.settings.max_output_tokens,
        }
    )


async def render_markdown(http: Request) -> Response:
    """Return the HTML of the Markdown in the body, as JSON: a browser that is sent here shows no page of it."""
    body = await http.body()
    if len(body) > MAX_MARKDOWN_BYTES:
        message = (
            f"expected at most {MAX_MARKDOWN_BYTES} bytes of Markdown, got {len(body)}; show the text itself"
        )
        return error_response(ApiError(413, message, code="request_too_large"))
    html = await run_in_threadpool(to_html, body.decode("utf-8", "replace"))
    return JsonReply({"html": html})
