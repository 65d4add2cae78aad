"""Settings of a training run: phases, budget and learning rates."""

from __future__ import annotations

from dataclasses import dataclass

from secondguess.train.run_folder import Budget


@dataclass(frozen=True)
class Phase:
    """Settings that apply until a share of the budget is spent.

    Args:
        until: share of the budget at which the phase ends, above 0 and up to 1.
        num_layers: depth of the model.
        length: tokens per window of text.
        tokens_per_step: tokens per optimiser step, at least one window.
    """

    until: float
    num_layers: int
    length: int
    tokens_per_step: int


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

    def phase_at(self, progress: float) -> Phase:
        return next((phase for phase in self.phases if progress < phase.until), self.phases[-1])

    def rate_at(self, progress: float, step: int) -> float:
        """Return the factor on both learning rates."""
        warm = min(1.0, (step + 1) / max(1, self.warmup_steps))
        return warm * min(1.0, (1.0 - progress) / self.decay_share)
