"""Response templates of Transformers for model families whose tokenizers have none, chosen by the chat template.

The formats are those that the models' chat templates write for earlier calls; docs/server.md lists the families.
"""

from __future__ import annotations

from typing import Any, NamedTuple

ResponseTemplate = dict[str, Any]


def _deepseek(name: str) -> str:
    """Return a special token of DeepSeek, with its wide bars and its underscores."""
    return f"<\uff5c{name.replace(' ', chr(0x2581))}\uff5c>"


CALLS_BEGIN, CALLS_END = _deepseek("tool calls begin"), _deepseek("tool calls end")
CALL_BEGIN, CALL_END = _deepseek("tool call begin"), _deepseek("tool call end")
SEPARATOR = _deepseek("tool sep")

BEGINNING = r"(?s)^.*?(?=(?:<think>\s*)?\Z)"
"""All of a prompt but reasoning that it has opened."""
CALL = {"type": "function", "function": "{content}"}
NAMED_CALL = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
CALL_OF_LIST = {"type": "function", "function": {"name": "{name}", "arguments": "{arguments}"}}
REASONING = {"reasoning_content": {"open": "<think>", "close_pattern": r"</think>\s*"}}
CONTENT: ResponseTemplate = {"content": {"content": "text"}}
END_OF_TEXT = r"</s>|<\|end_of_text\|>|<\|eot_id\|>|<\|eom_id\|>|<\|end\|>"


def _calls(begin: str, end: str, **settings: Any) -> ResponseTemplate:
    """Return the field of tool calls between two patterns."""
    return {
        "open_pattern": begin,
        "close_pattern": end,
        "repeats": True,
        "content": "json",
        "transform": NAMED_CALL if "(?P<name>" in begin else CALL,
        **settings,
    }


class Family(NamedTuple):
    """Format of the tool calls of some models.

    Args:
        name: name of the family.
        marks: texts that are all in its chat templates.
        calls: field of its tool calls.
        others: other fields; by default content, which is all other text.
    """

    name: str
    marks: tuple[str, ...]
    calls: ResponseTemplate
    others: ResponseTemplate = CONTENT


FAMILIES = (
    Family(
        "gpt-oss",
        ("<|channel|>", "<|message|>"),
        _calls(
            r"(?:<\|start\|>assistant)?(?: to=functions\.(?P<name>[\w.-]+))?<\|channel\|>commentary"
            r"(?: to=functions\.(?P<name>[\w.-]+))? *(?:<\|constrain\|>)?(?:json)?<\|message\|>",
            r"<\|(?:call|end|return)\|>",
        ),
        {
            "reasoning_content": {"open_pattern": r"<\|channel\|>analysis<\|message\|>", "close": "<|end|>"},
            "content": {
                "open_pattern": r"(?:<\|start\|>assistant)?<\|channel\|>final[^<]*<\|message\|>",
                "close_pattern": r"<\|(?:return|end)\|>",
                "content": "text",
            },
        },
    ),
    Family(
        "Qwen3-Coder",
        ("<function=", "<parameter="),
        {
            "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\s]+)>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>"},
            "transform": NAMED_CALL,
        },
    ),
    Family(
        "Hermes and Qwen",
        ("<tool_call>", "arguments"),
        # Qwen2.5-Coder writes its call as a block of code.
        _calls(r'\s*<tool_call>\s*|\A\s*```(?:json)?\s*(?=\{\s*"name"\s*:)', r"\s*(?:</tool_call>|```)\s*"),
    ),
    Family(
        "DeepSeek V3",
        (CALL_BEGIN, "```json"),
        _calls(
            rf"\s*(?:{CALLS_BEGIN}\s*)?{CALL_BEGIN}function{SEPARATOR}(?P<name>[^\n]+)\n```json\n",
            rf"\s*```\s*{CALL_END}",
        ),
        {**CONTENT, "end": {"open_pattern": rf"\s*{CALLS_END}"}},
    ),
    Family(
        "DeepSeek V3.1",
        (CALL_BEGIN,),
        _calls(
            rf"\s*(?:{CALLS_BEGIN}\s*)?{CALL_BEGIN}(?P<name>[^<\n]+){SEPARATOR}",
            rf"\s*{CALL_END}",
        ),
        {**CONTENT, "end": {"open_pattern": rf"\s*{CALLS_END}"}},
    ),
    Family(
        "Mistral, one name per call",
        ("[TOOL_CALLS]", "[ARGS]"),
        _calls(
            r"\s*\[TOOL_CALLS\](?P<name>[\w.-]+)(?:\[CALL_ID\]\w+)?\[ARGS\]",
            rf"\s*(?:(?=\[TOOL_CALLS\])|{END_OF_TEXT})",
        ),
    ),
    Family(
        "Mistral",
        ("[TOOL_CALLS]",),
        _calls(
            r"\s*\[TOOL_CALLS\]\s*", rf"\s*(?:{END_OF_TEXT})", transform_each=True, transform=CALL_OF_LIST
        ),
    ),
    Family(
        "FunctionGemma",
        ("<start_function_call>",),
        _calls(
            r"\s*<start_function_call>call:(?P<name>[\w.-]+)",
            r"\s*<end_function_call>\s*",
            content_args={"unquoted_keys": True, "string_delims": [["<escape>", "<escape>"]]},
        ),
    ),
    Family(
        "Granite and Phi",
        ("<|tool_call|>",),
        _calls(
            r"\s*<\|tool_call\|>\s*",
            rf"\s*(?:<\|/tool_call\|>\s*|{END_OF_TEXT})",
            transform_each=True,
            transform=CALL_OF_LIST,
        ),
    ),
    Family(
        "Llama 3",
        ("<|start_header_id|>", '"parameters"'),
        _calls(
            r'\A\s*(?:<\|python_tag\|>)?\s*(?=\{\s*"name"\s*:)',
            rf"\s*(?:{END_OF_TEXT})",
            transform={
                "type": "function",
                "function": {"name": "{content.name}", "arguments": "{content.parameters}"},
            },
        ),
    ),
)
"""Families, of which the first one whose marks are found is taken."""


def find_family(chat_template: str) -> Family | None:
    """Return the family of a chat template; None if its calls have no known format."""
    return next((family for family in FAMILIES if all(mark in chat_template for mark in family.marks)), None)


def response_template(chat_template: str) -> ResponseTemplate | None:
    """Return the response template for a chat template; None if it writes neither calls in a known format nor reasoning."""
    family = find_family(chat_template)
    reasons = REASONING if "</think>" in chat_template else {}
    if family is None:
        fields = {**reasons, **CONTENT} if reasons else None
    else:
        fields = {**reasons, "tool_calls": family.calls, **family.others}
    return None if fields is None else {"start_anchor_pattern": BEGINNING, "fields": fields}
