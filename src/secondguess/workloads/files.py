"""Reading of prompts from JSON lines (datasets and chats) and plain text files.

An invalid file is refused with the location of the error: skipping lines would make a benchmark
cover fewer prompts than expected.
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
    """Read JSON lines: one prompt per object; blank lines are skipped, a line that `convert` refuses is named."""
    prompts = []
    # Not splitlines(): JSON strings may contain unescaped Unicode line separators.
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            if not isinstance(record, dict):
                raise BadInputError(f"expected an object with a non-empty text 'prompt', got {record!r:.60}")
            json.dumps(record, ensure_ascii=False).encode()
            prompt = convert(record, path)
        except UnicodeEncodeError:
            problem = "expected text, got half of a surrogate pair (a lone \\ud8xx)"
        except BadInputError as error:
            problem = str(error)
        except (ValueError, RecursionError) as error:
            problem = f"expected one JSON object per line, got something else: {error}"
        else:
            prompts.append(prompt)
            continue
        raise BadInputError(f"{problem} in {path.name}, line {number}; fix or remove the line")
    return _at_least_one(prompts, path)


def read_text(path: Path) -> str:
    """Return the text of a file in UTF-8, with Unix line ends and without a byte order mark."""
    if not path.is_file():
        found = f"the folder {path}" if path.is_dir() else f"none at {path}"
        raise BadInputError(
            f"expected a file of prompts, got {found}; give one with --prompts FILE "
            "(JSON lines with a 'prompt' each, or plain text), or --prompts builtin for a small built-in set"
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


def is_jsonl(path: Path) -> bool:
    """Return whether a file contains JSON lines rather than plain text."""
    if path.suffix.lower() in JSON_SUFFIXES:
        return True
    first = next((line for line in read_text(path).split("\n") if line.strip()), "")
    try:
        return isinstance(json.loads(first), dict)
    except (ValueError, RecursionError):
        return False


def convert_any_record(record: Record, path: Path) -> Prompt:
    """Convert a record: `prompt`, `question`, the first of `turns`, or a chat's user messages."""
    found = text_of(record, "prompt") or text_of(record, "question")
    found = found or first_turn(record) or _user_texts(record)
    if not found:
        raise BadInputError(
            "expected an object with a non-empty text 'prompt' (or 'question', 'turns', 'messages'; for training 'text'), got "
            + (f"the keys {', '.join(sorted(record))}" if record else "an empty object")
        )
    return Prompt(found, _task_of(record) or path.stem)


def text_of(record: Record, key: str) -> str:
    """Return the text of a key; empty if it is absent, blank or no text."""
    text = record.get(key)
    return text if isinstance(text, str) and text.strip() else ""


def first_turn(record: Record) -> str:
    """Return the first text of `turns`; empty if there is none."""
    turns = record.get("turns")
    return text_of({"first": turns[0]}, "first") if isinstance(turns, list) and turns else ""


def _user_texts(record: Record) -> str:
    """Return all user messages of a chat, separated by blank lines."""
    messages = next((found for key in CHAT_KEYS if isinstance(found := record.get(key), list)), [])
    texts = [_message_text(message) for message in messages if isinstance(message, dict)]
    return "\n\n".join(text for text in texts if text)


def _message_text(message: Record) -> str:
    if message.get("role", message.get("from")) not in USER_ROLES:
        return ""
    content = message.get("content", message.get("value"))
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text") if isinstance(part, dict) else part for part in parts]
    return "".join(text for text in texts if isinstance(text, str))


def _task_of(record: Record) -> str:
    for key in TASK_KEYS:
        if record.get(key) is not None:
            if not text_of(record, key):
                raise BadInputError(
                    f"expected a text as {key!r} (the prompt's task), got {record[key]!r:.60}"
                )
            return text_of(record, key).strip()
    return ""


def _at_least_one(prompts: list[PromptT], path: Path) -> list[PromptT]:
    if not prompts:
        raise BadInputError(f"expected at least one prompt in {path.name}, got an empty file")
    return prompts
