"""Checks of a target and its drafter without loading them.

`load` refuses an invalid pair before any weights are read, `inspect` describes a valid one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from secondguess.checkpoint.plan import Checkpoint
from secondguess.checkpoint.weight_files import count_parameters
from secondguess.drafters import drafter_class, parse_drafter_name
from secondguess.drafters.base import Drafter
from secondguess.drafters.combined import check_parts
from secondguess.drafters.vocabulary.pair import VocabularyPair, read_method
from secondguess.drafters.vocabulary.tokens import Vocabulary
from secondguess.errors import BadInputError
from secondguess.heads.files import find_head_folder
from secondguess.names import Name
from secondguess.runtime.base import Runtime, partial_forward_error
from secondguess.runtime.weight_format import INT4


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
        head_bytes: bytes of the weights that it adds to the target, where known: those of a trained
            head, in the target's dtype, or of a copy of the target; 0 for a head in the target's own
            folder, which is counted with the target.
        options: values of all its options.
        given: options in the name, as written.
        parts: descriptions of the component drafters, if the name joins several; else empty.
        deterministic, never_drafts, can_draft_trees, needs_samples, default_controller: as of `Drafter`. A draft
            model with another tokenizer may turn out to be deterministic when it is loaded.
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
    deterministic: bool = False
    never_drafts: bool = False
    can_draft_trees: bool = False
    needs_samples: bool = False
    default_controller: str = Drafter.default_controller


LOOKUP_DRAFTER = "suffix"
COPY_DRAFTER = f"{LOOKUP_DRAFTER}+self:{INT4.name}"


def default_drafter(model: str, target: Checkpoint | None = None) -> str:
    """Return the name of the drafter that a target gets when none is given.

    Args:
        target: its checkpoint, not loaded; None leaves out a copy of the target.
    """
    if model == "builtin":
        return "suffix+model:builtin-draft"
    return COPY_DRAFTER if target is not None and target.has_room_for_copy(INT4) else LOOKUP_DRAFTER


def confirm_default(drafter: str, runtime: Runtime) -> str:
    """Return the default drafter of a target that is loaded now.

    It has no copy if the kernels failed their check at loading, so that the target runs otherwise, or a module
    does not run with other layers.
    """
    return LOOKUP_DRAFTER if drafter == COPY_DRAFTER and runtime.why_not_copied else drafter


def resolve_drafter(name: str, target: Checkpoint | None = None) -> DrafterInfo:
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
    return DrafterInfo(
        name,
        "+".join(part.kind for part in parts),
        draft_model=next((part.draft_model for part in parts if part.draft_model), None),
        needs_target=any(part.needs_target for part in parts),
        head_bytes=sum(part.head_bytes for part in parts),
        parts=parts,
        deterministic=all(part.deterministic for part in parts),
        can_draft_trees=any(part.can_draft_trees for part in parts),
        needs_samples=any(part.needs_samples for part in parts),
    )


def _resolve(name: Name, target: Checkpoint | None) -> DrafterInfo:
    drafter = drafter_class(name.kind)
    required = drafter.requirements(name)
    needs_target = required.head or drafter.uses_target_layers
    head_bytes = 0
    if target is not None:
        is_whole = target.runtimes[0] == "transformers" and required.target_copy is None
        if drafter.uses_target_layers and is_whole:
            raise partial_forward_error()
        if required.head:
            folder = find_head_folder(name, target.name, target.path)
            required = drafter.requirements(name, folder)
            if folder != Path(target.path):
                head_bytes = count_parameters(folder) * target.dtype.itemsize
        if required.target_copy is not None:
            head_bytes = target.copy_bytes(required.target_copy)
        if target.num_layers < required.num_target_layers:
            raise BadInputError(
                f"expected a drafter that uses layers of {target.name}, which has the layers 0 to "
                f"{target.num_layers - 1}, got {name}, which needs {required.num_target_layers} layers"
            )
    return DrafterInfo(
        str(name),
        name.kind,
        required.draft_model,
        needs_target,
        trained=name.argument if needs_target else None,
        head_bytes=head_bytes,
        options=required.options,
        given=name.options,
        deterministic=drafter.deterministic,
        never_drafts=drafter.never_drafts,
        can_draft_trees=drafter.can_draft_trees or "tree" in name.options,
        needs_samples=drafter.needs_samples,
        default_controller=drafter.default_controller,
    )


@dataclass(frozen=True)
class Pair:
    """Target and drafter that fit, as far as can be known without their weights.

    Args:
        draft_model: None if the drafter has no model.
        vocabularies: None if there is no draft model, or its tokenizer is the target's.
    """

    target: Checkpoint
    drafter: DrafterInfo
    draft_model: Checkpoint | None
    vocabularies: VocabularyPair | None = None


def resolve_pair(
    model: str,
    drafter: str | None = None,
    *,
    dtype: str = "auto",
    device: str = "auto",
    quantize: str | None = None,
    drafter_quantize: str | None = None,
    runtime: str = "auto",
) -> Pair:
    """Find a target and its drafter and check that they fit. Arguments and errors are those of `load`."""
    target = Checkpoint.resolve(model, dtype=dtype, device=device, quantize=quantize, runtime=runtime)
    drafter = default_drafter(model, target) if drafter is None else drafter
    described = resolve_drafter(drafter, target)
    require_model_to_quantize(drafter_quantize, drafter, described.draft_model is not None)
    if described.draft_model is None:
        return Pair(target, described, None)
    draft_model = Checkpoint.resolve(
        described.draft_model, dtype=dtype, device=device, quantize=drafter_quantize, drafts=True
    )
    names = parse_drafter_name(drafter)
    (name,) = (each for each in names if drafter_class(each.kind).requirements(each).draft_model is not None)
    return Pair(target, described, draft_model, pair_vocabularies(target, draft_model, name))


def pair_vocabularies(target: Checkpoint, draft_model: Checkpoint, drafter: Name) -> VocabularyPair | None:
    """Return the vocabularies of a target and a draft model; None if they have one tokenizer.

    Args:
        target, draft_model: the models; no weights are read.
        drafter: name of the drafter. Its option `vocab` overrides the choice of the method.

    Raises:
        BadInputError: vocabularies, or trees, that the method cannot draft with.
        CheckpointError: a tokenizer that is missing, or cannot be compared.
    """
    method = read_method(drafter)
    if method is None and target.has_same_tokenizer(draft_model):
        return None
    target_vocabulary, draft_vocabulary = (
        Vocabulary.from_tokenizer(each.tokenizer, each.name) for each in (target, draft_model)
    )
    pair = VocabularyPair.from_vocabularies(target_vocabulary, draft_vocabulary, method)
    if pair.method == "string" and "tree" in drafter.options:
        raise BadInputError(
            f"expected a draft of one path for vocab=string, which {draft_model.name} needs for {target.name}, got "
            f"{drafter}; leave out the tree, or give vocab=intersection"
        )
    return pair


def require_model_to_quantize(drafter_quantize: str | None, drafter: str, has_model: bool) -> None:
    """Refuse 8-bit weights of a draft model for a drafter without one.

    Raises:
        BadInputError: the message names the drafter.
    """
    if drafter_quantize is not None and not has_model:
        raise BadInputError(
            f"expected a drafter with a model for drafter_quantize={drafter_quantize!r}, got {drafter}; leave it out"
        )


def require_drafter_of_history(drafter: str) -> None:
    """Refuse a drafter of which no part drafts from other outputs.

    Raises:
        BadInputError: the message names the drafter.
    """
    if not any(drafter_class(part.kind).shares_history for part in parse_drafter_name(drafter)):
        raise BadInputError(
            f"expected the drafter suffix, alone or joined by +, for share_history, got {drafter}; leave it out or "
            "take another drafter"
        )
