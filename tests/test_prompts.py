"""Conversations as prompts: formatted by the tokenizer's chat template, checked, and read from prompt files."""

from __future__ import annotations

import json
import shutil
from functools import partial

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from secondguess import load
from secondguess.errors import BadInputError
from secondguess.prompts import encode, with_list_contents

TEMPLATE = (
    "{{ eos_token }}{% for message in messages %}"
    "{% if message['role'] == 'alien' %}{{ raise_exception('only people may speak') }}{% endif %}"
    "{{ message['role'] + ': ' + message['content'] + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "def f(x):"},
]
FORMATTED = "<|end|>system: Be brief.<|end|>user: def f(x):<|end|>assistant: "
SETTINGS = {"max_tokens": 6}


@pytest.fixture(scope="module")
def chat_checkpoint(tiny_checkpoint, tmp_path_factory):
    """The tiny checkpoint with a chat template, and a tokenizer that puts a special token before every text."""
    directory = tmp_path_factory.mktemp("chat") / "model"
    shutil.copytree(tiny_checkpoint, directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.chat_template = TEMPLATE
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|end|> $A", special_tokens=[("<|end|>", 0)]
    )
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def llm(chat_checkpoint):
    return load(chat_checkpoint, "none", dtype="float32")


@pytest.fixture(scope="module")
def formatted_ids(llm):
    return llm.target.tokenizer(FORMATTED, add_special_tokens=False).input_ids


class TestConversations:
    def test_the_template_formats_messages_and_opens_the_reply(self, llm, formatted_ids):
        assert encode(llm.target, CONVERSATION) == formatted_ids
        output = llm.generate(CONVERSATION, **SETTINGS)
        assert output.token_ids == llm.generate(formatted_ids, **SETTINGS).token_ids

    def test_special_tokens_are_not_added_to_those_of_the_template(self, llm):
        assert encode(llm.target, "x")[0] == 0  # the tokenizer does add one to plain text
        ids = encode(llm.target, CONVERSATION)
        assert (ids[0], ids.count(0)) == (0, 3)

    def test_a_list_of_conversations_is_a_batch(self, llm):
        other = [{"role": "user", "content": "class A:"}]
        alone = [llm.generate(prompt, **SETTINGS).token_ids for prompt in (CONVERSATION, other, "x")]
        for outputs in (llm.generate([CONVERSATION, other, "x"], **SETTINGS),):
            assert [output.token_ids for output in outputs] == alone
        first, second = llm.generate(("x", tuple(other)), **SETTINGS)
        assert (first.token_ids, second.token_ids) == (alone[2], alone[1])

    def test_no_prompts_have_no_outputs(self, llm):
        assert llm.generate([]) == []

    def test_a_conversation_can_have_several_samples(self, llm):
        samples = llm.generate(CONVERSATION, n=2, temperature=1, seed=3, **SETTINGS)
        assert len({sample.text for sample in samples}) == 2

    def test_a_conversation_can_be_streamed(self, llm):
        text = "".join(piece.text for piece in llm.stream(CONVERSATION, **SETTINGS))
        assert text == llm.generate(CONVERSATION, **SETTINGS).text

    def test_a_conversation_may_contain_replies(self, llm):
        longer = [*CONVERSATION, {"role": "assistant", "content": ""}, {"role": "user", "content": "more"}]
        ids = llm.target.tokenizer(
            "<|end|>system: Be brief.<|end|>user: def f(x):<|end|>assistant: <|end|>user: more<|end|>assistant: ",
            add_special_tokens=False,
        ).input_ids
        assert encode(llm.target, longer) == ids


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([{"role": "user"}], r"messages\[0\] to have content"),
        ([{"content": "x"}], r"messages\[0\] to have role"),
        ([{"prompt": "x"}], r"messages\[0\] to have role and content alone, got also 'prompt'"),
        ([*CONVERSATION, "x"], r"messages\[2\] to be an object with role and content, got 'x'"),
        ([{"role": "user", "content": None}], r"content of messages\[0\] to be text, got None"),
        (
            [{"role": "user", "content": [{"type": "text", "text": "x", "more": "y"}]}],
            r"each part of messages\[0\] to be text or an image",
        ),
        ([{"role": 3, "content": "x"}], r"role of messages\[0\] to be text, got 3"),
        ([{"role": "", "content": "x"}], r"role of messages\[0\] with at least one character"),
        ([{"role": "user", "content": "x\ud800"}], "lone surrogate"),
        (
            [{"role": "user", "content": "x", "tool_calls": []}],
            r"messages\[0\].*got also 'tool_calls'.*apply_chat_template",
        ),
        ([{"role": "alien", "content": "x"}], "chat template.*only people may speak"),
        ([CONVERSATION, [{"role": "user"}]], r"messages\[0\] to have content"),
        ([{"role": "user", "content": "z9" * 200}], "255"),
    ],
    ids=lambda value: ascii(value)[:40],
)
def test_malformed_messages_are_refused(llm, messages, words):
    with pytest.raises(BadInputError, match=words):
        llm.generate(messages, **SETTINGS)


def test_a_tokenizer_without_a_template_is_refused(tiny_checkpoint):
    llm = load(tiny_checkpoint, "none", dtype="float32")
    for generate in (llm.generate, llm.stream):
        with pytest.raises(
            BadInputError, match=f"chat template.*{tiny_checkpoint}.*tokenizer.chat_template.*text"
        ):
            generate(CONVERSATION)
    llm.target.tokenizer.chat_template = TEMPLATE
    assert llm.generate(CONVERSATION, **SETTINGS).token_ids


# prompt files


@pytest.fixture
def answer_file(secondguess_command, chat_checkpoint, tmp_path):
    """Answers a prompt file of some lines."""

    def run(*lines, options=("--json",)):
        file = tmp_path / "prompts.jsonl"
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        components = (
            "--model",
            chat_checkpoint,
            "--drafter",
            "none",
            "--dtype",
            "float32",
            "--max-tokens",
            6,
        )
        return secondguess_command("generate", "--prompt-file", file, *components, *options)

    return run


def test_messages_are_read_from_a_prompt_file(llm, answer_file):
    done = answer_file({"messages": CONVERSATION, "metadata": 3}, {"prompt": "x"})
    first, second = done.records
    assert first["token_ids"] == llm.generate(CONVERSATION, **SETTINGS).token_ids
    assert first["metadata"] == 3
    assert second["token_ids"] == llm.generate("x", **SETTINGS).token_ids


def test_the_text_output_shows_the_messages(llm, answer_file):
    reply = llm.generate(CONVERSATION, **SETTINGS).text
    shown = answer_file({"messages": CONVERSATION}, options=()).out
    assert shown == f"system: Be brief.\nuser: def f(x):\n{reply}\n"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ({"prompt": "x", "messages": CONVERSATION}, ["line 2", "either prompt or messages, got both"]),
        ({"max_tokens": 3}, ["line 2", "either prompt or messages, got neither"]),
        ({"messages": "hello"}, ["line 2", "messages", "'hello'"]),
        ({"messages": []}, ["line 2", "messages", "at least one"]),
        ({"messages": None}, ["line 2", "messages", "None"]),
        ({"messages": [{"role": "user"}]}, ["line 2", "messages[0] to have content"]),
        ({"messages": [{"role": "alien", "content": "x"}]}, ["line 2", "only people may speak"]),
        ({"message": CONVERSATION}, ["line 2", "'message'", "messages"]),
    ],
    ids=lambda value: str(value)[:40],
)
def test_malformed_messages_in_a_prompt_file_are_refused(answer_file, line, words):
    done = answer_file({"messages": CONVERSATION}, line)
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    for word in words:
        assert word in done.err


TEMPLATES = {
    "texts": "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}",
    "lists": "{% for m in messages %}{{ m.role }}:{% for p in m.content %}{{ p['text'] }}{% endfor %}\n{% endfor %}",
    "lists after a text": "{{ 'system:' + messages[0].content }}\n{% for m in messages[1:] %}{{ m.role }}:"
    "{% for p in m.content %}{{ p['text'] }}{% endfor %}\n{% endfor %}",
}


@pytest.mark.parametrize(
    ("template", "takes_lists"), [("texts", False), ("lists", True), ("lists after a text", False)]
)
def test_contents_become_lists_only_if_the_whole_conversation_can_be_read_so(
    chat_checkpoint, template, takes_lists
):
    messages = [{"role": "system", "content": "be short"}, {"role": "user", "content": " hello "}]
    tokenizer = AutoTokenizer.from_pretrained(chat_checkpoint)
    render = partial(tokenizer.apply_chat_template, chat_template=TEMPLATES[template], tokenize=False)
    found = with_list_contents(render, messages)
    assert (found is messages) is not takes_lists
    if takes_lists:
        assert render(found) == "system:be shortuser: hello "
