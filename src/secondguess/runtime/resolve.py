"""Validation of the names that loading accepts, and lookup of a model's directory.

Imports neither torch nor Transformers, so that the command line rejects a wrong name at once.
"""

from __future__ import annotations

import re
from pathlib import Path

from secondguess.builtin import builtin_paths
from secondguess.errors import BadInputError, CheckpointError

DTYPE_NAMES = ("float64", "float32", "bfloat16", "float16")
QUANTIZATIONS = ("int8",)
RUNTIMES = ("auto", "native", "fused", "transformers")


def check_dtype(name: str) -> None:
    """Check the name of a dtype.

    Raises:
        BadInputError: if it is unknown; the message lists the known names.
    """
    if name != "auto" and name not in DTYPE_NAMES:
        raise BadInputError(f"expected dtype auto, {', '.join(DTYPE_NAMES)}, got {name!r}")


def check_device(name: str) -> None:
    """Check the form of a device name; `pick_device` checks that the device exists.

    Raises:
        BadInputError: if the form is unknown; the message lists the known forms.
    """
    if not re.fullmatch(r"auto|cpu|cuda(:[0-9]+)?", name):
        raise BadInputError(f"expected device auto, cpu, cuda or cuda:N, got {name!r}")


def check_quantization_name(name: str | None) -> None:
    """Check the name of a quantization; None is no quantization.

    Raises:
        BadInputError: if it is unknown; the message lists the known names.
    """
    if name is not None and name not in QUANTIZATIONS:
        raise BadInputError(f"expected quantize {', '.join(QUANTIZATIONS)} or nothing, got {name!r}")


def check_runtime(kind: str) -> None:
    """Check the name of a runtime.

    Raises:
        BadInputError: if it is unknown; the message lists the known names.
    """
    if kind not in RUNTIMES:
        raise BadInputError(f"expected runtime {', '.join(RUNTIMES)}, got {kind!r}")


def find_checkpoint(name: str) -> str:
    """Return the local directory of a model.

    Args:
        name: a directory, a repository in the local Hugging Face cache, `builtin` or
            `builtin-draft`.

    Raises:
        CheckpointError: if there is none; the message lists the places that were searched.
    """
    if name in ("builtin", "builtin-draft"):
        target, drafter = builtin_paths()
        return str(target if name == "builtin" else drafter)
    directory = Path(name)
    if directory.is_dir():
        if not (directory / "config.json").is_file():
            raise CheckpointError(
                f"expected a model directory in Transformers format, got {name} without a config.json"
            )
        return name
    # Repository names do not start like a path and have at most two parts, organisation and name.
    is_path = directory.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1
    found = None if is_path else _find_in_cache(name)
    if found is None:
        advice = (
            "check the path" if is_path else f"check the path, or fetch it first with `hf download {name}`"
        )
        raise CheckpointError(
            f"expected a model directory or a model in the local Hugging Face cache, got {name!r}, "
            f"which is neither; {advice}"
        )
    return str(found.parent)


def _find_in_cache(name: str) -> Path | None:
    """Return the `config.json` of a repository in the local Hugging Face cache, or None."""
    import huggingface_hub

    try:
        found = huggingface_hub.try_to_load_from_cache(name, "config.json")
    except (OSError, ValueError):  # not a valid repository name
        return None
    return Path(found) if isinstance(found, str) else None
