"""What drafters cost to have: bytes beside the target's, minutes of training; and which ones there are for a target."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from secondguess.builtin import head_path
from secondguess.drafters import DRAFTERS, draft_model_paths, parse_drafter_name
from secondguess.errors import CheckpointError
from secondguess.heads.files import read_provenance
from secondguess.runtime.loading import find_checkpoint

TREE = "tree=2x2x1"
"""The tree that every drafter with laws is compared as."""


@dataclass(frozen=True)
class Possession:
    """What having a drafter takes.

    Args:
        num_bytes: of its weights as stored; 0 for what borrows the target's or has none.
        training_minutes: None where nothing was trained or nobody wrote down how long.
    """

    num_bytes: int = 0
    training_minutes: float | None = None


def possession(drafter: str) -> Possession:
    """What a drafter by this name takes, its parts added up."""
    folders = [Path(find_checkpoint(path)) for path in draft_model_paths(drafter)]
    for name in parse_drafter_name(drafter):
        folder = Path(name.argument) if name.argument else head_path(name.kind)
        if name.kind != "model" and folder is not None and (folder / "config.json").is_file():
            folders.append(folder)
    minutes = [found for folder in folders if (found := _minutes(folder)) is not None]
    return Possession(sum(map(_num_bytes, folders)), sum(minutes) if minutes else None)


def _num_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def _minutes(folder: Path) -> float | None:
    try:
        provenance = read_provenance(folder)
    except CheckpointError:
        return None
    minutes = None if provenance is None else provenance.training.get("minutes")
    return None if minutes is None else float(minutes)


def all_drafters(model: str) -> tuple[str, ...]:
    """Every drafter there is for a target without a further path: in chains, and those with laws in trees too.

    For the built-in target these are the ones in the box; for others, look-ups and what lies in its own checkpoint.
    """
    names = ["suffix", "ngram"]
    if model == "builtin":
        laws = ["model:builtin-draft"]
        laws += [kind for kind in DRAFTERS if kind != "model" and head_path(kind) is not None]
        names += [variant for name in laws for variant in (name, f"{name},{TREE}")]
        names.append("suffix+model:builtin-draft")
    elif _has_modules(model):
        names += ["mtp", f"mtp,{TREE}"]
    return tuple(names)


def _has_modules(model: str) -> bool:
    """Whether a checkpoint says that it holds multi-token-prediction modules."""
    try:
        config = json.loads((Path(find_checkpoint(model)) / "config.json").read_text())
    except (OSError, ValueError):
        return False
    return bool(config.get("num_nextn_predict_layers") or config.get("mtp_num_hidden_layers"))
