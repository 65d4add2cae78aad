"""Page `/docs`: the routes and the fields of their bodies, from the application's OpenAPI document."""

from __future__ import annotations

import json
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
    page = f"# {app.title} {app.version}\n\nThe API in OpenAPI's format: `/openapi.json`. {describe(app.openapi())}"
    return HTMLResponse(PAGE.format(to_html(page)), headers=HEADERS)


def describe(document: Mapping[str, Any]) -> str:
    """Return the routes, the fields of their bodies and the types of fields in Markdown, from an OpenAPI document."""
    return "\n".join(_lines(document))


def _lines(document: Mapping[str, Any]) -> Iterator[str]:
    yield "Fields without a remark are as in OpenAI's API, in vLLM's or, of `/infill`, in llama.cpp's.\n"
    schemas, shown = document["components"]["schemas"], set()
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            yield f"## `{method.upper()} {path}`\n\n{operation.get('description', '')}\n"
            body = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
            if reference := body.get("schema", {}).get("$ref"):
                name = reference.rpartition("/")[2]
                shown.add(name)
                yield from _table(schemas[name])
    yield "## Types of fields\n"
    for name, schema in schemas.items():
        # The schemas of FastAPI's errors, which are not sent, have no description.
        if name not in shown and "description" in schema:
            yield f"### {name}\n\n{schema['description']}\n"
            yield from _table(schema)


def _table(schema: Mapping[str, Any]) -> Iterator[str]:
    yield "| field | type | |\n|---|---|---|"
    required = schema.get("required", ())
    for name, field in sorted(schema["properties"].items(), key=lambda item: item[0] not in required):
        kind = _kind(field) or "refused"
        if field.get("default") is not None:
            kind += f", default {_value(field['default'])}"
        remark = field.get("description", "").replace("|", "\\|")
        yield f"| `{name}` | {kind}{', required' if name in required else ''} | {remark} |"
    yield ""


def _value(value: object) -> str:
    return f"`{value if isinstance(value, str) and value else json.dumps(value)}`"


def _kind(field: Mapping[str, Any]) -> str:
    """Return the type of a field; empty if it can only be null."""
    if "$ref" in field:
        return str(field["$ref"]).rpartition("/")[2]
    if "enum" in field or "const" in field:
        return " or ".join(map(_value, field.get("enum", [field.get("const")])))
    choices = field.get("anyOf") or field.get("oneOf")
    if choices:
        return " or ".join(dict.fromkeys(kind for choice in choices if (kind := _kind(choice))))
    kind = str(field.get("type", "any"))
    if kind == "array":
        return f"list of {_kind(field.get('items', {})) or 'any'}"
    for bound, word in (("minimum", "from"), ("maximum", "to")):
        kind += f" {word} {field[bound]:g}" if bound in field else ""
    return "" if kind == "null" else kind
