"""Validated access to the fields of a trained drafter's `config.json`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from secondguess.errors import CheckpointError


@contextmanager
def config_errors(folder: Path) -> Iterator[None]:
    """Convert errors raised while reading a `config.json` into a `CheckpointError` with its path.

    Raises:
        CheckpointError: in place of a `KeyError`, `TypeError`, `ValueError` or `AttributeError`.
    """
    try:
        yield
    except KeyError as error:
        raise CheckpointError(f"expected the field {error} in {folder / 'config.json'}, got none") from error
    except (TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"expected a drafter that fits in {folder / 'config.json'}, got: {error}"
        ) from error


def whole_number(config: Mapping[str, Any], key: str, least: int = 1) -> int:
    """Return an integer field of at least `least`; call it inside `config_errors`."""
    value = config[key]
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{key} of {value!r}, which should be a whole number from {least} on")
    return value


def get_bool(config: Mapping[str, Any], key: str, default: bool) -> bool:
    """Return a boolean field; call it inside `config_errors`."""
    value = config.get(key, default)
    if not isinstance(value, bool):
        raise ValueError(f"{key} of {value!r}, which should be true or false")
    return value


def require_same(what: str, found: int, expected: int, folder: Path) -> None:
    """Raise if a drafter was trained for a target of another size.

    Raises:
        CheckpointError: `found` differs from `expected`; the message names the size `what`.
    """
    if found != expected:
        raise CheckpointError(
            f"expected a drafter for a target with a {what} of {expected}, got one for {found} in {folder}; "
            "use the target that it was trained for"
        )
