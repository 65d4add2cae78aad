"""Verification of a batch in one call of the kernels: the verdicts of `Verifier.verify`, which defines them."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from families import needs_kernels
from secondguess.core import Draft, Row, Verdict
from secondguess.errors import SecondGuessError
from secondguess.runtime.native.verification import KernelRule
from secondguess.sampling import SamplingParams
from secondguess.sampling.noise import KeyedNoise
from secondguess.sampling.penalties import LogitProcessors
from secondguess.sampling.probs import compute_target_probs
from secondguess.verifiers import make_verifier
from secondguess.verifiers.base import Verifier, verify_by_kernels, verify_logits

pytestmark = needs_kernels

SAMPLED: tuple[dict[str, float], ...] = (
    {"temperature": 1.0},
    {"temperature": 0.7, "min_p": 0.05},
    {"temperature": 1.4, "top_k": 5},
    {"temperature": 0.9, "top_p": 0.8},
    {"temperature": 0.01},
    {"temperature": 1.0, "repetition_penalty": 1.3},
)
SETTINGS = (*SAMPLED, {"temperature": 0.0})


def random_row(rng: random.Random, settings: dict[str, float], coupled: bool) -> Row:
    params = SamplingParams(max_tokens=100, **settings)
    row = Row([rng.randrange(2) for _ in range(rng.randint(1, 40))], params, seed=rng.getrandbits(50))
    row.coupled = coupled
    return row


def draw_tokens(row: Row, probs: Tensor) -> list[int]:
    """Draw a chain from distributions `[node, vocab]`."""
    noise = KeyedNoise.from_rows([row])
    return [int(noise.draft(dist[None], depth)) for depth, dist in enumerate(probs)]


def random_case(
    rng: random.Random, rows: list[Row], has_probs: bool, sizes: tuple[list[int], int] | None = None
) -> tuple[Draft, Tensor]:
    """Return chains drawn for rows, and the target's logits `[row, node + 1, vocab]`."""
    generator = torch.Generator().manual_seed(rng.getrandbits(40))
    most = rng.randint(0, 9)
    lengths, width = sizes or ([rng.randint(0, most) for _ in rows], rng.choice((2, 7, 300, 1030)))
    num_nodes, stride = max(lengths), rng.choice((0, 5))
    logits = torch.randn(len(rows), num_nodes + 1, width + stride, generator=generator)
    logits = (logits * rng.choice((0.1, 2.0, 20.0)))[..., :width]
    change = torch.randn(len(rows), num_nodes, width, generator=generator) * rng.choice((0.0, 0.3, 2.0))
    probs = torch.zeros(len(rows), num_nodes, width)
    for index, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        own = logits[index : index + 1, :length] + change[index : index + 1, :length]
        dists = compute_target_probs(own, [row], Draft.empty(1)) if length else own
        if length and rng.random() < 0.2:
            dists = torch.nn.functional.one_hot(dists.argmax(-1), width).float()
        probs[index, :length] = dists[0]
    chains = [draw_tokens(row, own[:length]) for row, own, length in zip(rows, probs, lengths, strict=True)]
    return Draft.chains(chains, probs if has_probs else None), logits


def in_steps(verifier: Verifier, rows: list[Row], draft: Draft, logits: Tensor) -> Verdict:
    return verifier.verify(draft, compute_target_probs(logits, rows, draft), KeyedNoise.from_rows(rows))


def at_once(verifier: Verifier, rows: list[Row], draft: Draft, logits: Tensor) -> Verdict | None:
    return verify_by_kernels(verifier, rows, draft, logits, KeyedNoise.from_rows(rows))


def check_equal(verifier: Verifier, rows: list[Row], draft: Draft, logits: Tensor) -> Verdict:
    found, expected = at_once(verifier, rows, draft, logits), in_steps(verifier, rows, draft, logits)
    assert found is not None
    assert found.lengths == expected.lengths
    assert found.next_tokens == expected.next_tokens
    for row, own in enumerate(expected.samples):
        if own:
            assert list(found.samples[row]) == list(own)
    for row, own in zip(rows, found.samples, strict=True):
        assert verifier.kernel_rule(row, draft) is KernelRule.MATCH or not own
    return found


@pytest.mark.parametrize("name", ["block", "auto", "coupled"])
def test_verdicts_about_one_row_are_those_of_separate_steps(name: str) -> None:
    verifier, rng = make_verifier(name), random.Random(5)
    accepted = set()
    for case in range(1000):
        row = random_row(rng, SAMPLED[case % len(SAMPLED)], name == "coupled")
        draft, logits = random_case(rng, [row], has_probs=True)
        found = check_equal(verifier, [row], draft, logits)
        accepted.add((draft.num_nodes, found.lengths[0]))
    assert accepted >= {(nodes, length) for nodes in (1, 2, 3) for length in range(nodes + 1)}


@pytest.mark.parametrize("has_probs", [True, False])
def test_verdicts_about_a_batch_are_those_of_separate_steps(has_probs: bool) -> None:
    """Rows with and without seeds, at all temperatures, with chains of unequal lengths."""
    verifier, rng = make_verifier("auto"), random.Random(6)
    accepted, num_rejected = 0, 0
    for _ in range(400):
        rows = [
            random_row(rng, rng.choice(SETTINGS), coupled=rng.random() < 0.4)
            for _ in range(rng.randint(2, 9))
        ]
        rows[0].params = SamplingParams(temperature=1.0, max_tokens=100)
        draft, logits = random_case(rng, rows, has_probs)
        found = check_equal(verifier, rows, draft, logits)
        accepted += sum(found.lengths)
        num_rejected += sum(
            length < wanted for length, wanted in zip(found.lengths, draft.num_levels, strict=True)
        )
    assert accepted > 500
    assert num_rejected > 500


def test_verdicts_with_more_probabilities_than_are_kept() -> None:
    verifier, rng = make_verifier("block"), random.Random(6)
    for lengths in ([33], [3], [33, 0]):
        rows = [random_row(rng, {"temperature": 1.0}, coupled=False) for _ in lengths]
        check_equal(verifier, rows, *random_case(rng, rows, has_probs=True, sizes=(lengths, 140_000)))


def test_greedy_rows_beside_sampled_ones_are_verified_by_every_rule() -> None:
    rng = random.Random(8)
    for name in ("block", "auto", "coupled"):
        for _ in range(20):
            rows = [random_row(rng, {"temperature": each}, coupled=name == "coupled") for each in (0.0, 1.0)]
            draft, logits = random_case(rng, rows, has_probs=True)
            if draft.num_nodes:
                check_equal(make_verifier(name), rows, draft, logits)


def test_settings_are_applied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the kernels cannot verify."""
    calls, rng = [], random.Random(9)
    apply = LogitProcessors.apply
    monkeypatch.setattr(LogitProcessors, "apply", lambda *each: calls.append(1) or apply(*each))
    rows = [random_row(rng, {"temperature": 1.0, "repetition_penalty": 1.3}, coupled=False) for _ in range(2)]
    draft, logits = random_case(rng, rows, has_probs=True, sizes=([3, 2], 50))
    assert draft.probs is not None
    calls.clear()
    noise = KeyedNoise.from_rows(rows)
    verify_logits(make_verifier("auto"), rows, draft, logits, noise)
    assert len(calls) == 1
    double = replace(draft, probs=draft.probs.double())
    verify_logits(make_verifier("auto"), rows, double, logits.double(), noise)
    assert len(calls) == 2


def test_other_drafts_and_noise_are_verified_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(1)
    rows = [random_row(rng, {"temperature": 1.0}, coupled=False) for _ in range(2)]
    draft, logits = random_case(rng, rows, has_probs=True, sizes=([3, 2], 50))
    verifier = make_verifier("block")
    assert at_once(verifier, rows, draft, logits) is not None
    assert at_once(verifier, rows, replace(draft, probs=None), logits) is None
    for change in ({"tokens": draft.tokens.int()}, {"lengths": draft.lengths.int()}):
        assert at_once(verifier, rows, replace(draft, **change), logits) is None
    for token in (50, -1):  # no token of the vocabulary
        other = draft.tokens.clone()
        other[1, 1] = token
        assert at_once(verifier, rows, replace(draft, tokens=other), logits) is None
    assert at_once(verifier, rows, draft, logits.double()) is None
    assert at_once(verifier, rows, replace(draft, parents=torch.full((2, 3), -1)), logits) is None
    assert at_once(verifier, rows, draft, logits[:, :-1]) is None
    assert at_once(verifier, rows, draft, logits[..., :-1]) is None
    assert draft.probs is not None
    apart = torch.nn.functional.pad(draft.probs, (0, 3))[..., :-3]  # rows further apart than they are wide
    assert at_once(verifier, rows, replace(draft, probs=apart), logits) is None
    assert at_once(make_verifier("rejection"), rows, draft, logits) is None
    monkeypatch.setattr(KeyedNoise, "of_rows", lambda self: None)  # as where outcomes are enumerated
    assert at_once(verifier, rows, draft, logits) is None
    monkeypatch.undo()
    rows[1].coupled = True
    assert at_once(verifier, rows, draft, logits) is None


@pytest.mark.parametrize("name", ["block", "auto"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_are_refused(name: str, temperature: float) -> None:
    rng = random.Random(2)
    rows = [random_row(rng, {"temperature": each}, coupled=False) for each in (temperature, 1.0)]
    draft, logits = random_case(rng, rows, has_probs=True, sizes=([2, 1], 50))
    logits[0, -1, 0] = torch.nan
    with pytest.raises(SecondGuessError, match="expected finite logits"):
        verify_logits(make_verifier(name), rows, draft, logits, KeyedNoise.from_rows(rows))
