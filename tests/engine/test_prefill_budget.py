"""Tokens to prefill between two rounds."""

from __future__ import annotations

from secondguess.engine.prefill_budget import MAX_DELAY, MAX_TOKENS, MIN_TOKENS, PrefillBudget


def measured(round_seconds: float, token_seconds: float) -> PrefillBudget:
    budget = PrefillBudget()
    budget.add_round(round_seconds)
    budget.add_prefill(100, 100 * token_seconds)
    return budget


def test_only_the_chunk_limits_prefill_while_no_row_decodes() -> None:
    assert measured(0.01, 0.001).max_tokens(0) == MAX_TOKENS


def test_a_prefill_takes_about_two_rounds_while_rows_decode() -> None:
    tokens = measured(0.1, 0.001).max_tokens(1)
    assert tokens * 0.001 == MAX_DELAY * 0.1


def test_the_number_of_tokens_is_bounded() -> None:
    assert measured(0.001, 0.001).max_tokens(1) == MIN_TOKENS
    assert measured(10.0, 0.001).max_tokens(1) == MAX_TOKENS
    assert PrefillBudget().max_tokens(1) in (MIN_TOKENS, MAX_TOKENS)


def test_averages_follow_the_measurements() -> None:
    budget = measured(0.1, 0.001)
    for _ in range(30):
        budget.add_prefill(10, 10 * 0.002)
    assert 90 <= budget.max_tokens(1) <= 110
