"""The certificate with small samples: it passes for the default configuration and fails for wrong distributions."""

import json
import math
from dataclasses import replace
from functools import cache

import pytest

from checkpoints import random_llama
from secondguess.core import Verdict
from secondguess.drafters.mirroring import TokenDrafter
from secondguess.drafters.vocabulary.drafter import TranslatingDrafter
from secondguess.errors import BadInputError
from secondguess.proof.certificate import (
    OTHER_TOKEN,
    Cells,
    CertifyOptions,
    certify,
    g_test,
    tiny_system,
)
from secondguess.proof.fakes import random_probs
from secondguess.runtime.modules import tiny as runtime_tiny
from secondguess.runtime.modules.transformers import TransformersRuntime
from secondguess.verifiers import residuals
from secondguess.verifiers.auto import AutoVerifier
from vocabulary_cases import tiny_pair

SMALL = CertifyOptions(num_samples=4000, limit=0.08, batch_size=1000)


@cache
def small_certificate(**parts):
    return certify(tiny_system(**parts), SMALL)


@pytest.mark.parametrize(
    "parts",
    [
        {},
        {"verifier": "rejection"},
        {"verifier": "coupled", "controller": "confidence:3,threshold=0.5"},
        {"drafter": "ngram"},
        {"drafter": "none", "controller": "fixed:0"},
    ],
    ids=str,
)
def test_the_default_configuration_passes(parts):
    certificate = small_certificate(**parts)
    assert certificate.passed, str(certificate)
    assert certificate.num_cells == 81
    assert certificate.covers_all_texts


def test_a_draft_model_with_another_vocabulary_passes():
    system = tiny_system()
    vocabularies = tiny_pair(["a", "b", "c"], ["x", "c", "b", "bc"])
    runtime = TransformersRuntime(random_llama(4, vocab_size=4).double())
    drafter = TranslatingDrafter(runtime, "model:other", 3, vocabularies)
    options = CertifyOptions(num_samples=2000, limit=0.12)
    certificate = certify(replace(system, components=replace(system.components, drafter=drafter)), options)
    assert certificate.passed, str(certificate)
    assert certificate.acceptance_rate > 0.1


def test_drafts_of_text_are_certified_as_they_are_decoded():
    """Coupled, as without a seed: a copy of the target that drafts as text is never rejected."""
    system = tiny_system()
    runtime = TransformersRuntime(runtime_tiny.tiny_pair()[0])
    drafter = TranslatingDrafter(runtime, "model:other", 3, tiny_pair("abc", "abc"))
    options = CertifyOptions(num_samples=1000, limit=0.3)
    certificate = certify(replace(system, components=replace(system.components, drafter=drafter)), options)
    assert certificate.acceptance_rate == 1


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_other_temperatures_pass(temperature):
    certificate = certify(tiny_system(), CertifyOptions(num_samples=2000, limit=0.1, temperature=temperature))
    assert certificate.passed, str(certificate)
    if temperature == 0:
        assert certificate.distance == 0


def test_a_wrong_distribution_fails(monkeypatch):
    """Corrections drawn from the target's distribution instead of the residual: the classic mistake."""
    monkeypatch.setattr(
        residuals, "next_token_probs", lambda draft, dists, lengths, weights: residuals.at(dists, lengths)
    )
    certificate = certify(tiny_system(), SMALL)
    assert not certificate.passed
    assert certificate.p_value < 1e-6
    assert "FAILED" in str(certificate)


def test_a_wrong_verifier_derived_from_the_default_fails():
    class AcceptsAll(AutoVerifier):
        def verify(self, draft, target_probs, noise):
            return Verdict.from_chain(draft.lengths.tolist(), [0] * draft.num_rows)

    system = tiny_system()
    components = replace(system.components, verifier=AcceptsAll())
    certificate = certify(replace(system, components=components), CertifyOptions(num_samples=1000, limit=0.2))
    assert not certificate.passed
    assert certificate.p_value < 1e-6


def test_rejections_are_counted_by_position():
    """Each draft has one rejected token or none: rejected at a position or accepted up to it."""
    certificate = small_certificate()
    accepted, rejected = certificate.accepted_per_position, certificate.rejected_per_position
    assert len(accepted) == len(rejected) == 2
    assert min(rejected) > 100
    assert accepted[0] >= accepted[1] + rejected[1] > accepted[1] > 100, "not all drafts have two tokens"
    shown = (
        f"by position  1: {accepted[0]:,} accepted, {rejected[0]:,} rejected; "
        f"2: {accepted[1]:,} accepted, {rejected[1]:,} rejected"
    )
    assert f"{shown}\n" in str(certificate)


def test_a_drafter_that_is_never_rejected_is_named():
    """The target drafts for itself, so the certificate says nothing about rejections."""
    system = tiny_system(verifier="rejection")
    copy = tiny_system().components.target
    drafter = TokenDrafter(copy, "model:copy", copy.vocab_size)
    system = replace(system, components=replace(system.components, drafter=drafter))
    certificate = certify(system, CertifyOptions(num_samples=1000, limit=0.2))
    assert sum(certificate.rejected_per_position) == 0 < certificate.accepted_per_position[1]
    assert " accepted, 0 rejected; with nothing rejected, rejection is not tested" in str(certificate)


def test_a_certificate_of_plain_decoding_has_no_acceptance():
    certificate = small_certificate(drafter="none", controller="fixed:0")
    assert certificate.as_dict()["acceptance_rate"] is None
    assert "nothing drafted, 1.00 tokens per target pass" in str(certificate)


def test_the_bound_is_the_distance_plus_mcdiarmids_slack():
    certificate = small_certificate()
    assert certificate.bound == pytest.approx(certificate.distance + math.sqrt(math.log(1e6) / 8000))
    assert CertifyOptions(num_samples=2000, delta=1e-3, limit=0.5).slack == pytest.approx(
        math.sqrt(math.log(1e3) / 4000)
    )


def test_too_few_samples_for_the_limit_fail():
    certificate = replace(small_certificate(), limit=0.01)
    assert certificate.p_value > 1e-6
    assert not certificate.passed


def test_the_default_is_large_enough_to_pass():
    """The expected distance of a correct sampler, E sum |P - Q'| / 2 by the normal approximation, is below the limit."""
    options, subject = CertifyOptions(), tiny_system()

    def next_dist(text):
        return subject.reference_logits((*subject.prompt, *text)).softmax(-1)

    masses = Cells.split(next_dist, options.num_tokens, options.num_cells).masses.values()
    deviations = [math.sqrt(mass * (1 - mass) / options.num_samples) for mass in masses]
    assert math.sqrt(2 / math.pi) * sum(deviations) / 2 + options.slack < 0.97 * options.limit


def test_a_certificate_is_printed_as_text_and_as_json():
    certificate = small_certificate()
    assert json.loads(json.dumps(certificate.as_dict()))["passed"] is True
    for words in (
        "total variation distance <=",
        "p-value",
        "random Llama",
        "float32",
        "model:perturbed-copy",
        "auto",
        "fixed:2",
    ):
        assert words in str(certificate)
    assert 0.4 < certificate.acceptance_rate < 0.95


@pytest.mark.parametrize("verifier", ["coupled", "auto"])
def test_the_batch_size_has_no_effect(verifier):
    small = CertifyOptions(num_samples=1000, limit=0.5, batch_size=70)
    whole = CertifyOptions(num_samples=1000, limit=0.5, batch_size=1000)
    subject = tiny_system(verifier=verifier)
    assert certify(subject, small).distance == certify(subject, whole).distance


def test_the_same_seed_gives_the_same_certificate_and_reports_probabilities_and_then_texts():
    told = []
    again = certify(tiny_system(), SMALL, lambda *now: told.append(now))
    assert again.distance == small_certificate().distance
    phases = {what: [(done, total) for done, total, each in told if each == what] for *_, what in told}
    assert list(phases) == ["exact probabilities", "sampling texts"]
    assert phases["exact probabilities"][0] == (1, 81)
    assert {total for _, total in phases["exact probabilities"]} == {81}
    drawn = [done for done, _ in phases["sampling texts"]]
    assert drawn == sorted(drawn)
    # Reported within the batches of 1,000, too.
    assert (drawn[0], drawn[-1]) == (0, 4000)
    assert any(done % 1000 for done in drawn)
    assert {total for _, total in phases["sampling texts"]} == {4000}


def test_the_reference_model_runs_once_per_prefix():
    dist, asked = random_probs(50, seed=1), []

    def next_dist(text):
        asked.append(text)
        return dist(text)

    Cells.split(next_dist, num_tokens=3, num_cells=30)
    assert len(asked) == len(set(asked))


def test_cells_split_the_most_probable_prefixes():
    dist = random_probs(50, seed=1)
    cells = Cells.split(dist, num_tokens=3, num_cells=30)
    assert sum(cells.masses.values()) == pytest.approx(1)
    assert 30 <= len(cells.masses) <= 35
    assert not cells.covers_all_texts(3)
    likeliest = int(dist(()).argmax())
    rarest = int(dist(()).argmin())
    assert cells.cell_of((rarest, 0, 0)) == (OTHER_TOKEN,)
    assert cells.cell_of((likeliest, 0, 0))[0] == likeliest
    assert cells.masses[(OTHER_TOKEN,)] == pytest.approx(1 - float(dist(()).topk(4).values.sum()))


def test_every_text_of_a_small_vocabulary_has_its_cell():
    dist = random_probs(3, seed=1)
    cells = Cells.split(dist, num_tokens=2, num_cells=9)
    assert cells.covers_all_texts(2)
    for text, mass in cells.masses.items():
        assert mass == pytest.approx(float(dist(())[text[0]] * dist(text[:1])[text[1]]))


def test_g_test_equals_chi_square():
    # G = 2 (60 ln(60/50) + 40 ln(40/50)) = 4.027 with one degree of freedom
    assert g_test([60, 40], [50, 50]) == pytest.approx(0.04477, abs=1e-4)
    assert g_test([50, 50], [50, 50]) == pytest.approx(1.0)


def test_g_test_pools_rare_cells_and_rejects_impossible_ones():
    assert g_test([50, 50, 1], [50, 48.5, 1.5]) == pytest.approx(g_test([50, 51], [50, 50]), abs=1e-9)
    # The last cell is too rare to stand alone, and no rarer one is left to be pooled with it.
    assert g_test([6, 2, 4], [4, 4, 4]) == 1.0, "one pool: nothing to compare"
    left_over = g_test([0, 0, 12, 4], [4, 4, 4, 4])
    assert left_over == pytest.approx(g_test([0, 16], [8, 8]), abs=1e-9)
    assert g_test([9, 0, 0], [3, 3, 3]) == 1.0
    assert g_test([3, 3, 3, 3, 9], [3, 3, 3, 3, 3]) == pytest.approx(g_test([6, 15], [6, 9]), abs=1e-9)
    assert g_test([99, 1], [100, 0]) == 0.0
    assert g_test([100, 0], [100, 0]) == 1.0


@pytest.mark.parametrize(
    "wrong", [{"num_samples": 10}, {"limit": 0}, {"delta": 1}, {"num_tokens": 0}, {"batch_size": 0}]
)
def test_invalid_options_are_refused(wrong):
    with pytest.raises(BadInputError, match=next(iter(wrong))):
        CertifyOptions(**wrong)


def test_a_drafter_of_another_model_is_refused():
    with pytest.raises(BadInputError, match="random target"):
        tiny_system(drafter="model:elsewhere")
