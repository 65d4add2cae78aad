"""Verifiers by name. Each verification rule is one module; `base.py` defines the interface."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from secondguess.errors import BadInputError, suggestion

if TYPE_CHECKING:
    from secondguess.verifiers.base import Verifier

VERIFIERS = {
    "auto": "secondguess.verifiers.auto:AutoVerifier",
    "greedy": "secondguess.verifiers.greedy:GreedyVerifier",
    "rejection": "secondguess.verifiers.rejection:RejectionVerifier",
    "block": "secondguess.verifiers.block:BlockVerifier",
    "traversal": "secondguess.verifiers.traversal:TraversalVerifier",
    "coupled": "secondguess.verifiers.coupled:CoupledVerifier",
}
"""Name on the command line -> import path of the class, imported on first use."""


RELAXATIONS = {"lantern": "arXiv 2410.03355", "gsd": "arXiv 2508.07747"}
"""Rules for image tokens that accept tokens near the target's, which changes the distribution."""


def check_verifier_name(name: str) -> None:
    """Raise a BadInputError for a verifier that does not exist, without importing torch."""
    if name in RELAXATIONS:
        raise BadInputError(
            f"expected a lossless verifier, got '{name}' ({RELAXATIONS[name]}), which changes the distribution of the "
            "output; use 'auto' or 'coupled'"
        )
    if name not in VERIFIERS:
        raise BadInputError(
            f"expected a verifier among {', '.join(VERIFIERS)}, got {name!r}{suggestion(name, VERIFIERS)}"
        )


def make_verifier(name: str) -> Verifier:
    """Return a new verifier."""
    check_verifier_name(name)
    module, _, class_name = VERIFIERS[name].partition(":")
    verifier: Verifier = getattr(import_module(module), class_name)()
    return verifier
