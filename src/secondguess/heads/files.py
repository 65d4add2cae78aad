"""Trained drafters on disk: where they are, whose they are, what is in them.

A folder holds `config.json`, weights in safetensors (or, in published formats, a pickle of tensors), a card, and
`secondguess.json`: for which target it was trained, how, and what it reached.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from secondguess.builtin import head_path
from secondguess.errors import BadInputError, CheckpointError, StrangerWarning
from secondguess.names import Name
from secondguess.runtime.fingerprint import hash_weights, weight_files

PROVENANCE = "secondguess.json"

NAMED = {"draft": "model"}
"""What was trained -> the kind of drafter that a name asks for to use it, where the two differ."""

INSIDE = {"mtp": "secondguess.heads.mtp_files:is_inside"}
"""Kind of drafter that may come inside its target's checkpoint -> where the function is that says so of a folder."""


@dataclass(frozen=True)
class Provenance:
    """Where a trained drafter comes from.

    Args:
        kind: of drafter, such as `medusa`; as it was trained.
        target: the name of the target it was trained for.
        fingerprint: of the target's weights (`runtime.fingerprint`).
        training: how it was made: data, losses, budget, commit, machine.
        figures: what it reached on held-out text.
    """

    kind: str
    target: str
    fingerprint: str
    training: Mapping[str, Any] = field(default_factory=dict)
    figures: Mapping[str, Any] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        (folder / PROVENANCE).write_text(json.dumps(asdict(self), indent=2) + "\n")


def read_provenance(folder: Path) -> Provenance | None:
    """What the folder says of where it comes from; None for what was not trained here."""
    path = folder / PROVENANCE
    if not path.is_file():
        return None
    try:
        return Provenance(**json.loads(path.read_text()))
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"expected a readable {PROVENANCE} in {folder}, got: {error}") from error


def find_head_folder(name: Name, target_name: str, target_path: str) -> Path:
    """The folder of a trained drafter: the one that a name says, the one that was shipped for the target, or the target's.

    Raises:
        BadInputError: the name says none, and none was shipped.
        CheckpointError: no such folder, or one of a drafter of another kind.
    """
    if name.argument:
        folder = Path(name.argument)
        if not (folder / "config.json").is_file():
            raise CheckpointError(
                f"expected the folder of a trained {name.kind} drafter with a config.json, got {name.argument}; "
                f"train one with `secondguess train {name.kind} --model {target_name} --out FOLDER`"
            )
    else:
        found = _find_own(name.kind, target_name, target_path)
        if found is None:
            raise BadInputError(
                f"expected {name.kind}:PATH for the target {target_name}, for which none is in the box, got no path; "
                f"train one with `secondguess train {name.kind} --model {target_name} --out FOLDER`"
            )
        folder = found
    _refuse_another_kind(folder, name.kind)
    return folder


def _find_own(kind: str, target_name: str, target_path: str) -> Path | None:
    """What the target has without anybody naming it."""
    if not target_path:
        return None  # a model that somebody made in memory
    if target_name == "builtin" and (shipped := head_path(kind)):
        return shipped
    return Path(target_path) if _is_inside(kind, Path(target_path)) else None


def _is_inside(kind: str, folder: Path) -> bool:
    """Whether a drafter of this kind is part of the model in a folder."""
    module, _, function = INSIDE.get(kind, "").partition(":")
    return bool(function) and bool(getattr(import_module(module), function)(folder))


def _refuse_another_kind(folder: Path, kind: str) -> None:
    """What was trained as something else; a whole model may be that, and hold a drafter of this kind as well."""
    provenance = read_provenance(folder)
    if provenance is None or provenance.kind == kind or _is_inside(kind, folder):
        return
    instead = NAMED.get(provenance.kind, provenance.kind)
    raise CheckpointError(
        f"expected the folder of a trained {kind} drafter, got {folder}, which holds a {provenance.kind} drafter; "
        f"write {instead}:{folder}"
    )


def warn_of_stranger(folder: Path, kind: str, target_name: str, target_path: str) -> None:
    """Warn of a drafter that was trained for other weights: it guesses worse, and the text stays right.

    Args:
        folder, kind: of a drafter that fits its target; for one that does not there is an error to tell instead.
        target_name, target_path: of the target; without weight files at its path nothing is compared.
    """
    provenance = read_provenance(folder)
    if provenance is None or not target_path or not weight_files(Path(target_path)):
        return  # nothing to compare, or nothing to compare it with
    if provenance.fingerprint != hash_weights(Path(target_path)):
        warnings.warn(
            f"the {kind} drafter in {folder} was trained for {provenance.target} with other weights than {target_name}'s: "
            "the text stays right, the guesses will be poor; train it anew",
            StrangerWarning,
            stacklevel=2,
        )


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's `config.json`.

    Raises:
        CheckpointError: missing or broken.
    """
    try:
        content = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"expected a readable config.json in {folder}, got: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(
            f"expected a JSON object in {folder / 'config.json'}, got {type(content).__name__}"
        )
    return content


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder, from safetensors, or else from pickles of tensors (`*.pt`, `*.bin`; nothing else is unpickled).

    Raises:
        CheckpointError: none there, or unreadable ones.
    """
    files = sorted(folder.glob("*.safetensors"))
    pickles = sorted([*folder.glob("*.pt"), *folder.glob("*.bin")])
    try:
        tensors: dict[str, Tensor] = {}
        for path in files:
            tensors |= load_file(path)
        for path in [] if files else pickles:
            tensors |= torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, ValueError, RuntimeError, SafetensorError, EOFError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(f"expected readable weights in {folder}, got: {first}") from error
    if not tensors:
        raise CheckpointError(f"expected weights (safetensors, .pt or .bin) in {folder}, got none")
    return tensors


def find_tensors(folder: Path) -> dict[str, Path]:
    """In which safetensors file each tensor of a folder is; none of them is read.

    Raises:
        CheckpointError: a broken file.
    """
    places: dict[str, Path] = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, "pt") as file:
                places |= dict.fromkeys(file.keys(), path)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"expected readable weights in {folder}, got: {error}") from error
    return places


def read_named_tensors(places: Mapping[str, Path]) -> dict[str, Tensor]:
    """Tensors by name, out of the files that `find_tensors` found them in."""
    tensors: dict[str, Tensor] = {}
    for path in sorted(set(places.values())):
        with safe_open(path, "pt") as file:
            tensors |= {name: file.get_tensor(name) for name, place in places.items() if place == path}
    return tensors


def load_into(module: torch.nn.Module, tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Put tensors into a module that has exactly these names and shapes.

    Raises:
        CheckpointError: naming what is missing, unknown or of another shape.
    """
    wanted = module.state_dict()
    missing = sorted(set(wanted) - set(tensors))
    unknown = sorted(set(tensors) - set(wanted))
    wrong = [name for name in wanted if name in tensors and wanted[name].shape != tensors[name].shape]
    if missing or unknown or wrong:
        problem = (
            f"missing {missing[0]}"
            if missing
            else f"unknown {unknown[0]}"
            if unknown
            else f"{wrong[0]} of shape {list(tensors[wrong[0]].shape)} instead of {list(wanted[wrong[0]].shape)}"
        )
        raise CheckpointError(f"expected the weights that config.json describes in {folder}, got {problem}")
    module.load_state_dict(dict(tensors))
