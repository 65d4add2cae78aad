"""Measurement of how much a module amplifies rounding."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn


def rounding_error(linears: Iterable[nn.Module], run: Callable[[], Tensor]) -> float:
    """Return the relative root-mean-square error of logits if every output of linear layers is off by one rounding.

    Two correct computations in the same dtype differ by less: on four released models by .15 to .35 of it in bfloat16.
    """
    expected = run().float()
    signs = torch.Generator(expected.device).manual_seed(0)

    def round_once_more(_: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> Tensor:
        sign = 2 * torch.randint(2, output.shape, generator=signs, device=output.device) - 1
        return (output.float() * (1 + torch.finfo(output.dtype).eps / 2 * sign)).to(output.dtype)

    with ExitStack() as hooks:
        for linear in linears:
            hooks.callback(linear.register_forward_hook(round_once_more).remove)
        found = run().float()
    return float((found - expected).norm() / expected.norm())
