"""The names that loading takes, and the directory of a model. Imports neither torch nor Transformers, so that the command
line refuses a wrong name at once."""

from __future__ import annotations

import re
from pathlib import Path

from secondguess.builtin import builtin_paths
from secondguess.errors import BadInputError, CheckpointError

DTYPE_NAMES = ("float64", "float32", "bfloat16", "float16")
QUANTIZATIONS = ("int8",)
RUNTIMES = ("auto", "native", "fused", "transformers")


def check_dtype(name: str) -> None:
    """Refuse a dtype that does not exist here.

    Raises:
        BadInputError: naming those that do.
    """
    if name != "auto" and name not in DTYPE_NAMES:
        raise BadInputError(f"expected dtype auto, {', '.join(DTYPE_NAMES)}, got {name!r}")


def check_device(name: str) -> None:
    """Refuse what cannot be the name of a device; `pick_device` knows which devices this machine has.

    Raises:
        BadInputError: naming the forms that a device has.
    """
    if not re.fullmatch(r"auto|cpu|cuda(:[0-9]+)?", name):
        raise BadInputError(f"expected device auto, cpu, cuda or cuda:N, got {name!r}")


def check_quantization_name(name: str | None) -> None:
    """Refuse a quantization that does not exist; None is no quantization.

    Raises:
        BadInputError: naming those that do.
    """
    if name is not None and name not in QUANTIZATIONS:
        raise BadInputError(f"expected quantize {', '.join(QUANTIZATIONS)} or nothing, got {name!r}")


def check_runtime(kind: str) -> None:
    """Refuse the name of a runtime that does not exist.

    Raises:
        BadInputError: naming those that do.
    """
    if kind not in RUNTIMES:
        raise BadInputError(f"expected runtime {', '.join(RUNTIMES)}, got {kind!r}")


def find_checkpoint(name: str) -> str:
    """Return the directory of a model that is on this machine.

    Raises:
        CheckpointError: naming the places that were looked at.
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
    # What begins like a path, or has more parts than organisation and name, is the name of no repository.
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
    """Return the `config.json` of a repository in the local Hugging Face cache; None where it is not there."""
    import huggingface_hub

    try:
        found = huggingface_hub.try_to_load_from_cache(name, "config.json")
    except (OSError, ValueError):  # a name that no repository can have
        return None
    return Path(found) if isinstance(found, str) else None
