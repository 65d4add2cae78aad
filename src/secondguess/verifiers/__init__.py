"""Who decides which guesses become text. Each rule is one file; `base.py` is the contract."""

from __future__ import annotations

from importlib import import_module

from secondguess.errors import BadInputError
from secondguess.verifiers.base import Exactness, Verifier

VERIFIERS = {
    "auto": "auto:AutoVerifier",
    "greedy": "greedy:GreedyVerifier",
    "rejection": "rejection:RejectionVerifier",
    "block": "block:BlockVerifier",
    "recursive": "recursive:RecursiveVerifier",
    "traversal": "traversal:TraversalVerifier",
    "coupled": "coupled:CoupledVerifier",
}
"""Name on the command line -> module and class, imported when asked for."""


def make_verifier(name: str) -> Verifier:
    """The rule of that name.

    Raises:
        BadInputError: no such rule; the message lists those there are.
    """
    if name not in VERIFIERS:
        raise BadInputError(f"expected a verifier among {', '.join(VERIFIERS)}; got '{name}'")
    module, class_name = VERIFIERS[name].split(":")
    verifier: Verifier = getattr(import_module(f"{__name__}.{module}"), class_name)()
    return verifier


__all__ = ["VERIFIERS", "Exactness", "Verifier", "make_verifier"]
