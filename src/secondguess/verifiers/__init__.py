"""Who decides which guesses become text. Each rule is one file; `base.py` is the contract."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from secondguess.errors import BadInputError

if TYPE_CHECKING:
    from secondguess.verifiers.base import Verifier

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


def check_verifier_name(name: str) -> None:
    """Refuse a verifier that does not exist, without importing torch.

    Raises:
        BadInputError: listing those there are.
    """
    if name not in VERIFIERS:
        raise BadInputError(f"expected a verifier among {', '.join(VERIFIERS)}; got '{name}'")


def make_verifier(name: str) -> Verifier:
    """The rule of that name.

    Raises:
        BadInputError: no such rule; the message lists those there are.
    """
    check_verifier_name(name)
    module, class_name = VERIFIERS[name].split(":")
    verifier: Verifier = getattr(import_module(f"{__name__}.{module}"), class_name)()
    return verifier
