"""Drafters of pictures: look-up of neighbours, and samples of the last round."""

from __future__ import annotations

import random

import pytest
import torch

from drafter_cases import TARGET_DIST, VOCAB_SIZE, model_drafter, noisy_dist, run
from secondguess.api import check_verifier
from secondguess.beyond.images.grid import GridDrafter, GridIndex, GridOptions
from secondguess.beyond.images.jacobi import JacobiDrafter, JacobiOptions, SampledAhead
from secondguess.core import Row
from secondguess.drafters.combined import CombinedDrafter
from secondguess.drafters.ngram import NgramDrafter
from secondguess.errors import BadInputError
from secondguess.sampling import SamplingParams
from secondguess.verifiers import make_verifier

SAMPLED = SamplingParams(max_tokens=40, temperature=1.0)
WIDTH = 5


def slow_continuation(tokens: list[int], limit: int) -> list[int]:
    """Scan the picture for the latest place with the same neighbours, the most neighbours first."""
    text = list(tokens)
    for _ in range(limit):
        for dy_dx in (
            [(0, -1), (-1, -1), (-1, 0), (-1, 1)],
            [(0, -1), (-1, -1), (-1, 0)],
            [(0, -1), (-1, 0)],
        ):
            steps = [dy * WIDTH + dx for dy, dx in dy_dx]
            first = -min(steps)
            wanted = [text[len(text) + step] for step in steps] if len(text) >= first else None
            places = range(first, len(tokens))
            found = [place for place in places if [text[place + step] for step in steps] == wanted]
            if found:
                text.append(text[found[-1]])
                break
        else:
            break
    return text[len(tokens) :]


@pytest.mark.parametrize("seed", range(6))
def test_the_neighbours_found_equal_those_of_a_full_scan(seed: int) -> None:
    source = random.Random(seed)
    index, text = GridIndex(WIDTH), []
    for _ in range(25):
        piece = [source.randrange(3) for _ in range(source.randint(0, 4))]
        text += piece
        index.extend(piece)
        limit = source.randint(0, 9)
        assert index.continuation(limit) == slow_continuation(text, limit)
        assert index.tokens == text


def stripes(context: tuple[int, ...]) -> torch.Tensor:
    """Return the one-hot distribution of the token above; the first line counts."""
    token = context[-WIDTH] if len(context) >= WIDTH else len(context)
    return torch.nn.functional.one_hot(torch.tensor(token % VOCAB_SIZE), VOCAB_SIZE).double()


def test_repeated_lines_are_drafted() -> None:
    result = run(GridDrafter(GridOptions(width=WIDTH)), [[0]], SAMPLED, dist=stripes)
    assert result.stats[0].acceptance_rate == 1.0
    assert result.stats[0].num_accepted >= 40 - 3 * WIDTH - 10


@pytest.mark.parametrize(("width", "num_rounds"), [(WIDTH, 5 + 7), (1, 40)])
def test_positions_never_sampled_are_drafted_by_the_token_above(width: int, num_rounds: int) -> None:
    """The first line is not the one above it; then rounds of 5 tokens, or of one if the last is drafted again."""
    result = run(JacobiDrafter(JacobiOptions(width=width)), [[0]], SAMPLED, dist=stripes, coupled=True)
    assert result.stats[0].num_rounds <= num_rounds


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_samples_of_the_last_round_are_drafted(temperature: float) -> None:
    """If no token depends on those before it, each was sampled right the first time: half of them are drafted."""
    params = SamplingParams(max_tokens=40, temperature=temperature)
    rows = [[1, 2], [3]]
    same = TARGET_DIST((0,))
    result = run(JacobiDrafter(), rows, params, dist=lambda context: same, coupled=True)
    for stats in result.stats:
        assert stats.num_rounds <= 2 * 40 / (4 + 1)


def test_samples_replace_earlier_ones_of_the_same_positions() -> None:
    text = SampledAhead()
    text.update([1, 2, 3, 4], num_committed=1)
    text.update([5, 6], num_committed=1)
    assert text.ahead == [6, 4]


def test_the_text_before_the_samples_is_read_once() -> None:
    drafter, row = JacobiDrafter(), Row([1, 2, 3], SAMPLED)
    drafter.begin([row])
    drafter.candidates([row])
    assert drafter._indices[row].tokens == row.tokens


def test_rounds_without_samples_draft_anew() -> None:
    """Beside a drafter with distributions, rows without a seed are verified by a rule that samples once."""
    drafter = CombinedDrafter([JacobiDrafter(), model_drafter(noisy_dist(TARGET_DIST, seed=5))], VOCAB_SIZE)
    result = run(drafter, [[1, 2], [3]], SAMPLED)
    assert result.stats[0].num_drafted > 0


@pytest.mark.parametrize("verifier", ["rejection", "block", "traversal"])
def test_verifiers_without_samples_are_refused(verifier: str) -> None:
    alone, joined = JacobiDrafter(), CombinedDrafter([NgramDrafter(), JacobiDrafter()], VOCAB_SIZE)
    for drafter in (alone, joined):
        with pytest.raises(BadInputError, match=rf"jacobi, got '{verifier}', .* 'auto' or 'coupled'"):
            check_verifier(make_verifier(verifier), drafter)


@pytest.mark.parametrize("verifier", ["lantern", "gsd"])
def test_lossy_relaxations_are_refused_by_name(verifier: str) -> None:
    with pytest.raises(BadInputError, match=rf"expected a lossless verifier, got '{verifier}' \(arXiv"):
        make_verifier(verifier)


@pytest.mark.parametrize(("options", "width"), [(GridOptions, 1), (JacobiOptions, 0), (GridOptions, 9000)])
def test_invalid_widths_are_refused(options: type, width: int) -> None:
    with pytest.raises(BadInputError, match=f"expected width of the drafter .* got {width}"):
        options(width=width)
