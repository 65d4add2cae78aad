"""Selection of the systems that a benchmark compares."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import torch

from secondguess.bench.config import BenchConfig
from secondguess.bench.systems import Models, SecondguessSystem, System, draft_models, speculator_name
from secondguess.checkpoint.loaded import LoadedModel
from secondguess.controllers import make_controller
from secondguess.errors import BadInputError
from secondguess.workloads.provenance import public_name


def make_systems(config: BenchConfig, models: Models) -> list[System]:
    """Return our plain decoding, our drafters under their controllers, then peers and servers.

    Every drafter runs under its default controller and under the named ones; model drafters also
    run at each constant draft length.

    Raises:
        BadInputError: an unknown name, a controller that no drafter uses, two systems with the
            same name, or a server that does not respond.
    """
    fixed = [f"fixed:{length}" for length in config.draft_lengths]
    for name in (*config.controllers, *fixed):
        make_controller(name)  # refuses an unknown name
    systems: list[System] = [SecondguessSystem(models, "none")]
    for drafter in config.drafters_to_run:
        default = SecondguessSystem(models, drafter)
        # With `--drafters all`, named controllers replace the default one.
        if not (config.runs_all and config.controllers):
            systems.append(default)
        lengths = fixed if default.draft_model is not None and not config.runs_all else []
        for controller in dict.fromkeys([*lengths, *config.controllers]):
            # A controller that needs draft probabilities is left out for a drafter without; `coverage_notes` says so.
            with suppress(BadInputError):
                systems.append(SecondguessSystem(models, drafter, controller))
    unused = _unused_controllers(systems, config)
    for controller in config.controllers:
        if all((drafter, controller) in unused for drafter in config.drafters_to_run):
            found = ", ".join(map(public_name, config.drafters_to_run)) or "none at all"
            raise BadInputError(
                f"expected a drafter that would ask the controller {controller!r}, got {found}; add a drafter with a "
                "model, or take fixed:K"
            )
    if "transformers" in config.against:
        systems += _transformers_systems(config, models, draft_models(systems))
    systems += _servers(config, models)
    names = [system.name for system in systems]
    if len(set(names)) < len(names):
        raise BadInputError(f"expected drafters whose names differ in a report, got {', '.join(names)}")
    return systems


def coverage_notes(systems: Sequence[System], config: BenchConfig) -> list[str]:
    """Return notes on systems that are missing in some settings."""
    notes = [
        f"{public_name(drafter)} is not run with {controller}, which it would not ask"
        for drafter, controller in _unused_controllers(systems, config)
    ]
    alone = list(dict.fromkeys(system.family for system in systems if not system.batches))
    if alone and config.batch_sizes != (1,):
        notes.append(f"{', '.join(alone)}: at batch size 1 only, since they decode one prompt at a time here")
    return notes


def _unused_controllers(systems: Sequence[System], config: BenchConfig) -> list[tuple[str, str]]:
    """Return the pairs of drafter and named controller that do not run together."""
    names = {system.name for system in systems}
    return [
        (drafter, controller)
        for drafter in config.drafters_to_run
        for controller in config.controllers
        if speculator_name(drafter, controller) not in names
    ]


def _transformers_systems(config: BenchConfig, models: Models, draft_names: Sequence[str]) -> list[System]:
    from secondguess.bench.peers import TransformersModel, transformers_systems

    def stock(loaded: LoadedModel) -> TransformersModel:
        return TransformersModel(loaded.path, getattr(torch, loaded.dtype), loaded.runtime.device)

    assistants = {name: stock(models.draft_model(name)) for name in draft_names}
    return transformers_systems(stock(models.target), assistants, config.draft_lengths)


def _servers(config: BenchConfig, models: Models) -> list[System]:
    if not config.servers:
        return []
    from secondguess.bench.server import Server

    tokenizer = models.target.tokenizer

    def decode(ids: Sequence[int]) -> str:
        # Without special tokens: the server's own tokenizer adds them.
        text: str = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    return [Server(address, decode) for address in config.servers]
