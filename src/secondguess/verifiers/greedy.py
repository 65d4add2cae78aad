"""Greedy match: at temperature 0 a node is accepted if it is the target's most likely token."""

from __future__ import annotations

from torch import Tensor

from secondguess.core import Draft, Verdict
from secondguess.errors import BadInputError
from secondguess.sampling import SamplingParams
from secondguess.sampling.noise import Noise
from secondguess.sampling.truncation import most_likely
from secondguess.verifiers.base import Exactness, Verifier


class GreedyVerifier(Verifier):
    """Verifier that accepts the target's most likely tokens (chains and trees); temperature 0."""

    name = "greedy"
    exactness = Exactness.LOSSLESS
    reports_samples = True

    def check(self, params: SamplingParams) -> None:
        if params.temperature != 0:
            raise BadInputError(
                f"verifier 'greedy' expects temperature 0, got {params.temperature:g}; "
                "set temperature to 0 or use verifier 'auto'"
            )

    def verify(self, draft: Draft, target_probs: Tensor, noise: Noise) -> Verdict:
        if not noise.all_greedy:
            raise BadInputError(
                "verifier 'greedy' expects rows at temperature 0, got a row that samples; "
                "set temperature to 0 or use verifier 'auto'"
            )
        return self.verify_greedy(draft, most_likely(target_probs).tolist())
