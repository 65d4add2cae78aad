"""Settings of a training run: phases, budget and learning rates."""

from __future__ import annotations

from dataclasses import dataclass

from secondguess.errors import BadInputError


@dataclass(frozen=True)
class Phase:
    """Settings that apply until a share of the budget is spent.

    Args:
        until: share of the budget at which the phase ends, above 0 and up to 1.
        num_layers: depth of the model.
        length: tokens per window of text.
        tokens_per_step: tokens per optimiser step.

    Raises:
        BadInputError: a value out of range.
    """

    until: float
    num_layers: int
    length: int
    tokens_per_step: int

    def __post_init__(self) -> None:
        if not 0 < self.until <= 1:
            raise BadInputError(f"a phase ends at a share of the budget in (0, 1], got {self.until}")
        if self.num_layers < 1 or self.length < 2 or self.tokens_per_step < self.length:
            raise BadInputError(
                "a phase needs at least one layer, windows of 2 tokens and one window per step, "
                f"got {self.num_layers} layers, length {self.length}, {self.tokens_per_step} tokens per step"
            )


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
        if self.minutes is not None and not self.minutes > 0:
            raise BadInputError(
                f"expected --minutes above 0, got {self.minutes:g}: a training budget is positive; give more, or --steps"
            )
        if self.steps is not None and self.steps < 1:
            raise BadInputError(
                f"expected --steps of at least 1, got {self.steps}: a training budget is positive; give more, or --minutes"
            )

    def progress(self, seconds: float, step: int) -> float:
        shares = [0.0]
        if self.minutes is not None:
            shares.append(seconds / (60 * self.minutes))
        if self.steps is not None:
            shares.append(step / self.steps)
        return min(1.0, max(shares))


@dataclass(frozen=True)
class RunSettings:
    """Settings that determine a run, except for the data, the shape and the loss.

    Args:
        phases: in order; the last one ends at 1.
        budget: minutes, steps or both.
        seed: seed of the weights and of the order of the text.
        micro_tokens: tokens per micro-batch, over which gradients are accumulated.
        muon_rate, adam_rate: peak learning rates of Muon and AdamW.
        weight_decay: weight decay of Muon.
        warmup_steps: steps of linear warm-up.
        decay_share: last part of the budget, in which the learning rate decays to zero.
        function_share: share of the rows that begin at a function.
        checkpoint_seconds: interval between checkpoints.
        compile: whether training steps are compiled.
        most_threads: maximum number of threads.

    Raises:
        BadInputError: phases out of order, or a `decay_share` out of range.
    """

    phases: tuple[Phase, ...]
    budget: Budget
    seed: int = 0
    micro_tokens: int = 4096
    muon_rate: float = 0.02
    adam_rate: float = 0.003
    weight_decay: float = 0.05
    warmup_steps: int = 60
    decay_share: float = 0.35
    function_share: float = 0.5
    checkpoint_seconds: float = 180.0
    compile: bool = True
    most_threads: int = (
        0  # 0 keeps PyTorch's count; else the count is reduced while other processes use the cores
    )

    def __post_init__(self) -> None:
        ends = [phase.until for phase in self.phases]
        if not ends or ends != sorted(ends) or ends[-1] != 1.0:
            raise BadInputError(f"phases must be in order and the last must end at 1.0, got {ends}")
        depths = [phase.num_layers for phase in self.phases]
        if depths != sorted(depths):
            raise BadInputError(f"a later phase cannot have fewer layers, got {depths}")
        if not 0 < self.decay_share <= 1:
            raise BadInputError(f"decay_share must be in (0, 1], got {self.decay_share}")

    def phase_at(self, progress: float) -> Phase:
        return next((phase for phase in self.phases if progress < phase.until), self.phases[-1])

    def rate_at(self, progress: float, step: int) -> float:
        """Return the factor on both learning rates."""
        warm = min(1.0, (step + 1) / max(1, self.warmup_steps))
        return warm * min(1.0, (1.0 - progress) / self.decay_share)
