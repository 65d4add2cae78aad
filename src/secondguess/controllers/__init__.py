"""Controllers by name. A new one takes one module and one line in `CONTROLLERS`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from secondguess.names import Name, parse_name

if TYPE_CHECKING:
    from secondguess.controllers.base import Controller

CONTROLLERS = {
    "fixed": "secondguess.controllers.fixed:FixedController",
    "confidence": "secondguess.controllers.confidence:ConfidenceController",
    "entropy": "secondguess.controllers.entropy:EntropyController",
    "cost": "secondguess.controllers.cost.controller:CostController",
    "learned": "secondguess.controllers.learned:LearnedController",
}
"""Kind of controller -> module and class, imported on first use."""


def parse_controller_name(text: str) -> Name:
    """Parse a name such as `fixed:5` or `confidence:8,threshold=0.2`, without importing torch.

    Raises:
        BadInputError: an unknown kind, or options that are not `key=value`.
    """
    return parse_name(text, "controller", CONTROLLERS)


def make_controller(text: str) -> Controller:
    """Return a new controller for a name such as `fixed:5` or `confidence:8,threshold=0.2`.

    Raises:
        BadInputError: an unknown kind, argument or option, or an invalid value.
    """
    name = parse_controller_name(text)
    module, _, class_name = CONTROLLERS[name.kind].partition(":")
    controller_class: type[Controller] = getattr(import_module(module), class_name)
    return controller_class.build(name)
