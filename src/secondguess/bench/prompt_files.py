"""Reading of prompts from JSON lines (datasets and chats) and plain text files.

Every reader returns texts with their tasks. An invalid file is refused with the location of the
error: skipping lines would make a benchmark cover fewer prompts than expected.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TypeVar

from secondguess.errors import BadInputError

Record = Mapping[str, object]

MULTI_TURN = "multi-turn"
MULTI_TURN_CATEGORIES = (
    "writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities",
)  # fmt: skip
"""MT-bench's categories, which together are one of Spec-Bench's six tasks."""
SPEC_BENCH_TASKS = ("translation", "summarization", "qa", "math_reasoning", "rag")
"""Spec-Bench's other tasks, each with a category of its own."""

JSON_SUFFIXES = (".jsonl", ".json", ".ndjson")
TASK_KEYS = ("category", "task")
CHAT_KEYS = ("messages", "conversation", "conversations")
USER_ROLES = ("user", "human")


@dataclass(frozen=True)
class Prompt:
    """Text to continue, and its task."""

    text: str
    task: str


PromptT = TypeVar("PromptT", bound=Prompt)


def read_any(path: Path) -> list[Prompt]:
    """Read the prompts of a JSONL or plain text file; the format is detected."""
    return read_records(path, convert_any_record) if is_jsonl(path) else read_paragraphs(path)


def read_paragraphs(path: Path) -> list[Prompt]:
    """Read plain text: paragraphs between blank lines are prompts, the file's stem is the task."""
    lines = read_text(path).split("\n")
    paragraphs = [
        "\n".join(part) for blank, part in groupby(lines, lambda line: not line.strip()) if not blank
    ]
    return _at_least_one([Prompt(paragraph, path.stem) for paragraph in paragraphs], path)


def read_records(path: Path, convert: Callable[[Record, Path], PromptT]) -> list[PromptT]:
    """Read JSON lines: one prompt per object; blank lines are skipped.

    Raises:
        BadInputError: a missing file, no UTF-8, no prompts, or a line that `convert` refuses, with
            its number.
    """
    # Not splitlines(): JSON strings may contain unescaped Unicode line separators.
    lines = enumerate(read_text(path).split("\n"), start=1)
    return _at_least_one(
        [_convert(line, number, path, convert) for number, line in lines if line.strip()], path
    )


def read_text(path: Path) -> str:
    """Return the text of a file, with Unix line ends and without a byte order mark.

    Raises:
        BadInputError: no file, a binary file, or no UTF-8.
    """
    if path.is_dir():
        raise BadInputError(
            f"expected a file of prompts, got the folder {path}; give a file with --prompts FILE"
        )
    if not path.is_file():
        raise BadInputError(
            f"expected a file of prompts, found none at {path}; give one with --prompts FILE "
            f"(JSON lines with a 'prompt' each, or plain text), or --prompts builtin for a small built-in set"
        )
    content = path.read_bytes()
    if b"\0" in content:
        raise BadInputError(
            f"expected text in {path.name}, got a binary file (byte {content.index(0)} is zero); "
            "give JSON lines or plain text"
        )
    try:
        return content.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise BadInputError(
            f"expected UTF-8 text in {path.name}, got byte {error.start} of another encoding; "
            "convert it first (iconv does)"
        ) from None


def convert_any_record(record: Record, path: Path) -> Prompt:
    """Convert a record: `prompt`, `question`, the first of `turns`, or a chat's user messages."""
    found = None
    for read in (_text_at("prompt"), _text_at("question"), _first_turn, _user_texts):
        found = found or read(record)
    if not found:
        raise BadInputError(
            "expected an object with a non-empty text 'prompt' (or 'question', 'turns', 'messages'), got "
            + (f"the keys {', '.join(sorted(record))}" if record else "an empty object")
        )
    return Prompt(found, _task_of(record) or path.stem)


def spec_bench_record(record: Record, path: Path) -> Prompt:
    """Convert a Spec-Bench question: first turn, with its category (MT-bench's are one task)."""
    text, category = _first_turn(record), record.get("category")
    if not text:
        raise BadInputError(f"expected 'turns' with a text first, got {record.get('turns')!r:.60}")
    if category in MULTI_TURN_CATEGORIES:
        return Prompt(text, MULTI_TURN)
    if category not in SPEC_BENCH_TASKS:
        known = ", ".join((*MULTI_TURN_CATEGORIES, *SPEC_BENCH_TASKS))
        raise BadInputError(
            f"expected a category of Spec-Bench ({known}), got {category!r:.60}; "
            "other files go by --prompts PATH"
        )
    return Prompt(text, str(category))


def record_with(key: str, task: str) -> Callable[[Record, Path], Prompt]:
    """Return a converter for a dataset with one task and its prompts under one key."""

    def convert(record: Record, path: Path) -> Prompt:
        text = _text_at(key)(record)
        if not text:
            raise BadInputError(f"expected an object with a non-empty text {key!r} for {task}")
        return Prompt(text, task)

    return convert


def is_jsonl(path: Path) -> bool:
    """Return whether a file contains JSON lines rather than plain text."""
    if path.suffix.lower() in JSON_SUFFIXES:
        return True
    first = next((line for line in read_text(path).split("\n") if line.strip()), "")
    try:
        return isinstance(json.loads(first), dict)
    except (ValueError, RecursionError):
        return False


def _convert(line: str, number: int, path: Path, convert: Callable[[Record, Path], PromptT]) -> PromptT:
    place = f"{path.name}, line {number}"
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadInputError(
            f"expected one JSON object per line, got something else in {place}: {error}"
        ) from None
    if not isinstance(record, dict):
        raise BadInputError(
            f"expected an object with a non-empty text 'prompt', got {record!r:.60} in {place}"
        )
    try:
        prompt = convert(record, path)
        prompt.text.encode()
    except UnicodeEncodeError:
        raise BadInputError(
            f"expected text in {place}, got half of a surrogate pair (a lone \\ud8xx); remove it"
        ) from None
    except BadInputError as error:
        raise BadInputError(f"{error} in {place}; fix or remove the line") from None
    return prompt


def _text_at(key: str) -> Callable[[Record], str | None]:
    def read(record: Record) -> str | None:
        text = record.get(key)
        return text if isinstance(text, str) and text.strip() else None

    return read


def _first_turn(record: Record) -> str | None:
    turns = record.get("turns")
    first = turns[0] if isinstance(turns, list) and turns else None
    return first if isinstance(first, str) and first.strip() else None


def _user_texts(record: Record) -> str | None:
    """Return all user messages of a chat, separated by blank lines, or None if there are none."""
    messages = next((record[key] for key in CHAT_KEYS if isinstance(record.get(key), list)), [])
    texts = [_message_text(message) for message in messages if isinstance(message, dict)]  # type: ignore[attr-defined]
    return "\n\n".join(text for text in texts if text) or None


def _message_text(message: Record) -> str:
    if message.get("role", message.get("from")) not in USER_ROLES:
        return ""
    content = message.get("content", message.get("value"))
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text") if isinstance(part, dict) else part for part in parts]
    return "".join(text for text in texts if isinstance(text, str))


def _task_of(record: Record) -> str | None:
    for key in TASK_KEYS:
        task = record.get(key)
        if task is None:
            continue
        if not isinstance(task, str) or not task.strip():
            raise BadInputError(f"expected a text as {key!r} (the prompt's task), got {task!r:.60}")
        return task.strip()
    return None


def _at_least_one(prompts: list[PromptT], path: Path) -> list[PromptT]:
    if not prompts:
        raise BadInputError(f"expected at least one prompt in {path.name}, got an empty file")
    return prompts
