"""Tool calls that a reply lists in JSON or in Python."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from typing import Any

MAX_PYTHON = 2**16
"""Characters of calls in Python: a bound of the time and the memory that Python's parser takes."""
JSON_NAMES = {"true": True, "false": False, "null": None}
"""Names of JSON, which models write in Python, too."""
SEPARATOR = re.compile(r"\s*;?\s*")


def read_calls(text: str) -> list[dict[str, Any]]:
    """Return the names and arguments of calls.

    They are in JSON, objects or lists of them, of which several are joined by semicolons or spaces; or in Python, a list
    of calls with literals by keyword. Other texts raise a ValueError, calls without name or arguments a KeyError.
    """
    return list(_in_python(text) if re.match(r"\[\s*\w", text) else _in_json(text))


def _in_json(text: str) -> Iterator[dict[str, Any]]:
    decoder, end = json.JSONDecoder(), 0
    while end < len(text):
        value, end = decoder.raw_decode(text, end)
        for call in value if isinstance(value, list) else [value]:
            if not isinstance(call, dict):
                raise ValueError(f"expected calls as objects, got {call!r:.60}")
            yield {
                "name": call["name"],
                "arguments": call["parameters" if "parameters" in call else "arguments"],
            }
        if separator := SEPARATOR.match(text, end):
            end = separator.end()


def _in_python(text: str) -> Iterator[dict[str, Any]]:
    if len(text) > MAX_PYTHON:
        raise ValueError(f"expected calls of at most {MAX_PYTHON} characters, got {len(text)}")
    try:
        body = ast.parse(text, mode="eval").body
    except (SyntaxError, MemoryError) as error:  # for instance, of deep nesting
        raise ValueError("expected calls in Python") from error
    for call in body.elts if isinstance(body, ast.List) else [body]:
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name)) or call.args:
            raise ValueError("expected calls with arguments by keyword")
        arguments = {}
        for keyword in call.keywords:
            if keyword.arg is None:
                raise ValueError("expected arguments by keyword, got a dictionary of them")
            arguments[keyword.arg] = ast.literal_eval(_JsonNames().visit(keyword.value))
        yield {"name": call.func.id, "arguments": arguments}


class _JsonNames(ast.NodeTransformer):
    """Replacement of the names of JSON by their values."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(JSON_NAMES[node.id]) if node.id in JSON_NAMES else node
