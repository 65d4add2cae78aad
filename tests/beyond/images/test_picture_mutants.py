"""Mutation tests of the drafters of pictures, as in test_mutants."""

from __future__ import annotations

import torch
from torch import Tensor

from distribution_cases import (
    PAIRS,
    ROUNDING,
    Pair,
    after_prompt,
    coupled_text_dist,
    dist_error,
    make_pair_drafter,
)
from mutant_cases import Mutant, Patch, check, mutation_test
from secondguess.beyond.images import guidance
from secondguess.beyond.images.grid import GridDrafter, GridIndex, GridOptions
from secondguess.beyond.images.guidance import GuidedRuntime
from secondguess.beyond.images.jacobi import JacobiDrafter, SampledAhead
from secondguess.controllers import make_controller
from secondguess.core import Row, Verdict
from secondguess.decode import Components, decode
from secondguess.drafters.base import Drafter
from secondguess.proof.enumeration import enumerate_rounds, exact_dist, largest_difference
from secondguess.proof.fakes import NextTokenDist, TableModel, random_probs
from secondguess.sampling import SamplingParams
from secondguess.sampling.noise import KeyedNoise
from secondguess.verifiers import coupled, make_verifier

WIDTH, NUM_TOKENS = 5, 80

# Checks: each returns whether the code passes.


def coupled_dist_holds() -> bool:
    """Return whether texts drafted by their own samples, over all rounds, have the target's distribution."""
    pair = Pair(2, random_probs(2, 1), random_probs(2, 2))
    found = coupled_text_dist(pair, JacobiDrafter(), length=3)
    return largest_difference(found, exact_dist(after_prompt(pair.target), 4)) < ROUNDING


def rows_after(drafter: Drafter, dist: NextTokenDist) -> tuple[list[Row], list[int]]:
    """Return rows of two seeds, decoded to their ends, and their numbers of rounds."""
    params = SamplingParams(temperature=1.0, max_tokens=NUM_TOKENS)
    rows = [Row([0], params, seed=seed, coupled=True) for seed in (1, 2)]
    controller = make_controller("fixed:3")
    components = Components(TableModel(6, dist), drafter, make_verifier("coupled"), controller)
    for _ in decode(components, rows):
        pass
    return rows, [components.recorder.of(row).num_rounds for row in rows]


def samples_settle() -> bool:
    """Return whether samples that no token before them can change are accepted in the next round."""
    same = random_probs(6, 11)(())
    _, rounds = rows_after(JacobiDrafter(), lambda context: same)
    return max(rounds) <= 2 * NUM_TOKENS / 4


def one_text_per_seed() -> bool:
    """Return whether texts drafted by their own samples are those drafted by nothing."""
    dist = random_probs(6, 11)
    (drafted, _), (plain, _) = (rows_after(each, dist) for each in (JacobiDrafter(), GridDrafter()))
    return [row.tokens for row in drafted] == [row.tokens for row in plain]


def neighbours_are_found() -> bool:
    """Return whether a picture with one stripe, which only the line above shows, is drafted from the third line on."""

    def stripes(context: tuple[int, ...]) -> Tensor:
        token = context[-WIDTH] if len(context) >= WIDTH else int(len(context) == WIDTH - 1)
        return torch.nn.functional.one_hot(torch.tensor(token), 6).double()

    _, rounds = rows_after(GridDrafter(GridOptions(width=WIDTH)), stripes)
    return max(rounds) <= 2 * WIDTH + 1 + NUM_TOKENS / 4


def guided_dist_holds() -> bool:
    """Return whether guided texts have the guided distribution, over two rounds."""
    pair = PAIRS["binary"]
    target = GuidedRuntime(TableModel(2, pair.target))
    drafter, controller = make_pair_drafter("sampled", pair), make_controller("fixed:1")
    components = Components(target, drafter, make_verifier("auto"), controller)
    params = SamplingParams(temperature=1.0, max_tokens=NUM_TOKENS)
    (branches,) = enumerate_rounds(
        components, lambda: [target.guide(Row([0, 1], params), (1, 1, 0), 1.7)], num_rounds=2
    )

    def dist(output: tuple[int, ...]) -> Tensor:
        weights = pair.target((1, 1, 0, *output)) ** -0.7 * pair.target((0, 1, *output)) ** 1.7
        return weights / weights.sum()

    return dist_error(branches, dist, num_tokens=3) < ROUNDING


# Mutants: each puts one mistake into the code.


def a_fixed_point_is_taken_for_the_text(patch: Patch) -> None:
    """Jacobi decoding that ends when nothing changes any more, one token too early."""
    original = coupled.accept_matching

    def accept_matching(draft, chosen):
        verdict = original(draft, chosen)
        paths = [
            range(min(len(path) + 1, len(shape)))
            for path, shape in zip(verdict.paths, draft.shapes, strict=True)
        ]
        next_tokens = [own[len(path)] for own, path in zip(chosen, paths, strict=True)]
        return Verdict(paths, next_tokens, verdict.samples)

    patch.setattr(coupled, "accept_matching", accept_matching)


def the_token_after_a_mismatch_is_the_last_sample(patch: Patch) -> None:
    original = coupled.accept_matching

    def accept_matching(draft, chosen):
        verdict = original(draft, chosen)
        return Verdict(verdict.paths, [own[-1] for own in verdict.samples], verdict.samples)

    patch.setattr(coupled, "accept_matching", accept_matching)


def samples_are_off_by_one(patch: Patch) -> None:
    """The draft begins with the token that was committed last."""
    original = SampledAhead.update
    patch.setattr(
        SampledAhead, "update", lambda self, samples, count: original(self, samples, max(count - 1, 0))
    )


def samples_of_another_row(patch: Patch) -> None:
    original = coupled.accept_matching

    def accept_matching(draft, chosen):
        verdict = original(draft, chosen)
        return Verdict(verdict.paths, verdict.next_tokens, verdict.samples[::-1])

    patch.setattr(coupled, "accept_matching", accept_matching)


def races_are_run_anew_in_every_round(patch: Patch) -> None:
    """Noise keyed by the round: what was sampled before says nothing, and the text depends on the drafts."""
    original = KeyedNoise._race

    def race(self, dists, depths):
        begun = KeyedNoise(
            [key ^ position for key, position in zip(self.keys, self.positions, strict=True)],
            self.positions, self.coupled, self.greedy,
        )  # fmt: skip
        return original(begun, dists, depths)

    patch.setattr(KeyedNoise, "_race", race)


def the_line_above_is_elsewhere(patch: Patch) -> None:
    original = GridIndex.__init__
    patch.setattr(GridIndex, "__init__", lambda self, width: original(self, width + 2))


def guidance_of_probabilities(patch: Patch) -> None:
    """Distributions are mixed instead of logits."""

    def combine(own, negative, scales):
        factors = torch.tensor(scales)[:, None, None]
        own, negative = own.softmax(-1), negative.softmax(-1)
        return (negative + factors * (own - negative)).clamp_min(1e-9).log()

    patch.setattr(guidance, "combine", combine)


def guidance_away_from_the_prompt(patch: Patch) -> None:
    original = guidance.combine
    patch.setattr(guidance, "combine", lambda own, negative, scales: original(negative, own, scales))


def guidance_at_the_pending_token_alone(patch: Patch) -> None:
    """Nodes are verified without guidance."""
    original = guidance.combine

    def combine(own, negative, scales):
        return torch.cat([original(own, negative, scales)[:, :1], own[:, 1:]], 1)

    patch.setattr(guidance, "combine", combine)


MUTANTS = [
    Mutant(a_fixed_point_is_taken_for_the_text, check(coupled_dist_holds)),
    Mutant(the_token_after_a_mismatch_is_the_last_sample, check(coupled_dist_holds)),
    Mutant(races_are_run_anew_in_every_round, check(samples_settle), "races-anew-are-not-accepted"),
    Mutant(races_are_run_anew_in_every_round, check(one_text_per_seed), "races-anew-change-the-text"),
    Mutant(samples_are_off_by_one, check(samples_settle)),
    Mutant(samples_of_another_row, check(samples_settle)),
    Mutant(the_line_above_is_elsewhere, check(neighbours_are_found)),
    Mutant(guidance_of_probabilities, check(guided_dist_holds)),
    Mutant(guidance_away_from_the_prompt, check(guided_dist_holds)),
    Mutant(guidance_at_the_pending_token_alone, check(guided_dist_holds)),
]

test_the_check_passes_and_fails_with_the_mutant = mutation_test(MUTANTS)
