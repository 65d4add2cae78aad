"""`secondguess train KIND`, whole: texts, states, training, weights, card. Every stage that is done is found again.

The run lives in OUT/run, what it makes in OUT. Two runs never mix: what decides the weights is written down first, and a
folder that holds another run is refused by the name of what differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from secondguess.api import LLM, load
from secondguess.bench.provenance import gather
from secondguess.bench.systems import public_name
from secondguess.drafters import DRAFTERS
from secondguess.errors import BadInputError
from secondguess.heads.files import NAMED, Provenance
from secondguess.heads.learning import Learner
from secondguess.jobs.head_speed import measure_speed
from secondguess.jobs.lesson_texts import (
    AnswerSettings,
    Document,
    default_documents,
    read_documents,
    some_of,
    texts_as_they_stand,
    write_answers,
)
from secondguess.jobs.run_folder import claim, identity_of_texts
from secondguess.names import require_between
from secondguess.runtime.fingerprint import hash_weights
from secondguess.runtime.loading import pick_device, read_config
from secondguess.train.capture import Capture, LiveCapture, StoredCapture, ends_for_learning
from secondguess.train.export import saved_dtype
from secondguess.train.files import require_folder
from secondguess.train.head_card import write_card
from secondguess.train.head_trainer import (
    Aim,
    HeadTrainer,
    Progress,
    Standing,
    TrainSettings,
    acceptance_length,
)
from secondguess.train.lessons import TaughtText, Texts
from secondguess.train.losses import objective
from secondguess.train.recipes import Recipe, TargetFacts, make_recipe
from secondguess.train.schedule import Budget

DEFAULT_PROMPTS = 400
"""Out of the standard library, where no data is given."""
LONGEST_PREDICTED = 7
"""Nodes of the chains for which an acceptance length is predicted where one law serves all depths."""


@dataclass(frozen=True)
class HeadJob:
    """What to train, from what, and where to put it.

    Args:
        kind: of drafter.
        out: folder of the run and of what it makes.
        model, dtype, device: the target, as `load` takes them; dtype `auto` is float32 on a CPU.
        data: files of prompts, texts or chats; empty for prompts out of the standard library.
        num_prompts: at most so many documents of the data, evenly spread; 0 for all (400 without data).
        as_is: learn the texts as they stand instead of having the target answer.
        answers: how texts are made.
        loss: one of `losses.OBJECTIVES`; empty for the recipe's.
        changes: `NAME=VALUE` for fields of the recipe.
        whole: early-exit alone: train the target itself.
        budget: of the training, without texts and states.
        seed: of weights, texts and order.
        capture_gb: disk for the target's states; 0 reads them anew for every batch.
        patience, evaluate_steps, checkpoint_seconds, checkpoint_steps: as in `TrainSettings`.
    """

    kind: str
    out: Path
    model: str = "builtin"
    dtype: str = "auto"
    device: str = "auto"
    data: tuple[Path, ...] = ()
    num_prompts: int = 0
    as_is: bool = False
    answers: AnswerSettings = field(default_factory=AnswerSettings)
    loss: str = ""
    changes: tuple[str, ...] = ()
    whole: bool = False
    budget: Budget = field(default_factory=partial(Budget, minutes=30))
    seed: int = 0
    capture_gb: float = 0.0
    patience: int = 5
    evaluate_steps: int = 100
    checkpoint_seconds: float = 120.0
    checkpoint_steps: int = 0

    def __post_init__(self) -> None:
        require_folder(self.out, "--out")
        if self.as_is and not self.data:
            raise BadInputError(
                "expected --data FILE to learn as it stands, got none; give a file or leave out --as-is"
            )
        if not self.as_is:
            self.answers.require_room_for_prompts()
        if self.whole and self.kind != "early-exit":
            raise BadInputError(
                f"expected --whole for early-exit alone, got it for {self.kind}; leave it out"
            )
        require_between("--num-prompts", self.num_prompts, 0, 100_000_000)
        require_between("--capture-gb", self.capture_gb, 0, 1e6)
        require_between("the seed", self.seed, 0, 2**31 - 1)
        # Whatever can be wrong with these is said before anything is loaded.
        self.settings()
        objective(self.loss_name)

    @property
    def recipe(self) -> Recipe:
        return make_recipe(self.kind, self.changes, self.whole)

    @property
    def loss_name(self) -> str:
        return self.loss or self.recipe.loss

    @property
    def load_dtype(self) -> str:
        """Gradients pass through the target's head, which packed weights do not allow."""
        on_cpu = pick_device(self.device).type == "cpu"
        return "float32" if self.dtype == "auto" and on_cpu else self.dtype

    def settings(self) -> TrainSettings:
        recipe = self.recipe
        return TrainSettings(
            self.budget,
            learning_rate=recipe.learning_rate,
            weight_decay=recipe.weight_decay,
            warmup_steps=recipe.warmup_steps,
            clip=recipe.clip,
            batch_size=recipe.batch_size,
            places=recipe.places,
            seed=self.seed,
            checkpoint_seconds=self.checkpoint_seconds,
            checkpoint_steps=self.checkpoint_steps,
            evaluate_steps=self.evaluate_steps,
            patience=self.patience,
        )

    def identity(self) -> dict[str, Any]:
        """What decides texts and weights; a run goes on only with the same."""
        return {
            "kind": self.kind,
            "whole": self.whole,
            "as_is": self.as_is,
            **identity_of_texts(
                self.model,
                self.data,
                self.num_prompts,
                replace(self.answers, seed=self.seed),
                self.load_dtype,
            ),
            "loss": self.loss_name,
            "recipe": asdict(self.recipe),
            "seed": self.seed,
            "evaluate_steps": self.evaluate_steps,
        }


class Show(Protocol):
    """Whoever shows how it goes."""

    def line(self, text: str) -> None:
        """Something was decided or found."""

    def writing(self, done: int, total: int) -> None:
        """So many of the texts are written."""

    def training(self, progress: Progress) -> None:
        """A step was made."""

    def pause(self) -> None:
        """Nothing is lost here: KeyboardInterrupt may be raised."""


def train_head(job: HeadJob, show: Show) -> Provenance:
    """Run or continue a job to its end; the drafter is then in `job.out`.

    Raises:
        BadInputError: data or options that cannot be used, or a folder with another run.
        CheckpointError: a target that cannot be loaded or cannot lend its states, or whose layers such a drafter could not run.
    """
    documents = _documents(job)
    run = job.out / "run"
    llm = load(job.model, "suffix", dtype=job.load_dtype, device=job.device)
    if job.recipe.runs_first_layers:
        llm.target.runtime.require_layers_apart()
    claim(run, job.identity())
    texts = Texts.split(_texts(job, llm, documents, run / "texts", show))
    show.line(f"{len(texts.training)} texts to learn from, {len(texts.held_out)} held out")
    learner, standing = _learn(job, llm, texts, run, show)
    # As the target's own weights are stored: no guess is worth more bytes than what judges it.
    learner.to(saved_dtype(read_config(llm.target.path).to_dict()))
    job.recipe.save(learner, job.out, public_name(job.model))
    if job.recipe.keeps_tokenizer:
        llm.target.tokenizer.save_pretrained(job.out)
    path, num_words = llm.target.path, llm.target.runtime.vocab_size
    del learner, llm
    figures = _figures(job, standing) | _speed(job, texts, show)
    provenance = _provenance(job, Path(path), texts, standing, figures, num_words)
    write_card(job.out, provenance, _usage(job))
    return provenance


def _documents(job: HeadJob) -> list[Document]:
    if not job.data:
        return default_documents(job.num_prompts or DEFAULT_PROMPTS)
    documents = read_documents(job.data, job.as_is)
    return some_of(documents, job.num_prompts or len(documents))


def _texts(
    job: HeadJob, llm: LLM, documents: Sequence[Document], folder: Path, show: Show
) -> list[TaughtText]:
    if job.as_is:
        return texts_as_they_stand(llm.target, documents, job.answers.length)
    answers = replace(job.answers, seed=job.seed)
    return write_answers(llm, documents, answers, folder, show.writing, show.pause)


def _learn(job: HeadJob, llm: LLM, texts: Texts, run: Path, show: Show) -> tuple[Learner, Standing]:
    runtime, recipe = llm.target.runtime, job.recipe
    ends = ends_for_learning(runtime)
    facts = TargetFacts(
        path=Path(llm.target.path),
        config=read_config(llm.target.path).to_dict(),
        ends=ends,
        num_layers=runtime.num_layers,
        vocab_size=runtime.vocab_size,
        token_counts=texts.token_counts(runtime.vocab_size).to(runtime.device),
        device=runtime.device,
        seed=job.seed,
    )
    learner = recipe.fresh(facts).float().to(runtime.device)
    captures = _captures(job, llm, texts, learner.hidden_layers, run / "states", show)
    aim = Aim(objective(job.loss_name), recipe.weights, recipe.score)
    trainer = HeadTrainer(
        learner, ends, texts, *captures, aim, job.settings(), run, progress=show.training, pause=show.pause
    )
    return learner, trainer.run()


def _captures(
    job: HeadJob, llm: LLM, texts: Texts, layers: Sequence[int], folder: Path, show: Show
) -> tuple[Capture, Capture]:
    """Of the training texts, which may lie on disk, and of those held out, which are few."""
    runtime = llm.target.runtime
    live = LiveCapture(runtime, layers)
    if not job.capture_gb:
        return live, live
    dtype = torch.bfloat16 if llm.target.dtype == "bfloat16" else torch.float16
    stored = StoredCapture(folder, texts.training, layers, runtime, dtype)
    stored.fill(job.capture_gb, show.line, show.pause)
    return stored, live


def _figures(job: HeadJob, standing: Standing) -> dict[str, Any]:
    accepted = standing.best_accepted
    figures: dict[str, Any] = {"held_out_acceptance": [round(each, 4) for each in accepted]}
    if job.whole:
        return figures
    if job.recipe.guesses_alone:
        accepted = [*accepted, *[accepted[-1]] * (LONGEST_PREDICTED - len(accepted))]
    return figures | {
        "predicted_nodes": len(accepted),
        "predicted_acceptance_length": round(acceptance_length(accepted), 3),
    }


def _drafter_name(job: HeadJob) -> str | None:
    """Under which name `load` makes it; None for a kind that cannot draft (yet), and for a whole model."""
    kind = NAMED.get(job.kind, job.kind)
    return f"{kind}:{job.out}" if kind in DRAFTERS and not job.whole else None


def _speed(job: HeadJob, texts: Texts, show: Show) -> dict[str, Any]:
    name = _drafter_name(job)
    if name is None:
        return {}
    show.line("measuring the speed")
    return measure_speed(job.model, name, texts.held_out, job.dtype, job.device)


def _usage(job: HeadJob) -> str:
    name = _drafter_name(job)
    if name is None:
        return f"secondguess generate PROMPT --model {public_name(str(job.out))}"
    return f"secondguess generate PROMPT --model {public_name(job.model)} --drafter {name.partition(':')[0]}:FOLDER"


def _provenance(
    job: HeadJob,
    target: Path,
    texts: Texts,
    standing: Standing,
    figures: dict[str, Any],
    vocab_size: int,
) -> Provenance:
    where = gather(
        num_threads=torch.get_num_threads(),
        device=job.device,
        dtype=job.load_dtype,
        seed=job.seed,
        models={},
        runtimes={},
    )
    training = {
        "data": [path.name for path in job.data] or "prompts out of the standard library",
        "as_is": job.as_is,
        "texts": len(texts.training),
        "held_out_texts": len(texts.held_out),
        "vocabulary": vocab_size,
        "loss": job.loss_name,
        "recipe": asdict(job.recipe),
        "answers": asdict(job.answers),
        "steps": standing.step,
        "best_step": standing.best_step,
        "tokens": standing.tokens,
        "minutes": round(standing.seconds / 60, 2),
        "seed": job.seed,
        **{
            name: value
            for name, value in where.as_dict().items()
            if name in ("date", "command", "commit", "dirty", "versions", "processor", "num_threads", "dtype")
        },
    }
    return Provenance(job.kind, public_name(job.model), hash_weights(target), training, figures)
