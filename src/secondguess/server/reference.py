"""Page `/docs`: the routes and the fields of their bodies, from the application's OpenAPI document."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request as HttpRequest
from starlette.responses import HTMLResponse, Response

from secondguess.server.playground import HEADERS
from secondguess.server.playground.markdown import to_html

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>secondguess API</title><link rel="stylesheet" href="playground/playground.css"></head>
<body class="reference">{}</body></html>
"""


async def show_reference(http: HttpRequest) -> Response:
    """Return the page."""
    app: FastAPI = http.app
    return HTMLResponse(PAGE.format(to_html("\n".join(_lines(app.openapi())))), headers=HEADERS)


def _lines(document: Mapping[str, Any]) -> Iterator[str]:
    """Yield the page in Markdown."""
    yield f"# {document['info']['title']} {document['info']['version']}\n"
    yield "The API in OpenAPI's format: `/openapi.json`. Fields without a remark are those of OpenAI's API.\n"
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            yield f"## `{method.upper()} {path}`\n\n{operation.get('description', '')}\n"
            body = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
            if reference := body.get("schema", {}).get("$ref"):
                yield from _table(document["components"]["schemas"][reference.rpartition("/")[2]])


def _table(schema: Mapping[str, Any]) -> Iterator[str]:
    yield "| field | type | |\n|---|---|---|"
    required = schema.get("required", ())
    for name, field in sorted(schema["properties"].items(), key=lambda item: item[0] not in required):
        kind = _kind(field) or "refused"
        remark = field.get("description", "").replace("|", "\\|")
        yield f"| `{name}` | {kind}{', required' if name in required else ''} | {remark} |"
    yield ""


def _kind(field: Mapping[str, Any]) -> str:
    """Return the type of a field; empty if it can only be null."""
    if "$ref" in field:
        return str(field["$ref"]).rpartition("/")[2]
    if "enum" in field or "const" in field:
        return " or ".join(f"`{value}`" for value in field.get("enum", [field.get("const")]))
    choices = field.get("anyOf") or field.get("oneOf")
    if choices:
        return " or ".join(dict.fromkeys(kind for choice in choices if (kind := _kind(choice))))
    kind = str(field.get("type", "any"))
    if kind == "array":
        return f"list of {_kind(field.get('items', {})) or 'any'}"
    return "" if kind == "null" else kind
