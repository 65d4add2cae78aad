"""Mutation tests of continuous values, as in test_mutants."""

from __future__ import annotations

from dataclasses import replace

import numpy
import torch

from continuous_cases import Mixture, forecast_holds, reflection_holds, rules_hold, verification_holds
from mutant_cases import Mutant, Patch, check, mutation_test
from secondguess.beyond.forecasting import forecast, verification
from secondguess.beyond.forecasting.autoregression import AutoregressionDrafter
from secondguess.beyond.forecasting.distributions import Gaussian, StudentT
from secondguess.beyond.forecasting.forecaster import ForecastRuntime
from secondguess.runtime.hashes import Purpose
from secondguess.sampling.noise import KeyedNoise
from test_mutants import purposes_share_numbers


def corrections_are_drawn_from_the_target(patch: Patch) -> None:
    patch.setattr(
        verification, "keep_probs", lambda target, draft, values: torch.ones(values.shape[:-1]).double()
    )


def the_ratio_is_upside_down(patch: Patch) -> None:
    original = verification.acceptance_probs
    patch.setattr(
        verification, "acceptance_probs", lambda target, draft, values: original(draft, target, values)
    )


def rejected_values_are_shifted_and_not_reflected(patch: Patch) -> None:
    patch.setattr(verification, "reflected", lambda target, draft, values: values + target.loc - draft.loc)


def every_gaussian_is_reflected(patch: Patch) -> None:
    patch.setattr(
        verification,
        "corrections",
        lambda target, draft, values, noise: verification.reflected(target, draft, values),
    )


def densities_lack_the_scale(patch: Patch) -> None:
    patch.setattr(
        Gaussian, "log_density", lambda self, values: -((values - self.loc) / self.scale).square().sum(-1) / 2
    )


def trials_are_limited(patch: Patch) -> None:
    """The last of a few trials is taken if none was kept."""
    original = verification.keep_probs

    def keep(target, draft, values):
        probs = original(target, draft, values).clone()
        probs[:, -1] = 1.0
        return probs

    patch.setattr(verification, "keep_probs", keep)


def students_are_sampled_as_gaussians(patch: Patch) -> None:
    patch.setattr(
        StudentT, "sample", lambda self, uniforms: Gaussian(self.loc, self.scale).sample(uniforms[..., :1])
    )


def components_are_equally_likely(patch: Patch) -> None:
    original = Mixture.sample
    patch.setattr(
        Mixture,
        "sample",
        lambda self, uniforms: original(replace(self, log_weights=0 * self.log_weights), uniforms),
    )


def values_behind_a_rejection_count(patch: Patch) -> None:
    original = KeyedNoise.accept
    patch.setattr(KeyedNoise, "accept", lambda self, probs: numpy.sort(original(self, probs))[:, ::-1].copy())


def the_draft_claims_wider_distributions(patch: Patch) -> None:
    original = AutoregressionDrafter.propose

    def propose(self, *args):
        draft = original(self, *args)
        return replace(draft, dists=replace(draft.dists, scale=1.5 * draft.dists.scale))

    patch.setattr(AutoregressionDrafter, "propose", propose)


def scores_are_of_the_step_before(patch: Patch) -> None:
    original = ForecastRuntime.score
    patch.setattr(
        ForecastRuntime,
        "score",
        lambda self, rows, series, values, starts, lengths: original(
            self, rows, series, values, (starts - 1).clamp(min=0), lengths
        ),
    )


def large_drafts_are_withdrawn(patch: Patch) -> None:
    """The draft length depends on drawn values (anticipation)."""
    original = forecast._Sampler._draft

    def draft(self, *args):
        found = original(self, *args)
        small = (found.values[..., 0] < 0.3).long().cumprod(1).sum(1)
        return replace(found, lengths=torch.minimum(found.lengths, small))

    patch.setattr(forecast._Sampler, "_draft", draft)


MUTANTS = [
    Mutant(corrections_are_drawn_from_the_target, check(rules_hold, "students")),
    Mutant(corrections_are_drawn_from_the_target, check(verification_holds, "students"), "redraw-from-p"),
    Mutant(the_ratio_is_upside_down, check(rules_hold, "unequal-scales")),
    Mutant(rejected_values_are_shifted_and_not_reflected, check(reflection_holds, "equal-scales-2d")),
    Mutant(
        rejected_values_are_shifted_and_not_reflected,
        check(verification_holds, "equal-scales"),
        "not-reflected",
    ),
    Mutant(every_gaussian_is_reflected, check(verification_holds, "unequal-scales")),
    Mutant(densities_lack_the_scale, check(rules_hold, "unequal-scales")),
    Mutant(trials_are_limited, check(verification_holds, "students")),
    Mutant(students_are_sampled_as_gaussians, check(verification_holds, "students")),
    Mutant(components_are_equally_likely, check(verification_holds, "mixtures")),
    Mutant(
        purposes_share_numbers(Purpose.ACCEPT, Purpose.DRAW),
        check(verification_holds, "students"),
        "one-number",
    ),
    Mutant(purposes_share_numbers(Purpose.DRAFT, Purpose.ACCEPT), check(forecast_holds), "draft-accepts"),
    Mutant(values_behind_a_rejection_count, check(forecast_holds)),
    Mutant(the_draft_claims_wider_distributions, check(forecast_holds)),
    Mutant(scores_are_of_the_step_before, check(forecast_holds)),
    Mutant(large_drafts_are_withdrawn, check(forecast_holds)),
]

test_the_check_passes_and_fails_with_the_mutant = mutation_test(MUTANTS)
