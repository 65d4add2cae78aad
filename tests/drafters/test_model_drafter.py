"""The draft model: cache, distributions, vocabulary and context."""

from __future__ import annotations

from functools import partial
from itertools import count

import pytest
import torch
from torch import Tensor

from drafter_cases import (
    PROMPTS,
    TARGET_DIST,
    VOCAB_SIZE,
    greedy_text,
    model_drafter,
    never_called,
    noisy_dist,
    run,
    worst_dist,
)
from interruptions import interrupted_at
from secondguess.core import Budgets, Draft, Row, Verdict
from secondguess.drafters import mirroring, sampling_drafter
from secondguess.drafters.base import DrafterResources
from secondguess.drafters.model import ModelDrafter
from secondguess.errors import BadInputError
from secondguess.names import parse_name
from secondguess.proof.fakes import NextTokenDist, TableModel, random_probs
from secondguess.runtime.base import ForwardOutput, HiddenStates
from secondguess.sampling import SamplingParams
from secondguess.sampling.noise import KeyedNoise
from secondguess.sampling.probs import compute_draft_probs

SAMPLED = SamplingParams(max_tokens=40, temperature=1.0)


def always(dists: Tensor, depth: int, *_: object) -> list[bool]:
    return [True] * dists.shape[0]


def propose(drafter: ModelDrafter, rows: list[Row], budgets: Budgets) -> Draft:
    drafter.prepare(rows, [0] * len(rows))
    return drafter.propose(rows, budgets, KeyedNoise.from_rows(rows))


def test_rows_can_be_drafted_for_after_any_interruption() -> None:
    """Rows of other calls among them, which go on if only one thread is interrupted."""
    expected = None
    for line in count(1):
        drafter = model_drafter(TARGET_DIST)
        rows = [
            Row(list(prompt), SamplingParams(temperature=0.0)) for prompt in ([1, 2, 3], [4, 5, 6, 7], [2, 2])
        ]
        propose(drafter, rows[:1], Budgets([2], always))
        rows[0].tokens += [5, 6]
        was_interrupted = interrupted_at(
            line,
            (mirroring, sampling_drafter),
            partial(drafter.prepare, rows, [0] * 3),
        )
        found = propose(drafter, rows, Budgets([3] * 3, always)).token_lists
        expected = expected or found
        assert found == expected
        if not was_interrupted:
            break
    assert line > 30


@pytest.mark.parametrize(("temperature", "coupled"), [(0.0, False), (1.0, False), (1.0, True)])
def test_drafts_of_the_target_itself_are_always_accepted(temperature: float, coupled: bool) -> None:
    params = SamplingParams(max_tokens=15, temperature=temperature)
    result = run(model_drafter(TARGET_DIST), params=params, controller="fixed:4", coupled=coupled)
    assert all(stats.acceptance_rate == 1.0 for stats in result.stats)
    assert all(stats.acceptance_length == 5.0 for stats in result.stats)


def test_drafts_that_are_always_wrong_are_never_accepted() -> None:
    result = run(model_drafter(worst_dist(TARGET_DIST)))
    assert all(stats.num_drafted > 0 and stats.num_accepted == 0 for stats in result.stats)


def test_no_token_is_forwarded_twice_if_all_are_accepted() -> None:
    drafter = model_drafter(TARGET_DIST)
    run(drafter, [[1, 2, 3]], SamplingParams(max_tokens=15), controller="fixed:4")
    # Of the 3 + 15 tokens the draft model reads each once, but for the last round's last draft and bonus,
    # after which nothing is drafted.
    assert drafter.runtime.num_scored_tokens == 3 + 15 - 2


def test_only_the_replaced_token_is_forwarded_after_a_rejection() -> None:
    drafter = model_drafter(worst_dist(TARGET_DIST))
    run(drafter, [[1, 2, 3]], SamplingParams(max_tokens=6), controller="fixed:2")
    # Four rounds of two drafts, then one of one (the last place belongs to the target) and one of none.
    # Each forwards the token that replaced the rejected one, and the first draft to draft a second one.
    assert drafter.runtime.num_scored_tokens == 4 * 2 + 1 + 2  # and the prompt's first two tokens
    assert drafter.runtime.num_forwards == 4 * 2 + 1


@pytest.mark.parametrize("controller", ["fixed:4", "confidence:4"])
@pytest.mark.parametrize("batch", [1, 4])
def test_forwards_per_round_are_at_most_the_draft_length(controller: str, batch: int) -> None:
    drafter = model_drafter(noisy_dist(TARGET_DIST, seed=5))
    result = run(drafter, PROMPTS[:batch], SAMPLED, controller=controller)
    if batch == 1:
        assert drafter.runtime.num_forwards == result.stats[0].num_drafted
    assert drafter.runtime.num_forwards <= 4 * result.target.num_forwards


def test_only_rows_that_still_draft_are_in_a_forward_pass() -> None:
    class Counting(TableModel):
        widths: list[int]

        def score(self, rows: list[Row], draft: Draft) -> ForwardOutput:  # type: ignore[override]
            self.widths.append(len(rows))
            return super().score(rows, draft)

    runtime = Counting(VOCAB_SIZE, TARGET_DIST)
    runtime.widths = []
    drafter = ModelDrafter(runtime, "model:table", VOCAB_SIZE)
    rows = [Row(list(prompt), SAMPLED, seed=1) for prompt in PROMPTS]
    drafter.begin(rows)
    draft = propose(drafter, rows, Budgets([3, 0, 1, 2], never_called, uses_probs=False))
    assert runtime.widths == [3, 2, 1]
    assert draft.lengths.tolist() == [3, 0, 1, 2]
    assert (draft.tokens[~draft.mask] == 0).all()
    assert draft.probs is not None
    assert draft.probs.isfinite().all()


def test_keep_drafting_is_called_only_if_another_node_is_possible() -> None:
    asked: list[int] = []

    def keep_drafting(dists: Tensor, depth: int, *_: object) -> list[bool]:
        asked.append(depth)
        return always(dists, depth)

    drafter = model_drafter(TARGET_DIST)
    rows = [Row([1, 2], SAMPLED)]
    drafter.begin(rows)
    propose(drafter, rows, Budgets([3], keep_drafting))
    assert asked == [0, 1]


@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_keep_drafting_receives_the_distribution_before_sampling_settings(temperature: float) -> None:
    shown: list[Tensor] = []

    def keep_drafting(logits: Tensor, depth: int, *_: object) -> list[bool]:
        shown.append(logits.softmax(-1))
        return always(logits, depth)

    drafter = model_drafter(TARGET_DIST)
    rows = [Row([1, 2], SamplingParams(max_tokens=9, temperature=temperature))]
    drafter.begin(rows)
    draft = propose(drafter, rows, Budgets([3], keep_drafting))
    contexts = [(1, 2), (1, 2, int(draft.tokens[0, 0]))]
    torch.testing.assert_close(torch.cat(shown), torch.stack([TARGET_DIST(context) for context in contexts]))


def test_a_row_stops_drafting_after_the_node_at_which_keep_drafting_is_false() -> None:
    drafter = model_drafter(TARGET_DIST)
    rows = [Row(list(prompt), SAMPLED, seed=1) for prompt in PROMPTS]
    drafter.begin(rows)
    stops = torch.tensor([0, 2, 1, 9])
    draft = propose(drafter, rows, Budgets([4, 4, 4, 4], lambda dists, depth, *_: depth < stops))
    assert draft.lengths.tolist() == [1, 3, 2, 4]


def test_reported_distributions_are_those_the_nodes_were_drawn_from() -> None:
    """Under the row's own settings, each node after its drafted ancestors."""
    params = SamplingParams(max_tokens=9, temperature=0.7, top_k=4, repetition_penalty=1.4)
    drafter = model_drafter(TARGET_DIST)
    rows = [Row([1, 2], params, seed=3), Row([4], params, seed=8)]
    drafter.begin(rows)
    draft = propose(drafter, rows, Budgets([3, 3], always))
    assert draft.probs is not None
    for index, row in enumerate(rows):
        for depth in range(3):
            drafted = draft.tokens[index : index + 1, :depth]
            logits = TARGET_DIST((*row.tokens, *drafted[0].tolist())).log()[None]
            expected = compute_draft_probs(logits, [row], drafted)[0][0]
            torch.testing.assert_close(draft.probs[index, depth], expected)
            assert expected[draft.tokens[index, depth]] > 0


def test_greedy_drafts_carry_no_probs_and_follow_penalties() -> None:
    dist = random_probs(VOCAB_SIZE, seed=3, sharpness=0.1)
    params = SamplingParams(max_tokens=30, repetition_penalty=3.0)
    result = run(model_drafter(dist), [[1, 2, 3]], params, dist=dist)
    # The target's own distribution with the same penalties always agrees.
    assert result.stats[0].acceptance_rate == 1.0
    drafter = model_drafter(dist)
    rows = [Row([1, 2, 3], params)]
    drafter.begin(rows)
    assert propose(drafter, rows, Budgets([3], always)).probs is None


def test_block_verification_may_correct_a_token_by_itself() -> None:
    """Then all committed tokens are cached already, and the last must be forgotten to be forwarded again."""
    drafter = model_drafter(TARGET_DIST)
    row = Row([1, 2], SAMPLED)
    drafter.begin([row])
    draft = propose(drafter, [row], Budgets([3], always))
    row.tokens += draft.tokens[0, :2].tolist()
    drafter.observe([row], Verdict.from_chain([1], draft.tokens[:, 1].tolist()), {})
    num_scored = drafter.runtime.num_scored_tokens
    again = propose(drafter, [row], Budgets([1], always))
    assert drafter.runtime.num_scored_tokens == num_scored + 1
    assert again.probs is not None
    torch.testing.assert_close(again.probs[0, 0], TARGET_DIST(tuple(row.tokens)))


@pytest.mark.parametrize("num_accepted", [0, 1, 2, 3])
def test_the_cache_matches_the_text_after_any_verdict(num_accepted: int) -> None:
    drafter = model_drafter(TARGET_DIST)
    row = Row([1, 2], SAMPLED, seed=4)
    drafter.begin([row])
    for _ in range(3):
        draft = propose(drafter, [row], Budgets([3], always))
        accepted = draft.tokens[0, :num_accepted].tolist()
        next_token = (int(draft.tokens[0, min(num_accepted, 2)]) + 1) % VOCAB_SIZE
        row.tokens += [*accepted, next_token]
        verdict = Verdict.from_chain([num_accepted], [next_token])
        drafter.observe([row], verdict, {})
    draft = propose(drafter, [row], Budgets([1], always))
    assert draft.probs is not None
    torch.testing.assert_close(draft.probs[0, 0], TARGET_DIST(tuple(row.tokens)))


def test_rounds_without_drafts_are_caught_up_in_one_forward_pass() -> None:
    drafter = model_drafter(TARGET_DIST)
    row = Row([1, 2], SAMPLED)
    drafter.begin([row])
    for token in (3, 4, 5):
        assert propose(drafter, [row], Budgets([0], never_called)).num_nodes == 0
        row.tokens.append(token)
        drafter.observe([row], Verdict.from_chain([0], [token]), {})
    draft = propose(drafter, [row], Budgets([1], always))
    assert drafter.runtime.num_forwards == 1
    assert draft.probs is not None
    torch.testing.assert_close(draft.probs[0, 0], TARGET_DIST((1, 2, 3, 4, 5)))


def resized(dist: NextTokenDist, vocab_size: int, vocab_seen: int) -> NextTokenDist:
    """Return a distribution of another width: it reads only tokens below `vocab_seen` and gives new tokens some mass."""

    def of(context: tuple[int, ...]) -> Tensor:
        assert all(token < vocab_seen for token in context)
        own = dist(tuple(context))
        wider = torch.full((max(0, vocab_size - own.shape[0]),), 0.3, dtype=own.dtype)
        probs = torch.cat([own, wider])[:vocab_size]
        return probs / probs.sum()

    return of


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("vocab_size", [VOCAB_SIZE - 2, VOCAB_SIZE + 5])
def test_vocabularies_of_different_widths(vocab_size: int, temperature: float) -> None:
    runtime = TableModel(vocab_size, resized(TARGET_DIST, vocab_size, vocab_size))
    drafter = ModelDrafter(runtime, "model:table", VOCAB_SIZE)
    params = SamplingParams(max_tokens=30, temperature=temperature)
    result = run(drafter, params=params)
    assert all(stats.num_accepted > 0 for stats in result.stats)
    if temperature == 0:
        assert result.outputs == [greedy_text(prompt, 30) for prompt in PROMPTS]


@pytest.mark.parametrize("vocab_size", [VOCAB_SIZE - 2, VOCAB_SIZE + 5])
def test_reported_distributions_have_the_targets_width(vocab_size: int) -> None:
    runtime = TableModel(vocab_size, resized(TARGET_DIST, vocab_size, vocab_size))
    drafter = ModelDrafter(runtime, "model:table", VOCAB_SIZE)
    rows = [Row([VOCAB_SIZE - 1, 1], SAMPLED)]
    drafter.begin(rows)
    probs = propose(drafter, rows, Budgets([2], always)).probs
    assert probs is not None
    assert probs.shape == (1, 2, VOCAB_SIZE)
    torch.testing.assert_close(probs.sum(-1), torch.ones(1, 2, dtype=probs.dtype))


class StrictContext(TableModel):
    """Refuses to hold more than its context, as a real model must."""

    def begin(self, rows: list[Row]) -> list[HiddenStates]:  # type: ignore[override]
        assert all(len(row.tokens) - 1 <= self.context_length for row in rows)
        return super().begin(rows)

    def score(self, rows: list[Row], draft: Draft) -> ForwardOutput:  # type: ignore[override]
        assert all(len(row.tokens) <= self.context_length for row in rows)
        return super().score(rows, draft)


@pytest.mark.parametrize("context_length", [1, 5, 6, 7, 12])
def test_drafting_stops_where_the_draft_models_context_is_full(context_length: int) -> None:
    drafter = ModelDrafter(StrictContext(VOCAB_SIZE, TARGET_DIST, context_length), "model:table", VOCAB_SIZE)
    result = run(drafter, params=SamplingParams(max_tokens=12))
    assert result.outputs == [greedy_text(prompt, 12) for prompt in PROMPTS]
    # Its last forward holds `context_length` tokens; the node drawn from that one is at this position.
    for prompt, stats in zip(PROMPTS, result.stats, strict=True):
        num_positions = max(0, context_length + 1 - len(prompt))
        assert stats.num_drafted <= num_positions
        assert (stats.num_drafted > 0) == (num_positions > 0)


def test_the_name_model_needs_a_path() -> None:
    resources = DrafterResources(VOCAB_SIZE, lambda path: TableModel(VOCAB_SIZE, TARGET_DIST))
    assert (
        ModelDrafter.build(parse_name("model:some/dir", "drafter", ["model"]), resources).name
        == "model:some/dir"
    )
    for text in ("model", "model:", "model:some/dir,speed=9"):
        with pytest.raises(BadInputError, match=r"model"):
            ModelDrafter.requirements(parse_name(text, "drafter", ["model"]))
