"""`secondguess.toml`: settings that `tune` selected for a model on a machine.

    schema = 1
    [load]     arguments of `load()`; an absent key has the default of `load()`
    [tuned]    measurements behind the selection, for readers, `export` and `inspect`

Commands read it with `--config FILE`. A file with an unknown key or an invalid value is refused.
"""

from __future__ import annotations

import json
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import Field, NonNegativeFloat, field_validator

from secondguess.builtin import builtin_paths
from secondguess.core import MAX_DRAFT_LENGTH
from secondguess.errors import BadInputError
from secondguess.validation import Settings, Text

SCHEMA = 1

Rate = Annotated[float, Field(ge=0, le=1)]
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
# A key of a TOML table is a text, and an array a list.
BatchSize = Annotated[int, Field(ge=1, le=999_999, strict=False)]
Rates = Annotated[tuple[Rate, ...], Field(strict=False)]


class Table(Settings):
    """Table of the file; None is an absent key, and descriptions become the comments of the keys."""

    def given(self) -> dict[str, Any]:
        """Return the keys that are present, with their values."""
        return self.model_dump(exclude_none=True)

    def to_toml(self) -> list[str]:
        """Return one line per key that is present."""
        fields = type(self).model_fields
        return [f"{key} = {_toml(value)}  # {fields[key].description}" for key, value in self.given().items()]


class LoadSettings(Table):
    """Arguments of `load` by name; None leaves a choice to `load`, which also validates names."""

    model: Text = Field(description="the target: a directory, a cached model's name, or builtin")
    drafter: Text | None = Field(
        default=None, description="none, model:PATH, ngram, suffix, early-exit, medusa, ..."
    )
    verifier: Text | None = Field(
        default=None, description="rule that accepts draft tokens; auto is always lossless"
    )
    controller: Text | None = Field(default=None, description="chooses the draft length")
    dtype: Text | None = Field(default=None, description="compute dtype")
    device: Text | None = Field(default=None, description="cpu or cuda[:N]")
    quantize: Text | None = Field(
        default=None, description="int8 or int4: the target's weights in 8 or 4 bits"
    )
    drafter_quantize: Text | None = Field(
        default=None, description="int8 or int4: the draft model's weights in 8 or 4 bits"
    )
    runtime: Text | None = Field(default=None, description="runtime of the target")
    share_history: bool | None = Field(
        default=None, description="draft from recent outputs of other prompts, too"
    )

    @field_validator("drafter")
    @classmethod
    def _without_auto(cls, name: str | None) -> str | None:
        return None if name == "auto" else name  # the default


class TuningRecord(Table):
    """Measurements behind the selection. All are optional, and `load` reads none of them."""

    date: Text | None = Field(default=None, description="date of the measurement")
    processor: Text | None = Field(default=None, description="processor of the measurement")
    num_threads: Annotated[int, Field(ge=1, le=65_536)] | None = Field(
        default=None, description="number of CPU threads"
    )
    workload: Text | None = Field(default=None, description="prompts of the measurement")
    workload_sha256: Sha256 | None = Field(
        default=None, description="SHA-256 of these prompts, joined by NUL"
    )
    model_sha256: Sha256 | None = Field(
        default=None, description="SHA-256 of the target's weights; others are refused"
    )
    acceptance_rate: Rate | None = Field(default=None, description="accepted / drafted tokens")
    acceptance_by_position: Rates | None = Field(
        default=None, description="the same by position in the draft"
    )
    draft_length: Annotated[int, Field(ge=0, le=MAX_DRAFT_LENGTH)] | None = Field(
        default=None, description="the best constant draft length; 0: best without drafts"
    )
    cost_ratio: NonNegativeFloat | None = Field(
        default=None, description="time of a draft step relative to a target pass (c)"
    )
    speedup: dict[BatchSize, NonNegativeFloat] | None = Field(
        default=None, description="speed relative to plain decoding, by batch size"
    )


@dataclass(frozen=True)
class Configuration:
    """Content of a configuration file."""

    load: LoadSettings
    tuned: TuningRecord = field(default_factory=TuningRecord)

    def to_toml(self) -> str:
        """Return the text of the file, with a comment for every key."""
        lines = ["# Written by secondguess; read with --config FILE. A key that is left out has its default."]
        lines += [f"schema = {SCHEMA}", "", "[load]", *self.load.to_toml()]
        if self.tuned.given():
            lines += ["", "[tuned]", *self.tuned.to_toml()]
        return "\n".join(lines) + "\n"


def _toml(value: object) -> str:
    """Return a value in TOML: as JSON, except for `=` in tables and an escaped delete character."""
    return json.dumps(value, ensure_ascii=False, separators=(", ", " = ")).replace("\x7f", "\\u007f")


class _Tables(Settings):
    load: dict[str, Any] = Field(default_factory=dict)
    tuned: dict[str, Any] = Field(default_factory=dict)


TableT = TypeVar("TableT", bound=Table)


def read_configuration(path: str | Path) -> Configuration:
    """Read a configuration file, written by `tune` or by hand.

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
    except (ValueError, RecursionError) as error:
        raise BadInputError(
            f"expected a configuration in TOML and UTF-8, got {path}, which is not: {error}"
        ) from None
    schema = document.pop("schema", "none")
    if isinstance(schema, bool) or schema != SCHEMA:
        raise BadInputError(
            f"{path}: expected schema = {SCHEMA}, got {schema!r:.60}; tune again with this version, or write it there"
        )
    try:
        tables = _Tables(**document)
        return Configuration(
            _read_table(LoadSettings, "load", tables.load), _read_table(TuningRecord, "tuned", tables.tuned)
        )
    except BadInputError as error:
        raise BadInputError(f"{path}: {error}") from None


def _read_table(table: type[TableT], name: str, values: dict[str, Any]) -> TableT:
    try:
        return table(**values)
    except BadInputError as error:
        raise BadInputError(f"[{name}]: {error}") from None


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
    from secondguess.checkpoint.weight_files import hash_weights

    expected, model = configuration.tuned.model_sha256, configuration.load.model
    if expected is None:
        return
    found = hash_weights(Path(find_checkpoint(model)))
    if found != expected:
        raise BadInputError(
            f"expected the weights of {model} that {source} was tuned for (SHA-256 {expected[:12]}...), got others "
            f"({found[:12]}...); tune again, or take model_sha256 out of the file to use it all the same"
        )
