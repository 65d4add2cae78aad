"""Check of logits for NaN and infinity."""

from __future__ import annotations

import math

from torch import Tensor

from secondguess.errors import NonFiniteLogitsError


def are_finite(logits: Tensor) -> bool:
    """Return whether no logit is NaN or infinite; -inf is allowed."""
    return not (bool(logits.isnan().any()) or bool((logits == math.inf).any()))


def require_finite(logits: Tensor, whose: str = "the model") -> None:
    """Check logits of the target, or of a drafter.

    Raises:
        NonFiniteLogitsError: they are NaN or infinite.
    """
    if not are_finite(logits):
        raise NonFiniteLogitsError(
            f"expected finite logits from {whose}, got NaN or infinity; its weights are broken, or "
            "overflow in this precision: try another dtype"
        )
