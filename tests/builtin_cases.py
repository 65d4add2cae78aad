"""The built-in models with several drafters, loaded once."""

from __future__ import annotations

from secondguess.api import LLM, choose_controller
from secondguess.drafters.spec import make_drafter


def with_drafter(pair: LLM, drafter: str, controller: str | None = None) -> LLM:
    """Return an `LLM` with another drafter for the same models.

    Args:
        pair: loaded with the drafter `model:builtin-draft`.
        drafter: its name; a draft model is always that of the pair.
        controller: its name; None for the drafter's default.
    """
    made = make_drafter(
        drafter,
        target_vocab_size=pair.target.runtime.vocab_size,
        load_draft_model=lambda path: pair.drafter.runtime,  # type: ignore[attr-defined]
        target=pair.target,
    )
    return LLM(pair.target, made, pair.verifier, choose_controller(controller, made))
