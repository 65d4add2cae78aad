"""Who guesses, by name. To add one: one file, one line in `DRAFTERS` (docs/adding-a-drafter.md)."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from secondguess.drafters.base import Drafter, Supplies
from secondguess.names import Name, parse_name
from secondguess.runtime.base import Runtime

DRAFTERS = {
    "none": "secondguess.drafters.none:NoDrafter",
    "model": "secondguess.drafters.model:ModelDrafter",
    "ngram": "secondguess.drafters.ngram:NgramDrafter",
    "suffix": "secondguess.drafters.suffix:SuffixDrafter",
}
"""Kind of drafter -> where its class is; imported only when it is asked for."""


def parse_drafter_name(text: str) -> Name:
    """Split a drafter's name such as `model:PATH,key=value`.

    Raises:
        BadInputError: a kind that does not exist, or options that are not `key=value`.
    """
    return parse_name(text, "drafter", DRAFTERS)


def make_drafter(text: str, *, target_vocab_size: int, load_draft_model: Callable[[str], Runtime]) -> Drafter:
    """Make the drafter that a name asks for.

    Args:
        text: the name, such as `none`, `ngram,max=4` or `model:PATH`.
        target_vocab_size: width of the target's logits.
        load_draft_model: gives the runtime of the model at a path; called only by drafters that have one.

    Raises:
        BadInputError: a kind, an argument, an option or a value that does not exist.
    """
    name = parse_drafter_name(text)
    module, _, class_name = DRAFTERS[name.kind].partition(":")
    drafter_class: type[Drafter] = getattr(import_module(module), class_name)
    return drafter_class.build(name, Supplies(target_vocab_size, load_draft_model))
