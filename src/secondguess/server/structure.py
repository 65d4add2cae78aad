"""Structured replies: the grammar of a request's format, of its tools, or of its own."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from secondguess.errors import BadInputError
from secondguess.sampling import Grammar
from secondguess.server.errors import check_limit, refused
from secondguess.server.schemas import ChatRequest, Extensions, NamedTool, ResponseFormat, Tool

VALUES = ("const", "enum", "default", "examples")
"""Keys of a JSON schema that hold values, not schemas."""


def grammar_of_chat(request: ChatRequest, max_bytes: int) -> Grammar | None:
    """Return the grammar that the reply to a chat follows; None for free text. More than one structure is refused."""
    found = {
        "response_format": _of_format(request.response_format, max_bytes),
        "tool_choice": _of_tool_choice(request, max_bytes),
        "structured_outputs": grammar_of_outputs(request, max_bytes),
    }
    return _only({name: grammar for name, grammar in found.items() if grammar is not None})


def grammar_of_outputs(request: Extensions, max_bytes: int) -> Grammar | None:
    """Return the grammar of the extensions `structured_outputs` and `guided_json`, `guided_regex` and `guided_choice`."""
    given = {
        f"guided_{notation}": (notation, value)
        for notation in ("json", "regex", "choice")
        if (value := getattr(request, f"guided_{notation}")) is not None
    }
    if request.structured_outputs is not None:
        own = request.structured_outputs.model_dump(exclude_none=True, by_alias=True)
        if len(own) != 1:
            raise refused(
                "structured_outputs",
                f"expected structured_outputs with one field, got {', '.join(own) or 'none'}",
            )
        given["structured_outputs"] = next(iter(own.items()))
    return _only({name: _of_notation(name, *found, max_bytes) for name, found in given.items()})


def _only(given: Mapping[str, Grammar]) -> Grammar | None:
    """Return the one grammar by the fields that gave it; None for no grammar."""
    if len(given) > 1:
        first, second, *_ = given
        raise refused(second, f"expected one structure of the reply, got {first} and {second}; leave one out")
    return next(iter(given.values()), None)


def _of_notation(name: str, notation: str, value: Any, max_bytes: int) -> Grammar:
    """Return the grammar that a field describes in one of the notations of `StructuredOutputs`."""
    if notation == "json":
        return _of_schema(name, value, max_bytes)
    if notation == "json_object":
        return Grammar.json_object()
    if notation == "choice":  # strings of Lark are those of JSON
        value = "start: " + " | ".join(json.dumps(text).replace("\x7f", r"\u007f") for text in value)
    _check_size(name, value, max_bytes)
    return Grammar.regex(value) if notation == "regex" else Grammar.lark(value)


def forces_call(request: ChatRequest) -> bool:
    """Return True if the reply must be a tool call."""
    return request.tool_choice == "required" or isinstance(request.tool_choice, NamedTool)


def _of_format(chosen: ResponseFormat | None, max_bytes: int) -> Grammar | None:
    if chosen is None:
        return None
    if chosen.json_schema is not None and chosen.type != "json_schema":
        raise refused(
            "response_format",
            f"expected type json_schema together with json_schema, got {chosen.type}; change the type or leave it out",
        )
    if chosen.type == "text":
        return None
    if chosen.type == "json_object":
        return Grammar.json_object()
    if chosen.json_schema is None or chosen.json_schema.schema_ is None:
        raise refused("response_format", "expected json_schema.schema together with type json_schema; add it")
    return _of_schema("response_format", chosen.json_schema.schema_, max_bytes)


def _of_tool_choice(request: ChatRequest, max_bytes: int) -> Grammar | None:
    if not forces_call(request):
        return None
    tools = list(request.tools or ())
    if isinstance(request.tool_choice, NamedTool):
        name = request.tool_choice.function.name
        tools = [tool for tool in tools if tool.function.name == name]
        if not tools:
            raise refused("tool_choice", f"expected tool_choice to name one of the tools, got {name!r}")
    return _of_schema("tools", call_schema(tools), max_bytes)


def call_schema(tools: Sequence[Tool]) -> dict[str, Any]:
    """Return the schema of a call of one of these tools: an object with `name` and `arguments`."""
    calls = []
    for index, tool in enumerate(tools):
        base = ("#" if len(tools) == 1 else f"#/anyOf/{index}") + "/properties/arguments"
        parameters = {"type": "object", **_moved(tool.function.parameters or {}, base)}
        properties = {"name": {"const": tool.function.name}, "arguments": parameters}
        required = ["name", "arguments"]
        calls.append(
            {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
        )
    return calls[0] if len(calls) == 1 else {"anyOf": calls}


def _moved(schema: Any, base: str) -> Any:
    """Return a part of a schema whose root moves to `base`: local references are adapted."""
    if isinstance(schema, list):
        return [_moved(part, base) for part in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {}
    for key, value in schema.items():
        if key == "$ref" and isinstance(value, str) and value.startswith("#"):
            moved[key] = base + value[1:]
        elif key in VALUES:
            moved[key] = value
        elif not (key == "$id" and isinstance(value, str)):
            moved[key] = _moved(value, base)
    return moved


def _enforceable(schema: Any) -> Any:
    """Return a part of a schema without `uniqueItems`, which pydantic writes for sets and no grammar enforces."""
    if isinstance(schema, list):
        return [_enforceable(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: value if key in VALUES else _enforceable(value)
        for key, value in schema.items()
        if not (key == "uniqueItems" and isinstance(value, bool))
    }


def _of_schema(name: str, schema: Mapping[str, Any], max_bytes: int) -> Grammar:
    text = json.dumps(_enforceable(schema), ensure_ascii=False)
    _check_size(name, text, max_bytes)
    try:
        return Grammar.json_schema(text)
    except BadInputError as error:
        raise refused(name, str(error), "invalid_value") from None


def _check_size(name: str, text: str, max_bytes: int) -> None:
    check_limit(name, len(text.encode()), max_bytes, f"bytes of {name}")
