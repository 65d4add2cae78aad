"""The training loop of everything that learns to guess for one frozen target.

The target is read, the head guesses at every place, AdamW follows the losses of the depths, weighted by the recipe. The rate
warms up and falls along a cosine. With a budget of steps, what a step does is a function of the seed, the step and the weights:
a run that was killed and resumed from its checkpoint writes the log of the unbroken one, bit by bit (float32, one machine). With
a budget of minutes the rate follows the clock.
"""

from __future__ import annotations

import copy
import json
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn

from secondguess.errors import BadInputError, CheckpointError
from secondguess.heads.learning import Learner, Lesson, Marks, Objective
from secondguess.names import require_between
from secondguess.runtime.base import Ends
from secondguess.train.capture import Capture
from secondguess.train.files import write_atomically
from secondguess.train.lessons import Batch, TaughtText, Texts, batches_in_order, training_batches
from secondguess.train.schedule import Budget

CHECKPOINT, LOG = "checkpoint.pt", "log.jsonl"


@dataclass(frozen=True)
class TrainSettings:
    """How to train a head.

    Args:
        budget: minutes, steps or both.
        learning_rate: of AdamW at its height.
        weight_decay: of AdamW.
        warmup_steps: until that height.
        clip: largest norm of the gradient.
        batch_size: texts per step.
        places: share of the places that count from which a step learns, drawn anew for each: neighbours say much the same,
            and a law at every place is most of what a step costs.
        seed: of the order of the texts and of whatever a head draws while it learns.
        checkpoint_seconds, checkpoint_steps: between checkpoints; whichever comes first, 0 steps for seconds alone.
        evaluate_steps: between looks at the held-out texts.
        patience: so many looks without anything better end the run; 0 never ends it early.
    """

    budget: Budget
    learning_rate: float = 1e-3
    weight_decay: float = 0.0
    warmup_steps: int = 50
    clip: float = 1.0
    batch_size: int = 8
    places: float = 1.0
    seed: int = 0
    checkpoint_seconds: float = 120.0
    checkpoint_steps: int = 0
    evaluate_steps: int = 100
    patience: int = 5

    def __post_init__(self) -> None:
        require_between("the learning rate", self.learning_rate, 1e-8, 1)
        require_between("the weight decay", self.weight_decay, 0, 10)
        require_between("the number of warm-up steps", self.warmup_steps, 0, 1_000_000)
        require_between("the largest norm of the gradient", self.clip, 1e-6, 1e6)
        require_between("the batch size", self.batch_size, 1, 65_536)
        require_between("the share of places", self.places, 0.001, 1)
        require_between("the seed", self.seed, 0, 2**31 - 1)
        require_between("the seconds between checkpoints", self.checkpoint_seconds, 1, 1e9)
        require_between("the steps between checkpoints", self.checkpoint_steps, 0, 1_000_000_000)
        require_between("the steps between looks at held-out text", self.evaluate_steps, 1, 1_000_000_000)
        require_between("the patience", self.patience, 0, 1_000_000)


@dataclass(frozen=True)
class Progress:
    """What a step did, for whoever shows it.

    Args:
        step: steps done.
        share: of the budget that is spent, 0 to 1.
        loss: weighted over the depths, nats.
        accepted: share of guesses that the target would accept, by depth.
        tokens_per_second: read in this step, padding not counted.
        seconds_left: to the end of the budget at this pace.
    """

    step: int
    share: float
    loss: float
    accepted: list[float]
    tokens_per_second: float
    seconds_left: float


@dataclass(frozen=True)
class Aim:
    """What a head is trained towards.

    Args:
        objective: the loss of one guess.
        weights: of the losses of so many depths.
        score: of the acceptance by depth on held-out text; higher is better.
    """

    objective: Objective
    weights: Callable[[int], Sequence[float]]
    score: Callable[[Sequence[float]], float]


@dataclass
class Standing:
    """How far a run is; all of it is in the checkpoint."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    evaluated_step: int = -1
    best_step: int = 0
    best_accepted: list[float] = field(default_factory=list)
    num_disappointments: int = 0
    log_bytes: int = 0


def nothing() -> None:
    """Never asks to stop."""


class HeadTrainer:
    """Holds a run's state; `run` continues it to the end of its budget.

    Args:
        learner: what learns, on the target's device.
        ends: of the target, in float32.
        texts: and what is held out of them.
        capture, held_out_capture: make lessons of them.
        aim: losses, their weights, and what is better.
        settings: how.
        folder: of `checkpoint.pt` and `log.jsonl`; a run found there goes on.
        progress: told after every step.
        pause: called between steps; raises KeyboardInterrupt to stop, which leaves a checkpoint.
    """

    def __init__(
        self,
        learner: Learner,
        ends: Ends,
        texts: Texts,
        capture: Capture,
        held_out_capture: Capture,
        aim: Aim,
        settings: TrainSettings,
        folder: Path,
        *,
        progress: Callable[[Progress], None],
        pause: Callable[[], None] = nothing,
    ) -> None:
        self.learner, self.ends, self.texts, self.aim = learner, ends, texts, aim
        self.capture, self.held_out_capture = capture, held_out_capture
        self.settings, self.folder = settings, folder
        self._tell, self._pause = progress, pause
        self.standing = Standing()
        self._parameters = [each for each in learner.parameters() if each.requires_grad]
        if not self._parameters:
            raise BadInputError(f"expected weights to train in a {type(learner).__name__}, got none")
        self.optimizer = torch.optim.AdamW(
            self._parameters, lr=settings.learning_rate, weight_decay=settings.weight_decay
        )
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: self._rate(step))
        self._best: dict[str, Tensor] = {}
        if (folder / CHECKPOINT).is_file():
            self._load()

    @property
    def share(self) -> float:
        """Of the budget that is spent."""
        return self.settings.budget.progress(self.standing.seconds, self.standing.step)

    def run(self) -> Standing:
        """Train until the budget is spent or nothing gets better; the learner ends with the best weights.

        Raises:
            KeyboardInterrupt: what `pause` raised, after a checkpoint.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        self._cut_log()
        with (self.folder / LOG).open("ab") as log:
            self._run(log)
            if self.standing.evaluated_step != self.standing.step:
                self._evaluate(log)
            self.save(log)
        self.learner.load_state_dict(self._best)
        self.learner.eval()
        return self.standing

    def _run(self, log: BinaryIO) -> None:
        settings, standing = self.settings, self.standing
        batches = iter(
            training_batches(self.texts.training, settings.batch_size, settings.seed, standing.step)
        )
        last_save = time.monotonic()
        while self.share < 1.0 and not self._out_of_patience():
            begun = time.monotonic()
            self._take_step(next(batches), log)
            if standing.step % settings.evaluate_steps == 0:
                self._evaluate(log)
            now = time.monotonic()
            standing.seconds += now - begun
            due = settings.checkpoint_steps and standing.step % settings.checkpoint_steps == 0
            if due or now - last_save > settings.checkpoint_seconds:
                self.save(log)
                last_save = time.monotonic()
            self._pause_after_saving(log)

    def _pause_after_saving(self, log: BinaryIO) -> None:
        try:
            self._pause()
        except KeyboardInterrupt:
            self.save(log)
            raise

    def _out_of_patience(self) -> bool:
        return 0 < self.settings.patience <= self.standing.num_disappointments

    def _take_step(self, batch: Batch, log: BinaryIO) -> None:
        begun = time.monotonic()
        self.learner.train()
        with torch.random.fork_rng():
            # What a head draws (dropout, anchors) depends on the step alone, not on what was drawn before it.
            torch.manual_seed(self.settings.seed * 1_000_003 + self.standing.step)
            lesson = _thinned(self.capture.lesson(batch), self.settings.places)
            marks = self.learner.learn(lesson, self.ends, self.aim.objective)
            loss = self._weighted(marks)
            loss.backward()  # type: ignore[no-untyped-call]
        value = float(loss.detach())
        if not math.isfinite(value):
            raise CheckpointError(
                f"expected a finite loss, got {value} in step {self.standing.step}; the last checkpoint stands: "
                "resume it with a lower learning rate"
            )
        nn.utils.clip_grad_norm_(self._parameters, self.settings.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.standing.step += 1
        self.schedule.step()
        num_tokens = sum(batch.lengths)
        self.standing.tokens += num_tokens
        accepted = [float(each) for each in marks.accepted]
        _write_line(log, {"step": self.standing.step, "loss": value, "accepted": accepted})
        seconds = max(time.monotonic() - begun, 1e-9)
        self._tell(
            Progress(
                self.standing.step,
                self.share,
                value,
                accepted,
                num_tokens / seconds,
                self._seconds_left(),
            )
        )

    def _weighted(self, marks: Marks) -> Tensor:
        weights = self.aim.weights(len(marks.losses))
        loss = torch.stack([weight * each for weight, each in zip(weights, marks.losses, strict=True)]).sum()
        return loss if marks.extra is None else loss + marks.extra

    def _seconds_left(self) -> float:
        share = self.share
        return self.standing.seconds * (1 - share) / share if share else math.inf

    def _rate(self, step: int) -> float:
        """The factor on the learning rate: a line up, then half a cosine down to zero."""
        warm = min(1.0, (step + 1) / max(1, self.settings.warmup_steps))
        return warm * 0.5 * (1 + math.cos(math.pi * self.share))

    def _evaluate(self, log: BinaryIO) -> None:
        standing = self.standing
        accepted = held_out_acceptance(
            self.learner,
            self.ends,
            self.texts.held_out,
            self.held_out_capture,
            self.aim,
            self.settings.batch_size,
        )
        score = self.aim.score(accepted)
        standing.evaluated_step = standing.step
        if not standing.best_accepted or score > self.aim.score(standing.best_accepted):
            standing.best_step, standing.best_accepted = standing.step, accepted
            standing.num_disappointments = 0
            self._best = copy.deepcopy(self.learner.state_dict())
        else:
            standing.num_disappointments += 1
        _write_line(log, {"step": standing.step, "held_out_accepted": accepted, "score": score})

    def save(self, log: BinaryIO) -> None:
        """Write the whole state; first the log, so that it is never behind the checkpoint."""
        log.flush()
        os.fsync(log.fileno())
        self.standing.log_bytes = log.tell()
        content = {
            "learner": self.learner.state_dict(),
            "best": self._best,
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "standing": vars(self.standing),
        }
        with write_atomically(self.folder / CHECKPOINT) as stream:
            torch.save(content, stream)

    def _load(self) -> None:
        path = self.folder / CHECKPOINT
        try:
            content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
            self.learner.load_state_dict(content["learner"])
            self.optimizer.load_state_dict(content["optimizer"])
            self.schedule.load_state_dict(content["schedule"])
            self.standing = Standing(**content["standing"])
            self._best = content["best"]
        except Exception as error:
            first = (str(error).splitlines() or [type(error).__name__])[0]
            raise CheckpointError(
                f"expected the checkpoint of such a run in {path}, got: {first}; choose another --out, or delete the file "
                "to start anew"
            ) from error

    def _cut_log(self) -> None:
        """Forget what a killed run wrote after its last checkpoint."""
        with (self.folder / LOG).open("ab") as log:
            log.truncate(self.standing.log_bytes)


def _write_line(log: BinaryIO, content: dict[str, object]) -> None:
    log.write(json.dumps(content).encode() + b"\n")


def _thinned(lesson: Lesson, share: float) -> Lesson:
    """The same lesson with fewer places that count."""
    if share == 1:
        return lesson
    lots = torch.rand(lesson.counts.shape).to(lesson.counts.device)
    return replace(lesson, counts=lesson.counts & (lots < share))


@torch.no_grad()
def held_out_acceptance(
    learner: Learner,
    ends: Ends,
    texts: Sequence[TaughtText],
    capture: Capture,
    aim: Aim,
    batch_size: int,
) -> list[float]:
    """Mean acceptance by depth over texts, every counted token alike."""
    learner.eval()
    total, num_counted = torch.zeros(0), 0
    for batch in batches_in_order(texts, batch_size):
        marks = learner.learn(capture.lesson(batch), ends, aim.objective)
        accepted = torch.stack([each.float().cpu() for each in marks.accepted])
        total = accepted * batch.num_counted + (total if num_counted else 0)
        num_counted += batch.num_counted
    return (total / max(1, num_counted)).tolist()


def acceptance_length(accepted: Sequence[float]) -> float:
    """tau of a chain whose node at depth d is accepted with chance `accepted[d]` once all before it were.

    >>> acceptance_length([0.5, 0.5])
    1.75
    """
    expected, reached = 1.0, 1.0
    for chance in accepted:
        reached *= chance
        expected += reached
    return expected
