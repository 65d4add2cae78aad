"""Selection of the systems that a benchmark compares."""

from __future__ import annotations

from pathlib import Path

from secondguess.bench.config import BenchConfig, MeasuringSettings
from secondguess.bench.systems import Models, SecondguessSystem, System, draft_models, require_different_names
from secondguess.builtin import head_path
from secondguess.checkpoint.resolve import find_checkpoint
from secondguess.controllers import make_controller
from secondguess.drafters import DRAFTERS, draft_model_paths, parse_drafter_name
from secondguess.errors import BadInputError
from secondguess.heads.mtp import contains_mtp
from secondguess.names import AUTO
from secondguess.pairing import default_drafter
from secondguess.workloads.provenance import public_name

TREE = "tree=2x2x1"
"""Tree shape in which drafters with draft probabilities are compared, besides the chain."""


def drafters_to_run(config: MeasuringSettings, default: str) -> tuple[str, ...]:
    """Return the drafters to compare: the named ones, all, or the target's default and its components."""
    if config.runs_all:
        return all_drafters(config.model, default)
    if config.drafters is not None:
        names = (default if name == AUTO else name for name in config.drafters)
        return tuple(dict.fromkeys(name for name in names if name != "none"))  # plain decoding always runs
    return _compared_by_default(default)


def _compared_by_default(default: str) -> tuple[str, ...]:
    parts = map(str, parse_drafter_name(default))
    return tuple(dict.fromkeys((default, *parts, "ngram", "suffix")))


def all_drafters(model: str, default: str) -> tuple[str, ...]:
    """Return every drafter available for a target without naming another checkpoint.

    All run as chains, those with draft probabilities also as trees.
    """
    if model == "builtin":
        heads = [kind for kind in DRAFTERS if kind != "model" and head_path(kind) is not None]
        dists = ["model:builtin-draft", *heads]
        trees = [variant for name in dists for variant in (name, f"{name},{TREE}")]
        return ("suffix", "ngram", *trees, "suffix+model:builtin-draft")
    own = ["mtp", f"mtp,{TREE}"] if contains_mtp(Path(find_checkpoint(model))) else []
    return tuple(dict.fromkeys((*_compared_by_default(default), *own)))


def require_draft_model(config: BenchConfig) -> None:
    """Refuse draft lengths that no draft model would use; with all drafters, only assistants of Transformers do."""
    length = config.draft_lengths[0]
    if config.runs_all and "transformers" not in config.against:
        raise BadInputError(
            f"expected --controller fixed:K with --drafters all, got --draft-length {length}, which only "
            "Transformers would read there"
        )
    names = drafters_to_run(config, default_drafter(config.model))
    if not any(draft_model_paths(name) for name in names):
        raise BadInputError(
            f"expected a drafter with a draft model for --draft-length {length}, got "
            f"{', '.join(map(public_name, names)) or 'none'}; give --controller fixed:{length}, which runs with any drafter"
        )


def make_systems(config: BenchConfig, models: Models) -> tuple[list[System], list[str]]:
    """Return our plain decoding, our drafters under their controllers, then peers; and notes on those missing.

    Every drafter runs under its default controller and under the named ones; model drafters also run at each constant
    draft length. A controller that needs draft probabilities is left out for a drafter without.
    """
    systems, unused = _own_systems(config, models)
    if "transformers" in config.against:
        from secondguess.bench.peers import TransformersModel, transformers_systems

        assistants = {name: TransformersModel.of(models.draft_model(name)) for name in draft_models(systems)}
        systems += transformers_systems(TransformersModel.of(models.target), assistants, config.draft_lengths)
    require_different_names(systems)
    notes = [
        f"{public_name(drafter)} is not run with {controller}, which does not work with it"
        for drafter, controller in unused
    ]
    alone = list(dict.fromkeys(system.family for system in systems if not system.batches))
    if alone and config.batch_sizes != (1,):
        notes.append(f"{', '.join(alone)}: at batch size 1 only, since they decode one prompt at a time here")
    return systems, notes


def _own_systems(config: BenchConfig, models: Models) -> tuple[list[System], list[tuple[str, str]]]:
    """Return the systems of this package, and the drafters and controllers that do not work together."""
    fixed = [f"fixed:{length}" for length in config.draft_lengths]
    for name in (*config.controllers, *fixed):
        make_controller(name)  # refuses an unknown name
    drafters = drafters_to_run(config, models.default_drafter)
    systems: list[System] = [SecondguessSystem(models, "none")]
    unused: list[tuple[str, str]] = []
    for drafter in drafters:
        default = SecondguessSystem(models, drafter)
        # With `--drafters all`, named controllers replace the default one.
        if not (config.runs_all and config.controllers):
            systems.append(default)
        lengths = fixed if default.draft_model is not None and not config.runs_all else []
        for controller in dict.fromkeys([*lengths, *config.controllers]):
            try:
                systems.append(SecondguessSystem(models, drafter, controller))
            except BadInputError:
                unused.append((drafter, controller))
    for controller in config.controllers:
        if all((drafter, controller) in unused for drafter in drafters):
            found = ", ".join(map(public_name, drafters)) or "none at all"
            raise BadInputError(
                f"expected a drafter that the controller {controller!r} works with, got {found}; add a drafter with a "
                "model, or take fixed:K"
            )
    return systems, unused
