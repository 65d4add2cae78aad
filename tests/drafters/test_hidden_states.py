"""The buffer of hidden states that a head has not read yet."""

from __future__ import annotations

import torch
from torch import Tensor

from secondguess.core import Row, Verdict
from secondguess.drafters.hidden_states import HiddenStateBuffer
from secondguess.sampling import SamplingParams

WIDTH = 3


def buffer_for(num_rows: int) -> tuple[HiddenStateBuffer, list[Row]]:
    rows = [Row([1, 2], SamplingParams()) for _ in range(num_rows)]
    buffer = HiddenStateBuffer([4])
    for row in rows:
        buffer.begin(row, {4: torch.zeros(1, WIDTH)})
    return buffer, rows


def verdict_of(paths: list[list[int]]) -> Verdict:
    return Verdict(paths, [0] * len(paths))


def states_of(num_rows: int, num_queries: int) -> Tensor:
    return torch.arange(num_rows * num_queries * WIDTH, dtype=torch.float32).reshape(
        num_rows, num_queries, WIDTH
    )


def test_each_row_keeps_the_states_of_pending_and_the_path() -> None:
    buffer, rows = buffer_for(2)
    plain, drafted = states_of(2, 1), states_of(2, 4)
    buffer.observe(rows, verdict_of([[], []]), {4: plain})
    buffer.observe(rows, verdict_of([[1, 2], []]), {4: drafted})
    first, second = (buffer.take(row)[4] for row in rows)
    torch.testing.assert_close(first[1:], torch.cat((plain[0], drafted[0, [0, 2, 3]])))
    torch.testing.assert_close(second[1:], torch.cat((plain[1], drafted[1, [0]])))
    assert not buffer.has(rows[0])


def test_a_row_does_not_keep_the_states_of_other_rows() -> None:
    """They may end long before it, and it may never be drafted for."""
    buffer, rows = buffer_for(8)
    buffer.observe(rows, verdict_of([[]] * 8), {4: states_of(8, 1)})
    for row in rows[1:]:
        buffer.release(row)
    held = [
        states.untyped_storage().nbytes() for piece in buffer._pieces[rows[0]] for states in piece.values()
    ]
    assert held == [WIDTH * 4, WIDTH * 4]
