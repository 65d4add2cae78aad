"""`secondguess.toml`: settings that `tune` selected for a model on a machine.

    schema = 1
    [load]     arguments of `load()`; an absent key has the default of `load()`
    [tuned]    measurements behind the selection, for readers, `export` and `inspect`

Commands read it with `--config FILE`. A file with an unknown key or an invalid value is refused.
"""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from secondguess.builtin import builtin_paths
from secondguess.core import MAX_DRAFT_LENGTH
from secondguess.errors import BadInputError

SCHEMA = 1
SHA256 = re.compile("[0-9a-f]{64}")


class InvalidValue(Exception):
    """Invalid value of a key; the message describes valid ones."""


# Checks of values: each returns the normalised value, or raises `InvalidValue` with the valid ones.


def _text(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidValue('a text in quotes, such as "auto"')
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidValue("a text that can be written in UTF-8") from None
    return value


def _sha256(value: object) -> str:
    if not isinstance(value, str) or not SHA256.fullmatch(value):
        raise InvalidValue("a SHA-256 of 64 hexadecimal digits")
    return value


def _integer(low: int, high: int) -> Callable[[object], int]:
    def check(value: object) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise InvalidValue(f"a whole number from {low} to {high}")
        return value

    return check


def _number(value: object, high: float = math.inf) -> float:
    expected = f"a number from 0 to {high:g}" if math.isfinite(high) else "a number of at least 0"
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise InvalidValue(expected)
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not 0 <= number <= high or math.isinf(number):
        raise InvalidValue(expected)
    return number


def _rate(value: object) -> float:
    return _number(value, high=1)


def _rates(value: object) -> tuple[float, ...]:
    try:
        if isinstance(value, list | tuple):
            return tuple(map(_rate, value))
    except InvalidValue:
        pass
    raise InvalidValue("a list of numbers from 0 to 1, such as [0.8, 0.6]")


def _speedup(value: object) -> dict[int, float]:
    """Check a table of speed-ups by batch size; keys are integers here and strings in TOML."""
    try:
        if isinstance(value, Mapping):
            return {_batch_size(size): _number(ratio) for size, ratio in value.items()}
    except InvalidValue:
        pass
    raise InvalidValue('a table of batch size = speed-up, such as { "1" = 2.3 }')


def _batch_size(value: object) -> int:
    if isinstance(value, str) and re.fullmatch("[1-9][0-9]{0,5}", value, re.ASCII):
        return int(value)
    return _integer(1, 999_999)(value)


def _key(check: Callable[[object], Any], meaning: str, *, required: bool = False) -> Any:
    """Define a key of a table by its check and its meaning, the comment written beside the key."""
    metadata = {"check": check, "meaning": meaning}
    return field(metadata=metadata) if required else field(default=None, metadata=metadata)


class _TableSchema:
    """Dataclass whose fields are the keys of one table of the file; None is an absent key."""

    def __post_init__(self) -> None:
        for key in fields(self):  # type: ignore[arg-type]
            value = getattr(self, key.name)
            if value is None and key.default is None:
                continue
            try:
                object.__setattr__(self, key.name, key.metadata["check"](value))
            except InvalidValue as unfit:
                raise BadInputError(
                    f"expected {key.name} to be {unfit}, got {_shortened_repr(value)}"
                ) from None

    def given(self) -> dict[str, Any]:
        """Return the keys that are present, with their values."""
        names = [key.name for key in fields(self)]  # type: ignore[arg-type]
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


@dataclass(frozen=True)
class LoadSettings(_TableSchema):
    """Arguments of `load` by name; None leaves a choice to `load`, which also validates names."""

    model: str = _key(_text, "the target: a directory, a cached model's name, or builtin", required=True)
    drafter: str | None = _key(_text, "drafter: none, model:PATH, ngram, suffix, early-exit, medusa, ...")
    verifier: str | None = _key(_text, "verifier; auto is always lossless")
    controller: str | None = _key(_text, "how far to guess")
    dtype: str | None = _key(_text, "what computes")
    device: str | None = _key(_text, "where it computes")
    quantize: str | None = _key(_text, "int8: the target's weights in 8 bits")
    drafter_quantize: str | None = _key(_text, "int8: the draft model's weights in 8 bits")
    runtime: str | None = _key(_text, "runtime of the target")


@dataclass(frozen=True)
class TuningRecord(_TableSchema):
    """Measurements behind the selection. All are optional, and `load` reads none of them."""

    date: str | None = _key(_text, "date of the measurement")
    processor: str | None = _key(_text, "on what")
    num_threads: int | None = _key(_integer(1, 65_536), "number of CPU threads")
    workload: str | None = _key(_text, "on which prompts")
    workload_sha256: str | None = _key(_sha256, "SHA-256 of their file")
    model_sha256: str | None = _key(_sha256, "SHA-256 of the target's weights; others are refused")
    acceptance_rate: float | None = _key(_rate, "accepted / drafted")
    acceptance_by_position: tuple[float, ...] | None = _key(_rates, "the same by position in the draft")
    draft_length: int | None = _key(
        _integer(0, MAX_DRAFT_LENGTH), "the best constant draft length; 0: best without drafts"
    )
    cost_ratio: float | None = _key(_number, "one draft step over one target pass")
    speedup: Mapping[int, float] | None = _key(_speedup, "over plain decoding, by batch size")


@dataclass(frozen=True)
class Configuration:
    """Content of a configuration file."""

    load: LoadSettings
    tuned: TuningRecord = field(default_factory=TuningRecord)

    def to_toml(self) -> str:
        """Return the text of the file, with a comment for every key."""
        lines = ["# Written by secondguess; read with --config FILE. A key that is left out has its default."]
        lines += [f"schema = {SCHEMA}", "", "[load]", *_lines(self.load)]
        if self.tuned.given():
            lines += ["", "[tuned]", *_lines(self.tuned)]
        return "\n".join(lines) + "\n"

    def write(self, path: Path) -> None:
        """Write the file.

        Raises:
            BadInputError: the file cannot be written.
        """
        try:
            path.write_text(self.to_toml(), encoding="utf-8", newline="\n")
        except OSError as error:
            raise BadInputError(f"expected a place to write {path} to, got: {error.strerror}") from None


def read_configuration(path: str | Path) -> Configuration:
    """Read a configuration file, written by `Configuration.write` or by hand.

    Raises:
        BadInputError: a file that is missing, not TOML, of another schema, or with unknown keys or
            invalid values.
    """
    try:
        document = tomllib.loads(Path(path).read_bytes().decode())
    except OSError as error:
        raise BadInputError(
            f"expected a configuration file, got {path}: {error.strerror}; `secondguess tune` writes one"
        ) from None
    except UnicodeDecodeError as error:
        raise BadInputError(
            f"expected a configuration in TOML, got {path} with bytes that are not UTF-8 (at {error.start}); "
            "give the file that `secondguess tune` wrote"
        ) from None
    except (ValueError, RecursionError) as error:
        raise BadInputError(f"expected a configuration in TOML, got {path}, which is not: {error}") from None
    try:
        return _parse(document)
    except BadInputError as error:
        raise BadInputError(f"{path}: {error}") from None


def _parse(document: Mapping[str, Any]) -> Configuration:
    schema = document.get("schema")
    if isinstance(schema, bool) or schema != SCHEMA:
        got = "none" if schema is None else _shortened_repr(schema)
        raise BadInputError(f"expected schema = {SCHEMA}, got {got}; tune again with this version")
    _refuse_unknown(document, ["schema", "load", "tuned"], "at the top")
    for table in ("load", "tuned"):
        if not isinstance(document.get(table, {}), dict):
            raise BadInputError(
                f"expected {table} to be a table [{table}], got {_shortened_repr(document[table])}"
            )
    load, tuned = document.get("load", {}), document.get("tuned", {})
    _refuse_unknown(load, [key.name for key in fields(LoadSettings)], "in [load]")
    _refuse_unknown(tuned, [key.name for key in fields(TuningRecord)], "in [tuned]")
    if "model" not in load:
        raise BadInputError('expected a model in [load], got none; write model = "..." there')
    return Configuration(LoadSettings(**load), TuningRecord(**tuned))


def _refuse_unknown(table: Mapping[str, Any], known: list[str], where: str) -> None:
    for key in table:
        if key not in known:
            meant = get_close_matches(key, known, n=1)
            hint = f"did you mean {meant[0]!r}?" if meant else f"take it out (known: {', '.join(known)})"
            raise BadInputError(f"expected no key {_shortened_repr(key)} {where}; {hint}")


def same_model(first: str, second: str) -> bool:
    """Return True if two names refer to the same model, as far as names and directories show."""
    if first == second:
        return True
    places = [_model_directory(name) for name in (first, second)]
    return None not in places and places[0] == places[1]


def _model_directory(name: str) -> Path | None:
    if name in ("builtin", "builtin-draft"):
        return builtin_paths()[name == "builtin-draft"].resolve()
    path = Path(name)
    return path.resolve() if path.is_dir() else None


def require_same_model(configuration: Configuration, model: str, source: Path) -> None:
    """Refuse a configuration that was written for another model.

    Raises:
        BadInputError: the message names both models.
    """
    if not same_model(configuration.load.model, model):
        raise BadInputError(
            f"expected a configuration of the model {model}, got {source}, which is one of "
            f"{configuration.load.model}; give no --model, or tune {model}"
        )


def require_same_weights(configuration: Configuration, source: Path) -> None:
    """Refuse a configuration whose model's weights have changed; without a stored hash, accept it.

    Reads all weights, once per process (`hash_weights`).

    Raises:
        BadInputError: the weights have another hash.
    """
    from secondguess.checkpoint.resolve import find_checkpoint
    from secondguess.checkpoint.weights import hash_weights

    expected, model = configuration.tuned.model_sha256, configuration.load.model
    if expected is None:
        return
    found = hash_weights(Path(find_checkpoint(model)))
    if found != expected:
        raise BadInputError(
            f"expected the weights of {model} that {source} was tuned for (SHA-256 {expected[:12]}...), got others "
            f"({found[:12]}...); tune again, or take model_sha256 out of the file to use it all the same"
        )


def _lines(table: _TableSchema) -> list[str]:
    meanings = {key.name: key.metadata["meaning"] for key in fields(table)}  # type: ignore[arg-type]
    return [f"{name} = {_toml(value)}  # {meanings[name]}" for name, value in table.given().items()]


def _toml(value: object) -> str:
    if isinstance(value, str):
        # A JSON string is a TOML string, except that TOML requires an escaped delete character.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, dict):
        return "{ " + ", ".join(f'"{key}" = {_toml(each)}' for key, each in value.items()) + " }"
    if isinstance(value, tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return repr(value)


def _shortened_repr(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
