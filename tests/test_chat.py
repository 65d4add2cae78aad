"""`secondguess chat`: conversations from a pipe and on a terminal, commands, interruptions and refusals."""

from __future__ import annotations

import os
import re
import select
import signal
import sys
from types import SimpleNamespace

import pytest

import secondguess
import secondguess.api
import secondguess.prompts
from forked import start_command

TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
SYSTEM = {"role": "system", "content": "Be short."}


@pytest.fixture
def components(tiny_checkpoint, tmp_path):
    """Options that name a model with a chat template, and a drafter that needs no model."""
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE)
    options = [
        "--model",
        tiny_checkpoint,
        "--chat-template",
        template,
        "--drafter",
        "suffix",
        "--dtype",
        "float32",
    ]
    return [*options, "--max-tokens", 12]


@pytest.fixture
def replies_of_api(tiny_checkpoint):
    """Replies to messages, one conversation, from `generate`."""
    llm = secondguess.load(str(tiny_checkpoint), "none", dtype="float32")
    llm.target.tokenizer.chat_template = TEMPLATE

    def replies(*contents, messages=()):
        messages, texts = list(messages), []
        for content in contents:
            messages.append({"role": "user", "content": content})
            texts.append(llm.generate(messages, max_tokens=12).text)
            messages.append({"role": "assistant", "content": texts[-1]})
        return texts

    return replies


@pytest.fixture
def type_lines(monkeypatch):
    """Gives the program lines, or exceptions, as if they came from a terminal; then its end (Ctrl-D)."""

    def type_all(*lines):
        waiting = iter([*lines, EOFError()])

        def read(prompt):
            line = next(waiting)
            if isinstance(line, BaseException):
                raise line
            return line

        monkeypatch.setattr("builtins.input", read)
        terminal = SimpleNamespace(
            stdin=SimpleNamespace(isatty=lambda: True),
            stdout=SimpleNamespace(isatty=lambda: False),
            stderr=sys.stderr,
        )
        monkeypatch.setattr("secondguess.cli.chat.sys", terminal)

    return type_all


def chat_json(secondguess_command, components, *lines, options=()):
    stdin = "".join(f"{line}\n" for line in lines).encode()
    return secondguess_command("chat", "--json", *components, *options, stdin=stdin)


def texts_of(done):
    assert done.code == 0, done.err
    return [record["text"] for record in done.records]


def test_each_reply_reads_the_whole_conversation(secondguess_command, components, replies_of_api):
    done = chat_json(secondguess_command, components, "def f(x):", "class A:", "naïve")
    assert texts_of(done) == replies_of_api("def f(x):", "class A:", "naïve")


def test_instructions_stand_first_even_after_a_reset(secondguess_command, components, replies_of_api):
    done = chat_json(
        secondguess_command, components, "x", "y", "/reset", "y", options=["--system", SYSTEM["content"]]
    )
    assert texts_of(done) == [
        *replies_of_api("x", "y", messages=[SYSTEM]),
        *replies_of_api("y", messages=[SYSTEM]),
    ]
    assert replies_of_api("y", messages=[SYSTEM]) != replies_of_api("y")  # else the test shows nothing


def test_a_backslash_joins_lines(secondguess_command, components, replies_of_api):
    done = chat_json(secondguess_command, components, "def f(x):\\", "    return x\\", "", "   ")
    assert texts_of(done) == replies_of_api("def f(x):\n    return x\n")


def test_nothing_is_read_after_quit(secondguess_command, components):
    assert len(texts_of(chat_json(secondguess_command, components, "x", "/quit ", "y"))) == 1


def test_commands_are_answered_on_standard_error(secondguess_command, components):
    lines = ["/stats", "x", "y", "/stats", "/help", "/nope", "/reset", "/stats"]
    done = chat_json(secondguess_command, components, *lines)
    assert len(texts_of(done)) == 2
    line = r"[\d.]+ tokens/s, (?:acceptance rate \d+%|nothing drafted), [\d.]+ tokens per target pass"
    expected = rf"no replies yet\nlast reply \(12 tokens\): {line}\nall replies \(24 tokens\): {line}\n"
    assert re.match(expected, done.err)
    for command in ("/stats", "/reset", "/help", "/quit"):
        assert f"\n{command} " in done.err
    assert "expected one of these commands, got /nope" in done.err
    assert done.err.endswith("new conversation\nno replies yet\n")


def test_a_path_is_a_message(secondguess_command, components, replies_of_api):
    done = chat_json(secondguess_command, components, "/usr/bin is a folder")
    assert texts_of(done) == replies_of_api("/usr/bin is a folder")


def test_people_see_message_reply_and_statistics(secondguess_command, components, replies_of_api):
    done = secondguess_command("chat", *components, stdin=b"x = \n")
    (text,) = replies_of_api("x = ")
    assert done.code == 0
    assert done.out == f"> x = \n{text}\n"
    assert re.search(r"\n[\d.]+ tokens/s, .* tokens per target pass\n$", done.err)


def test_settings_reach_the_replies(secondguess_command, components):
    options = ["--temperature", 1, "--seed", 3, "--max-tokens", 5]
    first, second = (chat_json(secondguess_command, components, "x", options=options) for _ in range(2))
    assert texts_of(first) == texts_of(second) != texts_of(chat_json(secondguess_command, components, "x"))
    assert len(first.records[0]["token_ids"]) == 5


def test_an_interrupted_reply_is_kept(secondguess_command, components, type_lines, monkeypatch):
    conversations, shown = [], []
    encode = secondguess.prompts._encode_messages

    def record(target, messages):
        conversations.append(messages)
        return encode(target, messages)

    def interrupt(writer, pieces):
        shown.extend(pieces)
        if len(conversations) == 1 and len(shown) == 3:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("secondguess.prompts._encode_messages", record)
    monkeypatch.setattr("secondguess.cli.output.JsonWriter.show", interrupt)
    type_lines("x", "y")
    done = secondguess_command("chat", "--json", *components, "--max-tokens", 40)
    assert done.code == 0
    first, second = done.records
    assert first["finish_reason"] is None
    assert 3 <= len(first["token_ids"]) < 40
    assert len(second["token_ids"]) == 40
    assert [each["content"] for each in conversations[1]] == ["x", first["text"], "y"]


def test_ctrl_c_in_a_pipe_ends_the_program(secondguess_command, components, monkeypatch):
    shown = []

    def interrupt(writer, pieces):
        shown.append(pieces)
        if len(shown) == 2:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("secondguess.cli.output.JsonWriter.show", interrupt)
    done = chat_json(secondguess_command, components, "x", "y")
    assert (done.code, len(done.records)) == (130, 1)


def test_ctrl_c_at_the_prompt_forgets_the_line(secondguess_command, components, type_lines):
    type_lines(KeyboardInterrupt(), "x")
    done = secondguess_command("chat", "--json", *components)
    assert (done.code, len(done.records)) == (0, 1)
    assert "Ctrl-D or /quit leaves" in done.err


def test_ctrl_c_forgets_a_message_of_several_lines(
    secondguess_command, components, type_lines, replies_of_api
):
    type_lines("one \\", KeyboardInterrupt(), "two", "/quit", "three")
    done = secondguess_command("chat", "--json", *components)
    assert texts_of(done) == replies_of_api("two")


def test_the_prompt_is_not_part_of_the_output(secondguess_command, components, type_lines):
    """As with `secondguess chat --json > replies.jsonl`."""
    type_lines("x")
    done = secondguess_command("chat", "--json", *components)
    assert done.out.startswith("{")
    assert done.err.count("> ") == 2


def test_a_conversation_that_fills_the_context(secondguess_command, components, type_lines):
    lines = ["x", "word " * 200, "y"]
    piped = chat_json(secondguess_command, components, *lines)
    assert (piped.code, len(piped.records)) == (2, 1)
    assert "expected a prompt of at most 255 tokens" in piped.err
    type_lines(*lines)
    typed = secondguess_command("chat", "--json", *components)
    assert (typed.code, len(typed.records)) == (0, 2)  # the long message was not added
    assert "/reset begins a new conversation" in typed.err


def test_a_model_without_a_template_is_refused(secondguess_command, tiny_checkpoint):
    done = secondguess_command("chat", "--model", tiny_checkpoint, "--drafter", "none", stdin=b"x\n")
    assert (done.code, done.out) == (2, "")
    assert "whose tokenizer has none; give one with --chat-template FILE" in done.err


def test_templates_that_cannot_be_used_are_refused(secondguess_command, components, tmp_path):
    missing = secondguess_command("chat", *components, "--chat-template", tmp_path / "missing", stdin=b"x\n")
    assert (missing.code, missing.out) == (2, "")
    assert "expected a readable file" in missing.err
    (tmp_path / "broken").write_text("{% for %}")
    broken = secondguess_command("chat", *components, "--chat-template", tmp_path / "broken", stdin=b"x\n")
    assert (broken.code, broken.out) == (2, "")
    assert "with an error in line 1: Expected" in broken.err


def test_input_that_is_not_utf8_is_refused(secondguess_command, components):
    done = secondguess_command("chat", *components, stdin=b"\xff\n")
    assert (done.code, done.out) == (2, "")
    assert "expected standard input in UTF-8, got 0xff" in done.err


def test_messages_to_the_built_in_target_are_comments(secondguess_command, monkeypatch):
    prompts = []

    def record(llm, prompts_of_call, params):
        tokenizer = llm.target.tokenizer
        ids = secondguess.prompts.encode(llm.target, prompts_of_call[0])
        prompts.append(tokenizer.decode(ids))
        return generation(llm, prompts_of_call, params)

    generation = secondguess.api.Generation
    monkeypatch.setattr("secondguess.api.Generation", record)
    done = secondguess_command("chat", "--json", "--max-tokens", 4, stdin=b"two\\\nlines\n")
    assert done.code == 0, done.err
    assert len(done.records) == 1
    assert prompts == ["# user: two\n# lines\n\n"]


def test_options_reach_load(loaded):
    given = {
        "model": "builtin",
        "drafter": "ngram",
        "verifier": "block",
        "controller": "fixed:2",
        "dtype": "float32",
        "device": "cpu",
        "quantize": "int8",
        "drafter_quantize": "int8",
        "runtime": "fused",
    }
    options = [part for name, value in given.items() for part in (f"--{name.replace('_', '-')}", value)]
    assert loaded("chat", *options) == given


def test_a_real_terminal(components, monkeypatch):
    """Typed lines, a command, and Ctrl-D."""
    import pty

    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("COLUMNS", "200")
    ours, theirs = pty.openpty()
    process = start_command(["chat", *components], [theirs] * 3)
    os.close(theirs)
    try:
        read_until(ours, r"Ctrl-D leaves\s+> $")
        os.write(ours, b"x = \n")
        read_until(ours, r"tokens per target pass\s+> $")
        os.write(ours, b"/stats\n")
        read_until(ours, r"all replies \(12 tokens\): .* tokens per target pass\s+> $")
        os.write(ours, b"\x04")
        process.join(60)
        assert process.exitcode == 0
    finally:
        process.kill()
        os.close(ours)


def read_until(terminal, pattern):
    """Read from a terminal until its new text matches; fails after a minute."""
    seen = ""
    while not re.search(pattern, seen):
        readable, _, _ = select.select([terminal], [], [], 60)
        assert readable, seen
        seen += os.read(terminal, 4096).decode()
