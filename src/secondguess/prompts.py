"""Prompts as text, token ids or conversations: validation and encoding."""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard

import numpy
from torch import Tensor

from secondguess.core import ImageInputs, Row
from secondguess.errors import BadInputError
from secondguess.images import MODELS_WITH_IMAGES

if TYPE_CHECKING:
    from secondguess.checkpoint.plan import Checkpoint

Message = Mapping[str, Any]
"""Message of a conversation, `{"role": ..., "content": ...}`.

Both values are text. For a vision-language model the content may be a list of parts, `{"type": "text",
"text": ...}` and `{"type": "image", "image": ...}`, each image an object of PIL or an array.
"""


class PromptModel(Protocol):
    """Model that prompts are encoded for: a `LoadedModel`, or a server's description of it."""

    @property
    def name(self) -> str: ...
    @property
    def checkpoint(self) -> Checkpoint: ...
    @property
    def tokenizer(self) -> Any: ...
    @property
    def num_input_tokens(self) -> int: ...
    @property
    def takes_images(self) -> bool: ...
    def encode(self, text: str) -> list[int]: ...


@dataclass(frozen=True)
class EncodedPrompt:
    """Token ids, and the inputs of the model for the images among them."""

    ids: list[int]
    images: ImageInputs | None = None

    @classmethod
    def from_inputs(cls, inputs: Mapping[str, Any]) -> EncodedPrompt:
        """Return the prompt of a processor's output."""
        images = {
            name: value for name, value in inputs.items() if name not in ("input_ids", "attention_mask")
        }
        return cls(inputs["input_ids"][0].tolist(), images)


class ExtendedPrompt(ABC):
    """Prompt whose rows need more than their tokens, such as a runtime around the target (`beyond/images/guidance.py`).

    Attributes:
        prompt: prompt of the rows.
    """

    prompt: Prompt

    @abstractmethod
    def prepare(self, models: Any, rows: Sequence[Row]) -> None:
        """Prepare the rows of the samples of this prompt, before they join the batch.

        Args:
            models: `engine.models.Models` that decode them.
        """


Prompt = str | EncodedPrompt | ExtendedPrompt | Sequence[int] | numpy.ndarray | Tensor | Sequence[Message]
"""Input of a generation.

Text; token ids, as a sequence of integers or as an array or tensor `[position]`; or a
conversation, which the tokenizer's chat template formats up to the beginning of the next reply.
`EncodedPrompt` is either of the last two, encoded before; `ExtendedPrompt` is for extensions.
"""

MESSAGE_FIELDS = ("role", "content")

_ARRAYS = (numpy.ndarray, Tensor)


def is_single(prompts: Prompt | Sequence[Prompt]) -> bool:
    """Return True for one prompt (or a value that cannot hold several), False for a list."""
    if isinstance(prompts, str | bytes | bytearray) or not isinstance(prompts, Sequence):
        return True
    return len(prompts) > 0 and not isinstance(prompts[0], (Sequence, ExtendedPrompt, *_ARRAYS))


def validate_prompt(prompt: object) -> str | list[int]:
    """Return the prompt as text that can be encoded, or as a list of token ids.

    Raises:
        BadInputError: any other value; the message describes it.
    """
    if isinstance(prompt, str):
        return _checked_text(prompt)
    if isinstance(prompt, bytes | bytearray):
        raise BadInputError("expected text or token ids, got bytes; decode them first: prompt.decode()")
    if isinstance(prompt, _ARRAYS):
        if prompt.ndim == 2 and len(prompt) == 1:  # as tokenizers return it
            prompt = prompt[0]
        if prompt.ndim != 1:
            raise BadInputError(
                f"expected token ids of one prompt [position], got an array of shape {list(prompt.shape)}; "
                "give a list of prompts, each without its padding"
            )
        prompt = prompt.tolist()
    if not isinstance(prompt, Sequence):
        raise BadInputError(
            f"expected text or a list of token ids, got {type(prompt).__name__}; "
            'give "text", [5, 6, 7], [{"role": "user", "content": "text"}], or a list of such prompts'
        )
    return [_checked_token(token, place) for place, token in enumerate(prompt)]


def _checked_text(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadInputError(
            f"expected text that UTF-8 can write, got the lone surrogate {text[error.start]!r} at character "
            f"{error.start}; remove it"
        ) from None
    return text


def _checked_token(token: object, place: int) -> int:
    # A bool is an index in Python, but never meant as a token id.
    if not isinstance(token, bool):
        try:
            return operator.index(token)  # type: ignore[arg-type]
        except TypeError:
            pass
    raise BadInputError(f"expected token ids to be whole numbers, got {token!r} at place {place}")


def is_conversation(prompt: object) -> TypeGuard[Sequence[object]]:
    """Return True for a list that begins with a message."""
    return isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def validate_messages(messages: object) -> list[dict[str, Any]]:
    """Return the messages of a conversation, each with a role and a content.

    Raises:
        BadInputError: anything else; the message names the invalid message and field.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise BadInputError(
            "expected messages to be a list of at least one message such as "
            f'{{"role": "user", "content": "text"}}, got {messages!r:.60}'
        )
    return [_checked_message(message, place) for place, message in enumerate(messages)]


def _checked_message(message: object, place: int) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise BadInputError(
            f"expected messages[{place}] to be an object with role and content, got {message!r:.60}"
        )
    for name in message:
        if name not in MESSAGE_FIELDS:
            raise BadInputError(
                f"expected messages[{place}] to have role and content alone, got also {name!r}; for what else a "
                "template reads, call the tokenizer's apply_chat_template and give the token ids"
            )
    for name in MESSAGE_FIELDS:
        if name not in message:
            raise BadInputError(f"expected messages[{place}] to have {name}, got {message!r:.60}")
        if name == "content" and isinstance(message[name], list):
            for part in message[name]:
                _check_part(part, place)
        elif isinstance(message[name], str):
            _checked_text(message[name])
        else:
            raise BadInputError(f"expected {name} of messages[{place}] to be text, got {message[name]!r:.60}")
    if not message["role"]:
        raise BadInputError(
            f"expected role of messages[{place}] with at least one character, got an empty one"
        )
    return {name: message[name] for name in MESSAGE_FIELDS}


def _check_part(part: object, place: int) -> None:
    """Check a part of a message's content.

    Images are objects, never paths or addresses: a prompt must not open files or connections.
    """
    if isinstance(part, Mapping) and part.keys() == {"type", "text"} and part["type"] == "text":
        if isinstance(part["text"], str):
            _checked_text(part["text"])
            return
    elif (
        isinstance(part, Mapping)
        and part.keys() == {"type", "image"}
        and part["type"] == "image"
        and (isinstance(part["image"], _ARRAYS) or type(part["image"]).__module__.startswith("PIL."))
    ):
        return
    raise BadInputError(
        f"expected each part of messages[{place}] to be text or an image, such as "
        '{"type": "text", "text": "text"} and {"type": "image", "image": PIL.Image.open(path)}, '
        f"got {part!r:.80}"
    )


def _has_images(messages: Sequence[Mapping[str, Any]]) -> bool:
    contents = [message["content"] for message in messages if isinstance(message["content"], list)]
    return any(part["type"] == "image" for content in contents for part in content)


def _text_of(content: str | list[dict[str, str]]) -> str:
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def _encode_images(target: PromptModel, messages: list[dict[str, Any]]) -> EncodedPrompt:
    """Format a conversation with images; return its token ids and the other inputs of the model."""
    if not target.takes_images:
        raise BadInputError(
            f"expected messages of text for {target.name}, got an image; images are taken by "
            f"{', '.join(sorted(MODELS_WITH_IMAGES))}"
        )
    processor = target.checkpoint.processor
    # every content as a list, because a processor looks for images in lists
    parts = [
        message
        if isinstance(message["content"], list)
        else message | {"content": [{"type": "text", "text": message["content"]}]}
        for message in messages
    ]
    try:
        inputs = processor.apply_chat_template(
            parts, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
        )
    except Exception as error:  # a template is code from the checkpoint and can raise anything
        raise BadInputError(
            f"expected messages that the processor of {target.name} can format, got an error from it: {error}; "
            "change the messages"
        ) from error
    return EncodedPrompt.from_inputs(inputs)


def processor_template(target: PromptModel) -> str | None:
    """Return the chat template of a model's processor of images, where the tokenizer has none; else None."""
    if target.tokenizer.chat_template or not target.takes_images:
        return None
    template: str | None = target.checkpoint.processor.chat_template
    return template


def with_list_contents(
    render: Callable[[list[dict[str, Any]]], str], messages: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return messages of text as a template reads them: with contents as lists of parts if it reads no others.

    Some templates of vision-language models leave a content out that is a text. This is tried with the last message.

    Args:
        render: formats messages by the template.
    """
    listed = [
        {**message, "content": [{"type": "text", "text": message["content"]}]}
        if isinstance(message["content"], str)
        else message
        for message in messages
    ]
    last = messages[-1]["content"]
    text = last.strip() if isinstance(last, str) else ""
    if not text or _shows(render, messages, text) or not _shows(render, listed, text):
        return messages
    return listed


def _shows(render: Callable[[list[dict[str, Any]]], str], messages: list[dict[str, Any]], text: str) -> bool:
    try:
        return text in render(messages)
    except Exception:  # a template is code from the checkpoint and can raise anything
        return False


def _encode_messages(target: PromptModel, messages: list[dict[str, Any]]) -> list[int]:
    """Format a conversation; its template adds the special tokens, so the tokenizer adds none."""
    template = processor_template(target)
    if not (template or target.tokenizer.chat_template):
        raise BadInputError(
            f"expected a model with a chat template for messages, got {target.name}, whose tokenizer has none; "
            "use a model that was trained for chats, set tokenizer.chat_template, or give the prompt as text"
        )
    render = partial(target.tokenizer.apply_chat_template, chat_template=template, add_generation_prompt=True)
    messages = with_list_contents(partial(render, tokenize=False), messages)
    try:
        ids: list[int] = render(messages, return_dict=False, tokenizer_kwargs={"verbose": False})
    except Exception as error:  # a template is code from the checkpoint and can raise anything
        raise BadInputError(
            f"expected messages that the chat template of {target.name} can format, got an error from it: {error}; "
            "change the messages"
        ) from error
    return ids


def encode(target: PromptModel, prompt: Prompt) -> list[int]:
    """Return the token ids of a prompt of text.

    Raises:
        BadInputError: as in `encode_with_images`, or a prompt with images.
    """
    ids, images = encode_with_images(target, prompt)
    if images is not None:
        raise BadInputError(
            "expected a prompt of text, got an image; images are taken by LLM.generate and stream"
        )
    return ids


def encode_with_images(target: PromptModel, prompt: Prompt) -> tuple[list[int], ImageInputs | None]:
    """Return the token ids of a prompt, and the inputs of the model for its images.

    Raises:
        BadInputError: a value that is not a prompt, a prompt without tokens, token ids outside the
            vocabulary, messages that cannot be formatted, or images for a model that takes none.
        CheckpointError: images for a model whose processor is missing.
    """
    images = None
    if isinstance(prompt, EncodedPrompt):
        ids, images = prompt.ids, prompt.images
    elif is_conversation(prompt):
        messages = validate_messages(prompt)
        if _has_images(messages):
            encoded = _encode_images(target, messages)
            ids, images = encoded.ids, encoded.images
        else:
            ids = _encode_messages(
                target, [message | {"content": _text_of(message["content"])} for message in messages]
            )
    elif isinstance(checked := validate_prompt(prompt), str):
        # A tokenizer may add special tokens to an empty text.
        ids = target.encode(checked) if checked else []
    else:
        ids = checked
    if not ids:
        raise BadInputError("expected a prompt with at least one token, got an empty one")
    if images is not None and ids[-1] == getattr(target.checkpoint.config, "image_token_id", None):
        raise BadInputError(
            "expected text after the last image of the prompt, got none; add it, or use another template"
        )
    last = target.num_input_tokens - 1
    for token in ids:
        if not 0 <= token <= last:
            raise BadInputError(f"expected token ids from 0 to {last}, got {token}")
    return ids, images
