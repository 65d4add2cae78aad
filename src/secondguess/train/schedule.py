"""Budget of a training run."""

from __future__ import annotations

from dataclasses import dataclass

from secondguess.errors import BadInputError


@dataclass(frozen=True)
class Budget:
    """Budget in minutes, steps or both; a run ends when either is spent.

    Raises:
        BadInputError: neither is given, or one is not positive.
    """

    minutes: float | None = None
    steps: int | None = None

    def __post_init__(self) -> None:
        if self.minutes is None and self.steps is None:
            raise BadInputError("a training budget needs minutes or steps")
        for name, value in (("minutes", self.minutes), ("steps", self.steps)):
            if value is not None and not value > 0:
                raise BadInputError(
                    f"expected --{name} above 0, as a training budget is positive, got {value:g}"
                )

    def progress(self, seconds: float, step: int) -> float:
        """Return the share of the budget that is spent, 0 to 1."""
        by_time = seconds / (60 * self.minutes) if self.minutes else 0.0
        by_steps = step / self.steps if self.steps else 0.0
        return min(1.0, max(by_time, by_steps))
