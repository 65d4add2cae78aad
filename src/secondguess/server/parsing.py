"""Replies of a model split into content, reasoning and tool calls, as text is committed."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

from secondguess.sampling.text import IncrementalDecoder, Piece

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


class _StopFilter:
    """Holds back text that a stop string would cut off, until the row goes on or ends."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = stop
        self._longest = max(map(len, stop), default=1) - 1
        self._held = ""
        self._search_from = 0
        self._match: tuple[int, int] | None = None  # span in `_held`

    def push(self, text: str) -> str:
        """Add the text of a token and return the text that is certain to stay."""
        if self._match is not None:  # the row went on: it had to reach `min_tokens`
            self._search_from, self._match = self._match[1], None
        self._held += text
        starts = [(self._held.find(stop, self._search_from), len(stop)) for stop in self._stop]
        match = min(((start, start + size) for start, size in starts if start >= 0), default=None)
        end = len(self._held) - self._num_open() if match is None else match[0]
        kept, self._held = self._held[:end], self._held[end:]
        self._search_from = max(0, self._search_from - end)
        self._match = match and (0, match[1] - end)
        return kept

    def finish(self, rest: str, stopped: bool) -> str:
        """Return the text that is left, without the stop string that ended it."""
        return "" if stopped and self._match is not None else self._held + rest

    def _num_open(self) -> int:
        """Return the length of the longest end of the text that can begin a stop string."""
        unmatched = self._held[self._search_from :]
        for size in range(min(self._longest, len(unmatched)), 0, -1):
            if any(stop.startswith(unmatched[-size:]) for stop in self._stop):
                return size
        return 0


class TemplateParser:
    """Reply split by the tokenizer's response template, token by token.

    Only committed tokens are parsed, so the result does not depend on how many come at once. A
    reply that the template cannot parse, such as a tool call with broken JSON, becomes content.

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
        self._filter = _StopFilter(stop)
        self._is_broken = False
        self._unsettled = ""  # text whose events have not come yet
        self._region: str | None = None
        self._follow(self._parser.initial_events)

    def feed(self, piece: Piece) -> list[Delta]:
        if self._is_broken:
            return [Delta("content", piece.text)]
        deltas = []
        for token in piece.tokens:
            deltas += self._parse(self._filter.push(self._decoder.push(token)))
            self.num_reasoning_tokens += self._region in REASONING_FIELDS
        return deltas

    def finish(self, stopped: bool) -> list[Delta]:
        if self._is_broken:
            return []
        deltas = self._parse(self._filter.finish(self._decoder.flush(), stopped))
        try:
            return deltas if self._is_broken else deltas + self._follow(self._parser.finalize()[1])
        except ValueError:
            return [*deltas, *self._break()]

    def _parse(self, text: str) -> list[Delta]:
        self._unsettled += text
        try:
            return self._follow(self._parser.feed(text))
        except (ValueError, TypeError, KeyError):
            return self._break()

    def _break(self) -> list[Delta]:
        self._is_broken = True
        return [Delta("content", self._unsettled)]

    def _follow(self, events: Sequence[Mapping[str, Any]]) -> list[Delta]:
        """Return the deltas of the response parser's events."""
        deltas = []
        for event in events:
            name = event["field"]
            if event["type"] == "region_open":
                self._region = name
            elif event["type"] == "region_close":
                self._region, self._unsettled = None, ""
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
