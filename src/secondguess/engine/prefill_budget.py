"""Number of prompt tokens to prefill between two rounds, from measured times."""

from __future__ import annotations

MAX_DELAY = 0.6
"""Maximum duration of the prefill between two rounds, in rounds.

With 1.0, a prompt of 2,000 tokens delayed tokens of eight streams by up to 3.9 rounds (99th percentile of each of
six runs), with 0.6 by up to 3.0, and was prefilled in 1.5 times the time.
"""
ARRIVAL_DELAY = 4.0
"""Maximum duration of a prefill for which no row waits, in rounds: a row that arrives meanwhile waits for its end."""
MIN_TOKENS = 8
"""Minimum number of tokens of such a prefill: with fewer, a forward pass costs more per token."""
MIN_TOKENS_ALONE = 48
"""The same while no row waits; prefill passes of 48 tokens took 6 % longer than of 512 on a CPU, those of 32 took 12 %."""
MAX_TOKENS = 512
"""Maximum number of tokens: cancellations are noticed between two prefills."""
WEIGHT = 0.2
"""Weight of the newest measurement in an average."""


class PrefillBudget:
    """Bound on the delay that rows which join cause to rows that are decoding."""

    def __init__(self) -> None:
        self._round_seconds = 0.0
        self._token_seconds = {True: 0.0, False: 0.0}  # beside rows that decode, in short passes; and alone

    def max_tokens(self, num_decoding: int, spent: float = 0.0, rows_may_arrive: bool = True) -> int:
        """Return the maximum number of tokens to prefill before the next round.

        `num_decoding` rows wait for the prefill, and have done so for `spent` seconds; others may arrive during it or not.
        """
        if not self._round_seconds or not (num_decoding or rows_may_arrive):
            return MAX_TOKENS
        delay = (
            MAX_DELAY * self._round_seconds - spent if num_decoding else ARRIVAL_DELAY * self._round_seconds
        )
        fewest = MIN_TOKENS if num_decoding else MIN_TOKENS_ALONE
        token_seconds = self._token_seconds[num_decoding > 0]
        tokens = int(delay / token_seconds) if token_seconds else fewest
        return min(max(tokens, fewest), MAX_TOKENS)

    def add_round(self, seconds: float) -> None:
        """Add the duration of a round."""
        self._round_seconds = _averaged(self._round_seconds, seconds)

    def add_prefill(self, num_tokens: int, seconds: float, num_decoding: int) -> None:
        """Add the duration of a prefill; of those for which no row waits, short ones say nothing of longer ones."""
        is_beside = num_decoding > 0
        if num_tokens >= (1 if is_beside else MIN_TOKENS_ALONE):
            self._token_seconds[is_beside] = _averaged(self._token_seconds[is_beside], seconds / num_tokens)


def _averaged(average: float, value: float) -> float:
    return value if not average else average + WEIGHT * (value - average)
