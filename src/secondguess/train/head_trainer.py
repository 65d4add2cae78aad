"""Training loop of drafters for a frozen target.

A step takes the target's hidden states for a batch of texts, drafts at its positions, and
minimises the losses of the depths with Muon for matrices and AdamW for the rest. Depths are drawn
with the recipe's weights as probabilities: the gradient is that of the weighted sum on average, at
the cost of fewer depths. The learning rate warms up and decays along a cosine. With a budget of
steps, a step is a function of the seed, the step and the weights: a run that was killed and resumed
from its checkpoint writes the same log as an uninterrupted one, bit by bit (one machine).
With a budget of minutes, the learning rate depends on the elapsed time.
"""

from __future__ import annotations

import copy
import json
import math
import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn

from secondguess.core import MAX_DRAFT_LENGTH
from secondguess.errors import BadInputError, CheckpointError
from secondguess.files import write_atomically
from secondguess.heads.learning import Objective, TrainableHead, TrainingBatch
from secondguess.runtime.base import EmbeddingAndHead
from secondguess.runtime.system.machine import has_bfloat16
from secondguess.train.capture import Capture
from secondguess.train.muon import Muon
from secondguess.train.recipes import Recipe
from secondguess.train.run_folder import Budget
from secondguess.train.training_data import Batch, TextSplit, TrainingText, batches_in_order, training_batches

CHECKPOINT, LOG = "checkpoint.pt", "log.jsonl"
CHECKPOINT_SECONDS = 120.0
"""Interval between checkpoints."""
SHOWN_DEPTHS = 5
"""Number of depths whose acceptance the progress shows."""


@dataclass(frozen=True)
class TrainerSettings:
    """Settings of a run."""

    recipe: Recipe
    objective: Objective
    budget: Budget
    seed: int  # of the order of the texts and of the head's random numbers
    evaluate_steps: int  # between evaluations on the held-out texts
    patience: int  # evaluations without improvement after which the run ends; 0 for no early end


@dataclass
class RunState:
    """Progress of a run, stored in the checkpoint."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    evaluated_step: int = -1  # step of the last evaluation; -1 before the first
    best_step: int = 0  # step with the largest acceptance length on held-out text
    best_accepted: list[float] = field(default_factory=list)  # its acceptance by depth
    num_disappointments: int = 0  # evaluations without improvement since then
    log_bytes: int = 0  # size of the log when the checkpoint was written


class HeadTrainer:
    """Training run with its state; `run` continues it to the end of its budget.

    `captures` are the sources of the hidden states of the training and the held-out texts. `folder` has
    `checkpoint.pt` and `log.jsonl`; a run found there is continued. `progress` gets the share of the budget and a
    description after every step. `pause` is called between steps; if it raises KeyboardInterrupt, a checkpoint is
    written.
    """

    def __init__(
        self,
        trainable: TrainableHead,
        target: EmbeddingAndHead,
        texts: TextSplit,
        captures: tuple[Capture, Capture],
        settings: TrainerSettings,
        folder: Path,
        progress: Callable[[float, str], None],
        pause: Callable[[], None],
    ) -> None:
        self.trainable, self.target, self.texts = trainable, target, texts
        self.capture, self.held_out_capture = captures
        self.settings, self.folder = settings, folder
        self._recipe = settings.recipe
        self._report_progress, self._pause = progress, pause
        self.state = RunState()
        self._parameters = [parameter for parameter in trainable.parameters() if parameter.requires_grad]
        if not self._parameters:
            raise BadInputError(f"cannot train a {type(trainable).__name__}: it has no weights to train")
        self.optimizers = make_optimizers(trainable, self._recipe.learning_rate)
        self._best: dict[str, Tensor] = {}
        if (folder / CHECKPOINT).is_file():
            self._load()

    @property
    def share(self) -> float:
        """Share of the budget that is spent, 0 to 1."""
        return self.settings.budget.progress(self.state.seconds, self.state.step)

    def run(self) -> RunState:
        """Train until the budget is spent or the score stops improving.

        The head then has the weights with the best score.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        self._cut_log()
        with (self.folder / LOG).open("ab") as log:
            self._run(log)
            if self.state.evaluated_step != self.state.step:
                self._evaluate(log)
            self.save(log)
        self.trainable.load_state_dict(self._best)
        self.trainable.eval()
        return self.state

    def _run(self, log: BinaryIO) -> None:
        state = self.state
        batches = iter(
            training_batches(self.texts.training, self._recipe.batch_size, self.settings.seed, state.step)
        )
        last_save = time.monotonic()
        while self.share < 1.0 and not self._out_of_patience():
            begun = time.monotonic()
            self._take_step(next(batches), log)
            if state.step % self.settings.evaluate_steps == 0:
                self._evaluate(log)
            now = time.monotonic()
            state.seconds += now - begun
            if now - last_save > CHECKPOINT_SECONDS:
                self.save(log)
                last_save = time.monotonic()
            try:
                self._pause()
            except KeyboardInterrupt:
                self.save(log)
                raise

    @property
    def has_stopped_early(self) -> bool:
        """True if the run ended because the score no longer improved, before its budget was spent."""
        return self.share < 1.0 and self._out_of_patience()

    def _out_of_patience(self) -> bool:
        return 0 < self.settings.patience <= self.state.num_disappointments

    def _take_step(self, batch: Batch, log: BinaryIO) -> None:
        begun = time.monotonic()
        self.trainable.train()
        with torch.random.fork_rng():
            # Random numbers (dropout, anchors) depend on the step alone, not on earlier draws.
            torch.manual_seed(self.settings.seed * 1_000_003 + self.state.step)
            training_batch = self._thinned(self.capture.training_batch(batch))
            with self._mixed_precision():
                depth_losses = self.trainable.learn(training_batch, self.target, self.settings.objective)
            loss = torch.stack(depth_losses.losses).sum()
            if depth_losses.extra is not None:
                loss = loss + depth_losses.extra
            loss.backward()  # type: ignore[no-untyped-call]
        value = float(loss.detach())
        if not math.isfinite(value):
            raise CheckpointError(
                f"cannot continue training: the loss of step {self.state.step} is {value}. Resume from the last checkpoint "
                "with a lower learning rate."
            )
        nn.utils.clip_grad_norm_(self._parameters, self._recipe.clip)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self._recipe.learning_rate * self._rate()
            with self._mixed_precision():
                optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.state.step += 1
        num_tokens = sum(batch.lengths)
        self.state.tokens += num_tokens
        accepted = [float(value) for value in depth_losses.accepted]
        _write_line(log, {"step": self.state.step, "loss": value, "accepted": accepted})
        seconds = max(time.monotonic() - begun, 1e-9)
        seconds_left = self.state.seconds * (1 - self.share) / self.share if self.share else math.inf
        self._report_progress(
            self.share,
            f"step {self.state.step}: loss {value:.3f}, acceptance by position "
            f"{' '.join(f'{share:.2f}' for share in accepted[:SHOWN_DEPTHS])}, {num_tokens / seconds:.0f} tokens/s, "
            f"{seconds_left:.0f} s left",
        )

    @contextmanager
    def _mixed_precision(self) -> Iterator[None]:
        """Compute products in bfloat16 where these are fast; weights and sums stay in float32."""
        device = self._parameters[0].device
        with (
            warnings.catch_warnings(),
            torch.autocast(device.type, torch.bfloat16, enabled=has_bfloat16(device)),
        ):
            warnings.filterwarnings(
                "ignore", "Mismatch dtype"
            )  # norms of such products, with weights in float32
            yield

    def _thinned(self, training_batch: TrainingBatch) -> TrainingBatch:
        """Return a batch with a random share of its counted positions and a random number of depths."""
        random_keys = torch.rand(training_batch.counts.shape).to(training_batch.counts.device)
        deepest = float(torch.rand(()))
        return replace(
            training_batch,
            counts=training_batch.counts & (random_keys < self._recipe.places),
            num_depths=sum(deepest < weight for weight in self._recipe.weights(MAX_DRAFT_LENGTH)),
        )

    def _rate(self) -> float:
        """Return the factor on the learning rate: linear warm-up, half a cosine down to zero."""
        warm = min(1.0, (self.state.step + 1) / max(1, self._recipe.warmup_steps))
        return warm * 0.5 * (1 + math.cos(math.pi * self.share))

    def _evaluate(self, log: BinaryIO) -> None:
        state = self.state
        accepted = held_out_acceptance(
            self.trainable,
            self.target,
            self.texts.held_out,
            self.held_out_capture,
            self.settings.objective,
            self._recipe.batch_size,
        )
        score = acceptance_length(accepted)
        state.evaluated_step = state.step
        if not state.best_accepted or score > acceptance_length(state.best_accepted):
            state.best_step, state.best_accepted = state.step, accepted
            state.num_disappointments = 0
            self._best = copy.deepcopy(self.trainable.state_dict())
        else:
            state.num_disappointments += 1
        _write_line(log, {"step": state.step, "held_out_accepted": accepted, "score": score})

    def save(self, log: BinaryIO) -> None:
        """Write the whole state; the log is written first, so that it is never behind it."""
        log.flush()
        os.fsync(log.fileno())
        self.state.log_bytes = log.tell()
        content = {
            "learner": self.trainable.state_dict(),
            "best": self._best,
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "standing": vars(self.state),
        }
        with write_atomically(self.folder / CHECKPOINT) as stream:
            _save(content, stream)

    def _load(self) -> None:
        path = self.folder / CHECKPOINT
        try:
            content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
            self.trainable.load_state_dict(content["learner"])
            for optimizer, optimizer_state in zip(self.optimizers, content["optimizers"], strict=True):
                optimizer.load_state_dict(optimizer_state)
            self.state = RunState(**content["standing"])
            self._best = content["best"]
        except Exception as error:
            first = (str(error).splitlines() or [type(error).__name__])[0]
            raise CheckpointError(
                f"cannot continue the run in {path}: it is no checkpoint of this head ({first}). Choose another --out, or "
                "delete the file to start anew."
            ) from error

    def _cut_log(self) -> None:
        """Remove the log lines that a killed run wrote after its last checkpoint."""
        with (self.folder / LOG).open("ab") as log:
            log.truncate(min(log.tell(), self.state.log_bytes))


def _save(content: dict[str, Any], stream: BinaryIO) -> None:
    """Call `torch.save`."""
    try:
        torch.save(content, stream)
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise


def _write_line(log: BinaryIO, content: dict[str, object]) -> None:
    log.write(json.dumps(content).encode() + b"\n")


def make_optimizers(trainable: nn.Module, learning_rate: float) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices between hidden states, and AdamW for the other weights."""
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in trainable.named_parameters():
        if parameter.requires_grad:
            is_of_vocabulary = any(part in name for part in ("embed_tokens", "lm_head", "markov"))
            (others if parameter.ndim < 2 or is_of_vocabulary else matrices).append(parameter)
    made: list[torch.optim.Optimizer] = []
    if matrices:
        made.append(Muon(matrices, learning_rate))
    if others:
        made.append(torch.optim.AdamW(others, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0))
    return made


@torch.no_grad()
def held_out_acceptance(
    trainable: TrainableHead,
    target: EmbeddingAndHead,
    texts: Sequence[TrainingText],
    capture: Capture,
    objective: Objective,
    batch_size: int,
) -> list[float]:
    """Return the mean acceptance by depth over texts, weighting all counted tokens equally."""
    trainable.eval()
    total, num_counted = torch.zeros(0), 0
    for batch in batches_in_order(texts, batch_size):
        depth_losses = trainable.learn(capture.training_batch(batch), target, objective)
        accepted = torch.stack([value.float().cpu() for value in depth_losses.accepted])
        total = accepted * batch.num_counted + (total if num_counted else 0)
        num_counted += batch.num_counted
    return (total / max(1, num_counted)).tolist()


def acceptance_length(accepted: Sequence[float]) -> float:
    """Return the expected acceptance length (tau) of a chain, from the acceptance rate by depth.

    >>> acceptance_length([0.5, 0.5])
    1.75
    """
    expected, reached = 1.0, 1.0
    for prob in accepted:
        reached *= prob
        expected += reached
    return expected
