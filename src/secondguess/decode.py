"""Speculative decoding loop: rows are prefilled, decode in rounds, and are released. Read this first.

`rounds.py` has one round: draft, score, verify, commit. Here, rows join a batch, are prefilled, take
part in rounds until they are finished, and leave it. `decode` runs the loop for a fixed set of rows;
`engine/shared_batch.py` uses the same `Batch` for `generate`, `stream`, the command line and the server.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

from torch import inference_mode

from secondguess.core import Commit, Row
from secondguess.errors import BadInputError
from secondguess.prefilling import prefill_rows
from secondguess.rounds import Components as Components
from secondguess.rounds import release, run_round
from secondguess.runtime.base import HiddenStates, join_hidden


class Batch:
    """Rows that decode together; rows join and leave between rounds.

    Args:
        components: components of the loop.
        max_prefill_tokens: maximum number of prompt tokens that a step prefills before its round, in
            the target and then in the drafter; None for all of them. It bounds how long rows that
            join delay the others.
    """

    def __init__(self, components: Components, max_prefill_tokens: int | None = None) -> None:
        if max_prefill_tokens is not None and max_prefill_tokens < 1:
            raise BadInputError(f"expected max_prefill_tokens of at least 1, got {max_prefill_tokens}")
        self.components = components
        self.max_prefill_tokens = max_prefill_tokens
        self._decoding: list[Row] = []
        self._prefilling: dict[Row, list[HiddenStates]] = {}

    def __len__(self) -> int:
        """Return the number of rows, those that are still prefilled included."""
        return len(self._prefilling) + len(self._decoding)

    @property
    def decoding(self) -> list[Row]:
        """Rows that take part in rounds: all tokens of their prompts but the last are cached."""
        return self._decoding

    @property
    def prefilling(self) -> list[Row]:
        """Rows whose prompts are not cached yet, in the order in which they are prefilled."""
        return list(self._prefilling)

    @inference_mode()
    def add(self, rows: Sequence[Row]) -> None:
        """Admit rows, whose prompts the next steps prefill in this order."""
        # Registered first, so that `close` releases them even if this is interrupted.
        self._prefilling.update((row, []) for row in rows)
        limits = self.components.drafter.admit(rows)
        # A token is scored only if it is prefilled.
        limits = [
            0 if row.prompt_logprobs is not None else limit for row, limit in zip(rows, limits, strict=True)
        ]
        # Per row, the number of tokens that are cached already: its slot's former row began with them.
        reused = self.components.target.admit(rows, limits)
        for row, num_reused in zip(rows, reused, strict=True):
            self.components.recorder.of(row).num_reused = num_reused
        # Other batches with the same target may have drafters that read other layers.
        self.components.target.request_hidden_states(self.components.drafter.hidden_layers, rows)

    def step(self) -> list[Commit]:
        """Prefill, then run a round over the rows whose prompts are cached, and release finished rows.

        Returns:
            One `Commit` per row that took part in the round or that needed a prefill alone.
        """
        commits = self.prefill(self.prefilling)
        self.prefill_drafter(self.components.drafter.unfinished)
        return commits + self.run(self._decoding)

    def run(self, rows: Sequence[Row]) -> list[Commit]:
        """Run a round over some of the rows whose prompts are cached, and release finished rows."""
        if not rows:
            return []
        # The drafter's prefill of a single row delays no other row, so it is part of the round.
        limit = self.max_prefill_tokens if len(rows) > 1 else None
        commits = run_round(self.components, rows, limit)
        self.remove([row for row in rows if row.finished])
        return commits

    def remove(self, rows: Sequence[Row]) -> None:
        """Release rows, finished or not."""
        if not rows:
            return
        # Slots stay contiguous: releasing the last row first moves the fewest cache entries.
        for row in reversed(rows):
            release(self.components, row)
            self._prefilling.pop(row, None)
        removed = set(rows)
        self._decoding = [row for row in self._decoding if row not in removed]

    def close(self) -> None:
        """Release all rows."""
        self.remove([*self._decoding, *self._prefilling])

    @inference_mode()
    def prefill(self, rows: Sequence[Row]) -> list[Commit]:
        """Prefill some of the rows whose prompts are not cached, up to `max_prefill_tokens` tokens.

        Of rows with the same prompt only the first is prefilled; the others wait for it and then
        copy its cache entries. After an error, the rows are as they were when they were admitted.

        Returns:
            Commits without tokens of the rows that are finished, because they may gain none (`max_tokens` 0).
        """
        if not rows:
            return []
        recorder = self.components.recorder
        try:
            with recorder.round([*self._decoding, *rows]), recorder.phase("prefill"):
                ready = prefill_rows(self.components, rows, self._prefilling, self.max_prefill_tokens)
                self.components.drafter.begin(ready, [join_hidden(self._prefilling[row]) for row in ready])
        except BaseException:
            self.components.target.rewind(rows, [recorder.of(row).num_reused for row in rows])
            for row in rows:
                self._prefilling[row] = []
                if row.prompt_logprobs is not None:
                    row.prompt_logprobs.clear()
            raise
        self._decoding += ready
        for row in ready:
            del self._prefilling[row]
        finished = [row for row in ready if not row.params.max_tokens]
        commits = [row.commit_nothing() for row in finished]
        self.remove(finished)
        return commits

    @inference_mode()
    def prefill_drafter(self, rows: Sequence[Row]) -> None:
        """Continue the drafter's prefill of rows that it has not finished, for which rounds do not wait."""
        if rows and self.max_prefill_tokens is not None:
            with self.components.recorder.round(rows), self.components.recorder.phase("prefill"):
                self.components.drafter.prefill(rows, self.max_prefill_tokens)


def decode(components: Components, rows: Sequence[Row]) -> Generator[list[Commit], None, None]:
    """Decode rows until all are finished, yielding the commits of each round.

    If the generator is closed early, the state of all unfinished rows is released.

    Args:
        components: components of the loop.
        rows: extended in place, with a finish reason at the end. Finished rows are skipped.

    Yields:
        One `Commit` per row that took part in the round.

    Raises:
        BadInputError: a draft or a row that the verifier cannot verify exactly.
    """
    batch = Batch(components)
    try:
        batch.add([row for row in rows if not row.finished])
        while batch:
            yield batch.step()
    finally:
        batch.close()
