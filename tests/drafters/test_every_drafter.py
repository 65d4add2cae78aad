"""What holds for every drafter under every controller: the text is the target's own."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
import torch
from drafter_cases import ADAPTIVE, CONTROLLERS, DRAFTERS, GREEDY, PROMPTS, greedy_text, never_asked, run

from secondguess.core import Budgets, Draft, Row, Verdict
from secondguess.drafters.base import Drafter
from secondguess.drafters.combined import CombinedDrafter
from secondguess.sampling import SamplingParams
from secondguess.sampling.noise import KeyedNoise, Noise

Propose = Callable[[Drafter, Sequence[Row], Budgets, Noise], Draft]

every_drafter = pytest.mark.parametrize("drafter", DRAFTERS)
every_controller = pytest.mark.parametrize("controller", CONTROLLERS)


@every_drafter
@every_controller
@pytest.mark.parametrize("batch", [1, 2, 4])
def test_greedy_text_is_that_of_plain_greedy_decoding(drafter: str, controller: str, batch: int) -> None:
    result = run(DRAFTERS[drafter](), PROMPTS[:batch], controller=controller)
    assert result.outputs == [greedy_text(prompt, 14) for prompt in PROMPTS[:batch]]


@every_drafter
@every_controller
def test_seeded_text_is_that_of_no_drafter(drafter: str, controller: str) -> None:
    params = SamplingParams(max_tokens=14, temperature=1.0)
    plain = run(DRAFTERS["none"](), params=params, controller="fixed:0", coupled=True)
    assert (
        run(DRAFTERS[drafter](), params=params, controller=controller, coupled=True).outputs == plain.outputs
    )


@every_drafter
@every_controller
def test_a_row_is_decoded_as_it_would_be_alone(drafter: str, controller: str) -> None:
    """Tokens and drafts; settings differ per row, so that rows stop drafting at different depths."""
    if controller.partition(":")[0] in ADAPTIVE:
        pytest.skip("it learns from all rows: sampled text keeps its law, but not its draws")
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
def test_greedy_text_under_penalties(drafter: str) -> None:
    params = SamplingParams(max_tokens=14, repetition_penalty=1.5, frequency_penalty=0.3, logit_bias={2: 1.0})
    assert run(DRAFTERS[drafter](), params=params).outputs == run(DRAFTERS["none"](), params=params).outputs


@every_drafter
def test_an_end_token_inside_a_draft_ends_the_row_there(drafter: str) -> None:
    plain = [greedy_text(prompt, 14) for prompt in PROMPTS]
    end = plain[0][2]
    expected = [text[: text.index(end) + 1] if end in text else text for text in plain]
    assert expected != plain
    result = run(DRAFTERS[drafter](), end_tokens=frozenset({end}), controller="fixed:6")
    assert result.outputs == expected


@every_drafter
@pytest.mark.parametrize("max_tokens", [1, 2, 3])
def test_room_smaller_than_the_draft(drafter: str, max_tokens: int) -> None:
    result = run(DRAFTERS[drafter](), params=SamplingParams(max_tokens=max_tokens), controller="fixed:8")
    assert result.outputs == [greedy_text(prompt, max_tokens) for prompt in PROMPTS]
    assert all(len(stats.drafted_per_position) <= max_tokens - 1 for stats in result.stats)


@every_drafter
def test_nothing_is_held_at_the_end(drafter: str) -> None:
    made = DRAFTERS[drafter]()
    result = run(made)
    assert result.target.num_live_rows == 0
    states = [value for value in vars(made).values() if isinstance(value, dict)]
    assert states == [{}] * len(states)
    runtime = getattr(made, "runtime", None)
    assert runtime is None or runtime.num_live_rows == 0


@pytest.mark.parametrize("drafter", ["ngram", "suffix"])
@pytest.mark.parametrize("seed", range(5))
def test_a_look_up_reads_each_committed_token_once(drafter: str, seed: int) -> None:
    """What it has read round by round is what it would read at once."""
    source = random.Random(seed)
    made, row = DRAFTERS[drafter](), Row([0, 1], GREEDY)
    budgets, noise = Budgets([8], never_asked), KeyedNoise.from_rows([row])
    made.begin([row])
    for _ in range(30):
        gained = source.choices([0, 1, 2], k=source.randint(1, 4))
        row.tokens += gained
        length, next_token = torch.tensor([len(gained) - 1]), torch.tensor([gained[-1]])
        made.observe([row], Verdict.from_chain(length, next_token), {})
        fresh = DRAFTERS[drafter]()
        fresh.begin([row])
        expected = fresh.propose([row], budgets, noise)
        assert made.propose([row], budgets, noise).tokens.tolist() == expected.tokens.tolist()


@every_drafter
def test_the_same_drafter_serves_many_runs(drafter: str) -> None:
    made = DRAFTERS[drafter]()
    assert run(made).outputs == run(made).outputs


def noting_budgets(propose: Propose, noted: list[list[int]]) -> Propose:
    def watched(part: Drafter, rows: Sequence[Row], budgets: Budgets, noise: Noise) -> Draft:
        noted.append(list(budgets.lengths))
        return propose(part, rows, budgets, noise)

    return watched


@pytest.mark.parametrize("drafter", ["suffix or model", "look-ups in turn"])
def test_a_part_that_guesses_for_nobody_is_not_asked(drafter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    either = DRAFTERS[drafter]()
    assert isinstance(either, CombinedDrafter)
    budgets_of_parts: list[list[int]] = []
    for kind in {type(part) for part in either.parts}:
        monkeypatch.setattr(kind, "propose", noting_budgets(kind.propose, budgets_of_parts))
    run(either, params=SamplingParams(max_tokens=14, temperature=1.0))
    assert len(budgets_of_parts) > 4
    assert all(any(lengths) for lengths in budgets_of_parts)


@every_drafter
def test_no_rows_at_all(drafter: str) -> None:
    assert run(DRAFTERS[drafter](), []).outputs == []
