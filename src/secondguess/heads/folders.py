"""Folders of trained drafters: named, shipped with a target, or part of its checkpoint."""

from __future__ import annotations

from pathlib import Path

from secondguess.builtin import head_path
from secondguess.errors import BadInputError, CheckpointError
from secondguess.heads.files import CONFIG, NAMED, read_provenance
from secondguess.heads.mtp import contains_mtp
from secondguess.names import Name


def find_head_folder(name: Name, target_name: str, target_path: str) -> Path:
    """Return the folder of a trained drafter.

    The folder is the path in the name, if it has one; else that of the built-in drafter of the
    target; else the target's own folder, if it contains such a drafter.

    Raises:
        BadInputError: no path in the name, and no drafter of this kind comes with the target.
        CheckpointError: no such folder, or it holds another kind of drafter.
    """
    how_to_train = f"train one with `secondguess train {name.kind} --model {target_name} --out FOLDER`"
    folder = Path(name.argument) if name.argument else find_own(name.kind, target_name, target_path)
    if folder is None:
        raise BadInputError(
            f"expected {name.kind}:PATH for the target {target_name}, which has no built-in one, got no path; {how_to_train}"
        )
    if name.argument and not (folder / CONFIG).is_file():
        raise CheckpointError(
            f"expected the folder of a trained {name.kind} drafter with a {CONFIG}, got {folder}; {how_to_train}"
        )
    _require_kind(folder, name.kind)
    return folder


def find_own(kind: str, target_name: str, target_path: str) -> Path | None:
    """Return the folder of the drafter of a kind that comes with the target, or None."""
    if not target_path:
        return None  # a model built in memory
    if target_name == "builtin" and (shipped := head_path(kind)):
        return shipped
    return Path(target_path) if _contains_drafter(kind, Path(target_path)) else None


def _contains_drafter(kind: str, folder: Path) -> bool:
    """Return whether the model in a folder contains a drafter of this kind."""
    return kind == "mtp" and contains_mtp(folder)


def _require_kind(folder: Path, kind: str) -> None:
    """Raise if the folder holds another kind of drafter.

    A folder trained as another kind passes if its model also contains a drafter of this kind.

    Raises:
        CheckpointError: another kind of drafter.
    """
    provenance = read_provenance(folder)
    if provenance is None or provenance.kind == kind or _contains_drafter(kind, folder):
        return
    instead = NAMED.get(provenance.kind, provenance.kind)
    raise CheckpointError(
        f"expected the folder of a trained {kind} drafter, got {folder}, which holds a {provenance.kind} drafter; "
        f"write {instead}:{folder}"
    )
