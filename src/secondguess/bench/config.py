"""Settings of a benchmark and of a tuning; nothing here imports torch."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from secondguess.drafters import parse_drafter_name
from secondguess.errors import BadInputError
from secondguess.names import ALL, AUTO
from secondguess.validation import Count, Different, Seed, Settings, Temperature


class MeasuringSettings(Settings):
    """Settings that a benchmark and a tuning share.

    `drafters` None takes the target's default drafter, its components, `ngram` and `suffix`; `num_threads` None
    leaves torch's own number.
    """

    model: str = "builtin"
    drafters: Different[str] | None = None
    dtype: str = "auto"
    device: str = "auto"
    batch_sizes: Annotated[Different[Count], Field(min_length=1)] = (1,)
    seed: Seed = 0
    num_threads: Annotated[int, Field(ge=1, le=1024)] | None = None

    @property
    def runs_all(self) -> bool:
        """True if all available drafters were requested with `all`."""
        return self.drafters == (ALL,)


class BenchConfig(MeasuringSettings):
    """Configuration of a benchmark: prompts, systems and the name of its report."""

    against: Different[Literal["transformers"]] = ()
    prompts: Annotated[Different[str], Field(min_length=1)] | None = None
    tasks: Different[str] = ()
    num_prompts: Count = 40
    num_tokens: Count = 128
    temperatures: Annotated[Different[Temperature], Field(min_length=1)] = (0.0, 1.0)
    draft_lengths: Different[Count] = (3, 5, 8)
    controllers: Different[str] = ()
    name: Annotated[str, Field(pattern=r"^[\w-]+$")] = "bench"

    def model_post_init(self, context: Any) -> None:
        if self.against and 1 not in self.batch_sizes:
            raise BadInputError(
                f"expected 1 among batch_sizes, since {', '.join(self.against)} decodes one prompt at a time, "
                f"got {self.batch_sizes}"
            )


class TuneConfig(MeasuringSettings):
    """Configuration of a tuning: prompts, candidates and time budget."""

    prompts: str | None = None
    num_prompts: Count = 12
    num_tokens: Annotated[int, Field(ge=2)] = 96
    temperature: Temperature = 0.0
    minutes: Annotated[float, Field(ge=0.01, le=24 * 60)] = 5.0

    def model_post_init(self, context: Any) -> None:
        for name in self.drafters or ():
            if name != AUTO and any(part.kind == "none" for part in parse_drafter_name(name)):
                raise BadInputError(
                    f"expected drafters that draft, got {name!r}; plain decoding is always measured, leave it out"
                )

    @property
    def temperatures(self) -> tuple[float, ...]:
        return (self.temperature,)
