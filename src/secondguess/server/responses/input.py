"""Requests of `/v1/responses` as requests of `/v1/chat/completions`, which has the same settings."""

from __future__ import annotations

from collections.abc import Sequence

from secondguess.server.errors import ApiError, refused
from secondguess.server.reply_fields import Json
from secondguess.server.responses.schemas import (
    FunctionCall,
    FunctionCallOutput,
    InputImage,
    InputItem,
    InputMessage,
    InputText,
    OutputText,
    ReasoningItem,
    ResponseNamedTool,
    ResponseRequest,
    SchemaFormat,
)
from secondguess.server.schemas import ChatRequest, Extensions

PARAMS = {
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "prompt": "input",
    "response_format": "text",
    "reasoning_effort": "reasoning",
}
"""Field of a chat -> the field of a response that it came from."""


def with_response_names(error: ApiError) -> ApiError:
    """Return an error about the chat as one about the response that it was made of."""
    param = PARAMS.get(error.param or "", error.param)
    message = error.message.replace(error.param, param) if error.param and param else error.message
    return ApiError(error.status, message, param, error.code, error.retry_after)


def to_chat(request: ResponseRequest) -> ChatRequest:
    """Return the chat with the same messages, tools and settings."""
    messages = [] if request.instructions is None else [{"role": "system", "content": request.instructions}]
    items = (
        [InputMessage(role="user", content=request.input)]
        if isinstance(request.input, str)
        else request.input
    )
    chat: Json = {name: getattr(request, name) for name in Extensions.model_fields}
    chat |= {
        "model": request.model,
        "messages": messages + to_messages(items),
        "max_completion_tokens": request.max_output_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "tools": _tools(request),
        "tool_choice": _tool_choice(request),
        "parallel_tool_calls": request.parallel_tool_calls,
        "response_format": _response_format(request),
        "reasoning_effort": request.reasoning.effort if request.reasoning else None,
        "logprobs": wants_logprobs(request) or None,
        "top_logprobs": request.top_logprobs if wants_logprobs(request) else None,
    }
    if not chat["messages"]:
        raise refused("messages", "expected messages with at least one item, got none", "invalid_value")
    return ChatRequest(**chat)


def wants_logprobs(request: ResponseRequest) -> bool:
    """Return True if the reply has log-probabilities."""
    return bool(request.include) or request.top_logprobs is not None


def to_messages(items: Sequence[InputItem]) -> list[Json]:
    """Return the items of a conversation as messages; reasoning, text and calls of a turn are one message."""
    messages: list[Json] = []
    for item in items:
        if isinstance(item, FunctionCallOutput):
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})
        elif isinstance(item, InputMessage) and item.role != "assistant":
            messages.append({"role": item.role, "content": _content(item)})
        else:
            _add_to_turn(messages, item)
    return messages


def _add_to_turn(messages: list[Json], item: InputMessage | FunctionCall | ReasoningItem) -> None:
    """Add an item to the assistant's message at the end, or begin one."""
    # Reasoning begins a turn.
    if not messages or messages[-1]["role"] != "assistant" or isinstance(item, ReasoningItem):
        messages.append({"role": "assistant"})
    turn = messages[-1]
    if isinstance(item, ReasoningItem):
        turn["reasoning_content"] = "".join(part.text for part in item.content or ())
    elif isinstance(item, InputMessage):
        turn["content"] = turn.get("content", "") + _text(item.content)
    else:
        function = {"name": item.name, "arguments": item.arguments}
        turn.setdefault("tool_calls", []).append(
            {"id": item.call_id, "type": "function", "function": function}
        )


def _content(message: InputMessage) -> str | list[Json]:
    """Return the content of a message: text, or the parts of a user's message."""
    content = message.content
    if isinstance(content, str) or message.role != "user":
        return _text(content)
    return [
        {"type": "image_url", "image_url": {"url": part.image_url}}
        if isinstance(part, InputImage)
        else {"type": "text", "text": part.text}
        for part in content
    ]


def _text(content: str | Sequence[InputText | InputImage | OutputText]) -> str:
    if isinstance(content, str):
        return content
    if any(isinstance(part, InputImage) for part in content):
        raise refused("messages", "expected images in messages of the user alone, got one in another")
    return "".join(part.text for part in content if not isinstance(part, InputImage))


def _tools(request: ResponseRequest) -> list[Json] | None:
    if request.tools is None:
        return None
    return [
        {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)}
        for tool in request.tools
    ]


def _tool_choice(request: ResponseRequest) -> object:
    if isinstance(request.tool_choice, ResponseNamedTool):
        return {"type": "function", "function": {"name": request.tool_choice.name}}
    return request.tool_choice


def _response_format(request: ResponseRequest) -> Json | None:
    chosen = request.text.format if request.text else None
    if isinstance(chosen, SchemaFormat):
        return {
            "type": "json_schema",
            "json_schema": chosen.model_dump(exclude={"type"}, exclude_none=True, by_alias=True),
        }
    return None if chosen is None else {"type": chosen.type}
