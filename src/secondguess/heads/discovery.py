"""Drafters on this machine for a target: trained ones in its checkpoint, beside it and in the local Hugging Face cache, and
small models beside it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from secondguess.checkpoint.gguf.config import ARCHITECTURES, DRAFTERS
from secondguess.checkpoint.gguf.file import peek_architecture
from secondguess.checkpoint.memory import MemoryEstimate, available_memory, head_memory, peak_memory
from secondguess.checkpoint.plan import Checkpoint
from secondguess.checkpoint.resolve import cached_folders, is_gguf, repository_of
from secondguess.checkpoint.weight_files import hash_weights, weight_files
from secondguess.errors import CheckpointError, SecondGuessError
from secondguess.heads.files import CONFIG, NAMED, config_errors, count_weights, read_config, read_provenance
from secondguess.heads.folders import find_own, kind_of
from secondguess.heads.formats import StoredHead, differ_by_padding, find_spelled

MAX_FOLDERS = 500
"""Number of folders that are looked at beside the target."""
KINDS = ("dspark", "eagle", "mtp", "gemma4-assistant", "medusa", "model", "early-exit", "layer-skip")
"""Kinds of trained drafters, those that gain most first."""
SMALL = 1 / 8
"""Largest size of a model that drafts without being named, as a share of the target's bytes, in files or in memory."""
NAMES_OF_TARGET = (
    "speculators_config.verifier.name_or_path",
    "base_model_name_or_path",
    "target_model_name_or_path",
)
"""Fields of `config.json` that name the target."""
SUFFIX_OF_FILE = re.compile(
    r"([-.](ud-|i\d[.-])?(i?q\d\w*|bf16|f16|f32|fp16|mxfp4\w*))?(-\d+-of-\d+)?\.gguf$"
)
"""End of the name of a GGUF file, in lower case: its type of weights, and its number."""


@dataclass(frozen=True)
class FoundDrafter:
    """Trained drafter, or small model, in a folder or a file.

    Args:
        name: for the option `drafter`.
        folder: its folder or file; the target's own, if its checkpoint contains the drafter.
        names_target: True if its configuration says that it was trained for the target.
        num_bytes: memory for its weights; 0 if the target's weights contain them.
        obstacle: reason why it does not draft for the target; empty if it may.
    """

    name: str
    folder: Path
    names_target: bool
    num_bytes: int
    obstacle: str = ""


def find_trained(target: Checkpoint) -> list[FoundDrafter]:
    """Return the trained drafters that are found for a target, best first; those that do not fit come last.

    Folders are read beside the target and below it, and in the local Hugging Face cache. Nothing is downloaded, and no
    weights are read. A folder that cannot be read is none of a drafter.
    """
    if target.source is None:
        return []
    own = Path(target.path)
    kinds = [kind for kind in KINDS if find_own(kind, target.name, target.path) == own]
    found = [(kind, FoundDrafter(kind, own, True, 0)) for kind in kinds]  # the name without a path
    for folder in _apart([*_beside(own), *cached_folders()], own):
        # Folders hold files of others, with any contents, and must not keep the target from being loaded.
        with suppress(Exception):
            if (kind := _kind(folder)) is not None:
                found.append((kind, _describe(kind, folder, target)))
    names = _names(target)

    def rank(item: tuple[str, FoundDrafter]) -> tuple[object, ...]:
        kind, drafter = item
        resembles = any(name in str(drafter.folder).lower() for name in names)
        return bool(drafter.obstacle), not drafter.names_target, not resembles, KINDS.index(kind)

    return [drafter for _, drafter in sorted(found, key=rank)]


def find_small_models(target: Checkpoint) -> list[FoundDrafter]:
    """Return the models beside a target whose weight files have at most `SMALL` of its bytes, the largest first.

    Whether they can be loaded is not known yet.
    """
    if target.source is None:
        return []
    own, found = Path(target.path), []
    limit = SMALL * min(_count_stored(own), target.memory().weights)
    for path in _apart(_beside(own), own):
        with suppress(Exception):  # as in `find_trained`
            if 0 < (num_bytes := _count_stored(path)) <= limit and _holds_model(path):
                found.append(FoundDrafter(f"model:{path}", path, False, num_bytes))
    return sorted(found, key=lambda model: -model.num_bytes)


def _holds_model(path: Path) -> bool:
    """Return whether a folder, or a GGUF file, may hold a model that can draft."""
    if is_gguf(path):
        return peek_architecture(path) in ARCHITECTURES
    return _kind(path) is None and not (path / "modules.json").exists()  # of a model for embeddings


def _count_stored(path: Path) -> int:
    """Return the bytes of the weight files of a model."""
    return sum(file.stat().st_size for file in weight_files(path))


def _apart(paths: Iterable[Path], target: Path) -> Iterator[Path]:
    """Return paths that may hold a drafter, each once, without the target's own."""
    seen = {target.resolve()}
    if target.is_file():
        seen.add(target.resolve().parent)
    for path in paths:
        with suppress(OSError, RuntimeError):  # no permission, or links that lead nowhere
            if path.resolve() not in seen and (path.is_file() or (path / CONFIG).is_file()):
                seen.add(path.resolve())
                yield path


def _beside(target: Path) -> Iterator[Path]:
    """Return the folders with a configuration and the GGUF files beside a target and below it."""
    folder = target.absolute() if target.is_dir() else target.absolute().parent
    places = [folder] if target.is_file() or repository_of(target) else [folder, folder.parent]
    return chain.from_iterable(map(_inside, places))


def _inside(folder: Path) -> list[Path]:
    """Return the folders in a folder that have a configuration, and its GGUF files, at most `MAX_FOLDERS`."""
    found = []
    with suppress(OSError):
        for path in sorted(folder.iterdir()):
            with suppress(OSError):
                if is_gguf(path) or (path / CONFIG).is_file():
                    found.append(path)
    return found[:MAX_FOLDERS]


def _kind(folder: Path) -> str | None:
    """Return the kind of the drafter in a folder or GGUF file; None if there is a model or something else."""
    # Reading the whole header of a file takes a while.
    if is_gguf(folder) and peek_architecture(folder) not in DRAFTERS:
        return None
    provenance = read_provenance(folder)
    if provenance is not None and provenance.kind in NAMED:
        return NAMED[provenance.kind]
    kind = kind_of(folder)
    return kind if kind in KINDS else None


def _describe(kind: str, folder: Path, target: Checkpoint) -> FoundDrafter:
    name = f"{kind}:{folder}"
    named, names_target = _named_target(folder, target)
    try:
        num_bytes = _count_bytes(folder, target)
    except CheckpointError as error:
        return FoundDrafter(name, folder, names_target, 0, str(error))
    obstacle = f"it was trained for {named}" if named is not None and not names_target else ""
    obstacle = (
        obstacle
        or _misfit(kind, folder, target, names_target)
        or lack_of_memory(target, head_memory(name, num_bytes))
    )
    return FoundDrafter(name, folder, names_target, num_bytes, obstacle)


def _count_bytes(folder: Path, target: Checkpoint) -> int:
    """Return the bytes of a drafter's weights in the target's dtype; of pickles, those of their files."""
    if num_weights := count_weights(folder):
        return num_weights * target.dtype.itemsize
    return sum(path.stat().st_size for pattern in ("*.pt", "*.bin") for path in folder.glob(pattern))


def _named_target(folder: Path, target: Checkpoint) -> tuple[str | None, bool]:
    """Return the name of the target that a drafter was trained for, if its folder says it, and whether it is this one."""
    provenance = read_provenance(folder)
    if provenance is not None:
        is_same = provenance.fingerprint == hash_weights(Path(target.path))
        return provenance.target, is_same or _last_part(provenance.target) in _names(target)
    config = read_config(folder)
    names = (find_spelled(config, field) for field in NAMES_OF_TARGET)
    named = next((name for name in names if isinstance(name, str) and name), None)
    return named, named is not None and _last_part(named) in _names(target)


def _names(target: Checkpoint) -> set[str]:
    names = (target.name, str(Path(target.path).resolve()))
    return {part for name in names if (part := _last_part(name))}


def _last_part(name: str) -> str:
    """Return the last part of the name or the path of a model, without the type of a file's weights."""
    name = repository_of(Path(name)) or name
    return SUFFIX_OF_FILE.sub("", name.replace("\\", "/").rstrip("/").rpartition("/")[2].lower())


def _misfit(kind: str, folder: Path, target: Checkpoint, names_target: bool) -> str:
    """Return why a drafter of these sizes does not fit the target; empty if nothing is known against it."""
    if kind == "model":
        return "" if names_target else "its configuration does not say for which target it is"
    try:
        with config_errors(folder):
            sizes = _sizes(StoredHead(folder, kind))
    except SecondGuessError as error:
        return str(error)
    text = target.config.get_text_config()
    own = {"width": text.hidden_size, "vocabulary": text.vocab_size, "number of layers": target.num_layers}
    for name, size in sizes.items():
        is_padded = name == "vocabulary" and size is not None and differ_by_padding(size, own[name])
        if size is not None and size != own[name] and not is_padded:
            return f"it is for a target with a {name} of {size}, not {own[name]}"
    if not names_target and None in (sizes["width"], sizes["vocabulary"]):
        return "its configuration does not say for which target it is"
    return ""


def _sizes(stored: StoredHead) -> dict[str, Any]:
    """Return the sizes of the target that a head was trained for; None if its configuration does not say."""
    layers = stored.layers
    width = stored.get("target_width") or stored.get("backbone_hidden_size") or layers.get("hidden_size")
    return {
        "width": width,
        "vocabulary": layers.get("vocab_size"),
        "number of layers": stored.get("num_target_layers"),
    }


def lack_of_memory(target: Checkpoint, drafter: MemoryEstimate) -> str:
    """Return that memory does not hold a drafter in addition to the target; empty if it does."""
    available = available_memory(target.device)
    needed = peak_memory([target.memory(), drafter])
    if available is None or needed <= available:
        return ""
    return f"it and the target need {needed >> 20:,} MiB of memory, of which {available >> 20:,} MiB are available"
