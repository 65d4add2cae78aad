"""Verification of chains of drafted values, in place of probabilities over a vocabulary.

With target density p and draft density q, a value x ~ q is accepted with probability
min(1, p(x) / q(x)), that is in total with the overlap of the densities, 1 - TV(p, q). No coupling
of p and q accepts more. After a rejection the value is drawn from the residual max(p - q, 0) / TV:

- For two Gaussians of equal covariance, the rejected value is reflected at the hyperplane between
  the means (reflection-maximal coupling; Bou-Rabee, Eberle and Zimmer 2020). This takes no draws.
- Otherwise values y ~ p are drawn until one is kept, each with probability 1 - min(1, q(y) / p(y)).
  A rejection then takes 1 / TV trials on average. As it occurs with probability TV, a verified
  value takes exactly one trial on average whatever p and q are. Their number has no bound, and the
  loop has none either: a limit would bias the values. n trials do not suffice with probability
  TV (1 - TV)^n, at most 1 / (e n) for any TV.

The joint distribution of the committed values is then the target's, as for tokens (Leviathan et al.
2022): sums become integrals.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from secondguess.beyond.forecasting.distributions import Distribution, Gaussian
from secondguess.runtime.hashes import Purpose
from secondguess.sampling.noise import KeyedNoise

FIRST_TRIALS, MAX_TRIALS = 4, 1024
"""Numbers of trials of a residual that are evaluated together: at first, and at most."""


@dataclass(frozen=True)
class ValueDraft:
    """Drafted values of a batch of rows."""

    values: Tensor  # [row, node, dim]
    lengths: Tensor  # [row], number of values that are verified; the others are padding
    dists: Distribution  # batch [row, node], distribution that each value was drawn from


def acceptance_probs(target: Distribution, draft: Distribution, values: Tensor) -> Tensor:
    """Return the probabilities min(1, p / q) of accepting drafted values."""
    return (target.log_density(values) - draft.log_density(values)).clamp(max=0.0).exp()


def keep_probs(target: Distribution, draft: Distribution, values: Tensor) -> Tensor:
    """Return the probabilities 1 - min(1, q / p) of keeping draws from the target as draws from the residual."""
    return -(draft.log_density(values) - target.log_density(values)).clamp(max=0.0).expm1()


def reflected(target: Gaussian, draft: Gaussian, values: Tensor) -> Tensor:
    """Return values reflected at the hyperplane between the means of Gaussians of equal covariance."""
    shift = (target.loc - draft.loc) / draft.scale
    noise = (values - draft.loc) / draft.scale
    along = (noise * shift).sum(-1, keepdim=True) / shift.square().sum(-1, keepdim=True)
    return target.loc + draft.scale * (noise - 2 * along * shift)


def verify(draft: ValueDraft, target: Distribution, noise: KeyedNoise) -> tuple[Tensor, Tensor]:
    """Return the number of accepted values `[row]` and the value that follows them `[row, dim]`.

    `target` has a batch `[row, node + 1]`: the distributions at the drafted positions and after.
    """
    num_rows, num_nodes = draft.values.shape[:2]
    probs = acceptance_probs(target.at((slice(None), slice(num_nodes))), draft.dists, draft.values)
    accepted = torch.from_numpy(noise.accept(probs.numpy())) & (
        torch.arange(num_nodes) < draft.lengths[:, None]
    )
    lengths = accepted.long().cumprod(1).sum(1)
    following = target.at((torch.arange(num_rows), lengths))
    uniforms = noise.uniforms([range(following.num_uniforms)] * num_rows, Purpose.DRAW)
    values = following.sample(torch.from_numpy(uniforms))
    rejected = (lengths < draft.lengths).nonzero()[:, 0]
    if len(rejected):
        positions = (rejected, lengths[rejected])
        values[rejected] = corrections(
            target.at(positions), draft.dists.at(positions), draft.values[positions], noise.select(rejected)
        )
    return lengths, values


def corrections(target: Distribution, draft: Distribution, values: Tensor, noise: KeyedNoise) -> Tensor:
    """Return draws `[row, dim]` from the residuals, given the rejected values."""
    if not (isinstance(target, Gaussian) and isinstance(draft, Gaussian)):
        return draw_residual(target, draft, noise)
    found = reflected(target, draft, values)
    unequal = (target.scale != draft.scale).any(-1).nonzero()[:, 0]
    if len(unequal):
        found[unequal] = draw_residual(target.at(unequal), draft.at(unequal), noise.select(unequal))
    return found


def draw_residual(target: Distribution, draft: Distribution, noise: KeyedNoise) -> Tensor:
    """Draw `[row, dim]` from the residuals max(p - q, 0) by trials from p."""
    per_trial = target.num_uniforms + 1
    remaining = torch.arange(len(noise.keys))
    found: Tensor | None = None
    first, count = 0, FIRST_TRIALS
    while len(remaining):
        indices = [range(first * per_trial, (first + count) * per_trial)] * len(remaining)
        uniforms = torch.from_numpy(noise.select(remaining).uniforms(indices, Purpose.DRAW))
        uniforms = uniforms.reshape(len(remaining), count, per_trial)
        p, q = target.at((remaining, None)), draft.at((remaining, None))
        trials = p.sample(uniforms[..., 1:])
        kept = uniforms[..., 0] < keep_probs(p, q, trials)
        found = torch.empty(len(remaining), trials.shape[-1], dtype=trials.dtype) if found is None else found
        done = kept.any(1)
        found[remaining[done]] = trials[done, kept[done].long().argmax(1)]
        remaining = remaining[~done]
        first, count = first + count, min(4 * count, MAX_TRIALS)
    assert found is not None
    return found
