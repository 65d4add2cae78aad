"""Validation of the names that loading accepts, and lookup of a model's directory.

Imports neither torch nor Transformers, so that the command line rejects a wrong name at once.
Every check raises `BadInputError`, with the known names.
"""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

from secondguess.builtin import builtin_paths
from secondguess.errors import BadInputError, CheckpointError, suggestion
from secondguess.runtime.weight_format import QUANTIZATIONS

DTYPE_NAMES = ("float64", "float32", "bfloat16", "float16")
ADAPTER = "adapter_config.json"
CACHED = "models--"
"""Prefix of the folders of models in the Hugging Face cache."""
RUNTIMES = ("auto", "native", "fused", "graphs", "transformers")


def is_gguf(path: str | Path) -> bool:
    """Return whether a path is that of a GGUF file, by its name."""
    return Path(path).suffix.lower() == ".gguf" and not Path(path).is_dir()


def check_dtype(name: str) -> None:
    """Check the name of a dtype."""
    _require(name in ("auto", *DTYPE_NAMES), f"dtype auto, {', '.join(DTYPE_NAMES)}", name)


def check_device(name: str) -> None:
    """Check the form of a device name; `pick_device` checks that the device exists."""
    known = re.fullmatch(r"auto|cpu|cuda(:[0-9]+)?", name) is not None
    _require(known, "device auto, cpu, cuda or cuda:N", name)


def check_quantization(name: str | None) -> None:
    """Check the name of a quantization; None is no quantization."""
    _require(name is None or name in QUANTIZATIONS, f"quantize {', '.join(QUANTIZATIONS)} or nothing", name)


def check_runtime(name: str) -> None:
    """Check the name of a runtime."""
    _require(name in RUNTIMES, f"runtime {', '.join(RUNTIMES)}", name)


def _require(known: bool, expected: str, name: str | None) -> None:
    if not known:
        raise BadInputError(f"expected {expected}, got {name!r}")


def find_checkpoint(name: str) -> str:
    """Return the local directory of a model, or its file in GGUF.

    Args:
        name: a directory, a GGUF file, a repository in the local Hugging Face cache, `builtin` or
            `builtin-draft`.

    Raises:
        CheckpointError: if there is none; the message lists the places that were searched.
    """
    if name in ("builtin", "builtin-draft"):
        target, drafter = builtin_paths()
        return str(target if name == "builtin" else drafter)
    directory = Path(name)
    if is_gguf(directory):
        return _find_gguf(name)
    if directory.is_dir():
        _refuse_adapter(directory)
        if not (directory / "config.json").is_file():
            raise CheckpointError(
                f"expected a model directory in Transformers format, got {name!r} without a config.json"
            )
        return name
    # Repository names do not start like a path and have at most two parts, organisation and name.
    is_path = directory.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1
    found = None if is_path else find_in_cache(name) or find_in_cache(name, ADAPTER)
    if found is None:
        advice = (
            "check the path" if is_path else f"check the path, or fetch it first with `hf download {name}`"
        )
        raise CheckpointError(
            f"expected a model directory or a model in the local Hugging Face cache, got {name!r}, "
            f"which is neither; {advice}{suggestion(name, ['builtin'])}"
        )
    _refuse_adapter(found.parent)
    return str(found.parent)


def _refuse_adapter(directory: Path) -> None:
    """Refuse the weights of a PEFT adapter, with or without those of a model beside them.

    Raises:
        CheckpointError: there are some.
    """
    is_whole = (directory / "config.json").is_file()
    if (directory / ADAPTER).is_file() and (any(directory.glob("adapter_model*")) or not is_whole):
        raise CheckpointError(
            f"expected a model, got {str(directory)!r} with a PEFT adapter ({ADAPTER}), which is not applied; merge it "
            "into its base model (`merge_and_unload` of PEFT), save that, and load it"
        )


def _find_gguf(name: str) -> str:
    parts = name.split("/")
    # An organisation and a name, or a name alone; the rest is the path in the repository.
    in_cache = (find_in_cache("/".join(parts[:size]), "/".join(parts[size:])) for size in (2, 1))
    found = name if Path(name).is_file() else next(filter(None, in_cache), None)
    if found is None:
        raise CheckpointError(
            f"expected a GGUF file, or one in the local Hugging Face cache as REPOSITORY/FILE, got {name!r}, "
            "which is neither; check the path, or fetch it first with `hf download REPOSITORY FILE`"
        )
    return str(found)


def find_in_cache(name: str, file: str = "config.json") -> Path | None:
    """Return a file of a repository in the local Hugging Face cache, or None."""
    import huggingface_hub

    try:
        found = huggingface_hub.try_to_load_from_cache(name, file)
    except (OSError, ValueError):  # not a valid repository name
        return None
    return Path(found) if isinstance(found, str) else None


def how_to_complete(folder: str) -> str:
    """Return advice on how to get files that a checkpoint directory lacks."""
    repository = repository_of(Path(folder))
    return f"fetch them with `hf download {repository}`" if repository else "copy them there, too"


def repository_of(path: Path) -> str | None:
    """Return the repository of a snapshot in the Hugging Face cache, or of a file in it; None for other paths."""
    for folder in path.parents:
        if folder.name == "snapshots" and folder.parent.name.startswith(CACHED):
            return folder.parent.name.removeprefix(CACHED).replace("--", "/", 1)
    return None


def download(name: str) -> None:
    """Download a repository, or a GGUF file of one, to the local Hugging Face cache.

    Args:
        name: REPOSITORY or REPOSITORY/FILE.

    Raises:
        CheckpointError: no network, no such repository or file, or no room on the disk.
    """
    if is_gguf(name) and name.count("/") < 2:
        raise CheckpointError(
            f"cannot download {name!r}: it names no repository. Write REPOSITORY/FILE.gguf."
        )
    from huggingface_hub import hf_hub_download, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        if is_gguf(name):
            organisation, repository, *path = name.split("/")
            hf_hub_download(f"{organisation}/{repository}", "/".join(path))
        else:
            snapshot_download(name)
    except (HfHubHTTPError, OSError, ValueError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise CheckpointError(
            f"cannot download {name!r}: {reason:.200} Check the name and the network, or copy the files to this machine."
        ) from error


def cached_folders() -> list[Path]:
    """Return the snapshots of models in the local Hugging Face cache: of each model that of `main`, or the newest."""
    from huggingface_hub.constants import HF_HUB_CACHE

    found = []
    for repository in sorted(Path(HF_HUB_CACHE).glob(f"{CACHED}*")):
        with suppress(OSError):
            revision = repository / "refs" / "main"
            named = repository / "snapshots" / revision.read_text().strip() if revision.is_file() else None
            snapshots = [path for path in (repository / "snapshots").iterdir() if path.is_dir()]
            found.append(
                named if named in snapshots else max(snapshots, key=lambda path: path.stat().st_mtime)
            )
    return found
