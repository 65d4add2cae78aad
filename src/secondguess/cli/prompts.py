"""Prompts from the command line, standard input, or a file with one JSON object per line."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from secondguess.errors import BadInputError, suggestion
from secondguess.images import read_image

FIELDS = ("prompt", "messages", "metadata")
"""Fields of a line other than sampling settings."""


@dataclass(frozen=True)
class Request:
    """A prompt with its own settings and metadata."""

    prompt: str | list[dict[str, Any]]
    settings: Mapping[str, object] = field(default_factory=dict)  # override those of the command line
    source: str = "prompt"  # of the prompt, for error messages
    metadata: Mapping[str, object] = field(default_factory=dict)  # for --json: {"metadata": value} or empty

    @property
    def shown(self) -> str:
        """The prompt as displayed: the text, or one line per message of a conversation."""
        if isinstance(self.prompt, str):
            return self.prompt
        shown = []
        for message in self.prompt:
            parts = message["content"]
            if isinstance(parts, list):
                parts = " ".join(part.get("text", "[image]") for part in parts)
            shown.append(f"{message['role']}: {parts}\n")
        return "".join(shown)


@contextmanager
def error_source(source: str) -> Iterator[None]:
    """Add the source of a prompt to the message of a `BadInputError`."""
    try:
        yield
    except BadInputError as error:
        raise BadInputError(f"{source}: {error}") from None


def read_requests(prompt: str | None, prompt_file: Path | None, images: Sequence[Path] = ()) -> list[Request]:
    """Return the requests of a prompt argument (`-` for standard input), with images before it, or of a prompt file."""
    if images and prompt is None:
        raise BadInputError("expected a PROMPT together with --image, got none; ask about the image")
    if prompt_file is not None and prompt is None:
        return _read_file(prompt_file)
    if prompt is None or prompt_file is not None:
        got = "neither" if prompt is None else "both"
        raise BadInputError(f"expected a PROMPT (or - for standard input) or a --prompt-file, got {got}")
    if prompt != "-":
        if not prompt:
            raise BadInputError("expected a prompt with at least one character, got an empty one")
        return [Request(_with_images(prompt, images))]
    return [Request(_with_images(read_input("-"), images), source="standard input")]


def read_input(name: str) -> str:
    """Return the text of a file, or of standard input for `-`."""
    source = "standard input" if name == "-" else name
    text = decode(sys.stdin.buffer.read() if name == "-" else _read_bytes(Path(name)), source)
    if not text:
        raise BadInputError(f"expected a text in {source}, got nothing")
    return text


def _with_images(text: str, images: Sequence[Path]) -> str | list[dict[str, Any]]:
    """Return a prompt, as a message if it has images."""
    if not images:
        return text
    parts = [{"type": "image", "image": read_image(_read_bytes(path), str(path))} for path in images]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


def _read_file(path: Path) -> list[Request]:
    requests = []
    # Split at \n only: JSON strings may contain the other Unicode line separators.
    for number, line in enumerate(read_text(path).removeprefix("\ufeff").split("\n"), start=1):
        source = f"{path} line {number}"
        if line.strip():
            with error_source(source):
                requests.append(_read_line(line, source))
    if not requests:
        raise BadInputError(f"expected at least one line with a prompt in {path}, got none")
    return requests


def _read_line(line: str, source: str) -> Request:
    from secondguess.configuration import LoadSettings
    from secondguess.sampling import SamplingParams

    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadInputError(
            f"expected one JSON object, got text that is not JSON ({error}); "
            'write a prompt as {"prompt": "..."}'
        ) from None
    if not isinstance(record, dict):
        raise BadInputError(f'expected an object such as {{"prompt": "..."}}, got {line.strip()[:40]}')
    names = list(SamplingParams.__dataclass_fields__)
    for name in record:
        if name not in (*FIELDS, *names):
            hint = suggestion(name, (*FIELDS, *names)) or "; data of your own goes under metadata"
            if name in LoadSettings.model_fields:
                hint = f"; give the option --{name.replace('_', '-')} to the command"
            raise BadInputError(
                f"expected the fields {', '.join(FIELDS)} and sampling settings ({', '.join(names)}), got {name!r}{hint}"
            )
    settings = {name: record[name] for name in names if name in record}
    if isinstance(settings.get("logit_bias"), dict):
        # JSON object keys are strings.
        settings["logit_bias"] = {_token_id(key): value for key, value in settings["logit_bias"].items()}
    metadata = {name: value for name, value in record.items() if name == "metadata"}
    return Request(_prompt(record), settings, source, metadata)


def _prompt(record: Mapping[str, Any]) -> str | list[dict[str, str]]:
    from secondguess.prompts import validate_messages

    if ("prompt" in record) == ("messages" in record):
        got = "both" if "prompt" in record else "neither"
        raise BadInputError(f"expected either prompt or messages, got {got}")
    if "messages" in record:
        return validate_messages(record["messages"])
    prompt = record["prompt"]
    if not isinstance(prompt, str) or not prompt:
        raise BadInputError(f"expected a field prompt with at least one character, got {prompt!r}")
    return prompt


def read_logit_bias(entries: list[str]) -> dict[int, float]:
    """Parse the values of `--logit-bias TOKEN=VALUE` into token id -> bias."""
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


def _token_id(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise BadInputError(f"expected token ids as keys of logit_bias, got {text!r}") from None


def read_text(path: Path) -> str:
    """Return the text of a file."""
    return decode(_read_bytes(path), str(path))


def read_template(path: Path | None) -> str | None:
    """Return the chat template of a file; None without a file."""
    if path is None:
        return None
    source = read_text(path)
    if not source.strip():
        raise BadInputError(f"expected a chat template in {path}, got an empty file")
    from secondguess.checkpoint.classes import check_chat_template

    check_chat_template(source, str(path))
    return source


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise BadInputError(f"expected a readable file, got {path}: {error.strerror}") from None


def decode(content: bytes, source: str) -> str:
    """Return bytes as text; `source` names them in the message of an error."""
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        byte = f"0x{content[error.start]:02x} at byte {error.start}"
        raise BadInputError(
            f"expected {source} in UTF-8, got {byte}; convert it first (iconv does)"
        ) from None
