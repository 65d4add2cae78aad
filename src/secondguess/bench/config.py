"""Settings of a benchmark and of a tuning."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from secondguess.drafters import parse_drafter_name
from secondguess.errors import BadInputError
from secondguess.names import ALL
from secondguess.validation import Count, Different, Seed, Settings, Temperature

PEERS = ("transformers",)
Threads = Annotated[int, Field(ge=1, le=1024)]


class MeasuringSettings(Settings):
    """Settings that a benchmark and a tuning share.

    Args:
        dtype, device: of all systems, as in `load`.
        batch_sizes: numbers of prompts that our systems decode together.
    """

    model: str = "builtin"
    dtype: str = "auto"
    device: str = "auto"
    batch_sizes: Annotated[Different[Count], Field(min_length=1)] = (1,)
    seed: Seed = 0


class BenchConfig(MeasuringSettings):
    """Configuration of a benchmark.

    Args:
        drafters: names of the drafters to compare. None takes the target's default drafter, its
            components, `ngram` and `suffix`. A single `all` takes every drafter available for the
            target, as chain and as tree, without constant draft lengths, and under `controllers`
            instead of the default ones if any are named.
        against: other libraries to compare with, from `PEERS`.
        prompts: one or several sources of prompts (see `load_workload`); None takes HumanEval if
            its file is in the folder `SECONDGUESS_DATA`, else `builtin`.
        num_prompts: number of prompts, spread evenly over the tasks and within each task.
        num_tokens: exact number of new tokens per prompt.
        draft_lengths: constant draft lengths at which model drafters (ours and the peers') run,
            besides their defaults.
        num_threads: torch threads, for all systems; None leaves torch's own number.
        controllers: controllers with which every drafter of ours runs, besides its default.

    Raises:
        BadInputError: an invalid value.
    """

    drafters: Different[str] | None = None
    against: Different[str] = ()
    prompts: Annotated[Different[str], Field(min_length=1)] | None = None
    num_prompts: Count = 40
    num_tokens: Count = 128
    temperatures: Annotated[Different[Temperature], Field(min_length=1)] = (0.0, 1.0)
    draft_lengths: Different[Count] = (3, 5, 8)
    num_threads: Threads | None = None
    name: Annotated[str, Field(pattern=r"^[\w-]+$")] = "bench"
    tasks: Different[str] = ()
    controllers: Different[str] = ()

    def model_post_init(self, context: Any) -> None:
        for peer in self.against:
            if peer not in PEERS:
                raise BadInputError(f"expected against to be one of {', '.join(PEERS)}, got {peer!r}")
        if self.against and 1 not in self.batch_sizes:
            raise BadInputError(
                f"expected 1 among batch_sizes, since {', '.join(self.against)} decodes one prompt at a time, "
                f"got {self.batch_sizes}"
            )

    @property
    def runs_all(self) -> bool:
        """True if all available drafters were requested with `all`."""
        return self.drafters == (ALL,)


class TuneConfig(MeasuringSettings):
    """Model, prompts, candidates and time budget of a tuning.

    Args:
        drafters: names of the drafters to compare; empty for the target's default drafter, its
            parts, `ngram` and `suffix`.
        prompts: one source of prompts (see `load_workload`).
        num_tokens: maximum number of new tokens per prompt; an end token ends a text before.
        minutes: time budget; with less of it, fewer prompts and runs.

    Raises:
        BadInputError: an invalid value, or a drafter that does not exist.
    """

    drafters: Different[str] = ()
    prompts: str | None = None
    num_prompts: Count = 12
    num_tokens: Annotated[int, Field(ge=2)] = 96
    temperature: Temperature = 0.0
    num_threads: Threads = 2
    minutes: Annotated[float, Field(ge=0.01, le=24 * 60)] = 5.0

    def model_post_init(self, context: Any) -> None:
        for name in self.drafters:
            if any(part.kind == "none" for part in parse_drafter_name(name)):
                raise BadInputError(
                    f"expected drafters that draft, got {name!r}; plain decoding is always measured, leave it out"
                )


def compared_by_default(default: str) -> tuple[str, ...]:
    """Return a target's default drafter, its parts, and look-ups."""
    parts = map(str, parse_drafter_name(default))
    return tuple(dict.fromkeys((default, *parts, "ngram", "suffix")))
