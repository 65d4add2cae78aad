"""Conversations as prompts: messages, tools and variables for the chat template of a tokenizer."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from inspect import signature
from typing import Any

import numpy

from secondguess.prompts import EncodedPrompt, processor_template, with_list_contents
from secondguess.server.calls.templates import response_template
from secondguess.server.errors import ApiError, refused
from secondguess.server.images import ImageReader
from secondguess.server.schemas import (
    AssistantMessage,
    ChatRequest,
    ImagePart,
    Message,
    RefusalPart,
    TextPart,
    UserMessage,
)
from secondguess.server.served_model import ServedModel

Content = str | Sequence[TextPart | ImagePart | RefusalPart] | None
Messages = list[dict[str, Any]]

EMPTY = ("", None, numpy.datetime64("NaT"))
"""Forms of an empty content: text and null. Transformers 5.23 removes None from a message, with its key, and passes the
third value to the template as null."""

TOOLS_OF_A_MESSAGE = re.compile(r"""\bmessage(?:\.tools\b|\[["']tools["']\])""")
"""Expression of chat templates, such as that of Phi-4-mini, that read tools as the text of a message's field."""


@dataclass(frozen=True)
class Conversation:
    """Input of a chat template."""

    messages: Messages  # with content as text, or as parts if `has_images`, and arguments of calls as JSON
    has_images: bool = False
    tools: list[dict[str, Any]] = field(default_factory=list)
    variables: Mapping[str, Any] = field(default_factory=dict)  # others of the template
    begins_reply: bool = True  # the prompt ends with the beginning of a reply
    continues: bool = False  # the prompt ends within the last message


class ChatTemplate:
    """Chat template of a model: that of its tokenizer, or another one in Jinja."""

    def __init__(self, target: ServedModel, template: str | None = None) -> None:
        self._target = target
        self._tokenizer = target.tokenizer
        self._name = target.name
        self._template = template

    @property
    def exists(self) -> bool:
        """True if the model has a template, so that it can format messages."""
        return bool(self._template or self._tokenizer.chat_template or processor_template(self._target))

    @cached_property
    def response_template(self) -> Mapping[str, Any] | None:
        """Description of replies: reasoning, content and tool calls; None if it is not known.

        It is the tokenizer's, or that of the family of its chat template.
        """
        described: Mapping[str, Any] | None = getattr(self._tokenizer, "response_template", None)
        source = self._template or self._tokenizer.chat_template or ""
        texts = source.values() if isinstance(source, Mapping) else [source]
        return described or response_template("\n".join(texts))

    def encode(self, conversation: Conversation) -> EncodedPrompt:
        """Return the token ids of a conversation, up to the beginning of the next reply."""
        formatter = self._target.checkpoint.processor if conversation.has_images else self._tokenizer
        source = self._source(formatter, bool(conversation.tools))
        own = {"messages", *signature(formatter.apply_chat_template).parameters} - {"documents"}
        if taken := own & conversation.variables.keys():
            raise refused(
                "chat_template_kwargs",
                f"expected variables of the chat template in chat_template_kwargs, got {', '.join(sorted(taken))}, "
                "which the server sets; leave it out",
            )
        if conversation.tools and not re.search(r"\btools\b", source):
            raise refused(
                "tools",
                f"cannot use tools: the chat template of {self._name} does not read them. Leave them out.",
            )
        format_messages = partial(
            formatter.apply_chat_template,
            tools=conversation.tools or None,
            chat_template=source,
            add_generation_prompt=conversation.begins_reply,
            **conversation.variables,
        )
        messages = conversation.messages
        if conversation.tools and not conversation.has_images and TOOLS_OF_A_MESSAGE.search(source):
            messages = _with_tools(messages, conversation.tools)
            if "tool_calls" not in source:
                messages = [_with_written_calls(message) for message in messages]
        messages = _readable(partial(format_messages, tokenize=False), messages)
        if not conversation.has_images:
            messages = with_list_contents(partial(format_messages, tokenize=False), messages)
        render = partial(format_messages, messages, continue_final_message=conversation.continues)
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
        self._target.check_characters(text)
        if conversation.continues and not conversation.has_images:
            content = conversation.messages[-1]["content"]
            # Templates that trim a message would let the model write its last spaces again.
            whole = text if text.endswith(content) else text + content[len(content.rstrip()) :]
            return EncodedPrompt(self._tokenizer(whole, add_special_tokens=False, verbose=False).input_ids)
        if not conversation.has_images:
            return EncodedPrompt(render(return_dict=False, tokenizer_kwargs={"verbose": False}))
        try:
            inputs = dict(render(tokenize=True, return_dict=True, return_tensors="pt"))
        except Exception as error:  # a processor can refuse an image for its size or number
            raise refused(
                "messages",
                f"expected images that the processor of {self._name} can read, got an error from it: {error}; "
                "change the images",
                "invalid_value",
            ) from error
        return EncodedPrompt.from_inputs(inputs)

    def _source(self, formatter: Any, tools: bool) -> str:
        if self._template is not None:
            return self._template
        template = formatter.chat_template or processor_template(self._target)
        if not template:
            raise refused(
                "messages",
                f"expected a model with a chat template for messages, got {self._name}, whose tokenizer has none; use "
                "/v1/completions, or start the server with a template",
            )
        if isinstance(template, Mapping):  # templates by name
            found = (template.get("tool_use") if tools else None) or template.get("default")
            if not found:
                raise refused(
                    "messages",
                    f"expected a model with a chat template named default for messages, got {self._name}, whose templates are "
                    f"named {', '.join(sorted(template))}; use /v1/completions, or start the server with a template",
                )
            template = found
        source: str = template
        return source


def to_conversation(request: ChatRequest, images: ImageReader) -> Conversation:
    """Return the conversation of a chat request; tools are left out with `tool_choice: none`."""
    tools = [] if request.tool_choice == "none" else request.tools or []
    variables = dict(request.chat_template_kwargs or {})
    if request.reasoning_effort is not None:
        variables["reasoning_effort"] = request.reasoning_effort
    continues = bool(request.continue_final_message)
    if continues:
        _check_continued(request)
    return replace(
        to_messages(request.messages, images),
        tools=[tool.model_dump(exclude_none=True) for tool in tools],
        variables=variables,
        begins_reply=not continues and request.add_generation_prompt is not False,
        continues=continues,
    )


def _check_continued(request: ChatRequest) -> None:
    """Refuse a request that continues a last message without text, or one of the user."""
    last = request.messages[-1]
    if request.add_generation_prompt:
        raise refused(
            "continue_final_message",
            "expected add_generation_prompt: false together with continue_final_message, got true; leave one out",
        )
    if not isinstance(last, AssistantMessage) or not text_of(last.content).strip() or last.tool_calls:
        raise refused(
            "continue_final_message",
            "expected a last message of the assistant with text and without tool calls, for continue_final_message, got "
            f"one of {last.role}; leave the field out",
            "invalid_value",
        )


def to_messages(messages: Sequence[Message], images: ImageReader) -> Conversation:
    """Return the conversation of messages, of which the chat template then formats one of several forms."""
    found = [_to_message(message, index) for index, message in enumerate(messages)]
    contents = [message.content for message in messages]
    has_images = any(
        isinstance(part, ImagePart) for parts in contents if isinstance(parts, list) for part in parts
    )
    if has_images:  # processors look for images in lists
        for own, message in zip(found, messages, strict=True):
            given = message.content if isinstance(message, UserMessage) else own["content"]
            own["content"] = [
                _to_part(part, images) for part in ([given] if isinstance(given, str) else given)
            ]
    return Conversation(found, has_images)


def _to_part(part: str | TextPart | ImagePart, images: ImageReader) -> dict[str, Any]:
    if isinstance(part, ImagePart):
        return {"type": "image", "image": images.read(part.image_url.url)}
    return {"type": "text", "text": part if isinstance(part, str) else part.text}


def _to_message(message: Message, index: int) -> dict[str, Any]:
    found = {key: value for key, value in message.model_dump(exclude_none=True).items() if value != []}
    found["content"] = text_of(message.content)
    if message.role == "developer":
        found["role"] = "system"
    if isinstance(message, AssistantMessage):
        found.pop("refusal", None)
        found["content"] = found["content"] or message.refusal or ""
        for call in found.get("tool_calls", ()):
            call["function"]["arguments"] = _checked_arguments(call["function"]["arguments"], index)
    return found


def _readable(render: Callable[[Messages], str], messages: Messages) -> Messages:
    """Return messages in the first form that a template can format without leaving all calls out.

    If each form that it can format leaves them out, or if it can format none, this is the first such form.
    """
    if not any("tool_calls" in message for message in messages):
        return messages
    found = None
    for form, renamed in zip(_forms(messages), _forms(messages, suffix="_"), strict=True):
        text = _formatted(render, form)
        if text is not None and text != _formatted(render, renamed):
            return form
        if text is not None and found is None:
            found = form
    return found or next(_forms(messages))


def _forms(messages: Messages, suffix: str = "") -> Iterator[Messages]:
    """Yield messages in the forms that templates read, the most common one first; `suffix` is added to names of functions.

    Arguments of calls are objects, or JSON for templates that join them to other text. An empty content
    beside calls is text, or null for templates that write calls only then. Identifiers of calls are as they came, or
    of nine characters for templates that refuse others, such as Mistral's.
    """
    for known in (messages, [_with_short_ids(message) for message in messages]):
        for empty in EMPTY:
            for read_arguments in (json.loads, str):
                yield [_with_form(message, read_arguments, empty, suffix) for message in known]


def _with_short_ids(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with identifiers of nine letters and digits, equal ones for equal ones."""

    def short(identifier: str) -> str:
        return hashlib.sha256(identifier.encode("utf-8", "replace")).hexdigest()[:9]

    if "tool_call_id" in message:
        return message | {"tool_call_id": short(message["tool_call_id"])}
    calls = [call | {"id": short(call["id"])} for call in message.get("tool_calls", ())]
    return message | {"tool_calls": calls} if calls else message


def _with_form(
    message: dict[str, Any], read_arguments: Callable[[str], Any], empty: object, suffix: str
) -> dict[str, Any]:
    if "tool_calls" not in message:
        return message
    calls = []
    for call in message["tool_calls"]:
        name, arguments = call["function"]["name"] + suffix, read_arguments(call["function"]["arguments"])
        calls.append(call | {"function": {"name": name, "arguments": arguments}})
    return message | {"content": message["content"] or empty, "tool_calls": calls}


def _with_tools(messages: Messages, tools: Sequence[Mapping[str, Any]]) -> Messages:
    """Return messages of which the first one, from the system, has the definitions of tools as JSON."""
    text = json.dumps([tool["function"] for tool in tools], ensure_ascii=False)
    if messages[0]["role"] != "system":
        messages = [{"role": "system", "content": ""}, *messages]
    return [messages[0] | {"tools": text}, *messages[1:]]


def _with_written_calls(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with its calls in its content, as Phi-4-mini writes them and its template does not."""
    if "tool_calls" not in message:
        return message
    functions = [call["function"] for call in message["tool_calls"]]
    calls = [function | {"arguments": json.loads(function["arguments"])} for function in functions]
    written = f"<|tool_call|>{json.dumps(calls, ensure_ascii=False)}<|/tool_call|>"
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return rest | {"content": message["content"] + written}


def _formatted(render: Callable[[Messages], str], messages: Messages) -> str | None:
    """Return the prompt of messages; None if the template fails."""
    try:
        return render(messages)
    except Exception:  # a template is code from the checkpoint and can raise anything
        return None


def text_of(content: Content) -> str:
    """Return the text of a message: a string, or parts that are joined."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = [part for part in content if not isinstance(part, ImagePart)]
    return "".join(part.refusal if isinstance(part, RefusalPart) else part.text for part in texts)


def _checked_arguments(arguments: str, index: int) -> str:
    """Return the arguments of an earlier tool call if they are JSON; `{}` if they are empty."""
    arguments = arguments or "{}"
    try:
        json.dumps(json.loads(arguments), ensure_ascii=False).encode()
        return arguments
    except (ValueError, RecursionError):
        raise refused(
            "messages",
            f"expected arguments of messages[{index}].tool_calls to be JSON in valid Unicode, "
            f"got {arguments!r:.60}; repeat them as they came",
            "invalid_value",
        ) from None
