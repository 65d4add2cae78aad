"""Where prompts come from: the command line, standard input, or a file with one JSON object per line."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from inspect import signature
from pathlib import Path

from secondguess.errors import BadInputError


@dataclass(frozen=True)
class Request:
    """A prompt with the settings that came with it, and where it stood (for error messages)."""

    prompt: str
    settings: Mapping[str, object] = field(default_factory=dict)
    source: str = "prompt"


def read_requests(prompt: str | None, prompt_file: Path | None) -> list[Request]:
    """The requests of one command.

    Raises:
        BadInputError: no prompt or two sources of them, an empty one, or a file that cannot be understood.
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
    # Only \n ends a line: the other line ends of Unicode may stand inside a JSON string.
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
    prompt = record.pop("prompt", None)
    if not isinstance(prompt, str) or not prompt:
        raise BadInputError(f"{source}: expected a field prompt with at least one character, got {prompt!r}")
    _require_valid_text(prompt, source)
    return Request(prompt, _settings(record, source), source)


def _settings(record: Mapping[str, object], source: str) -> dict[str, object]:
    """The sampling settings among a line's fields.

    Prompt sets carry fields of their own (`task_id`, `test`), which are not ours to judge; but what looks
    like a setting and is none would be ignored silently, so that is refused. So is what belongs to `load`:
    one team answers all lines.
    """
    from secondguess.api import load
    from secondguess.sampling import SamplingParams

    known = [setting.name for setting in fields(SamplingParams)]
    for name in record:
        if name in signature(load).parameters:
            option = f"--{name.replace('_', '-')}"
            raise BadInputError(
                f"{source}: expected sampling settings, got {name!r}, which is the same for every line; "
                f"use {option}"
            )
        if name not in known and (meant := get_close_matches(name, known, n=1, cutoff=0.8)):
            raise BadInputError(f"{source}: unknown setting {name!r}; did you mean {meant[0]!r}?")
    settings = {name: value for name, value in record.items() if name in known}
    bias = settings.get("logit_bias")
    if isinstance(bias, dict):
        # The keys of a JSON object are texts.
        settings["logit_bias"] = {_token_id(token, source): value for token, value in bias.items()}
    return settings


def read_logit_bias(entries: list[str]) -> dict[int, float]:
    """The values of `--logit-bias TOKEN=VALUE`.

    Raises:
        BadInputError: not of that form, or a token named twice.
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
