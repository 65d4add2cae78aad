"""Body of `/v1/responses`: its stateless part, in which a request holds the whole conversation."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag

from secondguess.server.schemas import (
    HINTS,
    STATELESS,
    Body,
    Bounded,
    Effort,
    Extensions,
    FunctionParameters,
    JsonObject,
    JsonSchemaFields,
    Limit,
    NumLogprobs,
    OtherService,
    SharedFields,
    StreamOptions,
    ToolName,
    Tools,
    Values,
    unsupported,
)

Status = Literal["in_progress", "completed", "incomplete"]


class InputText(Body):
    """Text of an input message."""

    type: Literal["input_text"]
    text: str


class InputImage(Body):
    """Image in an input message, for a vision-language model."""

    type: Literal["input_image"]
    image_url: str = Field(description="a data: URL; a file: URL if the server has a folder of images")
    detail: Literal["auto"] | None = None
    file_id: None = unsupported("the server stores no files; send the image as image_url")


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
    content: str | Bounded[Annotated[InputText | InputImage | OutputText, Field(discriminator="type")]]
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
    output: str | Bounded[InputText]
    id: str | None = None
    status: Status | None = None


class ReasoningItem(Body):
    """Reasoning of an earlier reply."""

    type: Literal["reasoning"]
    id: str | None = None
    summary: Values[JsonObject] | None = Field(default=None, max_length=0)
    content: Bounded[ReasoningText] | None = None
    status: Status | None = None
    encrypted_content: None = unsupported("reasoning is sent as text")


def _kind_of_item(item: object) -> str:
    """Return the `type` of an item; messages may leave it out."""
    if isinstance(item, Body):
        return str(getattr(item, "type", ""))
    return str(item.get("type", "message")) if isinstance(item, dict) else "message"


InputItem = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[FunctionCall, Tag("function_call")]
    | Annotated[FunctionCallOutput, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(_kind_of_item),
]


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

    effort: Effort | None = Field(default=None, description="for chat templates that read it")
    summary: None = unsupported("reasoning is returned as text")
    generate_summary: None = unsupported("reasoning is returned as text")
    context: None = unsupported("the chat template decides which reasoning it reads")


class ResponseRequest(Extensions, SharedFields):
    """Body of `/v1/responses`."""

    accepted = HINTS

    model: str | None = Field(default=None, description="a name of the served model, which is the default")
    input: str | Bounded[InputItem]
    instructions: str | None = None
    max_output_tokens: Limit = None
    temperature: float | None = Field(default=None, description="0 is greedy; by default the model's, or 1")
    top_p: float | None = None
    top_logprobs: NumLogprobs | None = None
    include: Values[Literal["message.output_text.logprobs"]] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    tools: Tools[ResponseTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponseNamedTool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    user: str | None = Field(default=None, description="written to the server's log with the request's id")
    background: Literal[False] | None = None
    truncation: Literal["disabled"] | None = None
    access_programs: None = unsupported(OtherService)
    background_options: None = unsupported(STATELESS)
    context_management: None = unsupported(STATELESS)
    conversation: None = unsupported(STATELESS)
    image: None = unsupported("images are parts of input")
    max_tool_calls: None = unsupported("it counts calls of OpenAI's own tools")
    previous_response_id: None = unsupported(STATELESS)
    prompt: None = unsupported(STATELESS)
