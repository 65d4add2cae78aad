"""The Muon optimizer."""

from __future__ import annotations

import pytest
import torch

from secondguess.train.muon import Muon, orthogonal


@pytest.mark.parametrize("shape", [(24, 8), (8, 24), (16, 16)])
def test_updates_have_singular_values_near_one(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * torch.logspace(0, 1, shape[1])
    found = torch.linalg.svdvals(orthogonal(matrix))
    assert found.min() > 0.6
    assert found.max() < 1.3
    torch.testing.assert_close(orthogonal(1000 * matrix), orthogonal(matrix))


def test_a_badly_scaled_problem_is_solved_in_all_directions() -> None:
    """Plain gradient descent hardly moves along the flat ones."""
    scales = torch.logspace(-1, 0, 8)
    weight = torch.nn.Parameter(torch.zeros(8, 8))
    optimizer = Muon([weight], learning_rate=0.05)
    for step in range(200):
        optimizer.param_groups[0]["lr"] = 0.05 * (1 - step / 200)
        optimizer.zero_grad()
        (((weight - torch.eye(8)) * scales).square().sum()).backward()
        optimizer.step()
    torch.testing.assert_close(weight.detach(), torch.eye(8), atol=0.1, rtol=0)
