"""Routes about the server and its model: models, health, metrics, tokenization."""

from __future__ import annotations

import time

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from secondguess.engine import EngineStatus
from secondguess.prompts import encode
from secondguess.server.bodies import BoundedRoute
from secondguess.server.conversations import to_messages
from secondguess.server.errors import RETRY_SECONDS, ApiError, refused
from secondguess.server.images import ImageReader
from secondguess.server.replies import JsonReply
from secondguess.server.reply_fields import Json
from secondguess.server.schemas import DetokenizeRequest, TokenizeRequest
from secondguess.server.service import Service, ServiceOf

router = APIRouter(tags=["server"], route_class=BoundedRoute)
STARTED = int(time.time())


@router.get("/v1/models")
async def list_models(service: ServiceOf) -> Response:
    """List the names of the model."""
    return JsonReply({"object": "list", "data": [_model(service, name) for name in service.model_names]})


@router.get("/v1/models/{name:path}")
async def get_model(name: str, service: ServiceOf) -> Response:
    """Describe a model."""
    service.check_model(name)
    return JsonReply(_model(service, name))


def _model(service: Service, name: str) -> Json:
    context = service.target.context_length
    return {
        "id": name,
        "object": "model",
        "created": STARTED,
        "owned_by": "secondguess",
        "max_model_len": context,
    }


@router.get("/health")
async def health(service: ServiceOf) -> Response:
    """Reply while the process serves requests; `model` is `asleep` while its weights are released."""
    return JsonReply({"status": "ok", "model": _state(service.engine.status())})


@router.get("/ready")
async def ready(service: ServiceOf) -> Response:
    """Reply 200 while new requests are accepted, 503 while the server drains."""
    status = service.engine.status()
    if status.is_draining:
        message = "cannot accept requests: the server is shutting down. Retry at another server."
        raise ApiError(503, message, code="draining", retry_after=RETRY_SECONDS)
    return JsonReply({"status": "ready", "model": _state(status)})


def _state(status: EngineStatus) -> str:
    return "asleep" if status.is_asleep else "loaded"


@router.get("/metrics")
async def metrics(service: ServiceOf) -> Response:
    """Return metrics in Prometheus' text format."""
    return Response(service.metrics.to_text(), media_type=CONTENT_TYPE_LATEST)


@router.post("/tokenize")
async def tokenize(request: TokenizeRequest, service: ServiceOf) -> Response:
    """Return the token ids of a text or a conversation."""
    service.check_model(request.model)
    tokens = await service.run(lambda: _token_ids(service, request))
    return JsonReply({"count": len(tokens), "max_model_len": service.target.context_length, "tokens": tokens})


def _token_ids(service: Service, request: TokenizeRequest) -> list[int]:
    if (request.prompt is None) == (request.messages is None):
        got = "neither" if request.prompt is None else "both"
        raise refused("prompt", f"expected either prompt or messages, got {got}", "invalid_value")
    if request.messages is not None:
        images = ImageReader(service.target, service.settings)
        return service.template.encode(to_messages(request.messages, images)).ids
    if not request.prompt:
        return []
    service.target.check_characters(request.prompt)
    if request.add_special_tokens:
        return encode(service.target, request.prompt)
    ids: list[int] = service.target.tokenizer(
        request.prompt, add_special_tokens=False, verbose=False
    ).input_ids
    return ids


@router.post("/detokenize")
async def detokenize(request: DetokenizeRequest, service: ServiceOf) -> Response:
    """Return the text of token ids, special tokens included."""
    service.check_model(request.model)
    return JsonReply({"prompt": await service.run(lambda: _text(service, request.tokens))})


def _text(service: Service, tokens: list[int]) -> str:
    if not tokens:
        return ""
    text: str = service.target.tokenizer.decode(encode(service.target, tokens))
    return text
