"""Replies of a model split into content, reasoning and tool calls, as text is committed."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

from secondguess.sampling.text import IncrementalDecoder, Piece, StopSearch

REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
"""Names of reasoning in the tokenizers' response templates."""


class Delta(NamedTuple):
    """Addition to a reply.

    Args:
        field: field of the reply that grows.
        text: additional text; of a tool call, its arguments as JSON.
        name: function of a tool call.
        call_id: identifier of a tool call.
    """

    field: Literal["content", "reasoning", "tool_call"]
    text: str
    name: str = ""
    call_id: str = ""


class ReplyParser(Protocol):
    """Parser of one sample's reply."""

    num_reasoning_tokens: int

    def feed(self, piece: Piece) -> list[Delta]:
        """Return what a committed piece adds to the reply."""
        ...

    def finish(self, stopped: bool) -> list[Delta]:
        """Return the rest of the reply; `stopped` if an end token or a stop string ended it."""
        ...


class PlainParser:
    """Reply of a tokenizer without a response template: all text is content."""

    num_reasoning_tokens = 0

    def feed(self, piece: Piece) -> list[Delta]:
        return [Delta("content", piece.text)]

    def finish(self, stopped: bool) -> list[Delta]:
        return []


class _SpecialTokens:
    """Tokenizer that writes special tokens, by which response templates find the parts of a reply."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=False)
        return text


class TemplateParser:
    """Reply split by the tokenizer's response template, token by token.

    Only committed tokens are parsed, so the result does not depend on how many come at once. A
    reply that the template cannot parse, such as a tool call with broken JSON, becomes content from
    the beginning of this call on.

    Args:
        tokenizer: a tokenizer with a response template.
        prompt: the prompt; templates often write the beginning of a reply.
        tools: definitions of the functions, by which arguments get their types.
        stop: stop strings of the request.
    """

    def __init__(
        self, tokenizer: Any, prompt: Sequence[int], tools: Sequence[Mapping[str, Any]], stop: Sequence[str]
    ) -> None:
        self.num_reasoning_tokens = 0
        self._decoder = IncrementalDecoder(_SpecialTokens(tokenizer), prompt)
        self._parser = tokenizer.get_response_parser(prefix=list(prompt), tools=list(tools) or None)
        self._search = StopSearch(stop)
        self._special_tokens = frozenset(tokenizer.all_special_ids)
        self._is_broken = False
        self._newest = ""  # text of the newest token
        self._unsettled = ""  # text whose events have not come yet
        self._region: str | None = None
        self._follow(self._parser.initial_events)

    def feed(self, piece: Piece) -> list[Delta]:
        deltas = []
        for token in piece.tokens:
            if self._is_broken and token in self._special_tokens:
                continue
            self._newest = self._decoder.push(token)
            self._search.push(self._newest)
            deltas += self._parse(self._search.release(self._search.num_certain))
            self.num_reasoning_tokens += self._region in REASONING_FIELDS
        return deltas

    def finish(self, stopped: bool) -> list[Delta]:
        is_cut = stopped and self._search.match is not None
        deltas = self._parse("" if is_cut else self._search.held + self._decoder.flush())
        if self._is_broken:
            return deltas
        try:
            return deltas + self._follow(self._parser.finalize()[1])
        except ValueError:
            if stopped and not is_cut:  # by an end token, which is not content
                self._unsettled = self._unsettled.removesuffix(self._newest)
            return [*deltas, *self._break()]

    def _parse(self, text: str) -> list[Delta]:
        if self._is_broken:
            return [Delta("content", text)]
        self._unsettled += text
        try:
            return self._follow(self._parser.feed(text))
        except (ValueError, TypeError, KeyError):
            return self._break()

    def _break(self) -> list[Delta]:
        self._is_broken, self._region = True, None
        return [Delta("content", self._unsettled)]

    def _follow(self, events: Sequence[Mapping[str, Any]]) -> list[Delta]:
        """Return the deltas of the response parser's events."""
        deltas = []
        for event in events:
            name = event["field"]
            if event["type"] == "region_open":
                self._region = name
            elif event["type"] == "region_close":
                self._region = None
                if name != "content":  # which ends where the text after it, not settled yet, opens a region
                    self._unsettled = ""
                if name == "tool_calls":
                    values = event["value"] if isinstance(event["value"], list) else [event["value"]]
                    deltas += [_tool_call(value) for value in values]
            elif not event.get("dirty") and (name == "content" or name in REASONING_FIELDS):
                deltas.append(Delta("content" if name == "content" else "reasoning", event["text"]))
                self._unsettled = ""
        return deltas


def _tool_call(value: Mapping[str, Any]) -> Delta:
    function = value["function"]
    arguments = function["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return Delta("tool_call", text, str(function["name"]), f"call_{secrets.token_hex(12)}")
