"""Training texts: every data format, and errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from secondguess.api import Generation, load
from secondguess.errors import BadInputError
from secondguess.train.training_texts import (
    AnswerSettings,
    Document,
    prompt_ids,
    read_documents,
    require_room,
    texts_as_they_stand,
    write_answers,
)

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
CHAT = {
    "messages": [
        {"role": "user", "content": "sort items"},
        {"role": "assistant", "content": "return items"},
        {"role": "user", "content": "again"},
        {"role": "assistant", "content": "no"},
    ]
}
SETTINGS = AnswerSettings(max_tokens=6, length=24, batch_size=2)


@pytest.fixture
def llm(tiny_checkpoint: Path):
    return load(str(tiny_checkpoint), "none", dtype="float32")


def answers(llm, documents, folder: Path, settings: AnswerSettings = SETTINGS):
    return write_answers(llm, documents, settings, folder, lambda *_: None, lambda: None)


def json_lines(path: Path, *records: object) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_every_data_format_is_read(tmp_path: Path) -> None:
    sharegpt = {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}]}
    lines = json_lines(
        tmp_path / "data.jsonl",
        {"prompt": "one", "completion": " two"},
        {"text": "whole"},
        {"question": "why?", "answer": "so"},
        CHAT,
        sharegpt,
    )
    first, second, third, chat, other = read_documents([lines], as_is=False)
    assert (first.text, first.answer) == ("one", " two")
    assert (second.text, second.answer) == ("whole", "")
    assert (third.text, third.answer) == ("why?", "so")
    assert chat.messages[0] == {"role": "user", "content": "sort items"}
    assert [message["role"] for message in other.messages] == ["user", "assistant"]


def test_plain_text_is_split_into_paragraphs_or_used_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("first\nline\n\nsecond\n")
    assert [document.text for document in read_documents([path], as_is=False)] == ["first\nline", "second"]
    assert [document.text for document in read_documents([path], as_is=True)] == ["first\nline\n\nsecond\n"]


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "empty"),
        (b"\0\1\2", "binary"),
        (b"\xff\xfe\xfa", "UTF-8"),
        (
            b'{"prompt": 1}\n',
            "non-empty text 'prompt'.*'messages'.*'text'.*got the keys prompt in data.jsonl, line 1",
        ),
        (b'{"prompt": "a", "task": 3}\n', "text as 'task'.*got 3 in data.jsonl, line 1"),
        (b'{"prompt": "a"}\n[1]\n', "object.*line 2"),
        (b'{"prompt": "a"}\n{"prompt"\n', "JSON object per line.*line 2"),
        (b'{"messages": [3]}\n', "'role' and 'content'.*line 1"),
        (b'{"messages": []}\n', "user's.*line 1"),
        (b'{"messages": [{"role": "assistant", "content": "x"}]}\n', "user's.*line 1"),
    ],
)
@pytest.mark.parametrize("as_is", [True, False])
def test_bad_files_are_refused_with_the_line(
    tmp_path: Path, content: bytes, complaint: str, as_is: bool
) -> None:
    path = tmp_path / ("data.txt" if not content.startswith(b"{") else "data.jsonl")
    path.write_bytes(content)
    with pytest.raises(BadInputError, match=complaint):
        read_documents([path], as_is)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match=r"--data FILE"):
        read_documents([tmp_path / "nothing"], as_is=False)


def test_only_the_answers_of_the_target_are_counted(llm, tmp_path: Path) -> None:
    documents = [Document(f"def f{number}(items):", "") for number in range(11)]
    told: list[int] = []
    texts = write_answers(
        llm, documents, SETTINGS, tmp_path, lambda done, total: told.append(done), lambda: None
    )
    assert told == [2, 4, 6, 8, 10, 11]
    for text, document in zip(texts, documents, strict=True):
        prompt = llm.target.encode(document.text)
        assert text.tokens[: len(prompt)] == prompt
        assert text.counts == [False] * len(prompt) + [True] * (len(text.tokens) - len(prompt))
        assert 1 <= sum(text.counts) <= 6
    greedy = llm.generate(documents[0].text, max_tokens=6)
    assert texts[0].tokens[-len(greedy.token_ids) :] == greedy.token_ids  # the first temperature is 0


def test_stored_answers_are_reused(llm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    documents = [Document(f"def f{number}(items):", "") for number in range(11)]
    whole = answers(llm, documents, tmp_path / "whole")
    calls: list[int] = []

    def counting(llm, prompts, params):
        calls.append(len(prompts))
        if len(calls) == 5:
            raise KeyboardInterrupt
        return Generation(llm, prompts, params)

    monkeypatch.setattr("secondguess.train.training_texts.Generation", counting)
    with pytest.raises(KeyboardInterrupt):
        answers(llm, documents, tmp_path / "cut")
    again = answers(llm, documents, tmp_path / "cut")
    assert calls == [2, 2, 2, 2, 2, 2, 1]
    assert again == whole


def test_a_long_prompt_is_truncated_on_the_left(llm, tmp_path: Path) -> None:
    document = Document("items " * 60, "")
    text = answers(llm, [document], tmp_path)[0]
    prompt = llm.target.encode(document.text)
    assert text.tokens[:18] == prompt[-18:]


def test_texts_longer_than_the_context_are_refused(llm) -> None:
    require_room(llm.target, 255)
    with pytest.raises(BadInputError, match="context of 256"):
        require_room(llm.target, 256)


def test_a_chat_is_formatted_by_the_template(llm) -> None:
    llm.target.tokenizer.chat_template = TEMPLATE
    document = Document("", "", messages=tuple(CHAT["messages"]))
    asked = "<user>sort items\n<assistant>return items\n<user>again\n<assistant>"
    assert prompt_ids(llm.target, document) == llm.target.encode(asked)
    text = texts_as_they_stand(llm.target, [document, document], 64)[0]
    counted = [token for token, counts in zip(text.tokens, text.counts, strict=True) if counts]
    assert llm.target.tokenizer.decode(counted) == "return items\nno\n"


def test_a_chat_without_a_template_is_plain_text(llm) -> None:
    document = Document("", "", messages=tuple(CHAT["messages"]))
    assert prompt_ids(llm.target, document) == llm.target.encode("sort items\n\nreturn items\n\nagain")


def test_with_as_is_only_the_completion_of_a_prompt_is_counted(llm) -> None:
    documents = [Document("def f(items):", "", answer="\n    return items"), Document("print(items)", "")]
    first, second = texts_as_they_stand(llm.target, documents, 64)
    counted = [token for token, counts in zip(first.tokens, first.counts, strict=True) if counts]
    assert llm.target.tokenizer.decode(counted).strip() == "return items"
    assert all(second.counts)
    with pytest.raises(BadInputError, match="more data"):
        texts_as_they_stand(llm.target, documents[:1], 64)
    with pytest.raises(BadInputError, match="below the target's context"):
        texts_as_they_stand(llm.target, documents, llm.target.runtime.context_length)
