"""Muon optimizer (Jordan et al., 2024) for weight matrices, in the dtype of the weights.

`torch.optim.Muon` computes in bfloat16, which takes 20 times as long as float32 on processors
without bfloat16 instructions.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the Newton-Schulz iteration, with the steepest slope at 0."""
NUM_ITERATIONS = 5
MOMENTUM = 0.95
"""Momentum of the gradient."""


class Muon(torch.optim.Optimizer):
    """Momentum whose updates are made orthogonal, so that every direction learns at the same rate.

    The parameters are matrices. Updates have the root mean square of AdamW's at the same learning rate.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], learning_rate: float) -> None:
        super().__init__(parameters, {"lr": learning_rate})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["average"] = torch.zeros_like(parameter)
                average = state["average"].lerp_(parameter.grad, 1 - MOMENTUM)
                update = orthogonal(parameter.grad.lerp(average, MOMENTUM))
                # 0.2 is the usual root mean square of AdamW's updates.
                parameter.add_(update, alpha=-0.2 * group["lr"] * max(parameter.shape) ** 0.5)


def orthogonal(matrix: Tensor) -> Tensor:
    """Return about the nearest orthogonal matrix: its singular values are between 0.7 and 1.2."""
    is_tall = matrix.shape[0] > matrix.shape[1]
    wide = matrix.T if is_tall else matrix
    wide = wide / torch.linalg.norm(wide).clamp_min(1e-7)
    first, third, fifth = COEFFICIENTS
    for _ in range(NUM_ITERATIONS):
        square = wide @ wide.T
        wide = first * wide + (third * square + fifth * square @ square) @ wide
    found: Tensor = wide.T if is_tall else wide
    return found
