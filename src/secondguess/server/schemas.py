"""Bodies of requests, with every field of OpenAI's that clients send.

A field is used; accepted without effect, if it cannot change the text (`Body.accepted`); or refused by name (`None`, with
the reason as its description), if the text would be another one than asked for. Unknown fields are refused. The server's
own fields are those of `Extensions`.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from secondguess.params import MAX_LOGPROBS

JsonValue = Any


MAX_ENTRIES = 4096
"""Entries of an object or a conversation: bounds the time that validation takes on the event loop."""
MAX_TOOLS = 512


MAX_DEPTH = 100
"""Levels of nested JSON, below the limit of pydantic's serializer."""


def _check_json(value: dict[str, JsonValue]) -> dict[str, JsonValue]:
    """Refuse what JSON cannot repeat in a reply: NaN, infinities and deep nesting."""
    if _is_deeper(value, MAX_DEPTH):
        raise ValueError(f"should have at most {MAX_DEPTH} levels")
    try:
        json.dumps(value, allow_nan=False)
    except ValueError:
        raise ValueError("should be JSON with finite numbers") from None
    return value


def _is_deeper(value: JsonValue, depth: int) -> bool:
    if not isinstance(value, dict | list):
        return False
    children = value.values() if isinstance(value, dict) else value
    return depth == 0 or any(_is_deeper(child, depth - 1) for child in children)


def _parsed_json(value: object) -> object:
    """Return the value of JSON in a text; anything else as it is."""
    if not isinstance(value, str):
        return value
    try:
        parsed = json.loads(value)
        json.dumps(parsed, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        raise ValueError("should be JSON in valid Unicode") from None
    return parsed


def _check_size(value: object) -> object:
    if isinstance(value, dict) and len(value) > MAX_ENTRIES:
        raise ValueError(f"should have at most {MAX_ENTRIES} entries")
    return value


def _none_for_minus_one(value: object) -> object:
    return None if value == -1 else value


Item = TypeVar("Item")
Values = Annotated[list[Item], Field(fail_fast=True)]
"""List of which the first invalid item is reported alone: a large body must not cost an error per item."""
Bounded = Annotated[list[Item], Field(fail_fast=True, max_length=MAX_ENTRIES)]
Tools = Annotated[list[Item], Field(fail_fast=True, max_length=MAX_TOOLS)]
Map = Annotated[dict[str, Item], BeforeValidator(_check_size)]
JsonObject = Annotated[dict[str, JsonValue], AfterValidator(_check_json)]
Metadata = Annotated[Map[str], AfterValidator(_check_json)]

NotNegative = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
Limit = Annotated[
    Positive | None,
    BeforeValidator(_none_for_minus_one, json_schema_input_type=Literal[-1] | Positive | None),
]
"""Number of tokens; none for null and, as in llama.cpp and Ollama, for -1."""
LimitOrZero = Annotated[
    NotNegative | None,
    BeforeValidator(_none_for_minus_one, json_schema_input_type=Literal[-1] | NotNegative | None),
]
NumLogprobs = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]
ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
STATELESS = "the server keeps no conversations; send the whole conversation as input"
NoAudio = "this server generates text"
OtherService = "it is a service of OpenAI's platform"
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
HINTS = frozenset([
    "service_tier", "store", "prompt_cache_key", "prompt_cache_retention", "prompt_cache_options",  # OpenAI
    "cache_salt", "kv_transfer_params", "priority", "request_id", "spaces_between_special_tokens",  # vLLM
    "cache_prompt", "id_slot", "return_progress",  # llama.cpp
    "rid", "keep_alive", "ttl",  # SGLang, Ollama, LM Studio
])  # fmt: skip
"""Fields of requests that cannot change the text: hints for caches, queues and storage."""


def unsupported(reason: str) -> Any:
    """Return the field of a name that is refused unless it is null."""
    return Field(default=None, description=reason)


class Body(BaseModel):
    """Part of a request; types are strict, NaN and unknown fields are refused, the values of `accepted` ones not read."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)
    accepted: ClassVar[frozenset[str]] = frozenset()

    @model_validator(mode="before")
    @classmethod
    def _prepare(cls, values: Any) -> Any:
        """Drop accepted fields, and write whole numbers such as 4.0, which some clients send, as integers.

        At most one unknown field is left, to be refused: a large body must not cost an error per field.
        """
        if not isinstance(values, dict):
            return values
        values = {
            name: int(value) if isinstance(value, float) and value.is_integer() else value
            for name, value in values.items()
            if name not in cls.accepted
        }
        if len(values) <= len(cls.model_fields):
            return values
        known = {field.alias or name for name, field in cls.model_fields.items()}
        unknown = next((name for name in values if name not in known), None)
        return {name: value for name, value in values.items() if name in known or name == unknown}


class StreamOptions(Body):
    """Options of a stream."""

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class SpeculationOptions(Body):
    """Speculation of one request."""

    draft_length: int | None = Field(
        default=None, description="tokens drafted per round; 0 is plain decoding"
    )
    max_draft: int | None = Field(default=None, description="limit of the tokens that the controller drafts")
    drafter: str | None = Field(
        default=None, description="parts of the server's drafter, such as suffix; ngram; or none"
    )
    history: bool | None = Field(
        default=None, description="false: share no outputs with other requests of the key (--share-history)"
    )


class TextPart(Body):
    """Text in a message."""

    accepted = frozenset({"cache_control"})

    type: Literal["text"]
    text: str


class ImageUrl(Body):
    """Image of a message."""

    url: str = Field(description="a data: URL; a file: URL if the server has a folder of images")
    detail: Literal["auto"] | None = None


class ImagePart(Body):
    """Image in a message, for a vision-language model."""

    accepted = frozenset({"cache_control"})

    type: Literal["image_url"]
    image_url: ImageUrl


class RefusalPart(Body):
    """Refusal in an earlier reply."""

    type: Literal["refusal"]
    refusal: str


Texts = str | Bounded[TextPart]


class Prediction(Body):
    """Text that the reply is expected to resemble; it is drafted from."""

    type: Literal["content"]
    content: Texts


class StructuredOutputs(Body):
    """Grammar of the reply, in one of several notations; vLLM's names."""

    json_: JsonObject | None = Field(default=None, alias="json", description="JSON schema")
    json_object: Literal[True] | None = None
    regex: str | None = None
    choice: Annotated[Bounded[str], Field(min_length=1)] | None = Field(
        default=None, description="one of these texts"
    )
    grammar: str | None = Field(default=None, description="in llguidance's dialect of Lark")


class Extensions(Body):
    """Fields that OpenAI's API lacks; vLLM's names where it has them."""

    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: Values[int] | None = None
    ignore_eos: bool | None = Field(default=None, description="go on after end tokens, up to max_tokens")
    speculation: Literal["auto", "off"] | SpeculationOptions | None = Field(
        default=None, description="auto: the controller decides; off: plain decoding"
    )
    structured_outputs: StructuredOutputs | None = None
    guided_json: Annotated[JsonObject | None, BeforeValidator(_parsed_json)] = Field(
        default=None, description="as structured_outputs.json, also as text"
    )
    guided_regex: str | None = Field(default=None, description="as structured_outputs.regex")
    guided_choice: Annotated[Bounded[str], Field(min_length=1)] | None = Field(
        default=None, description="as structured_outputs.choice"
    )
    guided_grammar: None = unsupported("it is in another notation; use structured_outputs.grammar")
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: Literal[True] | None = None
    report: bool | None = Field(
        default=None, description="add statistics of speculative decoding to the reply"
    )


class Sampling(Extensions):
    """Sampling settings that completions and chats share."""

    accepted = HINTS

    model: str | None = Field(default=None, description="a name of the served model, which is the default")
    frequency_penalty: float | None = None
    logit_bias: Map[float] | None = None
    n: int | None = None
    prediction: Prediction | None = Field(
        default=None, description="OpenAI's field of chats, also for completions"
    )
    presence_penalty: float | None = None
    seed: int | None = None
    stop: str | Bounded[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = Field(default=None, description="0 is greedy; by default the model's, or 1")
    top_p: float | None = None
    user: str | None = Field(default=None, description="written to the server's log with the request's id")
    timings_per_token: bool | None = Field(
        default=None, description="add llama.cpp's timings to the reply, or to the last chunk of a stream"
    )


class CompletionRequest(Sampling):
    """Body of `/v1/completions`."""

    prompt: str | Bounded[str] | Values[int] | Bounded[Values[int]]
    best_of: int | None = Field(default=None, description="n, or absent")
    echo: bool | None = None
    logprobs: NumLogprobs | None = Field(default=None, description="with echo also those of the prompt")
    prompt_logprobs: NumLogprobs | None = Field(
        default=None, description="report those of the prompt's tokens, with this many alternatives"
    )
    max_tokens: LimitOrZero = Field(
        default=None, description="0: the prompt is scored, and nothing generated"
    )
    suffix: str | None = Field(default=None, description="needs a tokenizer with fill-in-the-middle tokens")


class ExtraFile(Body):
    """Other file, or a part of one, in a request of `/infill`."""

    accepted = frozenset({"time"})

    filename: str = "file"
    text: str


class InfillRequest(Sampling):
    """Body of llama.cpp's `/infill`."""

    # Editors always send these. Limits of time and of indentation would only shorten the text.
    accepted = HINTS | {"samplers", "n_indent", "t_max_prompt_ms", "t_max_predict_ms"}

    input_prefix: str
    input_suffix: str
    input_extra: Bounded[ExtraFile] | None = None
    prompt: str = Field(default="", description="text after the prefix, such as the beginning of a line")
    n_predict: LimitOrZero = Field(default=None, description="0: the prompt is read into the cache alone")
    n: Literal[1] | None = None
    response_fields: Bounded[str] | None = Field(
        default=None,
        description="fields of the reply, such as content or timings/predicted_ms; by default all",
    )
    stream_options: None = unsupported("the last event has the counts")


class SystemMessage(Body):
    """Instructions; templates receive the role `system`."""

    accepted = frozenset({"id", "cache_control"})

    role: Literal["system", "developer"]
    content: Texts
    name: str | None = None


class UserMessage(Body):
    """Message of the user."""

    accepted = frozenset({"id", "cache_control"})

    role: Literal["user"]
    content: str | Bounded[Annotated[TextPart | ImagePart, Field(discriminator="type")]]
    name: str | None = None


class CalledFunction(Body):
    """Function of an earlier tool call."""

    accepted = frozenset({"parsed_arguments"})

    name: str
    arguments: str


class EarlierCall(Body):
    """Tool call of an earlier reply."""

    accepted = frozenset({"index"})

    id: str
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(Body):
    """Earlier reply, as this server, OpenAI's or its client returned it."""

    accepted = frozenset({"id", "index", "parsed", "cache_control"})

    role: Literal["assistant"]
    content: str | Bounded[TextPart | RefusalPart] | None = None
    name: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    tool_calls: Values[EarlierCall] | None = None
    annotations: Values[JsonObject] | None = Field(default=None, max_length=0)
    audio: None = unsupported(NoAudio)
    function_call: None = unsupported("it is deprecated; use tool_calls")


class ToolMessage(Body):
    """Result of a tool call."""

    accepted = frozenset({"id", "cache_control"})

    role: Literal["tool"]
    name: str | None = Field(default=None, description="some chat templates read it")
    content: Texts
    tool_call_id: str


Message = Annotated[SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]


class FunctionParameters(Body):
    """Function that the model may call."""

    name: ToolName
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = Field(default=None, description="a forced call always follows its parameters")


class Tool(Body):
    """Tool of a chat."""

    type: Literal["function"]
    function: FunctionParameters


class FunctionName(Body):
    """Name of a function."""

    name: ToolName


class NamedTool(Body):
    """Choice of one function."""

    type: Literal["function"]
    function: FunctionName


class JsonSchemaFields(Body):
    """Schema of a structured reply."""

    name: ToolName
    description: str | None = None
    schema_: JsonObject | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """Format of the reply."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFields | None = None


class SharedFields(Body):
    """Fields of chats and responses alike, besides those of sampling."""

    parallel_tool_calls: bool | None = Field(
        default=None, description="false: only the first call is returned"
    )
    metadata: Metadata | None = Field(default=None, description="repeated in the reply")
    safety_identifier: str | None = Field(default=None, description="written to the server's log, as `user`")
    moderation: None = unsupported(OtherService)


class ChatRequest(Sampling, SharedFields):
    """Body of `/v1/chat/completions`."""

    messages: Annotated[Bounded[Message], Field(min_length=1)]
    logprobs: bool | None = None
    prompt_logprobs: None = unsupported("score the text of the conversation by /v1/completions")
    top_logprobs: NumLogprobs | None = None
    max_completion_tokens: Limit = None
    max_tokens: Limit = None
    tools: Tools[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    response_format: ResponseFormat | None = None
    reasoning_effort: Effort | None = Field(default=None, description="for chat templates that read it")
    chat_template_kwargs: JsonObject | None = Field(
        default=None, description="variables of the chat template, which uses those that it reads"
    )
    add_generation_prompt: bool | None = Field(
        default=None,
        description="false: the prompt ends with the last message, without the beginning of a reply",
    )
    continue_final_message: bool | None = Field(
        default=None, description="true: the reply continues the last message, which is the assistant's"
    )
    modalities: Values[Literal["text"]] | None = None
    verbosity: Literal["medium"] | None = None
    audio: None = unsupported(NoAudio)
    function_call: None = unsupported("it is deprecated; use tool_choice")
    functions: None = unsupported("it is deprecated; use tools")
    web_search_options: None = unsupported(OtherService)


class TokenizeRequest(Body):
    """Body of `/tokenize`: a text or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[Bounded[Message], Field(min_length=1)] | None = None
    add_special_tokens: bool = True


class DetokenizeRequest(Body):
    """Body of `/detokenize`."""

    model: str | None = None
    tokens: Values[int]
