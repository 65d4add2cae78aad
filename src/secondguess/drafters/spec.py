"""Drafters as their names specify them, resolved once and before anything is loaded, and made of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol, Self

from secondguess.drafters import drafter_class, parse_drafter_name
from secondguess.drafters.base import Drafter, DrafterResources, Requirements
from secondguess.drafters.combined import CombinedDrafter, check_parts
from secondguess.drafters.vocabulary.pair import VocabularyPair
from secondguess.heads.folders import find_head_folder, warn_of_mismatch
from secondguess.names import Name
from secondguess.runtime.base import Runtime
from secondguess.runtime.weight_format import WeightFormat


@dataclass(frozen=True)
class PartSpec:
    """One of the drafters that a name joins, or its only one."""

    name: Name  # the part of the name
    drafter: type[Drafter]
    required: Requirements
    # Bytes of the weights that it adds to the target, where known: those of a trained head, in the target's dtype,
    # or of a copy of the target; 0 for a head in the target's own folder, which is counted with the target.
    head_bytes: int = 0
    vocabularies: VocabularyPair | None = (
        None  # of target and draft model, if their tokenizers are known to differ
    )

    @property
    def kind(self) -> str:
        return self.name.kind

    @property
    def draft_model(self) -> str | None:
        """Path or name of the draft model, if it uses one."""
        return self.required.draft_model

    @property
    def needs_target(self) -> bool:
        """True if it uses parts of the target, so that not all of it can be checked before the target is loaded."""
        return self.required.head or self.drafter.uses_target_layers

    @property
    def trained(self) -> str | None:
        """Path of a trained head, if the name gives one."""
        return self.name.argument if self.needs_target else None

    @property
    def options(self) -> Mapping[str, float]:
        """Values of all its options."""
        return self.required.options

    @property
    def never_drafts(self) -> bool:
        return self.drafter.never_drafts

    @property
    def deterministic(self) -> bool:
        return self.drafter.deterministic or self.vocabularies is not None

    @property
    def can_draft_trees(self) -> bool:
        return self.drafter.can_draft_trees or "tree" in self.name.options


@dataclass(frozen=True)
class DrafterSpec:
    """Drafter as its name specifies it; properties as of `Drafter`."""

    name: str  # as the user wrote it
    parts: tuple[PartSpec, ...]  # drafters that the name joins

    @classmethod
    def parse(cls, text: str) -> Self:
        """Check a drafter's name without its target.

        Raises:
            BadInputError: an unknown kind, argument, option or value, or parts that do not combine.
            CheckpointError: a folder that is missing, or that holds a drafter of another kind.
        """
        names = parse_drafter_name(text)
        if len(names) > 1:
            check_parts([name.kind for name in names])
        classes = [drafter_class(name.kind) for name in names]
        parts = (
            PartSpec(name, drafter, drafter.requirements(name))
            for name, drafter in zip(names, classes, strict=True)
        )
        return cls(text, tuple(parts))

    def map_parts(self, change: Callable[[PartSpec], PartSpec]) -> Self:
        """Return a specification with changed parts."""
        return replace(self, parts=tuple(map(change, self.parts)))

    @property
    def kind(self) -> str:
        """`none`, `model`, `ngram`, ...; of several drafters, joined by `+`."""
        return "+".join(part.kind for part in self.parts)

    @property
    def model_part(self) -> PartSpec | None:
        """Part with a draft model, if there is one."""
        return next((part for part in self.parts if part.draft_model), None)

    @property
    def draft_model(self) -> str | None:
        """Path or name of the draft model, if it uses one."""
        return None if self.model_part is None else self.model_part.draft_model

    @property
    def needs_target(self) -> bool:
        return any(part.needs_target for part in self.parts)

    @property
    def head_bytes(self) -> int:
        """Bytes of the weights that it adds to the target, where known."""
        return sum(part.head_bytes for part in self.parts)

    @property
    def target_copies(self) -> list[WeightFormat]:
        """Encodings of the weights of the copies of the target with which it drafts."""
        copies = (part.required.target_copy for part in self.parts)
        return [weight_format for weight_format in copies if weight_format is not None]

    @property
    def deterministic(self) -> bool:
        return all(part.deterministic for part in self.parts)

    @property
    def never_drafts(self) -> bool:
        return all(part.never_drafts for part in self.parts)

    @property
    def can_draft_trees(self) -> bool:
        return any(part.can_draft_trees for part in self.parts)

    @property
    def needs_samples(self) -> bool:
        return any(part.drafter.needs_samples for part in self.parts)

    @property
    def shares_history(self) -> bool:
        return any(part.drafter.shares_history for part in self.parts)

    @property
    def default_controller(self) -> str:
        return (
            self.parts[0].drafter.default_controller if len(self.parts) == 1 else Drafter.default_controller
        )


class Target(Protocol):
    """Loaded target: its runtime, the name given by the user, and the folder of its files."""

    @property
    def runtime(self) -> Runtime: ...
    @property
    def name(self) -> str: ...
    @property
    def path(self) -> str: ...


def make_drafter(
    drafter: str | DrafterSpec,
    *,
    target_vocab_size: int,
    load_draft_model: Callable[[str], Runtime],
    pair_vocabularies: Callable[[Name], VocabularyPair | None] = lambda name: None,
    target: Target | None = None,
) -> Drafter:
    """Build the drafter for a name.

    Args:
        drafter: the name, such as `none`, `ngram,max=4`, `model:PATH` or `suffix+model:PATH`, or what it specifies.
        target_vocab_size: width of the target's logits.
        load_draft_model: returns the runtime of the model at a path; called only by drafters that
            use a draft model.
        pair_vocabularies: compares the target's tokenizer with that of the draft model for a name; None
            if it is the same.
        target: target to draft for; required by drafters that use its weights or hidden states.

    Raises:
        BadInputError: an unknown kind, argument, option or value, or parts that do not combine.
        CheckpointError: a folder of a trained head that is missing, broken, or of another kind.
    """
    spec = DrafterSpec.parse(drafter) if isinstance(drafter, str) else drafter
    resources = DrafterResources(target_vocab_size, load_draft_model, pair_vocabularies)
    heads: dict[str, Path] = {}
    if target is not None:
        find_head = partial(_find_head, target, heads)
        resources = replace(resources, find_head_folder=find_head, target=target.runtime)
    parts = [part.drafter.build(part.name, resources) for part in spec.parts]
    made = parts[0] if len(parts) == 1 else CombinedDrafter(parts, target_vocab_size)
    if target is not None:
        # Fail now, rather than in the first round, if the target lacks these layers.
        target.runtime.request_hidden_states(made.hidden_layers)
        for kind, folder in heads.items():
            warn_of_mismatch(folder, kind, target.name, target.path)
    return made


def _find_head(target: Target, found: dict[str, Path], name: Name) -> Path:
    """Return the folder of the trained head for a name, and record it by kind in `found`."""
    found[name.kind] = find_head_folder(name, target.name, target.path)
    return found[name.kind]
