"""Checks of a target and its drafter without loading them.

`load` refuses an invalid pair before any weights are read, `inspect` describes a valid one.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from secondguess.checkpoint.plan import Checkpoint
from secondguess.controllers import make_controller
from secondguess.controllers.base import Controller
from secondguess.drafters.base import Drafter
from secondguess.drafters.spec import DrafterSpec, PartSpec
from secondguess.drafters.vocabulary.pair import VocabularyPair
from secondguess.drafters.vocabulary.tokens import Vocabulary
from secondguess.errors import (
    BadInputError,
    CheckpointError,
    MismatchWarning,
    SecondGuessError,
    UnsupportedModelError,
)
from secondguess.heads.discovery import FoundDrafter, find_small_models, find_trained, lack_of_memory
from secondguess.heads.files import count_weights
from secondguess.heads.folders import find_head_folder
from secondguess.names import AUTO, Name
from secondguess.runtime.base import Runtime
from secondguess.runtime.refusals import partial_forward_error
from secondguess.runtime.weight_format import INT4
from secondguess.verifiers.base import Verifier

T = TypeVar("T")

LOOKUP_DRAFTER = "suffix"
COPY_DRAFTER = f"{LOOKUP_DRAFTER}+self:{INT4.name}"
PLAIN_DECODING = "fixed:0"
"""Default controller of drafters that never draft."""


def default_drafter(model: str, target: Checkpoint | None = None) -> str:
    """Return the name of the drafter that a target gets when none is given.

    That is look-up, joined by a trained drafter that is found for the target (`find_drafters`), or else by a copy of it
    in 4 bits, if memory holds one, or else by a small model beside it.

    Args:
        target: its checkpoint, not loaded; None leaves out all but look-up.
    """
    if model == "builtin":
        return "suffix+model:builtin-draft"
    return LOOKUP_DRAFTER if target is None else choose_default(target, find_drafters(target))


def choose_default(target: Checkpoint, found: Sequence[FoundDrafter]) -> str:
    """Return the name of the default drafter of a target for which these were found (`find_drafters`)."""
    usable = next((drafter.name for drafter in found if not drafter.obstacle), None)
    if usable is not None:
        return f"{LOOKUP_DRAFTER}+{usable}"
    return COPY_DRAFTER if target.has_room_for_copy(INT4) else LOOKUP_DRAFTER


def _fallbacks(target: Checkpoint, found: Sequence[FoundDrafter]) -> list[str]:
    """Return the defaults after the first one, without models of their own; none if none of these drafters is used."""
    usable = [drafter.name for drafter in found if not drafter.obstacle]
    if not usable:
        return []
    heads = [f"{LOOKUP_DRAFTER}+{name}" for name in usable[1:] if not name.startswith("model:")]
    return list(dict.fromkeys((*heads, choose_default(target, ()), LOOKUP_DRAFTER)))


def find_drafters(
    target: Checkpoint, compared: dict[str, VocabularyPair | None] | None = None
) -> list[FoundDrafter]:
    """Return the drafters on this machine for a target, best first, with why those do not draft that do not fit.

    These are trained ones and, if none fits and the target cannot be copied, small models beside it up to the first
    that fits.

    Args:
        compared: is given the vocabularies of the target and of each model among them, by its path.
    """
    compared = {} if compared is None else compared
    resolved = [_resolved(found, target, compared) for found in find_trained(target)]
    trained = sorted(resolved, key=lambda found: bool(found.obstacle))
    if any(not drafter.obstacle for drafter in trained) or target.has_room_for_copy(INT4):
        return trained
    small: list[FoundDrafter] = []
    for model in find_small_models(target):
        small.append(_resolved(model, target, compared))
        if not small[-1].obstacle:
            break
    return [*small[-1:], *trained, *small[:-1]]


def _resolved(
    found: FoundDrafter, target: Checkpoint, compared: dict[str, VocabularyPair | None]
) -> FoundDrafter:
    """Return a drafter with the reason for which loading would refuse it, if it would; fill `compared`."""
    if found.obstacle:
        return found
    if not _names_its_folder(found):
        return replace(found, obstacle="its path has a + or a comma, which separate drafters and options")
    try:
        resolved = resolve_drafter(found.name, target)
        if resolved.model_part is None:
            return found
        draft_model = Checkpoint.resolve(
            str(found.folder), dtype=target.dtype_name, device=str(target.device), drafts=True
        )
        compared[str(found.folder)] = pair_vocabularies(target, draft_model, resolved.model_part.name)
        # One that was trained for the target needs none.
        needs_template = bool(target.tokenizer.chat_template) and not found.names_target
        lacks_template = needs_template and not draft_model.tokenizer.chat_template
    except SecondGuessError as error:
        return replace(found, obstacle=str(error))
    if lacks_template:
        return replace(found, obstacle="it has no chat template, and the target has one")
    return replace(found, obstacle=lack_of_memory(target, draft_model.memory()))


def _names_its_folder(found: FoundDrafter) -> bool:
    """Return whether a drafter's name is parsed as its folder's, which a + or a comma in the path may prevent."""
    with suppress(BadInputError):
        names = [part.name.argument or str(found.folder) for part in DrafterSpec.parse(found.name).parts]
        return names == [str(found.folder)]
    return False


def first_that_fits(make: Callable[[DrafterSpec], T], specs: Sequence[DrafterSpec]) -> T:
    """Return what is made of the first of these drafters for which that is possible; warn of those before it.

    Raises:
        CheckpointError, UnsupportedModelError: as for the last one, if none can.
    """
    for spec in specs[:-1]:
        try:
            return make(spec)
        except (CheckpointError, UnsupportedModelError) as error:
            warn_of_drafter_left_out(spec.name, str(error))
    return make(specs[-1])


def warn_of_drafter_left_out(drafter: str, reason: str) -> None:
    """Warn that a drafter that was found for a target does not draft for it."""
    warnings.warn(
        f"the drafter {drafter}, found for this target, is left out: {reason}", MismatchWarning, stacklevel=3
    )


def confirm_default(drafter: str, runtime: Runtime) -> str:
    """Return the name of the default drafter of a target that is loaded now.

    It has no copy if the kernels failed their check at loading, so that the target runs otherwise, or a module
    does not run with other layers.
    """
    return LOOKUP_DRAFTER if drafter == COPY_DRAFTER and runtime.why_not_copied else drafter


def resolve_drafter(name: str, target: Checkpoint | None = None) -> DrafterSpec:
    """Check a drafter's name, argument and options as `load` does, and return its description.

    Args:
        name: as the user wrote it.
        target: target of the drafter. Without it, a drafter that uses parts of the target is
            checked only in part.

    Raises:
        BadInputError: an unknown kind, argument, option or value, or layers that the target lacks.
        CheckpointError: a folder that is missing, or that holds a drafter of another kind.
        UnsupportedModelError: a target that does not provide what the drafter uses.
    """
    spec = DrafterSpec.parse(name)
    return spec if target is None else spec.map_parts(partial(_fit, target=target))


def _fit(part: PartSpec, target: Checkpoint) -> PartSpec:
    """Return a part of a drafter with the bytes of its weights, if the target provides what it uses."""
    required, head_bytes = part.required, 0
    is_whole = target.runtimes[0] == "transformers" and required.target_copy is None
    if part.drafter.uses_target_layers and is_whole:
        raise partial_forward_error()
    if required.head:
        folder = find_head_folder(part.name, target.name, target.path)
        required = part.drafter.requirements(part.name, folder)
        if folder != Path(target.path):
            head_bytes = count_weights(folder) * target.dtype.itemsize
    if required.target_copy is not None:
        head_bytes = target.copy_bytes(required.target_copy)
    if target.num_layers < required.num_target_layers:
        raise BadInputError(
            f"expected a drafter that uses layers of {target.name}, which has the layers 0 to "
            f"{target.num_layers - 1}, got {part.name}, which needs {required.num_target_layers} layers"
        )
    return replace(part, required=required, head_bytes=head_bytes)


@dataclass(frozen=True)
class Pair:
    """Target and drafter that fit, as far as can be known without their weights.

    Args:
        draft_model: None if the drafter has no model.
        vocabularies: None if there is no draft model, or its tokenizer is the target's.
        found: drafters that were found for the target, if the user named none.
        fallbacks: drafters to use instead of a default that cannot be loaded.
    """

    target: Checkpoint
    drafter: DrafterSpec
    draft_model: Checkpoint | None
    vocabularies: VocabularyPair | None = None
    found: Sequence[FoundDrafter] = ()
    fallbacks: Sequence[DrafterSpec] = ()


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
    found: Sequence[FoundDrafter] = ()
    compared: dict[str, VocabularyPair | None] = {}
    if drafter is None or drafter == AUTO:
        found = () if model == "builtin" else find_drafters(target, compared)
        drafter = default_drafter(model) if model == "builtin" else choose_default(target, found)
    specs = [resolve_drafter(name, target) for name in (drafter, *_fallbacks(target, found))]
    require_model_to_quantize(drafter_quantize, drafter, specs[0].draft_model is not None)

    def pair_with(spec: DrafterSpec) -> Pair:
        fallbacks = specs[specs.index(spec) + 1 :]
        if spec.model_part is None:
            return Pair(target, spec, None, found=found, fallbacks=fallbacks)
        path = str(spec.draft_model)
        draft_model = Checkpoint.resolve(
            path, dtype=dtype, device=device, quantize=drafter_quantize, drafts=True
        )
        if path not in compared:  # which takes a second for large vocabularies
            compared[path] = pair_vocabularies(target, draft_model, spec.model_part.name)
        vocabularies = compared[path]
        spec = spec.map_parts(
            lambda part: replace(part, vocabularies=vocabularies) if part.draft_model else part
        )
        return Pair(target, spec, draft_model, vocabularies, found, fallbacks)

    return first_that_fits(pair_with, specs)


def pair_vocabularies(target: Checkpoint, draft_model: Checkpoint, drafter: Name) -> VocabularyPair | None:
    """Return the vocabularies of a target and a draft model; None if they have one tokenizer.

    Args:
        target, draft_model: the models; no weights are read.
        drafter: name of the drafter.

    Raises:
        BadInputError: a tree, which a model with another tokenizer cannot draft.
        CheckpointError: a tokenizer that is missing, or cannot be compared.
    """
    if target.has_same_tokenizer(draft_model):
        return None
    target_vocabulary, draft_vocabulary = (
        Vocabulary.from_tokenizer(each.tokenizer, each.name) for each in (target, draft_model)
    )
    if "tree" in drafter.options:
        raise BadInputError(
            f"expected a draft of one path for {draft_model.name}, whose tokenizer is not that of {target.name}, got "
            f"{drafter}; leave out the tree"
        )
    return VocabularyPair.from_vocabularies(target_vocabulary, draft_vocabulary)


def require_model_to_quantize(drafter_quantize: str | None, drafter: str, has_model: bool) -> None:
    """Refuse 8-bit weights of a draft model for a drafter without one.

    Raises:
        BadInputError: the message names the drafter.
    """
    if drafter_quantize is not None and not has_model:
        raise BadInputError(
            f"expected a drafter with a model for drafter_quantize={drafter_quantize!r}, got {drafter}; leave it out"
        )


def require_drafter_of_history(drafter: DrafterSpec) -> None:
    """Refuse a drafter of which no part drafts from other outputs.

    Raises:
        BadInputError: the message names the drafter.
    """
    if not drafter.shares_history:
        raise BadInputError(
            f"expected the drafter suffix, alone or joined by +, for share_history, got {drafter.name}; leave it out or "
            "take another drafter"
        )


def choose_controller(name: str | None, drafter: Drafter | DrafterSpec) -> Controller:
    """Return the controller of this name, or the drafter's default if the name is None.

    Raises:
        BadInputError: no such controller, or one whose decisions have no effect on this drafter.
    """
    if name is None:
        return make_controller(drafter.default_controller)
    controller = make_controller(name)
    if drafter.never_drafts and controller.name != PLAIN_DECODING:
        raise BadInputError(
            f"expected no controller for the drafter {drafter.name}, which never drafts, got {name!r}; "
            "leave it out or take another drafter"
        )
    if drafter.deterministic and controller.needs_probs:
        raise BadInputError(
            f"expected a controller that reads no draft distributions for the drafter {drafter.name}, which has none, got "
            f"{name!r}; use fixed:K or a drafter with a model"
        )
    return controller


def check_verifier(verifier: Verifier, drafter: Drafter | DrafterSpec) -> None:
    """Refuse a verifier that cannot verify this drafter's drafts, before any text is generated.

    Raises:
        BadInputError: a verifier for chains, with a drafter that proposes trees; a verifier without
            samples, with a drafter that needs them.
    """
    if drafter.needs_samples and not verifier.reports_samples:
        raise BadInputError(
            f"expected a verifier that samples at every node for the drafter {drafter.name}, got {verifier.name!r}, whose "
            "decisions must not depend on how a draft was drawn; use verifier 'auto' or 'coupled'"
        )
    if drafter.can_draft_trees and not verifier.supports_trees:
        raise BadInputError(
            f"expected a verifier that supports trees for the drafter {drafter.name}, got {verifier.name!r}, which verifies "
            "single paths only; use verifier 'auto', 'traversal' or 'coupled', or a drafter of chains"
        )
