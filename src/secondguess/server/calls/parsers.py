"""Replies of a model split into content, reasoning and tool calls, as text is committed."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence, Set
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias

from secondguess.sampling.text import IncrementalDecoder, Piece, StopSearch
from secondguess.server.calls.templates import LISTED_CALLS
from secondguess.server.calls.texts import read_calls

REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
"""Names of reasoning in the tokenizers' response templates."""


class Delta(NamedTuple):
    """Addition to a reply: `text`, or for a tool call the JSON of its arguments or the beginning of it."""

    field: Literal["content", "reasoning", "tool_call", "arguments"]  # `arguments` are those of the last call
    text: str
    name: str = ""  # function of a tool call
    call_id: str = ""


class PlainParser:
    """Reply of a tokenizer without a response template: all text is content."""

    num_reasoning_tokens = 0

    def feed(self, piece: Piece) -> list[Delta]:
        """Return what a committed piece adds to the reply."""
        return [Delta("content", piece.text)]

    def finish(self, stopped: bool) -> list[Delta]:
        """Return the rest of the reply; `stopped` if an end token or a stop string ended it."""
        return []


class _SpecialTokens:
    """Tokenizer that writes special tokens, by which response templates find the parts of a reply."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def decode(self, token_ids: list[int], **options: bool) -> str:
        text: str = self._tokenizer.decode(token_ids, **{**options, "skip_special_tokens": False})
        return text

    def encode(self, text: str, **options: bool) -> list[int]:
        tokens: list[int] = self._tokenizer.encode(text, **options)
        return tokens


class TemplateParser:
    """Reply split by a response template of Transformers, token by token.

    Only committed tokens are parsed, so the result does not depend on how many come at once. A reply that the template
    cannot parse, such as a tool call with broken JSON, becomes content from the beginning of this call on. Text outside
    all fields is left out, except that it is content if a whole reply has no field, or none but reasoning.

    `prompt` may end with the beginning of the reply. The definitions in `tools` give arguments their types. With
    `include_stop` the stop string that ends the reply is a part of it; with `single_call` later calls are left out.
    """

    def __init__(
        self,
        tokenizer: Any,
        template: Mapping[str, Any],
        prompt: Sequence[int],
        tools: Sequence[Mapping[str, Any]],
        stop: Sequence[str],
        include_stop: bool = False,
        single_call: bool = False,
    ) -> None:
        self.num_reasoning_tokens = 0
        self._decoder = IncrementalDecoder(_SpecialTokens(tokenizer), prompt)
        self._new_parser = partial(tokenizer.get_response_parser, tools=list(tools) or None)
        self._parser = self._new_parser(dict(template), prefix=list(prompt))
        self._tools = {tool["function"]["name"] for tool in tools}
        calls = template["fields"].get("tool_calls", {})
        self._is_structured_by_tags = calls.get("content", "json") not in ("json", "text")
        self._search = StopSearch(stop)
        self._include_stop = include_stop
        added = tokenizer.added_tokens_decoder
        self._special_tokens = {
            *tokenizer.all_special_ids,
            *(token for token in added if added[token].special),
        }
        self._is_broken = False
        self._special: str | None = None  # text of the newest token, not parsed yet, if it is special
        self._unsettled = ""  # text whose events have not come yet
        self._region: str | None = None
        self._has_answer = False  # content or a call has begun
        self._single_call, self._num_calls = single_call, 0
        self._follow(lambda: self._parser.initial_events)

    def feed(self, piece: Piece) -> list[Delta]:
        deltas = []
        for token in piece.tokens:
            deltas += self._push_special()  # it was no end token, because another token follows
            is_special = token in self._special_tokens
            text = "" if self._is_broken and is_special else self._decoder.push(token)
            if is_special:
                self._special = text
            else:
                deltas += self._push(text)
        return deltas

    def finish(self, stopped: bool) -> list[Delta]:
        deltas = [] if stopped else self._push_special()
        match = self._search.match if stopped and self._special is None else None
        if match is None:
            deltas += self._parse(self._search.held + self._decoder.flush())
        elif self._include_stop:
            deltas += self._parse(self._search.release(match[1]))
        ending = self._special or ""  # an end token, which can close a field, but is no text
        last = self._parse(ending)
        if not self._is_broken:
            last += self._follow(self._last_events)
        if self._unsettled and not (self._is_broken or self._has_answer):
            # such as a call in another format, which would leave no trace
            last.append(Delta("content", self._unsettled))
        if last and last[-1].field != "tool_call":
            last[-1] = last[-1]._replace(text=last[-1].text.removesuffix(ending))
        return deltas + last

    def _last_events(self) -> Sequence[Mapping[str, Any]]:
        """Return the events of the end of a reply; ValueError for a call between tags without an end: it lacks arguments."""
        events: list[dict[str, Any]] = self._parser.finalize()[1]
        closed = [event["field"] for event in events if event["type"] == "region_close"]
        if self._is_structured_by_tags and "tool_calls" in closed:
            raise ValueError("a call without its end")
        return events

    def _push_special(self) -> list[Delta]:
        text, self._special = self._special, None
        return [] if text is None else self._push(text)

    def _push(self, text: str) -> list[Delta]:
        """Return what the text of a token adds, as far as no stop string can cut it off."""
        self._search.push(text)
        deltas = self._parse(self._search.release(self._search.num_certain))
        self.num_reasoning_tokens += self._region in REASONING_FIELDS
        return deltas

    def _parse(self, text: str) -> list[Delta]:
        if self._is_broken:
            return [Delta("content", text)] if text else []
        self._unsettled += text
        return self._follow(lambda: self._parser.feed(text))

    def _follow(self, parse: Callable[[], Sequence[Mapping[str, Any]]]) -> list[Delta]:
        """Return the deltas of the response parser's next events.

        Where it fails, the text whose events have not come is content.
        """
        deltas: list[Delta] = []
        try:
            for event in parse():
                deltas += self._deltas_of(event)
        except (ValueError, TypeError, KeyError, RecursionError):
            self._is_broken, self._region = True, None
            deltas.append(Delta("content", self._unsettled))
        return deltas

    def _deltas_of(self, event: Mapping[str, Any]) -> list[Delta]:
        name, deltas = event["field"], []
        if event["type"] == "region_open":
            self._region = name
            self._has_answer |= name in ("content", "tool_calls")
            return []
        if event["type"] == "region_close":
            self._region = None
            if name != "tool_calls" and not (name in REASONING_FIELDS and event["value"]):
                return []  # content ends where the text after it, not settled yet, opens a region
            if name == "tool_calls":
                calls = [_tool_call(call, self._tools) for call in self._calls_of(event["value"])]
                deltas = calls[: 1 - min(1, self._num_calls)] if self._single_call else calls
                self._num_calls += len(deltas)
        elif not event.get("dirty") and (name == "content" or name in REASONING_FIELDS):
            deltas = [Delta("content" if name == "content" else "reasoning", event["text"])]
        else:
            return []
        self._unsettled = ""
        return deltas

    def _calls_of(self, value: Any) -> list[Any]:
        """Return the calls that a field holds: one, several, or a text that lists them."""
        if isinstance(value, str):
            parser = self._new_parser(LISTED_CALLS, prefix=[])  # it gives arguments their types
            parser.feed(json.dumps(read_calls(value)))
            value = parser.finalize()[0]["tool_calls"]
        return value if isinstance(value, list) else [value]


CALL_HEAD = re.compile(r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*')
CALL_TAIL = re.compile(r"\s*\}\s*\Z")
"""Beginning and end of a forced call."""


class ForcedCallParser:
    """Reply that is one tool call, as `structure.call_schema` describes it.

    Its grammar makes a call of it from the first token on, so that arguments are returned as they are written.
    """

    num_reasoning_tokens = 0

    def __init__(self) -> None:
        self._held = ""
        self._has_begun = False

    def feed(self, piece: Piece) -> list[Delta]:
        self._held += piece.text
        deltas = []
        if not self._has_begun and (head := CALL_HEAD.match(self._held)):
            self._has_begun, self._held = True, self._held[head.end() :]
            deltas = [Delta("tool_call", "", json.loads(head[1]), new_id("call"))]
        tail = CALL_TAIL.search(self._held)
        given = self._held[: tail.start() if tail else len(self._held)] if self._has_begun else ""
        self._held = self._held[len(given) :]
        return [*deltas, Delta("arguments", given)] if given else deltas

    def finish(self, stopped: bool) -> list[Delta]:
        if not self._has_begun:
            return [Delta("content", self._held)]
        return [] if stopped else [Delta("arguments", self._held)]


ReplyParser: TypeAlias = PlainParser | TemplateParser | ForcedCallParser
"""Parser of one sample's reply."""


def _tool_call(value: Mapping[str, Any], tools: Set[str]) -> Delta:
    """Return a call of one of the tools, whose arguments are a JSON object in valid Unicode; ValueError for others."""
    name, arguments = value["function"]["name"], value["function"]["arguments"]
    if name not in tools:
        raise ValueError(f"a call of {name}")
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    arguments = {} if arguments is None else arguments
    if not isinstance(arguments, dict):
        raise ValueError(f"arguments {arguments!r:.60}")
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    text.encode()
    return Delta("tool_call", text, name, new_id("call"))


def new_id(prefix: str) -> str:
    """Return a new identifier of a call, an item or a response."""
    return f"{prefix}_{secrets.token_hex(12)}"
