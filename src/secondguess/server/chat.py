"""Conversations as prompts: messages, tools and variables for the chat template of a tokenizer."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from secondguess.builtin import CHAT_TEMPLATE, builtin_paths
from secondguess.checkpoint.loaded import LoadedModel
from secondguess.server.errors import ApiError, refused
from secondguess.server.lengths import check_characters
from secondguess.server.schemas import AssistantMessage, ChatRequest, Message, RefusalPart, TextPart


@dataclass(frozen=True)
class Conversation:
    """Input of a chat template.

    Args:
        messages: as templates expect them, with content as text and arguments as objects.
        tools: definitions of the functions that the model may call; empty for none.
        variables: further variables of the template.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = field(default_factory=list)
    variables: Mapping[str, Any] = field(default_factory=dict)


class ChatTemplate:
    """Chat template of a model.

    Args:
        target: the model.
        template: Jinja source in place of the tokenizer's; None for the tokenizer's, or, for the
            built-in target, a minimal one.
    """

    def __init__(self, target: LoadedModel, template: str | None = None) -> None:
        self._target = target
        self._tokenizer = target.tokenizer
        self._name = target.name
        if template is None and not self._tokenizer.chat_template and _is_builtin(target):
            template = CHAT_TEMPLATE
        self._template = template

    @property
    def can_parse(self) -> bool:
        """True if the tokenizer describes the replies of its model: reasoning, content and tool calls."""
        return getattr(self._tokenizer, "response_template", None) is not None

    def reads(self, variable: str, tools: bool = False) -> bool:
        """Return True if the template refers to a variable."""
        return re.search(rf"\b{re.escape(variable)}\b", self._source(tools)) is not None

    def encode(self, conversation: Conversation, add_generation_prompt: bool = True) -> list[int]:
        """Return the token ids of a conversation, up to the beginning of the next reply.

        Raises:
            ApiError: a model without a template, variables that it does not read, or messages that
                it cannot format.
        """
        source = self._source(bool(conversation.tools))
        if conversation.tools and not self.reads("tools", tools=True):
            raise refused(
                "tools",
                f"expected no tools, which the chat template of {self._name} does not read; leave them out",
            )
        for name in conversation.variables:
            if not self.reads(name, bool(conversation.tools)):
                raise refused(
                    name,
                    f"expected no {name}, which the chat template of {self._name} does not read; leave it out",
                )
        render = partial(
            self._tokenizer.apply_chat_template,
            conversation.messages,
            tools=conversation.tools or None,
            chat_template=source,
            add_generation_prompt=add_generation_prompt,
            **conversation.variables,
        )
        try:
            text = render(tokenize=False)
        except Exception as error:  # a template is code from the checkpoint and can raise anything
            raise ApiError(
                422,
                f"expected messages that the chat template of {self._name} can format, got an error from it: {error}; "
                "change the messages",
                "messages",
                "template_error",
            ) from error
        check_characters(self._target, text)
        ids: list[int] = render(return_dict=False, tokenizer_kwargs={"verbose": False})
        return ids

    def _source(self, tools: bool) -> str:
        if self._template is not None:
            return self._template
        if not self._tokenizer.chat_template:
            raise refused(
                "messages",
                f"expected a model with a chat template for messages, got {self._name}, whose tokenizer has none; use "
                "/v1/completions, or start the server with a template",
            )
        source: str = self._tokenizer.get_chat_template(tools=[{}] if tools else None)
        return source


def _is_builtin(target: LoadedModel) -> bool:
    return target.path == str(builtin_paths().target)


def to_conversation(request: ChatRequest) -> Conversation:
    """Return the conversation of a chat request; tools are left out with `tool_choice: none`."""
    tools = [] if request.tool_choice == "none" else request.tools or []
    variables = dict(request.chat_template_kwargs or {})
    if request.reasoning_effort is not None:
        variables["reasoning_effort"] = request.reasoning_effort
    return Conversation(
        to_messages(request.messages), [tool.model_dump(exclude_none=True) for tool in tools], variables
    )


def to_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages in the form that chat templates of Transformers expect.

    Raises:
        ApiError: a message without content, or text that UTF-8 cannot write.
    """
    return [_to_message(message, place) for place, message in enumerate(messages)]


def _to_message(message: Message, place: int) -> dict[str, Any]:
    found = {key: value for key, value in message.model_dump(exclude_none=True).items() if value != []}
    found["content"] = text_of(message.content)
    if message.role == "developer":
        found["role"] = "system"
    if isinstance(message, AssistantMessage):
        found.pop("refusal", None)
        found["content"] = found["content"] or message.refusal or ""
        for call in found.get("tool_calls", ()):
            call["function"]["arguments"] = _to_arguments(call["function"]["arguments"], place)
    _check_unicode(found, place)
    return found


def text_of(content: str | Sequence[TextPart | RefusalPart] | None) -> str:
    """Return the text of a message: a string, or parts that are joined."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.refusal if isinstance(part, RefusalPart) else part.text for part in content)


def _to_arguments(arguments: str, place: int) -> Any:
    """Return the arguments of an earlier tool call as the object that templates format."""
    try:
        return json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        raise refused(
            "messages",
            f"expected arguments of messages[{place}].tool_calls to be JSON, got {arguments!r:.60}; repeat them as they came",
            "invalid_value",
        ) from None


def _check_unicode(value: object, place: int) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise refused(
            "messages",
            f"expected messages[{place}] in valid Unicode, got the lone surrogate {error.object[error.start]!r}; remove it",
            "invalid_value",
        ) from None
