"""Output of `generate`: stop strings, streamed tokens and the padded result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from secondguess.core import Row
from secondguess.drop_in.processors import StoppingConditions, token_ids
from secondguess.errors import BadInputError
from secondguess.tensors import padded_tensor


class StopStringWatcher:
    """Incremental check of one row against `StopStringCriteria`, after a prompt with its padding, token by token."""

    def __init__(self, criteria: Sequence[Any], prompt: Sequence[int]) -> None:
        self._criteria = criteria
        self._length = max(criterion.maximum_token_len for criterion in criteria)
        self._tokens = list(prompt)[-self._length :]

    def push(self, token: int) -> bool:
        """Append the row's next token and return whether it completes a stop string."""
        self._tokens = [*self._tokens, token][-self._length :]
        tokens = torch.tensor([self._tokens])
        return any(bool(criterion(tokens, None)) for criterion in self._criteria)


def padding_token(config: Any, ending: StoppingConditions, num_rows: int) -> int:
    """Return the padding token after a finished row: `pad_token_id`, else the first end token.

    Without one, rows that may end at different lengths raise a BadInputError.
    """
    if num_rows == 1 or not ending.may_stop_early:
        return 0
    if not ending.has_end_tokens:
        raise BadInputError(
            "cannot end rows at stop strings: without eos_token_id, Transformers does not pad a row that has ended. Give "
            "eos_token_id, or generate row by row."
        )
    for name in ("pad_token_id", "eos_token_id"):
        value = getattr(config, name)
        if value is not None:
            return token_ids(name, value)[0]
    raise BadInputError("cannot pad rows that end at different lengths: pad_token_id is not set. Set it.")


class StreamedRows:
    """Streaming of a batch, one tensor `[row]` per step as in Transformers; finished rows are padded."""

    def __init__(self, streamer: Any, rows: Sequence[Row], padding: int) -> None:
        self._streamer = streamer
        self._rows = rows
        self._padding = padding
        self._num_streamed = 0

    def stream_ready_steps(self) -> None:
        """Stream all steps that every unfinished row has reached."""
        lengths = [row.num_output for row in self._rows if not row.finished]
        ready = min(lengths) if lengths else max(row.num_output for row in self._rows)
        for step in range(self._num_streamed, ready):
            self._streamer.put(torch.tensor([self._token(row, step) for row in self._rows]))
        self._num_streamed = ready

    def _token(self, row: Row, step: int) -> int:
        return row.tokens[row.num_prompt + step] if step < row.num_output else self._padding


def padded_output(input_ids: Tensor, rows: Sequence[Row], padding: int) -> Tensor:
    """Return `[row, position]` prompts as given, each followed by its right-padded output."""
    new = padded_tensor([row.output for row in rows], padding, input_ids.device)
    return torch.cat([input_ids, new], dim=1)
