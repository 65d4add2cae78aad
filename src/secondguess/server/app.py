"""The application: `create_app(engine, settings)`. Read this first; each route leads to its module."""

from __future__ import annotations

import logging
from typing import Any, get_type_hints

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from secondguess import __version__
from secondguess.engine import DrainingError, QueueFullError
from secondguess.errors import SecondGuessError
from secondguess.server import chat_routes, completion_routes, infill_routes, model_routes
from secondguess.server.errors import ApiError, api_error, validation_error
from secondguess.server.gate import Gate, KeyRing
from secondguess.server.playground import playground_routes
from secondguess.server.reference import show_reference
from secondguess.server.replies import error_response
from secondguess.server.responses import routes as response_routes
from secondguess.server.service import Service
from secondguess.server.settings import ServerSettings
from secondguess.server.sleep import ServerEngine

logger = logging.getLogger(__name__)

ROUTERS = tuple(
    module.router for module in (completion_routes, infill_routes, chat_routes, response_routes, model_routes)
)
"""Routers of the described routes, in the order of the reference."""


def create_app(engine: ServerEngine, settings: ServerSettings | None = None) -> FastAPI:
    """Return the ASGI application of a running engine, which the caller closes after the application has ended."""
    settings = settings or ServerSettings()
    service = Service(engine, settings)
    app = FastAPI(title="secondguess", version=__version__, docs_url=None, redoc_url=None)
    app.state.service = service
    for router in ROUTERS:
        app.include_router(router)
    app.include_router(playground_routes(), include_in_schema=False)
    app.add_route("/docs", show_reference)
    app.add_middleware(
        Gate,
        keys=KeyRing(settings.api_keys),
        max_body_bytes=service.max_body_bytes,
        metrics=service.metrics,
        is_draining=lambda: engine.status().is_draining,
    )
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],  # OpenAI's clients send headers about themselves
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    _add_error_handlers(app)
    return app


def _add_error_handlers(app: FastAPI) -> None:
    """Give every error OpenAI's form."""

    async def on_error(http: HttpRequest, error: Exception) -> Response:
        body = _body_model(http)
        found = api_error(error, body.model_fields if body else None)
        if found.status == 500:
            logger.error("request %s failed", http.state.request_id, exc_info=error)
        return error_response(found)

    async def on_invalid(http: HttpRequest, error: Any) -> Response:
        kind = http.headers.get("content-type", "none")
        media_type = kind.partition(";")[0].strip().lower()
        if media_type != "application/json" and not media_type.endswith("+json"):
            message = f"expected a body in JSON with the header Content-Type: application/json, got {kind}"
            return error_response(ApiError(400, f"{message}; set the header"))
        return error_response(validation_error(error.errors(), _body_model(http)))

    async def on_http(http: HttpRequest, error: Any) -> Response:
        is_ours = isinstance(error.detail, ApiError)
        reply = error_response(error.detail if is_ours else ApiError(error.status_code, str(error.detail)))
        reply.headers.update(error.headers or {})
        return reply

    for error_class in (ApiError, SecondGuessError, QueueFullError, DrainingError):
        app.add_exception_handler(error_class, on_error)
    app.add_exception_handler(RequestValidationError, on_invalid)
    app.add_exception_handler(HTTPException, on_http)


def _body_model(http: HttpRequest) -> type[BaseModel] | None:
    """Return the model of the body of the request's route."""
    endpoint = http.scope.get("endpoint")
    found: type[BaseModel] | None = None if endpoint is None else get_type_hints(endpoint).get("request")
    return found
