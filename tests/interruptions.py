"""Interruptions (Ctrl-C) at every line of some modules, one after the other."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import FrameType, ModuleType
from typing import Any


def interrupted_at(line: int, modules: Sequence[ModuleType], call: Callable[[], object]) -> bool:
    """Call a function, with a KeyboardInterrupt before the given executed line of these modules, counted from 1.

    Returns:
        False if the call ended before.
    """
    files, num_left = [module.__file__ for module in modules], line

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal num_left
        if frame.f_code.co_filename not in files:
            return None
        if event == "line":
            num_left -= 1
            if not num_left:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False
