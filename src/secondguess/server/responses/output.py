"""Output items of `/v1/responses`, with the events by which a stream describes their growth."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from secondguess.core import TokenLogprob
from secondguess.server.calls.parsers import Delta, new_id
from secondguess.server.reply_fields import Json, chat_logprob


class OutputItems:
    """Items of one reply: reasoning, messages and function calls, in order."""

    def __init__(self, with_logprobs: bool = False) -> None:
        self.items: list[Json] = []
        self._with_logprobs = with_logprobs
        self._logprobs: list[Json] = []  # of tokens whose text has not come yet
        self._open: str | None = None

    def add(self, deltas: Sequence[Delta], logprobs: Sequence[TokenLogprob] = ()) -> Iterator[Json]:
        """Add to the reply and yield the events.

        The next content gets the log-probabilities: their tokens need not have a text of their own.
        """
        if self._with_logprobs:
            self._logprobs += [chat_logprob(logprob) for logprob in logprobs]
        for delta in deltas:
            if delta.field == "tool_call":
                yield from self.close()
                yield from self._call(delta)
            elif delta.field == "arguments":
                yield self._arguments(delta.text)
            elif delta.text:
                yield from self._text(delta)

    def close(self, status: str = "completed") -> Iterator[Json]:
        """End the open item and yield the events."""
        if self._open is None:
            return
        item = self.items[-1]
        item["status"] = status
        if self._open == "call":
            self._open = None
            name, arguments = item["name"], item["arguments"]
            yield self._event("response.function_call_arguments.done", arguments=arguments, name=name)
            yield self._item_event("done")
            return
        (part,) = item["content"]
        if self._open == "content" and self._logprobs:
            yield self._text_event("")
        name = "response.output_text" if self._open == "content" else "response.reasoning_text"
        more = {"logprobs": part["logprobs"]} if self._open == "content" else {}
        self._open = None
        yield self._event(f"{name}.done", content_index=0, text=part["text"], **more)
        yield self._event("response.content_part.done", content_index=0, part=part)
        yield self._item_event("done")

    def _text(self, delta: Delta) -> Iterator[Json]:
        if self._open != delta.field:
            yield from self.close()
            yield from self._begin(delta.field)
        part = self.items[-1]["content"][0]
        part["text"] += delta.text
        if delta.field == "reasoning":
            yield self._event("response.reasoning_text.delta", content_index=0, delta=delta.text)
            return
        yield self._text_event(delta.text)

    def _text_event(self, text: str) -> Json:
        logprobs, self._logprobs = self._logprobs, []
        self.items[-1]["content"][0]["logprobs"] += logprobs
        return self._event("response.output_text.delta", content_index=0, delta=text, logprobs=logprobs)

    def _begin(self, field: str) -> Iterator[Json]:
        if field == "content":
            part: Json = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            item: Json = {"type": "message", "id": new_id("msg"), "role": "assistant"}
        else:
            part = {"type": "reasoning_text", "text": ""}
            item = {"type": "reasoning", "id": new_id("rs"), "summary": []}
        self.items.append({**item, "status": "in_progress", "content": []})
        yield self._item_event("added")
        self.items[-1]["content"] = [part]
        self._open = field
        yield self._event("response.content_part.added", content_index=0, part=dict(part))

    def _call(self, delta: Delta) -> Iterator[Json]:
        item = {"type": "function_call", "id": new_id("fc"), "call_id": delta.call_id, "name": delta.name}
        self.items.append({**item, "arguments": "", "status": "in_progress"})
        yield self._item_event("added")
        self._open = "call"
        if delta.text:  # the whole call
            yield self._arguments(delta.text)
            yield from self.close()

    def _arguments(self, text: str) -> Json:
        self.items[-1]["arguments"] += text
        return self._event("response.function_call_arguments.delta", delta=text)

    def _event(self, name: str, /, **fields: Any) -> Json:
        return {"type": name, "item_id": self.items[-1]["id"], "output_index": len(self.items) - 1, **fields}

    def _item_event(self, change: str) -> Json:
        item = dict(self.items[-1])
        return {"type": f"response.output_item.{change}", "output_index": len(self.items) - 1, "item": item}
