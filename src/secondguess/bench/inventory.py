"""Memory and training time of drafters, and the list of drafters available for a target."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from secondguess.builtin import head_path
from secondguess.checkpoint.resolve import find_checkpoint
from secondguess.checkpoint.weights import weight_files
from secondguess.drafters import DRAFTERS
from secondguess.errors import CheckpointError
from secondguess.heads.files import read_provenance
from secondguess.heads.mtp import contains_mtp
from secondguess.pairing import resolve_drafter

TREE = "tree=2x2x1"
"""Tree shape in which drafters with draft probabilities are compared, besides the chain."""


@dataclass(frozen=True)
class DrafterFootprint:
    """Memory and training time of a drafter.

    Args:
        num_bytes: size of its own weights as stored; 0 if it has none or uses the target's.
        training_minutes: None if nothing was trained or the duration was not recorded.
    """

    num_bytes: int = 0
    training_minutes: float | None = None


def drafter_footprint(drafter: str) -> DrafterFootprint:
    """Return memory and training time of the named drafter, summed over its components."""
    described = resolve_drafter(drafter)
    folders = []
    for part in described.parts or (described,):
        if part.draft_model is not None:
            folders.append(Path(find_checkpoint(part.draft_model)))
        elif part.needs_target:
            head = Path(part.trained) if part.trained else head_path(part.kind)
            if head is not None and (head / "config.json").is_file():
                folders.append(head)
    minutes = [found for folder in folders if (found := _training_minutes(folder)) is not None]
    return DrafterFootprint(sum(map(_num_bytes, folders)), sum(minutes) if minutes else None)


def _num_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in weight_files(folder))


def _training_minutes(folder: Path) -> float | None:
    try:
        provenance = read_provenance(folder)
    except CheckpointError:
        return None
    minutes = None if provenance is None else provenance.training.get("minutes")
    return None if minutes is None else float(minutes)


def all_drafters(model: str) -> tuple[str, ...]:
    """Return every drafter available for a target without naming another checkpoint.

    All run as chains, those with draft probabilities also as trees. For the built-in target these
    are lookups and the built-in draft model and heads; for others, lookups and the
    multi-token-prediction modules of the target's own checkpoint.
    """
    names = ["suffix", "ngram"]
    if model == "builtin":
        dists = ["model:builtin-draft"]
        dists += [kind for kind in DRAFTERS if kind != "model" and head_path(kind) is not None]
        names += [variant for name in dists for variant in (name, f"{name},{TREE}")]
        names.append("suffix+model:builtin-draft")
    elif contains_mtp(Path(find_checkpoint(model))):
        names += ["mtp", f"mtp,{TREE}"]
    return tuple(names)
