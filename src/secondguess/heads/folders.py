"""Folders of trained drafters: named, shipped with a target, or part of its checkpoint; and the kind in a folder."""

from __future__ import annotations

import warnings
from contextlib import suppress
from functools import cache
from pathlib import Path

from secondguess.builtin import head_path
from secondguess.checkpoint.resolve import find_in_cache, is_gguf
from secondguess.checkpoint.weight_files import hash_weights, weight_files
from secondguess.errors import BadInputError, CheckpointError, MismatchWarning
from secondguess.heads.files import CONFIG, NAMED, config_file, read_config, read_provenance, tensor_names
from secondguess.heads.formats import find_format
from secondguess.heads.gguf import kind_in
from secondguess.heads.mtp import contains_mtp
from secondguess.names import Name


def find_head_folder(name: Name, target_name: str, target_path: str) -> Path:
    """Return the folder of a trained drafter.

    The folder is the path in the name, if it has one; else that of the built-in drafter of the
    target; else the target's own folder, if it contains such a drafter.
    """
    how_to_train = f"train one with `secondguess train {name.kind} --model {target_name} --out FOLDER`"
    folder = _named_folder(name.argument) if name.argument else find_own(name.kind, target_name, target_path)
    if folder is None:
        raise BadInputError(
            f"expected {name.kind}:PATH for the target {target_name}, which has no built-in one, got no path; {how_to_train}"
        )
    if name.argument and not config_file(folder).is_file():
        raise CheckpointError(
            f"expected the folder of a trained {name.kind} drafter with a {CONFIG}, or a GGUF file, got {folder}; "
            f"{how_to_train}"
        )
    _require_kind(folder, name.kind)
    return folder


def _named_folder(name: str) -> Path:
    """Return the folder of this path, or that of the repository of this name in the Hugging Face cache."""
    cached = None if Path(name).is_dir() else find_in_cache(name)
    return Path(name) if cached is None else cached.parent


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
    """Raise a `CheckpointError` if the folder was trained as another kind, and its model contains none of this kind."""
    if is_gguf(folder):
        _require_kind_in_file(folder, kind)
        return
    provenance = read_provenance(folder)
    if provenance is None or provenance.kind == kind or _contains_drafter(kind, folder):
        return
    instead = NAMED.get(provenance.kind, provenance.kind)
    raise CheckpointError(
        f"expected the folder of a trained {kind} drafter, got {folder}, which holds a {provenance.kind} drafter; "
        f"write {instead}:{folder}"
    )


def _require_kind_in_file(path: Path, kind: str) -> None:
    """Raise a `CheckpointError` if a GGUF file holds no drafter of a kind."""
    found = kind_in(path)
    if found != kind:
        described = "a model" if found is None else f"a drafter of the kind {found}"
        raise CheckpointError(
            f"expected a GGUF file with a drafter of the kind {kind}, got {path}, which holds {described}"
        )


def refuse_head(model: str) -> None:
    """Refuse a draft model whose folder holds a drafter of another kind, which is no model of its own.

    `model` is the path of the folder, or the name of a repository in the local Hugging Face cache.
    The message has the name to write instead.
    """
    folder = Path(model)
    if not folder.is_dir() and not is_gguf(folder):
        found = find_in_cache(model)
        folder = folder if found is None else found.parent
    kind = kind_of(folder)
    if kind is not None:
        raise CheckpointError(
            f"expected the folder or GGUF file of a draft model, got {folder}, which holds a drafter of the kind {kind}; write "
            f"{kind}:{folder}"
        )


def kind_of(folder: Path) -> str | None:
    """Return the kind of the drafter in a folder, as in `--drafter`; None for a model, and for what is not known."""
    with suppress(CheckpointError):
        if is_gguf(folder):
            found_kind = kind_in(folder)
            return None if found_kind == "mtp" else found_kind  # a module is part of a model
        provenance, config = read_provenance(folder), read_config(folder)
        if provenance is not None:
            return None if provenance.kind in NAMED else provenance.kind
        names = cache(lambda: tensor_names(folder))
        found = find_format(config, lambda name: name in names())
        return None if found is None else found.kind
    return None


def warn_of_mismatch(folder: Path, kind: str, target_name: str, target_path: str) -> None:
    """Warn if a drafter was trained for other weights than the target's, those at `target_path`.

    Such a drafter has a lower acceptance rate; the output stays correct. Call this after the
    drafter was loaded, so that a drafter that does not fit raises its error first.
    """
    provenance = read_provenance(folder)
    if provenance is None or not target_path or not weight_files(Path(target_path)):
        return
    if provenance.fingerprint != hash_weights(Path(target_path)):
        warnings.warn(
            f"the {kind} drafter in {folder} was trained for {provenance.target} with other weights than {target_name}'s: "
            "the output stays correct, but few drafts will be accepted; retrain it",
            MismatchWarning,
            stacklevel=2,
        )
