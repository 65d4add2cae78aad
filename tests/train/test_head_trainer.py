"""The training loop of heads: it resumes after being killed, stops without improvement, and keeps the best weights."""

from __future__ import annotations

import errno
import json
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from forked import start_command
from secondguess.checkpoint.loader import load_model
from secondguess.checkpoint.plan import Checkpoint
from secondguess.errors import BadInputError, CheckpointError
from secondguess.heads.learning import (
    CountedTokens,
    DepthLosses,
    Objective,
    TrainableHead,
    TrainingBatch,
)
from secondguess.runtime.base import EmbeddingAndHead
from secondguess.train import head_trainer
from secondguess.train.capture import LiveCapture, frozen_float32_embedding_and_head
from secondguess.train.head_trainer import (
    HeadTrainer,
    TrainerSettings,
    acceptance_length,
)
from secondguess.train.losses import objective
from secondguess.train.recipes import Recipe, TargetInfo
from secondguess.train.run_folder import Budget
from secondguess.train.training_data import TextSplit, TrainingText

KL = objective("kl")
TEXTS = TextSplit.split(
    [
        TrainingText([(5 * number + 11 * place) % 300 for place in range(9)], [True] * 9)
        for number in range(20)
    ]
)


class TwoAhead(TrainableHead):
    """Head that predicts the next two tokens, each with one matrix, with dropout."""

    hidden_layers = (1,)

    def __init__(self, embedding_and_head: EmbeddingAndHead) -> None:
        super().__init__()
        self.maps = nn.ModuleList(
            nn.Linear(embedding_and_head.width, embedding_and_head.width) for _ in range(2)
        )
        self.dropout = nn.Dropout(0.2)

    def learn(
        self, training_batch: TrainingBatch, embedding_and_head: EmbeddingAndHead, objective: Objective
    ) -> DepthLosses:
        counted = CountedTokens(training_batch, embedding_and_head)
        losses, accepted = [], []
        for depth, mapped in enumerate(self.maps[: training_batch.num_depths]):
            end = training_batch.tokens.shape[1] - 1 - depth
            states = embedding_and_head.normalise(mapped(self.dropout(training_batch.hidden[1][:, :end])))
            loss, share = counted.loss_and_acceptance(
                depth + 1, states, embedding_and_head.unembed, objective
            )
            losses.append(loss)
            accepted.append(share)
        return DepthLosses(losses, accepted)

    def save(self, folder: Path, target: str = "") -> None:
        raise NotImplementedError


@dataclass(frozen=True)
class TwoAheadRecipe(Recipe):
    """Recipe of the head, with the weights of its depths."""

    depths: tuple[float, float] = (1.0, 1.0)

    def fresh(self, target: TargetInfo) -> TrainableHead:
        raise NotImplementedError

    def weights(self, num_depths: int) -> list[float]:
        return list(self.depths)


RECIPE = TwoAheadRecipe(learning_rate=0.01, warmup_steps=2, batch_size=2, places=1.0)


@pytest.fixture(scope="module")
def target(tiny_checkpoint: Path):
    return load_model(Checkpoint.resolve(tiny_checkpoint, dtype="float32")).runtime


@pytest.fixture
def make(target) -> Callable[..., HeadTrainer]:
    def trainer(
        folder: Path,
        steps: int = 12,
        progress: Callable[[float, str], None] = lambda share, words: None,
        pause: Callable[[], None] = lambda: None,
        recipe: Recipe = RECIPE,
        loss: Objective = KL,
        evaluate_steps: int = 4,
        patience: int = 5,
    ) -> HeadTrainer:
        embedding_and_head = frozen_float32_embedding_and_head(target)
        with torch.random.fork_rng():
            torch.manual_seed(1)
            trainable = TwoAhead(embedding_and_head)
        capture = LiveCapture(target, trainable.hidden_layers)
        return HeadTrainer(
            trainable,
            embedding_and_head,
            TEXTS,
            (capture, capture),
            TrainerSettings(recipe, loss, Budget(steps=steps), 0, evaluate_steps, patience),
            folder,
            progress,
            pause,
        )

    return trainer


def lines(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def interrupt_after(steps: int) -> Callable[[], None]:
    calls = iter(range(1, steps + 1))

    def pause() -> None:
        if next(calls) == steps:
            raise KeyboardInterrupt

    return pause


def test_training_lowers_the_loss_and_reports_progress(make, tmp_path: Path) -> None:
    told: list[tuple[float, str]] = []
    state = make(tmp_path, 60, progress=lambda *step: told.append(step)).run()
    steps = [line for line in lines(tmp_path) if "loss" in line]
    assert [line["step"] for line in steps] == list(range(1, 61))
    assert steps[-1]["loss"] < 0.7 * steps[0]["loss"]
    assert all(len(line["accepted"]) == 2 for line in steps)
    assert [share for share, _ in told] == pytest.approx([step / 60 for step in range(1, 61)])
    assert told[-1][1].startswith(f"step 60: loss {steps[-1]['loss']:.3f}, acceptance by position 0.")
    assert told[-1][1].endswith(" 0 s left")
    held_out = [line for line in lines(tmp_path) if "held_out_accepted" in line]
    assert [line["step"] for line in held_out] == list(range(4, 61, 4))
    assert state.best_accepted == max((line["held_out_accepted"] for line in held_out), key=acceptance_length)


@pytest.mark.parametrize("is_fast", [True, False])
def test_products_are_in_bfloat16_where_that_is_fast(
    make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_fast: bool
) -> None:
    monkeypatch.setattr("secondguess.train.head_trainer.has_bfloat16", lambda device: is_fast)
    trainer, dtypes = make(tmp_path, 30), set()
    trainer.trainable.maps[0].register_forward_hook(
        lambda module, inputs, output: dtypes.add(output.dtype) if module.training else None
    )
    trainer.run()
    assert dtypes == {torch.bfloat16 if is_fast else torch.float32}
    assert {weight.dtype for weight in trainer.trainable.parameters()} == {torch.float32}
    losses = [line["loss"] for line in lines(tmp_path) if "loss" in line]
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize("steps", [1, 4, 7])
def test_an_interrupted_run_equals_an_uninterrupted_one(make, tmp_path: Path, steps: int) -> None:
    whole = make(tmp_path / "whole")
    whole.run()
    with pytest.raises(KeyboardInterrupt):
        make(tmp_path / "cut", pause=interrupt_after(steps)).run()
    # A killed run may have written lines that no checkpoint knows.
    with (tmp_path / "cut" / "log.jsonl").open("ab") as log:
        log.write(b'{"step": 99, "loss": 0.0}\n{"half a')
    again = make(tmp_path / "cut")
    assert again.state.step == steps
    again.run()
    logs = [(tmp_path / name / "log.jsonl").read_bytes() for name in ("whole", "cut")]
    assert logs[0] == logs[1]
    for name, weight in whole.trainable.state_dict().items():
        assert torch.equal(weight, again.trainable.state_dict()[name])


class FullDisk(BytesIO):
    """A file on a disk with space for 1,000 bytes."""

    def write(self, content: Any) -> int:
        if self.tell() + memoryview(content).nbytes > 1000:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(content)


def test_a_full_disk_is_reported_as_such(make, tmp_path: Path, monkeypatch) -> None:
    """`torch.save` raises a `RuntimeError` instead."""
    monkeypatch.setattr(head_trainer, "write_atomically", lambda path: nullcontext(FullDisk()))
    with pytest.raises(OSError, match="No space left on device"):
        make(tmp_path).run()


def test_evaluation_keeps_no_gradients(make, tmp_path: Path, monkeypatch) -> None:
    """They would take the memory of many training steps."""
    learn, kept = TwoAhead.learn, []

    def watched(self: TwoAhead, *arguments: object) -> DepthLosses:
        kept.append((self.training, torch.is_grad_enabled()))
        return learn(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(TwoAhead, "learn", watched)
    make(tmp_path).run()
    assert set(kept) == {(True, True), (False, False)}


def test_a_finished_run_is_not_continued(make, tmp_path: Path) -> None:
    make(tmp_path).run()
    before = (tmp_path / "log.jsonl").read_bytes()
    make(tmp_path, progress=pytest.fail).run()
    assert (tmp_path / "log.jsonl").read_bytes() == before
    (tmp_path / "log.jsonl").unlink()
    make(tmp_path, progress=pytest.fail).run()
    assert b"\0" not in (tmp_path / "log.jsonl").read_bytes()


def test_training_without_improvement_ends_early_with_the_best_weights(
    make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores = iter([1.0, 3.0, 2.0, 2.5, 9.0])
    kept: list[dict[str, torch.Tensor]] = []
    known: dict[tuple[float, ...], float] = {}

    def score(accepted: Sequence[float]) -> float:
        if tuple(accepted) not in known:
            known[tuple(accepted)] = next(scores)
            kept.append({name: each.clone() for name, each in trainer.trainable.state_dict().items()})
        return known[tuple(accepted)]

    monkeypatch.setattr(head_trainer, "acceptance_length", score)
    trainer = make(tmp_path, 1000, patience=2)
    state = trainer.run()
    assert (state.step, state.best_step) == (16, 8)
    assert trainer.has_stopped_early
    state = trainer.trainable.state_dict()
    assert all(torch.equal(weight, state[name]) for name, weight in kept[1].items())
    assert not all(torch.equal(weight, state[name]) for name, weight in kept[3].items())


def test_the_weight_of_a_depth_is_the_share_of_steps_that_train_it(make, tmp_path: Path) -> None:
    make(
        tmp_path / "half",
        200,
        recipe=replace(RECIPE, depths=(1.0, 0.5)),
        evaluate_steps=1000,
    ).run()
    depths = [len(line["accepted"]) for line in lines(tmp_path / "half") if "loss" in line]
    assert set(depths) == {1, 2}
    assert depths.count(2) == pytest.approx(100, abs=30)
    first = make(tmp_path / "first", recipe=replace(RECIPE, depths=(1.0, 0.0)))
    before = {name: each.clone() for name, each in first.trainable.state_dict().items()}
    first.run()
    changed = {
        name for name, each in first.trainable.state_dict().items() if not torch.equal(each, before[name])
    }
    assert changed == {"maps.0.weight", "maps.0.bias"}


def test_the_learning_rate_warms_up_and_decays(make, tmp_path: Path) -> None:
    rates: list[float] = []
    trainer = make(tmp_path, progress=lambda *_: rates.append(trainer.optimizers[0].param_groups[0]["lr"]))
    trainer.run()
    assert rates[0] == pytest.approx(0.005)
    assert rates[1] > 0.009
    assert 0 < rates[-1] < 0.0005
    assert all(first > second for first, second in pairwise(rates[1:]))


def test_a_nan_loss_keeps_the_last_checkpoint(make, tmp_path: Path) -> None:
    trainer = make(tmp_path, loss=lambda probs, logits: (logits.sum(-1) * torch.nan, probs.sum(-1)))
    with pytest.raises(CheckpointError, match="the loss of step"):
        trainer.run()
    assert not (tmp_path / "checkpoint.pt").exists()


def test_a_foreign_checkpoint_is_refused(make, tmp_path: Path) -> None:
    torch.save({"learner": {}}, tmp_path / "checkpoint.pt")
    with pytest.raises(CheckpointError, match="another --out"):
        make(tmp_path)


def test_settings_are_checked() -> None:
    with pytest.raises(BadInputError, match="learning rate"):
        replace(RECIPE, learning_rate=-1.0)
    with pytest.raises(BadInputError, match="positive"):
        Budget(steps=0)


def test_a_killed_run_resumes_to_the_same_log_and_weights(
    tiny_checkpoint: Path, tmp_path: Path, secondguess_command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("secondguess.train.head_training.measure_speed", lambda *_: {})
    monkeypatch.setattr("secondguess.train.head_trainer.CHECKPOINT_SECONDS", 0.02)
    texts = tmp_path / "texts.txt"
    texts.write_text("def quicksort(items):\n    return items\n" * 60)

    def arguments(out: Path) -> list[str]:
        options = "--as-is --length 32 --steps 60 --evaluate-steps 15 --patience 0"
        changes = "--set num_layers=1 --set width=64 --set batch_size=2"
        paths = ["--out", str(out), "--model", str(tiny_checkpoint), "--data", str(texts)]
        return ["train", "draft", *paths, *options.split(), *changes.split()]

    killed = start_command(arguments(tmp_path / "killed"))
    checkpoint = tmp_path / "killed" / "run" / "checkpoint.pt"
    while killed.is_alive() and not checkpoint.is_file():
        time.sleep(0.01)
    time.sleep(0.1)
    killed.kill()
    killed.join()
    assert killed.exitcode == -signal.SIGKILL
    step = torch.load(checkpoint, weights_only=True)["standing"]["step"]
    assert 0 < step < 60
    for name in ("killed", "whole"):
        done = secondguess_command(*arguments(tmp_path / name))
        assert done.code == 0, done.err
    logs = [(tmp_path / name / "run" / "log.jsonl").read_bytes() for name in ("killed", "whole")]
    assert logs[0] == logs[1]
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("killed", "whole")]
    assert weights[0] == weights[1]
