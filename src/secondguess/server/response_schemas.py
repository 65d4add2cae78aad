"""Body of `/v1/responses`: its stateless part, in which a request holds the whole conversation."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from secondguess.server.schemas import (
    STATELESS,
    Body,
    Bounded,
    Effort,
    Extensions,
    FunctionParameters,
    JsonObject,
    JsonSchemaFields,
    Limit,
    Metadata,
    NumLogprobs,
    OtherService,
    StreamOptions,
    ToolName,
    Values,
    unsupported,
)

Status = Literal["in_progress", "completed", "incomplete"]


class InputText(Body):
    """Text of an input message."""

    type: Literal["input_text"]
    text: str


class OutputText(Body):
    """Text of an earlier reply."""

    type: Literal["output_text"]
    text: str
    annotations: Values[JsonObject] | None = Field(default=None, max_length=0)
    logprobs: Values[JsonObject] | None = None


class ReasoningText(Body):
    """Reasoning of an earlier reply."""

    type: Literal["reasoning_text"]
    text: str


class InputMessage(Body):
    """Message of a conversation; earlier replies have the role `assistant`."""

    type: Literal["message"] = "message"
    role: Literal["user", "system", "developer", "assistant"]
    content: str | Values[Annotated[InputText | OutputText, Field(discriminator="type")]]
    id: str | None = None
    status: Status | None = None
    phase: None = unsupported("replies have one phase")


class FunctionCall(Body):
    """Tool call of an earlier reply."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: Status | None = None


class FunctionCallOutput(Body):
    """Result of a tool call."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | Values[InputText]
    id: str | None = None
    status: Status | None = None


class ReasoningItem(Body):
    """Reasoning of an earlier reply."""

    type: Literal["reasoning"]
    id: str | None = None
    summary: Values[JsonObject] | None = Field(default=None, max_length=0)
    content: Values[ReasoningText] | None = None
    status: Status | None = None
    encrypted_content: None = unsupported("reasoning is sent as text")


InputItem = InputMessage | FunctionCall | FunctionCallOutput | ReasoningItem


class ResponseTool(FunctionParameters):
    """Function that the model may call."""

    type: Literal["function"]


class ResponseNamedTool(Body):
    """Choice of one function."""

    type: Literal["function"]
    name: ToolName


class PlainFormat(Body):
    """Format without a schema."""

    type: Literal["text", "json_object"]


class SchemaFormat(JsonSchemaFields):
    """Format with a schema."""

    type: Literal["json_schema"]


class TextOptions(Body):
    """Format of the reply."""

    format: Annotated[PlainFormat | SchemaFormat, Field(discriminator="type")] | None = None
    verbosity: Literal["medium"] | None = None


class ReasoningOptions(Body):
    """Reasoning of the model."""

    effort: Effort | None = Field(default=None, description="needs a chat template that reads it")
    summary: None = unsupported("reasoning is returned as text")
    generate_summary: None = unsupported("reasoning is returned as text")
    context: None = unsupported("the chat template decides which reasoning it reads")


class ResponseRequest(Extensions):
    """Body of `/v1/responses`."""

    model: str
    input: str | Bounded[InputItem]
    instructions: str | None = None
    max_output_tokens: Limit | None = None
    temperature: float | None = Field(default=None, description="0 is greedy; by default 1")
    top_p: float | None = None
    top_logprobs: NumLogprobs | None = None
    include: Values[Literal["message.output_text.logprobs"]] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    tools: Values[ResponseTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponseNamedTool | None = None
    parallel_tool_calls: Literal[True] | None = Field(default=None, description="the model decides")
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    metadata: Metadata | None = Field(default=None, description="repeated in the reply")
    user: str | None = Field(default=None, description="written to the server's log with the request's id")
    safety_identifier: str | None = Field(default=None, description="written to the server's log, as `user`")
    prompt_cache_key: str | None = Field(
        default=None, description="satisfied for any key: prompts that begin alike share their cache"
    )
    prompt_cache_retention: Literal["in_memory"] | None = None
    service_tier: Literal["auto", "default"] | None = None
    store: Literal[False] | None = Field(default=None, description="replies are not stored")
    background: Literal[False] | None = None
    truncation: Literal["disabled"] | None = None
    access_programs: None = unsupported(OtherService)
    background_options: None = unsupported(STATELESS)
    context_management: None = unsupported(STATELESS)
    conversation: None = unsupported(STATELESS)
    image: None = unsupported("this server reads text")
    max_tool_calls: None = unsupported("it counts calls of OpenAI's own tools")
    moderation: None = unsupported(OtherService)
    previous_response_id: None = unsupported(STATELESS)
    prompt: None = unsupported(STATELESS)
    prompt_cache_options: None = unsupported("prompts that begin alike always share their cache")
