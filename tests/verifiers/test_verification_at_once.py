"""Block verification in one call of the kernels: the verdicts of `BlockVerifier.verify`, which defines them."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from families import needs_kernels
from secondguess.core import Draft, Row
from secondguess.errors import SecondGuessError
from secondguess.sampling import SamplingParams
from secondguess.sampling.noise import KeyedNoise
from secondguess.sampling.probs import compute_target_probs
from secondguess.verifiers import make_verifier
from secondguess.verifiers.base import verify_logits

pytestmark = needs_kernels

SETTINGS: tuple[dict[str, float], ...] = (
    {"temperature": 1.0},
    {"temperature": 0.7, "min_p": 0.05},
    {"temperature": 1.4, "top_k": 5},
    {"temperature": 0.9, "top_p": 0.8},
    {"temperature": 0.01},
)


def random_case(
    rng: random.Random, settings: dict[str, float], sizes: tuple[int, int] | None = None
) -> tuple[Row, Draft, Tensor]:
    """Return a row, a chain drawn for it and the target's logits `[1, node + 1, vocab]`."""
    generator = torch.Generator().manual_seed(rng.getrandbits(40))
    num_nodes, width = sizes or (rng.randint(1, 9), rng.choice((2, 7, 300, 1030)))
    stride = rng.choice((0, 5))
    logits = torch.randn(1, num_nodes + 1, width + stride, generator=generator) * rng.choice((0.1, 2.0, 20.0))
    logits = logits[..., :width]
    row = Row([3] * rng.randint(1, 40), SamplingParams(max_tokens=100, **settings), seed=rng.getrandbits(50))
    noise = KeyedNoise.from_rows([row])
    change = torch.randn(1, num_nodes, width, generator=generator) * rng.choice((0.0, 0.3, 2.0))
    probs = compute_target_probs(logits[:, :-1] + change, [row], Draft.empty(1))
    if rng.random() < 0.2:
        probs = torch.nn.functional.one_hot(probs.argmax(-1), width).float()
    tokens = [int(noise.draft(probs[:, node], node)) for node in range(num_nodes)]
    return row, Draft.chains([tokens], probs), logits


@pytest.mark.parametrize("name", ["block", "auto"])
def test_verdicts_are_those_of_separate_steps(name: str) -> None:
    verifier, rng = make_verifier(name), random.Random(5)
    accepted = set()
    for case in range(1000):
        row, draft, logits = random_case(rng, SETTINGS[case % len(SETTINGS)])
        noise = KeyedNoise.from_rows([row])
        found = verifier.verify_row(row, draft, logits, noise)
        expected = verifier.verify(draft, compute_target_probs(logits, [row], draft), noise)
        assert found is not None
        assert (found.paths, found.next_tokens) == (expected.paths, expected.next_tokens)
        accepted.add((draft.num_nodes, found.lengths[0]))
    assert accepted >= {(nodes, length) for nodes in (1, 2, 3) for length in range(nodes + 1)}


def test_verdicts_with_more_probabilities_than_are_kept() -> None:
    verifier, rng = make_verifier("block"), random.Random(6)
    for sizes in ((33, 140_000), (3, 140_000)):
        row, draft, logits = random_case(rng, {"temperature": 1.0}, sizes)
        noise = KeyedNoise.from_rows([row])
        found = verifier.verify_row(row, draft, logits, noise)
        assert found == verifier.verify(draft, compute_target_probs(logits, [row], draft), noise)


def test_other_rows_and_noise_are_verified_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    row, draft, logits = random_case(random.Random(1), {"temperature": 1.0})
    verifier, noise = make_verifier("block"), KeyedNoise.from_rows([row])
    assert verifier.verify_row(row, draft, logits, noise) is not None
    for params in (
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.0, logit_bias={1: 3.0}),
        SamplingParams(temperature=1.0, repetition_penalty=1.2),
    ):
        assert verifier.verify_row(Row([3], params), draft, logits, noise) is None
    assert verifier.verify_row(row, Draft.empty(1), logits[:, :1], noise) is None
    assert verifier.verify_row(row, replace(draft, probs=None), logits, noise) is None
    assert verifier.verify_row(row, draft, logits.double(), noise) is None
    assert draft.probs is not None
    assert draft.num_nodes > 1
    padded = replace(draft, lengths=draft.lengths - 1)  # as beside a longer draft of another row
    assert verifier.verify_row(row, padded, logits, noise) is None
    assert verifier.verify_row(row, draft, logits[:, :-1], noise) is None
    assert verifier.verify_row(row, draft, logits[..., :-1], noise) is None
    apart = torch.nn.functional.pad(draft.probs, (0, 3))[..., :-3]  # rows further apart than they are wide
    assert not apart[0].is_contiguous()
    assert verifier.verify_row(row, replace(draft, probs=apart), logits, noise) is None
    monkeypatch.setattr(KeyedNoise, "of_row", lambda self: None)  # as where outcomes are enumerated
    assert verifier.verify_row(row, draft, logits, noise) is None
    monkeypatch.undo()
    row.coupled = True
    assert verifier.verify_row(row, draft, logits, noise) is None


def test_logits_that_are_not_finite_are_refused() -> None:
    row, draft, logits = random_case(random.Random(2), {"temperature": 1.0})
    logits[0, -1, 0] = torch.nan
    with pytest.raises(SecondGuessError, match="expected finite logits"):
        verify_logits(make_verifier("auto"), [row], draft, logits, KeyedNoise.from_rows([row]))
