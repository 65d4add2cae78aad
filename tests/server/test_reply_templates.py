"""Replies in the formats of model families, split whole, cut at every character, and malformed."""

import json
import random
import time
from typing import ClassVar

import pytest
from transformers.utils.chat_parsing import ResponseParser

from secondguess.sampling.text import Piece
from secondguess.server.calls.parsers import TemplateParser
from secondguess.server.calls.templates import (
    CALL_BEGIN,
    CALL_END,
    CALLS_BEGIN,
    CALLS_END,
    FAMILIES,
    SEPARATOR,
    find_family,
    response_template,
)

CITY = {"city": "Ljubljana", "days": 3}
CITY_JSON = json.dumps(CITY)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            },
        },
    }
    for name in ("get_weather", "get_time")
]
HERMES = '<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call>'
XML = "<tool_call>\n<function={}>\n<parameter=city>\nLjubljana\n</parameter>\n"
XML += "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
V3 = CALL_BEGIN + "function" + SEPARATOR + "{}\n```json\n{}\n```" + CALL_END
V31 = CALL_BEGIN + "{}" + SEPARATOR + "{}" + CALL_END
LIST = (
    f'[{{"name": "get_weather", "arguments": {CITY_JSON}}}, {{"name": "get_time", "arguments": {CITY_JSON}}}]'
)
GLM = "<tool_call>{}\n<arg_key>city</arg_key>\n<arg_value>Ljubljana</arg_value>\n"
GLM += "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>"
PYTHON = "[get_weather(city='Ljubljana', days=3), get_time(city='Ljubljana', days=3)]"
BOTH = [("get_weather", CITY), ("get_time", CITY)]
ONE = BOTH[:1]

# family -> marks of a chat template; reply; its content; its reasoning; its calls
REPLIES = {
    "Hermes and Qwen": (
        "<tool_call> arguments </think>",
        "<think>\nI look.\n</think>\n\nLet me see.\n"
        + "\n".join(HERMES.format(name, CITY_JSON) for name, _ in BOTH),
        "Let me see.",
        "\nI look.\n",
        BOTH,
    ),
    "Qwen3-Coder and Seed-OSS": (
        "<tool_call> <function= <parameter=",
        "Let me see.\n" + "\n".join(XML.format(name) for name, _ in BOTH),
        "Let me see.",
        "",
        BOTH,
    ),
    "GLM-4.5": (
        "<tool_call> <arg_key> </think>",
        "<think>I look.</think>\nLet me see.\n" + "\n".join(GLM.format(name) for name, _ in BOTH),
        "Let me see.",
        "I look.",
        BOTH,
    ),
    "DeepSeek V3": (
        f"{CALL_BEGIN} ```json",
        f"Let me see.{CALLS_BEGIN}" + "\n".join(V3.format(name, CITY_JSON) for name, _ in BOTH) + CALLS_END,
        "Let me see.",
        "",
        BOTH,
    ),
    "DeepSeek V3.1": (
        f"{CALL_BEGIN} </think>",
        f"<think>I look.</think>Let me see.{CALLS_BEGIN}"
        + "".join(V31.format(name, CITY_JSON) for name, _ in BOTH)
        + CALLS_END,
        "Let me see.",
        "I look.",
        BOTH,
    ),
    "Mistral": ("[TOOL_CALLS]", "[TOOL_CALLS] " + LIST, "", "", BOTH),
    "Mistral, one name per call": (
        "[TOOL_CALLS] [ARGS]",
        "".join(f"[TOOL_CALLS]{name}[ARGS]{CITY_JSON}" for name, _ in BOTH),
        "",
        "",
        BOTH,
    ),
    "FunctionGemma": (
        "<start_function_call>",
        "<start_function_call>call:get_weather{city:<escape>Ljubljana<escape>,days:3}<end_function_call>",
        "",
        "",
        ONE,
    ),
    "Granite": ("<|tool_call|>", "<|tool_call|>" + LIST, "", "", BOTH),
    "Llama 3": (
        "<|start_header_id|> tools",
        '{"name": "get_weather", "parameters": ' + CITY_JSON + "}",
        "",
        "",
        ONE,
    ),
    "Llama 4": ("<|header_start|> tools", f"<|python_start|>{PYTHON}<|python_end|>", "", "", BOTH),
    "Phi-4-mini": ("<|tool|> <|/tool|>", f"<|tool_call|>{LIST}<|/tool_call|>", "", "", BOTH),
    "gpt-oss": (
        "<|channel|> <|message|>",
        "<|channel|>analysis<|message|>I look.<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather "
        "<|constrain|>json<|message|>" + CITY_JSON + "<|call|>",
        "",
        "I look.",
        ONE,
    ),
}


class Characters:
    """Tokenizer with a token per character."""

    all_special_ids: tuple[int, ...] = ()
    added_tokens_decoder: ClassVar[dict[int, object]] = {}

    def decode(self, ids, **options):
        return "".join(map(chr, ids))

    def get_response_parser(self, template, prefix, tools):
        return ResponseParser(template, prefix=self.decode(prefix), tools=tools)


def parts_of(family, reply, size, prompt="<|im_start|>assistant\n", stopped=True):
    """Return the content, the reasoning and the calls of a reply that arrives in pieces of a size.

    Args:
        family: its name, or a response template.
        reply: the text.
        size: characters of a piece.
        prompt: text before the reply.
        stopped: whether an end token ended it, not a limit.
    """
    template = response_template(REPLIES[family][0]) if isinstance(family, str) else family
    parser = TemplateParser(Characters(), template, [*map(ord, prompt)], TOOLS, ())
    deltas = []
    for start in range(0, len(reply), size):
        text = reply[start : start + size]
        deltas += parser.feed(Piece(text, [*map(ord, text)], [], []))
    deltas += parser.finish(stopped)
    texts = {
        field: "".join(delta.text for delta in deltas if delta.field == field)
        for field in ("content", "reasoning")
    }
    calls = [(delta.name, json.loads(delta.text)) for delta in deltas if delta.field == "tool_call"]
    return texts["content"], texts["reasoning"], calls


# family -> further replies, each with the calls of the family's first reply
VARIANTS = {
    "Hermes and Qwen": [
        "\n".join(f'{{"name": "{name}", "arguments": {CITY_JSON}}}' for name, _ in BOTH),
        "\n".join(f'{{"name": "{name}", "arguments": {CITY_JSON}}}' for name, _ in BOTH) + "<|im_end|>",
        f"<tool_call>\n{LIST}\n<|im_end|>",
    ],
    "Llama 3": [
        '{"type": "function", "name": "get_weather", "arguments": ' + CITY_JSON + "}",
        '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Ljubljana", "days": "3"}}<|eom_id|>',
        '[get_weather(city="Ljubljana", days=3)]<|eot_id|>',
    ],
    "Llama 4": [
        f'{{"name": "get_weather", "parameters": {CITY_JSON}}}; {{"name": "get_time", "parameters": {CITY_JSON}}}<|eot|>',
        f"{PYTHON}<|eot|>",
    ],
    "Mistral": [
        f'[TOOL_CALLS]{{"name": "get_weather", "arguments": {CITY_JSON}}} {{"name": "get_time", "arguments": {CITY_JSON}}}'
    ],
    "Granite": [f"<tool_call>{LIST}", f"<|tool_call|>{LIST}<|end_of_text|>"],
    "Phi-4-mini": [f"functools{LIST}", f"<|tool_call|>{LIST}<|/tool_call|><|end|>"],
    "Qwen3-Coder and Seed-OSS": [
        REPLIES["Qwen3-Coder and Seed-OSS"][1].replace("<tool_call>\n", ""),
        REPLIES["Qwen3-Coder and Seed-OSS"][1].replace("tool_call>", "seed:tool_call>"),
    ],
    "GLM-4.5": ["\n".join(GLM.format(name) for name, _ in BOTH).replace("\n", "")],
}


@pytest.mark.parametrize("size", [1, 10_000])
@pytest.mark.parametrize(
    ("family", "reply"), [(family, reply) for family, replies in VARIANTS.items() for reply in replies]
)
def test_variants_of_a_format_are_calls(family, reply, size):
    content, _, calls = parts_of(family, reply, size)
    assert calls == REPLIES[family][4]
    assert content in ("", "Let me see.")
    for length in range(len(reply)) if size == 1 else ():
        assert all(call in calls for call in parts_of(family, reply[:length], 1)[2])


# expressions of chat templates, as their models document the format of calls -> the family that reads them
EXCERPTS = {
    "{{ '<tool_call>' + tool_call.name }}{{ '<arg_key>' + k + '</arg_key>' }} tc.arguments": "GLM-4.5",
    "{% set begin = '<seed:tool_call>' %}{{ begin + '<function=' + name + '>' }}{{ '<parameter=' + key }} tc.arguments":
        "Qwen3-Coder and Seed-OSS",
    "{{ '<tool_call>' }}{{ '<function=' + name }}{{ '<parameter=' + key }} tool_call.arguments":
        "Qwen3-Coder and Seed-OSS",
    "{{ '<tool_call>{\"name\": ' + name + ', \"arguments\": ' + arguments }}": "Hermes and Qwen",
    "{{ '<|system|>' + content + '<|tool|>' + message['tools'] + '<|/tool|>' }}": "Phi-4-mini",
    "{{ 'respond with <|tool_call|> followed by a JSON list' }}{{ '<|start_of_role|>' }} arguments": "Granite",
    "{{ '<|start_header_id|>' }}{% if tools %}{{ '\"parameters\": ' + tool_call.arguments }}": "Llama 3",
    "{{ '<|start_header_id|>' }}{% if tools %}{{ '[func_name1(params_name1=params_value1)]' }}": "Llama 3",
    "{{ '<|header_start|>' }}{% if tools %}{{ '<|python_start|>' }} parameters": "Llama 4",
    "{{ '<|start_header_id|>' }}{{ message.content }}": None,
    "{{ '<|tool_calls_section_begin|><|tool_call_begin|>' + call.id }} arguments tools": None,  # Kimi K2
    "{{ '<minimax:tool_call>' }}{{ '<invoke name=' + name }} arguments tools": None,
    "{{ '<|tool_call>call:' + name }}{{ '<tool_call|>' }} arguments tools": None,  # Gemma 4
    "{{ '<tool_calls>' + tool_calls | tojson }} arguments tools": None,  # Jamba
    "{{ '<|START_ACTION|>' }}{{ 'tool_name' }} parameters tools": None,  # Command
}  # fmt: skip


@pytest.mark.parametrize("excerpt", EXCERPTS)
def test_a_chat_template_tells_its_family(excerpt):
    family = find_family(excerpt)
    assert (family and family.name) == EXCERPTS[excerpt]


def test_seed_oss_has_reasoning_of_its_own():
    template = response_template("<seed:tool_call> <function= <parameter= </seed:think>")
    reply = f"<seed:think>I look.</seed:think>{VARIANTS['Qwen3-Coder and Seed-OSS'][1]}"
    for size in (1, 10_000):
        assert parts_of(template, reply, size) == ("Let me see.", "I look.", BOTH)


PYTHON_VALUES = {
    "'it\\'s'": "it's",
    "[1, -2.5, (3,)]": [1, -2.5, [3]],
    "{'a': None, 'b': true}": {"a": None, "b": True},
    "False": False,
    "null": None,
}


@pytest.mark.parametrize("value", PYTHON_VALUES)
def test_arguments_in_python_are_literals(value):
    expected = [("get_weather", {"place": PYTHON_VALUES[value]})]
    assert parts_of("Llama 3", f"[get_weather(place={value})]", 1) == ("", "", expected)


@pytest.mark.parametrize(
    "calls",
    [
        "[get_weather('Ljubljana')]",
        "[get_weather(**{'city': 1})]",
        "[get_weather(city=open('x'))]",
        "[get_weather(city=1 + x)]",
        "[get_weather(city={1, 2})]",
        "[get_weather(city=b'x')]",
        "[get_weather(city=1e999)]",
        r"[get_weather(city='\ud800')]",
        "[other(city=1)]",
        "[get_weather.now(city=1)]",
        "[get_weather(city=1), 2]",
        "[get_weather(city=" + "-" * 70_000 + "1)]",
        *(f"[get_weather(city={part * 9000}1)]" for part in ("-", "not ", "[", "1+", "lambda:", "a.")),
    ],
    ids=lambda text: text[:40],
)
def test_other_python_is_content(calls):
    assert parts_of("Llama 3", calls, 10_000) == (calls, "", [])


@pytest.mark.parametrize("arguments", ['"x"', "[1]", "3", '{"a": NaN}', r'{"a": "\ud800"}'])
def test_arguments_that_are_no_json_object_are_content(arguments):
    for family, reply in {
        "Hermes and Qwen": HERMES.format("get_weather", arguments),
        "Llama 3": f'{{"name": "get_weather", "parameters": {arguments}}}',
    }.items():
        assert parts_of(family, reply, 10_000) == (reply, "", [])


def test_a_call_without_arguments_has_an_empty_object():
    assert parts_of("Llama 3", '{"name": "get_time", "parameters": null}', 1)[2] == [("get_time", {})]


@pytest.mark.parametrize("reply", ["It rains", "<|channel|>final", "<|start|>assistant It rains"])
def test_a_reply_of_gpt_oss_that_a_limit_cuts_off_keeps_its_text(reply):
    for size in (1, 100):
        assert parts_of("gpt-oss", reply, size, stopped=False) == (reply, "", [])


def test_every_family_has_a_recorded_reply():
    assert {family.name for family in FAMILIES} == REPLIES.keys()
    assert all(find_family(marks).name == name for name, (marks, *_) in REPLIES.items())


@pytest.mark.parametrize("size", [1, 3, 10_000])
@pytest.mark.parametrize("family", REPLIES)
def test_a_reply_is_split_however_it_arrives(family, size):
    _, reply, *expected = REPLIES[family]
    assert parts_of(family, reply, size) == tuple(expected)


@pytest.mark.parametrize("family", REPLIES)
def test_a_reply_that_is_cut_keeps_its_parts(family):
    _, reply, _, reasoning, calls = REPLIES[family]
    for length in range(len(reply)):
        found = parts_of(family, reply[:length], 1)
        assert all(call in calls for call in found[2])
        assert reasoning.startswith(
            found[1].partition("<")[0]
        )  # the beginning of a tag is text until it is one


@pytest.mark.parametrize("family", REPLIES)
def test_a_reply_without_a_call_is_content(family):
    reply = "<|channel|>final<|message|>It rains." if family == "gpt-oss" else "It rains."
    for size in (1, 100):
        assert parts_of(family, reply, size) == ("It rains.", "", [])


@pytest.mark.parametrize("family", REPLIES)
def test_malformed_replies_are_content_or_calls(family):
    """300 of each family: characters replaced, removed, repeated and moved."""
    generator, replies = random.Random(0), [REPLIES[family][1], *VARIANTS.get(family, ())]
    for _ in range(300):
        reply = list(generator.choice(replies))
        for _ in range(generator.choice((1, 2, 5, 20))):
            place, kind = generator.randrange(len(reply)), generator.randrange(4)
            if kind == 0:
                reply[place] = generator.choice('{}[]<>"|, \nx1')
            elif kind == 1:
                del reply[place]
            elif kind == 2:
                reply[place:place] = reply[place : place + generator.randrange(1, 40)]
            else:
                reply = reply[place:] + reply[:place]
        content, reasoning, calls = parts_of(family, "".join(reply), generator.choice((1, 7, 100)))
        assert content or reasoning or calls


def test_arguments_may_hold_what_ends_calls_elsewhere():
    for text in ("```py\nx\n```", "<s>old</s>", "<|eot_id|> and <|end|>"):
        arguments = {"city": text}
        for family in ("Hermes and Qwen", "Llama 3", "Mistral", "Granite"):
            reply = REPLIES[family][1].replace(CITY_JSON, json.dumps(arguments))
            assert parts_of(family, reply, 1)[2] == [(name, arguments) for name, _ in REPLIES[family][4]]


def test_a_preamble_of_gpt_oss_is_content():
    reply = (
        "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
        + REPLIES["gpt-oss"][1].partition("<|start|>assistant")[2]
    )
    assert parts_of("gpt-oss", reply, 1) == ("I look.", "", ONE)
    reply = '<|channel|>final <|constrain|>json<|message|>{"a": 1}'
    assert parts_of("gpt-oss", reply, 1) == ('{"a": 1}', "", [])


def test_an_unknown_function_is_content():
    reply = HERMES.format("other", CITY_JSON)
    assert parts_of("Hermes and Qwen", reply, 1) == (reply, "", [])


def test_runs_of_white_space_take_no_time():
    start = time.perf_counter()
    for family in REPLIES:
        parts_of(family, "Hi" + "\n" * 2000, 1)
        parts_of(family, REPLIES[family][1].replace(": 3", ":" + "\n" * 1000 + "3"), 1)
    assert time.perf_counter() - start < 20


@pytest.mark.parametrize("size", [1, 100])
def test_a_call_in_a_block_of_code_is_a_call(size):
    """As Qwen2.5-Coder writes it."""
    call = '{\n  "name": "get_weather",\n  "arguments": ' + CITY_JSON + "\n}"
    assert parts_of("Hermes and Qwen", f"```json\n{call}\n```", size) == ("", "", ONE)
    for other in ('{"name": "Ana"}', '["name"]', call[:-1], call.replace("get_weather", "other")):
        for reply in (f"```json\n{other}\n```", other):
            assert parts_of("Hermes and Qwen", reply, size) == (reply, "", [])


def test_deep_nesting_is_content():
    reply = HERMES.format("get_weather", "[" * 100_000)
    content, _, calls = parts_of("Hermes and Qwen", reply, 1000)
    assert (content, calls) == (reply, [])
