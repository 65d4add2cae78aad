"""Reasoning, content and tool calls are split the same way however many tokens come at once."""

import json

import pytest
from chat_tokenizer import CALL, TOOL, chat_tokenizer

from secondguess.sampling.text import Piece
from secondguess.server.calls.parsers import Delta, ForcedCallParser, TemplateParser

PROMPT = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
REPLIES = {
    "content": "Hello, wörld 🎉 of text",
    "reasoning": "<think>first, add</think>The sum is three.",
    "call": CALL,
    "all": f"<think>hm</think>I call it.{CALL}\n{CALL}",
    "broken call": '<tool_call>{"name": "add", "argu</tool_call> after',
    "broken call after content": 'I call <tool_call>{"name": add</tool_call>the tail, one two three',
    "no arguments": 'Well <tool_call>{"name": "add"}</tool_call>tail',
    "no object": "Well <tool_call>5</tool_call>tail",
    "open call": '<tool_call>{"name": "add"',
    "open reasoning": "<think>still thinking",
}


@pytest.fixture(scope="module", params=[True, False], ids=["special", "added"])
def tokenizer(request):
    return chat_tokenizer(request.param)


def parse(tokenizer, reply, size, stop=(), end="<|im_end|>", prompt=PROMPT, stopped=True):
    """The parts of a reply that is committed in pieces of `size` tokens, joined by kind."""
    parser = TemplateParser(tokenizer, tokenizer.response_template, tokenizer(prompt).input_ids, [TOOL], stop)
    tokens = tokenizer(reply + end, add_special_tokens=False).input_ids
    deltas = []
    for start in range(0, len(tokens), size):
        part = tokens[start : start + size]
        text = tokenizer.decode(part, skip_special_tokens=True)
        deltas += parser.feed(Piece(text, part, [False] * len(part), []))
    deltas += parser.finish(stopped)
    joined = {name: "".join(d.text for d in deltas if d.field == name) for name in ("content", "reasoning")}
    calls = [(delta.name, json.loads(delta.text)) for delta in deltas if delta.field == "tool_call"]
    assert all(delta.call_id for delta in deltas if delta.field == "tool_call")
    return joined["content"], joined["reasoning"], calls, parser.num_reasoning_tokens


ADD = ("add", {"a": 1, "b": 2})


def test_parts_of_a_reply(tokenizer):
    assert parse(tokenizer, REPLIES["content"], 1)[:3] == (REPLIES["content"], "", [])
    assert parse(tokenizer, REPLIES["reasoning"], 1)[:3] == ("The sum is three.", "first, add", [])
    assert parse(tokenizer, REPLIES["call"], 1)[:3] == ("", "", [ADD])
    assert parse(tokenizer, REPLIES["all"], 1)[:3] == ("I call it.", "hm", [ADD, ADD])
    assert parse(tokenizer, REPLIES["open reasoning"], 1, end="", stopped=False)[1] == "still thinking"


@pytest.mark.parametrize("name", REPLIES)
def test_tool_calls_do_not_depend_on_the_number_of_tokens_per_round(tokenizer, name):
    expected = parse(tokenizer, REPLIES[name], 1)
    for size in range(2, 17):
        assert parse(tokenizer, REPLIES[name], size) == expected


def test_a_call_that_cannot_be_parsed_is_content(tokenizer):
    content, _, calls, _ = parse(tokenizer, REPLIES["broken call"], 1)
    assert not calls
    assert '{"name": "add", "argu' in content
    assert content.endswith(" after")
    content, _, calls, _ = parse(tokenizer, REPLIES["open call"], 1, end="", stopped=False)
    assert (content.endswith('{"name": "add"'), calls) == (True, [])


def test_text_around_a_broken_call_is_kept(tokenizer):
    reply = REPLIES["broken call after content"]
    for name in ("broken call after content", "no arguments", "no object"):
        assert parse(tokenizer, REPLIES[name], 1)[:3] == (REPLIES[name], "", [])
    for whole in ('Well <tool_call>{"name": "add"}', "Well <tool_call>5"):
        assert parse(tokenizer, whole, 2, end="", stopped=False)[:3] == (whole, "", [])
    for end in range(len("I call <tool_call>"), reply.index("</")):  # cut off by a limit
        assert parse(tokenizer, reply[:end], 3, end="", stopped=False)[:3] == (reply[:end], "", [])


def test_an_end_token_in_or_after_a_broken_call_is_not_content(tokenizer):
    assert parse(tokenizer, "Well <tool_call>{", 1)[:3] == ("Well <tool_call>{", "", [])
    tokenizer.add_tokens(["<|eom|>"], special_tokens=True)  # special, but not among the named special tokens
    reply = REPLIES["broken call"] + " STOP"
    for size in (1, 4):  # with `min_tokens` the row goes on after a stop string
        assert parse(tokenizer, reply, size, stop=("STOP",), end="<|eom|>")[0] == reply
    assert parse(tokenizer, "Well <tool_call>{}", 1, end="")[0] == "Well <tool_call>{}"


@pytest.mark.parametrize("size", [1, 2, 50])
def test_an_end_token_that_the_template_does_not_read_is_no_text(size):
    tokenizer = chat_tokenizer()
    tokenizer.add_tokens(["<|eom|>"], special_tokens=True)
    for stop in ((), ("<|eot",)):
        assert parse(tokenizer, "Well\n", size, stop, end="<|eom|>")[:3] == ("Well\n", "", [])
        assert parse(tokenizer, CALL, size, stop, end="<|eom|>")[:3] == ("", "", [ADD])
        for end in ("<|eom|>", "<|im_end|>"):
            assert parse(tokenizer, REPLIES["open reasoning"], size, stop, end)[:2] == ("", "still thinking")
    whole = "Well<|eom|> and"  # another token follows, or a limit ends the reply
    assert parse(tokenizer, whole, size)[0] == whole
    assert parse(tokenizer, "Well<|eom|>", size, end="", stopped=False)[0] == "Well<|eom|>"


def test_an_end_token_can_close_a_call():
    tokenizer = chat_tokenizer()
    fields = tokenizer.response_template["fields"]
    calls = fields["tool_calls"] | {"close": "<|im_end|>"}  # as gpt-oss has it
    tokenizer.response_template = tokenizer.response_template | {"fields": fields | {"tool_calls": calls}}
    assert parse(tokenizer, CALL.removesuffix("</tool_call>"), 1)[:3] == ("", "", [ADD])


@pytest.mark.parametrize("size", [1, 3, 50])
def test_text_outside_all_fields_is_content_only_if_there_is_no_other(size):
    tokenizer = chat_tokenizer()
    fields = tokenizer.response_template["fields"]
    content = {"open": "<answer>", "close": "<|im_end|>", "content": "text"}  # as gpt-oss has it
    tokenizer.response_template = tokenizer.response_template | {"fields": fields | {"content": content}}
    for text in ("call add(1)", "call <|im_start|>add(1)"):
        assert parse(tokenizer, text, size)[:3] == (text, "", [])
        assert parse(tokenizer, f"<think>hm</think>{text}", size)[:3] == (text, "hm", [])
        assert parse(tokenizer, f"{text}<answer>Well", size)[:3] == ("Well", "", [])
        assert parse(tokenizer, text + CALL, size)[:3] == ("", "", [ADD])
        assert parse(tokenizer, text, size, end="", stopped=False)[:3] == (text, "", [])
    for reply in ("", "<answer>", "<think>hm</think>", "<think>hm"):
        assert parse(tokenizer, reply, size)[0] == ""


def test_reasoning_that_the_prompt_opened_is_reasoning(tokenizer):
    content, reasoning, _, count = parse(tokenizer, "hm, three</think>3", 2, prompt=PROMPT + "<think>")
    assert (content, reasoning) == ("3", "hm, three")
    assert count == len(tokenizer("hm, three", add_special_tokens=False).input_ids)


def test_a_stop_string_is_cut_off(tokenizer):
    reply = "<think>a STOP b</think>one two ST"
    for size in (1, 3, 50):
        content, reasoning, *_ = parse(tokenizer, f"{reply}OP", size, stop=("STOP", "zz"), end="")
        assert (content, reasoning) == ("one two ", "a STOP b")
    # Without a stop string at the end, what could have begun one is text.
    assert parse(tokenizer, reply, 1, stop=("STOP",), end="", stopped=False)[0] == "one two ST"


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("cut", range(0, 90, 3))
def test_a_forced_call_is_returned_as_it_is_written(size, cut):
    """Whole, and cut by a limit; with braces and quotes in its arguments."""
    arguments = '{"text":"a } \\" }","more":{"b":{}}}'
    whole = '{"name":"find \\" it","arguments":' + arguments + "}"
    text = whole[: len(whole) - cut]
    parser = ForcedCallParser()
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    deltas = [delta for piece in pieces for delta in parser.feed(Piece(piece, [], [], []))]
    deltas += parser.finish(stopped=not cut)
    if not text.startswith(whole[: -len(arguments) - 1]):
        assert deltas == [Delta("content", text)]
        return
    first, *rest = deltas
    assert (first.field, first.text, first.name) == ("tool_call", "", 'find " it')
    assert {delta.field for delta in rest} <= {"arguments"}
    written = "".join(delta.text for delta in rest)
    assert written == (text[len(whole) - len(arguments) - 1 :] if cut else arguments)
