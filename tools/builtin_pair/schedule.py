"""Settings of a training run: phases, budget and learning rates."""

from __future__ import annotations

from dataclasses import dataclass

from secondguess.errors import BadInputError
from secondguess.names import check_range
from secondguess.train.schedule import Budget


@dataclass(frozen=True)
class Phase:
    """Settings that apply until a share of the budget is spent.

    Args:
        until: share of the budget at which the phase ends, above 0 and up to 1.
        num_layers: depth of the model.
        length: tokens per window of text.
        tokens_per_step: tokens per optimiser step, at least one window.

    Raises:
        BadInputError: a value out of range.
    """

    until: float
    num_layers: int
    length: int
    tokens_per_step: int

    def __post_init__(self) -> None:
        check_range("the end of a phase", self.until, 1e-6, 1)
        check_range("the layers of a phase", self.num_layers, 1, 1000)
        check_range("the length of a window", self.length, 2, 1_000_000)
        check_range("the tokens of a step", self.tokens_per_step, self.length, 1_000_000_000)


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
        most_threads: maximum number of threads, reduced while other processes use the cores; 0
            keeps PyTorch's thread count.

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
    most_threads: int = 0

    def __post_init__(self) -> None:
        ends = [phase.until for phase in self.phases]
        if not ends or ends != sorted(ends) or ends[-1] != 1.0:
            raise BadInputError(f"phases must be in order and the last must end at 1.0, got {ends}")
        depths = [phase.num_layers for phase in self.phases]
        if depths != sorted(depths):
            raise BadInputError(f"a later phase cannot have fewer layers, got {depths}")
        check_range("decay_share", self.decay_share, 1e-6, 1)

    def phase_at(self, progress: float) -> Phase:
        return next((phase for phase in self.phases if progress < phase.until), self.phases[-1])

    def rate_at(self, progress: float, step: int) -> float:
        """Return the factor on both learning rates."""
        warm = min(1.0, (step + 1) / max(1, self.warmup_steps))
        return warm * min(1.0, (1.0 - progress) / self.decay_share)
