"""Prompts from the command line, standard input, or a file with one JSON object per line."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from inspect import signature
from pathlib import Path

from secondguess.errors import BadInputError

FIELDS = ("prompt", "messages", "metadata")
"""Fields of a line other than sampling settings."""


@dataclass(frozen=True)
class Request:
    """A prompt with its own settings and metadata.

    Args:
        prompt: text, or the messages of a conversation.
        settings: sampling settings that override those of the command line.
        source: origin of the prompt, for error messages.
        metadata: `{"metadata": value}`, repeated in the output of `--json`; empty if absent.
    """

    prompt: str | list[dict[str, str]]
    settings: Mapping[str, object] = field(default_factory=dict)
    source: str = "prompt"
    metadata: Mapping[str, object] = field(default_factory=dict)

    @property
    def shown(self) -> str:
        """The prompt as displayed: the text, or one line per message of a conversation."""
        if isinstance(self.prompt, str):
            return self.prompt
        return "".join(f"{message['role']}: {message['content']}\n" for message in self.prompt)


def read_requests(prompt: str | None, prompt_file: Path | None) -> list[Request]:
    """Return the requests given by a prompt argument or a prompt file.

    Args:
        prompt: the prompt, or `-` for standard input.
        prompt_file: a file with one JSON object per line.

    Raises:
        BadInputError: neither or both are given, a prompt is empty, or the file is invalid.
    """
    if (prompt is None) == (prompt_file is None):
        got = "neither" if prompt is None else "both"
        raise BadInputError(f"expected a PROMPT (or - for standard input) or a --prompt-file, got {got}")
    if prompt_file is not None:
        return _read_file(prompt_file)
    return [_read_argument(prompt) if prompt != "-" else _read_standard_input()]


def _read_argument(prompt: str | None) -> Request:
    text = prompt or ""
    if not text:
        raise BadInputError("expected a prompt with at least one character, got an empty one")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise BadInputError("expected a prompt in UTF-8, got bytes that are not; convert it first") from None
    return Request(text)


def _read_standard_input() -> Request:
    text = _decode(sys.stdin.buffer.read(), "standard input")
    if not text:
        raise BadInputError("expected a prompt on standard input, got nothing")
    return Request(text, source="standard input")


def _read_file(path: Path) -> list[Request]:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise BadInputError(f"expected a readable prompt file, got {path}: {error.strerror}") from None
    # Split at \n only: JSON strings may contain the other Unicode line separators.
    text = _decode(content, str(path)).removeprefix("\ufeff")
    lines = enumerate(text.split("\n"), start=1)
    requests = [_read_line(line, f"{path} line {number}") for number, line in lines if line.strip()]
    if not requests:
        raise BadInputError(f"expected at least one line with a prompt in {path}, got none")
    return requests


def _read_line(line: str, source: str) -> Request:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadInputError(
            f"{source}: expected one JSON object, got text that is not JSON ({error})"
        ) from None
    if not isinstance(record, dict):
        raise BadInputError(
            f'{source}: expected an object such as {{"prompt": "..."}}, got {line.strip()[:40]}'
        )
    _refuse_unknown_fields(record, source)
    metadata = {name: value for name, value in record.items() if name == "metadata"}
    return Request(_prompt(record, source), _settings(record, source), source, metadata)


def _prompt(record: Mapping[str, object], source: str) -> str | list[dict[str, str]]:
    from secondguess.prompts import validate_messages

    if ("prompt" in record) == ("messages" in record):
        got = "both" if "prompt" in record else "neither"
        raise BadInputError(f"{source}: expected either prompt or messages, got {got}")
    if "messages" in record:
        try:
            return validate_messages(record["messages"])
        except BadInputError as error:
            raise BadInputError(f"{source}: {error}") from None
    prompt = record["prompt"]
    if not isinstance(prompt, str) or not prompt:
        raise BadInputError(f"{source}: expected a field prompt with at least one character, got {prompt!r}")
    _require_valid_text(prompt, source)
    return prompt


def _setting_names() -> list[str]:
    from secondguess.sampling import SamplingParams

    return [setting.name for setting in fields(SamplingParams)]


def _refuse_unknown_fields(record: Mapping[str, object], source: str) -> None:
    """Refuse fields that are not sampling settings, with a hint for options of `load`."""
    from secondguess.api import load

    settings = _setting_names()
    known = [*FIELDS, *settings]
    for name in record:
        if name in known:
            continue
        if name in signature(load).parameters:
            option = f"--{name.replace('_', '-')}"
            raise BadInputError(
                f"{source}: expected sampling settings, got {name!r}, which is the same for every line; "
                f"use {option}"
            )
        meant = get_close_matches(name, known, n=1, cutoff=0.8)
        advice = (
            f"did you mean {meant[0]!r}?" if meant else "if it is data of your own, put it under metadata"
        )
        raise BadInputError(
            f"{source}: expected the fields {', '.join(FIELDS)} and sampling settings ({', '.join(settings)}), "
            f"got {name!r}; {advice}"
        )


def _settings(record: Mapping[str, object], source: str) -> dict[str, object]:
    """Return the sampling settings among a line's fields."""
    settings = {name: record[name] for name in _setting_names() if name in record}
    bias = settings.get("logit_bias")
    if isinstance(bias, dict):
        # JSON object keys are strings.
        settings["logit_bias"] = {_token_id(token, source): value for token, value in bias.items()}
    return settings


def read_logit_bias(entries: list[str]) -> dict[int, float]:
    """Parse the values of `--logit-bias TOKEN=VALUE` into token id -> bias.

    Raises:
        BadInputError: a value has another form, or a token is given twice.
    """
    bias: dict[int, float] = {}
    for entry in entries:
        token, _, value = entry.partition("=")
        try:
            key, number = int(token), float(value)
        except ValueError:
            raise BadInputError(f"expected --logit-bias TOKEN=VALUE such as 198=-5, got {entry!r}") from None
        if key in bias:
            raise BadInputError(f"expected one --logit-bias per token, got two for {key}")
        bias[key] = number
    return bias


def _token_id(text: str, source: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise BadInputError(f"{source}: expected token ids as keys of logit_bias, got {text!r}") from None


def _decode(content: bytes, source: str) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        byte = f"0x{content[error.start]:02x} at byte {error.start}"
        raise BadInputError(
            f"expected {source} in UTF-8, got {byte}; convert it first (iconv does)"
        ) from None


def _require_valid_text(text: str, source: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise BadInputError(
            f"{source}: expected text, got half of a surrogate pair (a lone \\ud8xx)"
        ) from None
