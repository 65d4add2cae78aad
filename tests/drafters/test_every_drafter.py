"""Properties of every drafter under every controller: the text equals that of plain decoding."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest

from drafter_cases import ADAPTIVE, CONTROLLED, DRAFTERS, GREEDY, PROMPTS, greedy_text, never_called, run
from secondguess.core import Budgets, Draft, Row, Verdict
from secondguess.drafters.base import Drafter
from secondguess.drafters.combined import CombinedDrafter
from secondguess.sampling import SamplingParams
from secondguess.sampling.noise import KeyedNoise, Noise

Propose = Callable[[Drafter, Sequence[Row], Budgets, Noise], Draft]

every_drafter = pytest.mark.parametrize("drafter", DRAFTERS)
every_pair = pytest.mark.parametrize(("drafter", "controller"), CONTROLLED)


@every_pair
@pytest.mark.parametrize("batch", [1, 4])
def test_greedy_text_equals_plain_decoding(drafter: str, controller: str, batch: int) -> None:
    result = run(DRAFTERS[drafter](), PROMPTS[:batch], controller=controller)
    assert result.outputs == [greedy_text(prompt, 14) for prompt in PROMPTS[:batch]]


@every_pair
def test_seeded_text_equals_plain_decoding(drafter: str, controller: str) -> None:
    params = SamplingParams(max_tokens=14, temperature=1.0)
    plain = run(DRAFTERS["none"](), params=params, controller="fixed:0", coupled=True)
    assert (
        run(DRAFTERS[drafter](), params=params, controller=controller, coupled=True).outputs == plain.outputs
    )


@pytest.mark.parametrize(
    ("drafter", "controller"),
    [
        (drafter, controller)
        for drafter, controller in CONTROLLED
        if controller.partition(":")[0] not in ADAPTIVE
    ],
)
def test_a_row_of_a_batch_equals_the_row_alone(drafter: str, controller: str) -> None:
    """Tokens and drafts; settings differ per row, so that rows stop drafting at different depths.

    Controllers that learn from all rows are left out: draft lengths differ, and with them the draws of sampled text.
    """
    params = [
        SamplingParams(max_tokens=9, temperature=1.0),
        SamplingParams(max_tokens=3, temperature=0.0),
        SamplingParams(max_tokens=14, temperature=0.7, repetition_penalty=1.3),
        SamplingParams(max_tokens=14, temperature=1.0, top_k=3),
    ]
    together = run(DRAFTERS[drafter](), PROMPTS, params, controller=controller)
    for index, (prompt, own) in enumerate(zip(PROMPTS, params, strict=True)):
        alone = run(DRAFTERS[drafter](), [prompt], own, controller=controller)
        assert together.outputs[index] == alone.outputs[0]
        assert together.stats[index].drafted_per_position == alone.stats[0].drafted_per_position
        assert together.stats[index].accepted_per_position == alone.stats[0].accepted_per_position


@every_drafter
def test_greedy_text_under_penalties_equals_plain_decoding(drafter: str) -> None:
    params = SamplingParams(max_tokens=14, repetition_penalty=1.5, frequency_penalty=0.3, logit_bias={2: 1.0})
    assert run(DRAFTERS[drafter](), params=params).outputs == run(DRAFTERS["none"](), params=params).outputs


@every_drafter
def test_an_end_token_inside_a_draft_ends_the_row(drafter: str) -> None:
    plain = [greedy_text(prompt, 14) for prompt in PROMPTS]
    end = plain[0][2]
    expected = [text[: text.index(end) + 1] if end in text else text for text in plain]
    assert expected != plain
    result = run(DRAFTERS[drafter](), end_tokens=frozenset({end}), controller="fixed:6")
    assert result.outputs == expected


@every_drafter
@pytest.mark.parametrize("max_tokens", [1, 2, 3])
def test_drafts_are_limited_by_max_tokens(drafter: str, max_tokens: int) -> None:
    result = run(DRAFTERS[drafter](), params=SamplingParams(max_tokens=max_tokens), controller="fixed:8")
    assert result.outputs == [greedy_text(prompt, max_tokens) for prompt in PROMPTS]
    assert all(len(stats.drafted_per_position) <= max_tokens - 1 for stats in result.stats)


@every_drafter
def test_finished_rows_are_released(drafter: str) -> None:
    made = DRAFTERS[drafter]()
    result = run(made)
    assert result.target.num_live_rows == 0
    states = [value for value in vars(made).values() if isinstance(value, dict)]
    assert states == [{}] * len(states)
    runtime = getattr(made, "runtime", None)
    assert runtime is None or runtime.num_live_rows == 0


@pytest.mark.parametrize("drafter", ["ngram", "suffix", "grid"])
@pytest.mark.parametrize("seed", range(5))
def test_the_index_of_a_lookup_equals_that_of_a_new_drafter(drafter: str, seed: int) -> None:
    """Tokens are added round by round; the new drafter reads them at once."""
    source = random.Random(seed)
    made, row = DRAFTERS[drafter](), Row([0, 1], GREEDY)
    budgets, noise = Budgets([8], never_called), KeyedNoise.from_rows([row])
    made.begin([row])
    for _ in range(30):
        gained = source.choices([0, 1, 2], k=source.randint(1, 4))
        row.tokens += gained
        made.observe([row], Verdict.from_chain([len(gained) - 1], gained[-1:]), {})
        fresh = DRAFTERS[drafter]()
        fresh.begin([row])
        expected = fresh.propose([row], budgets, noise)
        assert made.propose([row], budgets, noise).tokens.tolist() == expected.tokens.tolist()


@every_drafter
def test_a_drafter_can_be_used_for_several_runs(drafter: str) -> None:
    made = DRAFTERS[drafter]()
    assert run(made).outputs == run(made).outputs


def recording_budgets(propose: Propose, recorded: list[list[int]]) -> Propose:
    def watched(part: Drafter, rows: Sequence[Row], budgets: Budgets, noise: Noise) -> Draft:
        recorded.append(list(budgets.lengths))
        return propose(part, rows, budgets, noise)

    return watched


@pytest.mark.parametrize("drafter", ["suffix or model", "look-ups in turn"])
def test_a_part_without_rows_to_draft_for_is_not_called(
    drafter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    either = DRAFTERS[drafter]()
    assert isinstance(either, CombinedDrafter)
    budgets_of_parts: list[list[int]] = []
    for kind in {type(part) for part in either.parts}:
        monkeypatch.setattr(kind, "propose", recording_budgets(kind.propose, budgets_of_parts))
    run(either, params=SamplingParams(max_tokens=14, temperature=1.0))
    assert len(budgets_of_parts) > 4
    assert all(any(lengths) for lengths in budgets_of_parts)


@every_drafter
def test_an_empty_batch_generates_nothing(drafter: str) -> None:
    assert run(DRAFTERS[drafter](), []).outputs == []
