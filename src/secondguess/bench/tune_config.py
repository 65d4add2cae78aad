"""Settings of a tuning."""

from __future__ import annotations

import math
from dataclasses import dataclass

from secondguess.api import default_drafter
from secondguess.drafters import draft_model_paths, parse_drafter_name
from secondguess.errors import BadInputError


@dataclass(frozen=True)
class TuneConfig:
    """Model, prompts, candidates and time budget of a tuning.

    Args:
        model: the target.
        drafters: names of the drafters to compare; empty for the target's default drafter, its draft model alone and
            joined with `suffix` where it has one, `suffix`, and `ngram`.
        prompts: as `bench` takes them; None takes HumanEval where it lies beside the checkout, else `builtin`.
        num_prompts: how many of them at most, evenly spread.
        num_tokens: new tokens per prompt at most; an end token ends a text before.
        temperature: of the texts.
        batch_sizes: for how many texts at once.
        dtype, device: as `load` takes them.
        num_threads: of torch.
        minutes: time budget; with less of it fewer prompts are used and fewer runs made.
        num_verified: how many of the best of each batch size enter the final runs, beside plain decoding and the default.
        int8: whether to run a target with weights in 8 bits too.
        seed: of sampled texts.

    Raises:
        BadInputError: a value out of range, or a drafter that does not exist.
    """

    model: str = "builtin"
    drafters: tuple[str, ...] = ()
    prompts: str | None = None
    num_prompts: int = 12
    num_tokens: int = 96
    temperature: float = 0.0
    batch_sizes: tuple[int, ...] = (1, 4, 16)
    dtype: str = "auto"
    device: str = "auto"
    num_threads: int = 2
    minutes: float = 5.0
    num_verified: int = 3
    int8: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        _between("num_prompts", self.num_prompts, 1, 10_000)
        _between("num_tokens", self.num_tokens, 2, 100_000)
        _between("temperature", self.temperature, 0, 100)
        _between("num_threads", self.num_threads, 1, 1024)
        _between("minutes", self.minutes, 0.01, 24 * 60)
        _between("num_verified", self.num_verified, 0, 100)
        _between("seed", self.seed, 0, 2**63 - 1)
        for size in self.batch_sizes:
            _between("batch_size", size, 1, 1024)
        for option in ("batch_sizes", "drafters"):
            values = getattr(self, option)
            if len(set(values)) < len(values):
                raise BadInputError(f"expected different {option}, got {', '.join(map(str, values))}")
        if not self.batch_sizes:
            raise BadInputError("expected at least one batch size, got none")
        for drafter in self.drafters_to_compare:
            _check_drafter(drafter)

    @property
    def drafters_to_compare(self) -> tuple[str, ...]:
        if self.drafters:
            return self.drafters
        own = default_drafter(self.model)
        models = [f"model:{path}" for path in draft_model_paths(own)]
        joined = [f"suffix+{model}" for model in models]
        return tuple(dict.fromkeys([own, *models, "suffix", "ngram", *joined]))


def _check_drafter(name: str) -> None:
    """Refuse plain decoding and unknown drafters before anything is loaded."""
    if any(part.kind == "none" for part in parse_drafter_name(name)):
        raise BadInputError(
            f"expected drafters that draft, got {name!r}; plain decoding is always measured, leave it out"
        )


def _between(option: str, value: float, low: float, high: float) -> None:
    if not (math.isfinite(value) and low <= value <= high):
        raise BadInputError(f"expected {option} to be from {low:g} to {high:g}, got {value:g}")
