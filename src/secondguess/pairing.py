"""Validation of drafter names without loading models.

Describes the drafter of a name, and lets `load` refuse an invalid one before any weights are read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import NoReturn

import torch

from secondguess.core import Draft, Row
from secondguess.drafters import build_drafter, parse_drafter_name
from secondguess.drafters.base import DrafterResources
from secondguess.drafters.combined import check_parts
from secondguess.errors import BadInputError
from secondguess.heads.files import find_head_folder
from secondguess.names import Name
from secondguess.runtime.base import EmbeddingAndHead, ForwardOutput, HiddenStates, Runtime
from secondguess.runtime.fingerprint import weight_files
from secondguess.runtime.layered import remaining_layers


@dataclass(frozen=True)
class DrafterInfo:
    """Description of a drafter, as far as its name determines it.

    Args:
        name: as the user wrote it.
        kind: `none`, `model`, `ngram`, ...; of several drafters, joined by `+`.
        draft_model: path or name of the draft model, if it uses one.
        needs_target: True if it uses parts of the target, so that not all of it can be checked
            before the target is loaded.
        trained: path of a trained head, if the name gives one.
        head_bytes: size of the trained head's weights, where known.
        options: values of all its options.
        given: options in the name, as written.
        parts: descriptions of the component drafters, if the name joins several; else empty.
    """

    name: str
    kind: str
    draft_model: str | None = None
    needs_target: bool = False
    trained: str | None = None
    head_bytes: int = 0
    options: Mapping[str, float] = field(default_factory=dict)
    given: Mapping[str, str] = field(default_factory=dict)
    parts: tuple[DrafterInfo, ...] = ()


class _DraftModelRequested(Exception):
    """Raised when a drafter requests a draft model, to stop its construction before loading."""


class _TargetRequested(Exception):
    """Raised when a drafter requests its target or trained head, to stop its construction."""


class UnloadedTarget(Runtime):
    """Placeholder for a target that is not loaded, with the properties known before loading.

    A drafter that calls its methods has passed all checks that are possible before loading:
    `_TargetRequested` stops its construction.

    Args:
        name: name that the user gave.
        path: its folder.
        num_layers: number of layers.
        supports_partial_forward: True if its layers will be able to run separately.
    """

    device = torch.device("meta")

    def __init__(self, name: str, path: str, num_layers: int, supports_partial_forward: bool = True) -> None:
        self.name = name
        self.path = path
        self.num_layers = num_layers
        self.supports_partial_forward = supports_partial_forward

    def embedding_and_head(self) -> EmbeddingAndHead:
        raise _TargetRequested

    def skip_layers(self, skipped: Sequence[int]) -> Runtime:
        self.require_partial_forward()
        remaining_layers(skipped, self.num_layers)
        raise _TargetRequested

    def admit(self, rows: Sequence[Row], reuse_limits: Sequence[int | None] | None = None) -> list[int]:
        raise _TargetRequested

    def prefill(self, rows: Sequence[Row], max_tokens: int | None = None) -> list[HiddenStates]:
        raise _TargetRequested

    def num_to_prefill(self, row: Row) -> int:
        raise _TargetRequested

    def score(self, rows: Sequence[Row], draft: Draft) -> ForwardOutput:
        raise _TargetRequested

    def keep(self, rows: Sequence[Row], paths: Sequence[Sequence[int]]) -> None:
        raise _TargetRequested

    def rewind(self, rows: Sequence[Row], lengths: Sequence[int]) -> None:
        raise _TargetRequested

    def end(self, row: Row) -> None:
        raise _TargetRequested


def resolve_drafter(name: str, target: UnloadedTarget | None = None) -> DrafterInfo:
    """Check a drafter's name, argument and options as `load` does, and return a description.

    Args:
        name: as the user wrote it.
        target: target of the drafter. Without it, a drafter that uses parts of the target is
            checked only in part.

    Raises:
        BadInputError: an unknown kind, argument, option or value, or layers that the target lacks.
        CheckpointError: a folder that is missing, or that holds a drafter of another kind.
        UnsupportedModelError: a target that does not provide what the drafter uses.
    """
    parts = tuple(_resolve(part, target) for part in parse_drafter_name(name))
    if len(parts) == 1:
        return replace(parts[0], name=name)
    check_parts([part.kind for part in parts])
    draft_model = next((part.draft_model for part in parts if part.draft_model), None)
    needs_target = any(part.needs_target for part in parts)
    kinds = "+".join(part.kind for part in parts)
    head_bytes = sum(part.head_bytes for part in parts)
    return DrafterInfo(name, kinds, draft_model, needs_target, head_bytes=head_bytes, parts=parts)


def require_model_to_quantize(drafter_quantize: str | None, drafter: str, has_model: bool) -> None:
    """Refuse 8-bit weights of a draft model for a drafter without one.

    Raises:
        BadInputError: the message names the drafter.
    """
    if drafter_quantize is not None and not has_model:
        raise BadInputError(
            f"expected a drafter with a model for drafter_quantize={drafter_quantize!r}, got {drafter}; leave it out"
        )


def _resolve(name: Name, target: UnloadedTarget | None) -> DrafterInfo:
    heads: list[Path] = []

    def tell(path: str) -> NoReturn:
        raise _DraftModelRequested(path)

    def tell_of_target(name: Name) -> NoReturn:
        raise _TargetRequested

    resources = DrafterResources(target_vocab_size=1, load_draft_model=tell, find_head_folder=tell_of_target)
    if target is not None:
        resources = replace(resources, find_head_folder=partial(_find_head, target, heads), target=target)
    try:
        drafter = build_drafter(name, resources)
    except _TargetRequested:
        return DrafterInfo(
            str(name),
            name.kind,
            needs_target=True,
            trained=name.argument,
            head_bytes=sum(file.stat().st_size for folder in heads for file in weight_files(folder)),
            given=name.options,
        )
    except _DraftModelRequested as asked:
        return DrafterInfo(str(name), name.kind, draft_model=str(asked), given=name.options)
    options = getattr(drafter, "options", None)
    values = dataclasses.asdict(options) if options is not None else {}
    return DrafterInfo(str(name), name.kind, options=values, given=name.options)


def _find_head(target: UnloadedTarget, found: list[Path], name: Name) -> Path:
    """Return the folder that `load` would read, and append it to `found`.

    The target's own folder is not appended, because its weights are counted with the target.
    """
    folder = find_head_folder(name, target.name, target.path)
    if folder != Path(target.path):
        found.append(folder)
    return folder
