"""Response templates of Transformers for model families whose tokenizers have none, chosen by the chat template.

The formats are those that the models' chat templates write for earlier calls; docs/server.md lists the families.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

ResponseTemplate = dict[str, Any]


def _deepseek(name: str) -> str:
    """Return a special token of DeepSeek, with its wide bars and its underscores."""
    return f"<\uff5c{name.replace(' ', chr(0x2581))}\uff5c>"


CALLS_BEGIN, CALLS_END = _deepseek("tool calls begin"), _deepseek("tool calls end")
CALL_BEGIN, CALL_END = _deepseek("tool call begin"), _deepseek("tool call end")
SEPARATOR = _deepseek("tool sep")

BEGINNING = r"(?s)^.*?(?=(?:<(?:seed:)?think>\s{0,4})?\Z)"
"""All of a prompt but reasoning that it has opened."""
NAMED_CALL = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
REASONING = {
    "reasoning_content": {
        "open_pattern": r"\A\s{0,4}<(?:seed:)?think>",
        "close_pattern": r"</(?:seed:)?think>\s{0,4}",
    }
}
CONTENT: ResponseTemplate = {"content": {"content": "text"}}
END_OF_TEXT = r"</s>|<\|(?:end_?of_?text|eo[tm](?:_id)?|(?:im_)?end)\|>"
AT_END = rf"\s{{0,4}}(?:{END_OF_TEXT})\Z"


LISTED_CALLS: ResponseTemplate = {
    "start_anchor_pattern": BEGINNING,
    "fields": {
        "tool_calls": {
            "content": "json",
            "transform_each": True,
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{arguments}"}},
        }
    },
}
"""Response template of calls as `texts.read_calls` returns them, written as JSON."""


def _calls(begin: str, end: str, **settings: Any) -> ResponseTemplate:
    """Return the field of calls between two patterns, of which the first one has the name."""
    return {
        "open_pattern": begin,
        "close_pattern": end,
        "repeats": True,
        "content": "json",
        "transform": NAMED_CALL,
        **settings,
    }


def _listed_calls(begin: str, end: str = AT_END) -> ResponseTemplate:
    """Return the field of calls between two patterns, which `texts.read_calls` reads."""
    return {"open_pattern": begin, "close_pattern": end, "repeats": True, "content": "text"}


LLAMA = _listed_calls(
    r"\A\s{0,4}(?:<\|python_(?:tag|start)\|>)?\s{0,4}"
    r'(?=\{\s{0,4}"(?:type|name)"\s{0,4}:|\[\s{0,4}[A-Za-z_]\w{0,63}\()',
    rf"\s{{0,4}}(?:<\|python_end\|>(?:{END_OF_TEXT})?|{END_OF_TEXT})\Z",
)
GRANITE = _listed_calls(
    r"\s{0,4}(?:<\|tool_call\|>|<tool_call>|\Afunctools)\s{0,4}(?=[\[{])",
    rf"\s{{0,4}}(?:<\|/tool_call\|>\s{{0,4}}(?:{END_OF_TEXT})?|{END_OF_TEXT})\Z",
)


class Family(NamedTuple):
    """Format of the tool calls of some models."""

    name: str
    marks: tuple[str, ...]  # texts that are all in its chat templates
    calls: ResponseTemplate
    others: ResponseTemplate = CONTENT


FAMILIES = (
    Family(
        "gpt-oss",
        ("<|channel|>", "<|message|>"),
        _calls(
            r"(?:<\|start\|>assistant)?(?:<\|channel\|>\w+)? to=functions\.(?P<name>[\w.-]+)[^<]*"
            r"(?:<\|(?:constrain|channel)\|>[^<]*){0,2}<\|message\|>",
            r"<\|(?:call|end|return)\|>",
        ),
        {
            "reasoning_content": {"open_pattern": r"<\|channel\|>analysis<\|message\|>", "close": "<|end|>"},
            "content": {
                "open_pattern": r"(?:<\|start\|>assistant)?<\|channel\|>(?:final|commentary)(?! to=)[^<]*"
                r"(?:<\|constrain\|>[^<]*)?<\|message\|>",
                "repeats": True,
                "join": "",
                "close_pattern": r"<\|(?:return|end)\|>",
                "content": "text",
            },
        },
    ),
    Family(
        "Qwen3-Coder and Seed-OSS",
        ("<function=", "<parameter="),
        {
            # Qwen3-Coder at times leaves the first tag out.
            "open_pattern": r"\s{0,4}(?:<(?:seed:)?tool_call>\s{0,4})?<function=(?P<name>[^>\s]+)>",
            "close": ["</tool_call>", "</seed:tool_call>"],
            "repeats": True,
            "content": "xml-inline",
            "content_args": {
                "tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>(?:(?!<parameter=).)*?)\n?</parameter>"
            },
            "transform": NAMED_CALL,
        },
    ),
    Family(
        "GLM-4.5",
        ("<tool_call>", "<arg_key>"),
        {
            "open_pattern": r"\s{0,4}<tool_call>\s{0,4}(?P<name>[\w.-]+)\s{0,4}(?=<)",
            "close": "</tool_call>",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {
                "tag_pattern": r"<arg_key>(?P<key>[^<]+)</arg_key>\s{0,4}<arg_value>(?P<value>.*?)</arg_value>"
            },
            "transform": NAMED_CALL,
        },
    ),
    Family(
        "Hermes and Qwen",
        ("<tool_call>", "arguments"),
        # Qwen2.5-Coder writes its calls as JSON without tags, or as a block of code. Strings in JSON have no line breaks.
        _listed_calls(
            r"\s{0,4}<tool_call>|\A\s{0,4}(?:```(?:json)?\s{0,4})?"
            r'(?=\{\s{0,4}"name"\s{0,4}:\s{0,4}"[\w.-]{1,64}"\s{0,4},\s{0,4}"arguments"\s{0,4}:)',
            rf"</tool_call>|(?<=\}}\n)```|{AT_END}",
        ),
    ),
    Family(
        "DeepSeek V3",
        (CALL_BEGIN, "```json"),
        _calls(
            rf"\s{{0,4}}(?:{CALLS_BEGIN}\s{{0,4}})?{CALL_BEGIN}function{SEPARATOR}(?P<name>[^\n]+)\n```json\n",
            rf"\s{{0,4}}```\s{{0,4}}{CALL_END}",
        ),
        {**CONTENT, "end": {"open_pattern": rf"\s{{0,4}}{CALLS_END}"}},
    ),
    Family(
        "DeepSeek V3.1",
        (CALL_BEGIN,),
        _calls(
            rf"\s{{0,4}}(?:{CALLS_BEGIN}\s{{0,4}})?{CALL_BEGIN}(?P<name>[^<\n]+){SEPARATOR}",
            rf"\s{{0,4}}{CALL_END}",
        ),
        {**CONTENT, "end": {"open_pattern": rf"\s{{0,4}}{CALLS_END}"}},
    ),
    Family(
        "Mistral, one name per call",
        ("[TOOL_CALLS]", "[ARGS]"),
        _calls(
            r"\s{0,4}\[TOOL_CALLS\](?P<name>[\w.-]+)(?:\[CALL_ID\]\w+)?\[ARGS\]",
            rf"\s{{0,4}}(?:(?=\[TOOL_CALLS\]\w)|(?:{END_OF_TEXT})\Z)",
        ),
    ),
    Family("Mistral", ("[TOOL_CALLS]",), _listed_calls(r"\s{0,4}\[TOOL_CALLS\]\s{0,4}")),
    Family(
        "FunctionGemma",
        ("<start_function_call>",),
        _calls(
            r"\s{0,4}<start_function_call>call:(?P<name>[\w.-]+)",
            r"\s{0,4}<end_function_call>\s{0,4}",
            content_args={"unquoted_keys": True, "string_delims": [["<escape>", "<escape>"]]},
        ),
    ),
    Family("Granite", ("<|tool_call|>",), GRANITE),
    Family("Phi-4-mini", ("<|tool|>", "<|/tool|>"), GRANITE),
    Family("Llama 3", ("<|start_header_id|>", "tools"), LLAMA),
    Family("Llama 4", ("<|header_start|>", "tools"), LLAMA),
)
"""Families, of which the first one whose marks are found is taken."""


def find_family(chat_template: str) -> Family | None:
    """Return the family of a chat template; None if its calls have no known format."""
    return next((family for family in FAMILIES if all(mark in chat_template for mark in family.marks)), None)


def response_template(chat_template: str) -> ResponseTemplate | None:
    """Return the response template for a chat template; None if it writes neither calls in a known format nor reasoning."""
    family = find_family(chat_template)
    reasons = REASONING if re.search(r"</(?:seed:)?think>", chat_template) else {}
    if family is None:
        fields = {**reasons, **CONTENT} if reasons else None
    else:
        fields = {**reasons, "tool_calls": family.calls, **family.others}
    return None if fields is None else {"start_anchor_pattern": BEGINNING, "fields": fields}
