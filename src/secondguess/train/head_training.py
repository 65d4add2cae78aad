"""`secondguess train KIND`: texts, hidden states, training, weights and card, in a resumable job.

The state of the run is in OUT/run, its results are in OUT. Runs are never mixed: the options that
determine the weights are recorded first, and a folder with a run of other options is refused with
the name of the first difference.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from secondguess.api import LLM, load
from secondguess.checkpoint.plan import pick_device
from secondguess.checkpoint.resolve import DTYPE_NAMES
from secondguess.checkpoint.weight_files import hash_weights
from secondguess.errors import BadInputError, UnsupportedModelError
from secondguess.heads.base import TargetModel
from secondguess.heads.files import NAMED, Provenance
from secondguess.heads.learning import LAST_HIDDEN, TrainableHead, TrainingBatch
from secondguess.names import check_range
from secondguess.train.capture import Capture, LiveCapture, StoredCapture, frozen_float32_embedding_and_head
from secondguess.train.head_card import write_card
from secondguess.train.head_speed import measure_speed
from secondguess.train.head_trainer import (
    HeadTrainer,
    RunState,
    TrainerSettings,
    acceptance_length,
)
from secondguess.train.losses import objective
from secondguess.train.recipes import Recipe, TargetInfo, make_recipe
from secondguess.train.run_folder import (
    RUN,
    Budget,
    check_or_record_options,
    identity_of_texts,
    require_drafter_folder,
)
from secondguess.train.training_data import TextSplit, TrainingText, require_texts
from secondguess.train.training_texts import (
    AnswerSettings,
    Document,
    default_documents,
    read_documents,
    require_room,
    texts_as_they_stand,
    write_answers,
)
from secondguess.workloads.loading import evenly_spaced
from secondguess.workloads.provenance import collect_provenance, public_name

DEFAULT_PROMPTS = 400
"""Number of prompts from the standard library if no data is given."""
PREDICTED_DRAFT_LENGTH = 7
"""Draft length of the predicted acceptance length if one distribution serves all depths."""


@dataclass(frozen=True)
class HeadJob:
    """Options of a training job; a BadInputError names those that are invalid or cannot be combined."""

    kind: str  # of drafter
    out: Path  # folder of the run and of its results
    model: str = "builtin"
    dtype: str = "auto"  # auto is float32 on a CPU
    device: str = "auto"
    data: tuple[Path, ...] = ()  # prompts, texts or chats; empty for the standard library
    num_prompts: int = 0  # evenly spread over the data; 0 for all, or DEFAULT_PROMPTS without data
    as_is: bool = False  # train on the texts themselves, not on the target's answers
    answers: AnswerSettings = field(default_factory=AnswerSettings)  # the job's seed replaces theirs
    loss: str = "lk"
    changes: tuple[str, ...] = ()  # NAME=VALUE for fields of the recipe
    budget: Budget = field(default_factory=partial(Budget, minutes=30))  # of the training alone
    seed: int = 0
    capture_gb: float = 0.0  # disk space for hidden states; 0 computes them for every batch
    patience: int = 5
    evaluate_steps: int = 100
    authors_layout: bool = False  # write the files as the authors of the method do

    def __post_init__(self) -> None:
        require_drafter_folder(self.out, self.model, self.drafter)
        if self.as_is and not self.data:
            raise BadInputError(
                "expected --data FILE to learn as it stands, got none; give a file or leave out --as-is"
            )
        if not self.as_is:
            self.answers.require_room_for_prompts()
        check_range("--num-prompts", self.num_prompts, 0, 100_000_000)
        check_range("--capture-gb", self.capture_gb, 0, 1e6)
        check_range("--seed", self.seed, 0, 2**31 - 1)
        check_range("--patience", self.patience, 0, 1_000_000)
        check_range("--evaluate-steps", self.evaluate_steps, 1, 1_000_000_000)
        object.__setattr__(self, "answers", replace(self.answers, seed=self.seed))
        # These raise errors for invalid options before anything is loaded.
        recipe = make_recipe(self.kind, self.changes)
        if self.authors_layout and not recipe.has_authors_layout:
            raise BadInputError(
                f"expected --authors-layout with a kind whose files have two layouts, eagle or dspark, got {self.kind}; leave it "
                "out"
            )
        objective(self.loss)

    @property
    def drafter(self) -> str:
        """Kind of drafter that reads the result."""
        return NAMED.get(self.kind, self.kind)

    @property
    def recipe(self) -> Recipe:
        return make_recipe(self.kind, self.changes)

    @property
    def load_dtype(self) -> str:
        """Dtype of the target. Gradients of heads without an LM head of their own pass through its, which must not be packed."""
        on_cpu = pick_device(self.device).type == "cpu"
        return "float32" if self.dtype == "auto" and on_cpu else self.dtype

    def identity(self) -> dict[str, Any]:
        """Return the options that determine texts and weights, with which a run is continued."""
        return {
            "kind": self.kind,
            "as_is": self.as_is,
            **identity_of_texts(self.model, self.data, self.num_prompts, self.answers, self.dtype),
            "loss": self.loss,
            "recipe": asdict(self.recipe),
            "seed": self.seed,
            "evaluate_steps": self.evaluate_steps,
        }


@dataclass(frozen=True)
class ProgressDisplay:
    """Display of the progress of a job on standard error."""

    bar: Callable[[int, int, str], None]  # called with steps done, steps in total and the current step
    pause: Callable[[], None]  # called where no work is lost; raises KeyboardInterrupt to stop

    def line(self, text: str) -> None:
        """Show a line about a decision or a result."""
        # Rich redirects standard error while it shows a bar, so the line appears above it.
        print(text, file=sys.stderr, flush=True)

    def writing(self, done: int, total: int) -> None:
        """Show how many of the texts are generated."""
        self.bar(done, total, "texts generated by the target")

    def training(self, share: float, words: str) -> None:
        """Show a training step."""
        self.bar(round(1000 * share), 1000, words)


def train_head(job: HeadJob, show: ProgressDisplay) -> Provenance:
    """Run or continue a job to its end, and write the drafter to `job.out`.

    Raises:
        BadInputError: data or options that cannot be used, or a folder with another run.
        CheckpointError: a target that cannot be loaded, whose hidden states are not available, or
            whose layers cannot be run separately by a drafter that needs it.
    """
    documents = _documents(job)
    run = job.out / RUN
    llm = load(job.model, "none", dtype=job.load_dtype, device=job.device)
    if job.recipe.runs_first_layers and not llm.target.runtime.supports_partial_forward:
        raise UnsupportedModelError(
            f"cannot train a drafter of kind {job.kind}: the layers of {job.model} cannot run one by one. Train another "
            "kind, such as medusa."
        )
    # All that can be refused is refused before the folder is bound to these options and texts are written.
    _untrained(job, llm, torch.ones(llm.target.runtime.vocab_size, dtype=torch.long))
    if job.as_is:
        learnt = texts_as_they_stand(llm.target, documents, job.answers.length)
    else:
        require_room(llm.target, job.answers.length)
        require_texts(len(documents))
    check_or_record_options(run, job.identity())
    if not job.as_is:
        learnt = _write_texts(job, documents, run / "texts", show)
    texts = TextSplit.split(learnt)
    show.line(f"{len(texts.training)} training texts, {len(texts.held_out)} held out")
    trainable, state = _learn(job, llm, texts, run, show)
    # Saved in the dtype of the target's weights: a drafter needs no more precision than that.
    trainable.to(_saved_dtype(llm.target.checkpoint.config.to_dict()))
    if job.authors_layout:
        trainable.save_in_authors_layout(job.out)
    else:
        trainable.save(job.out, public_name(job.model))
    if job.recipe.keeps_tokenizer:
        llm.target.tokenizer.save_pretrained(job.out)
    path, num_words = llm.target.path, llm.target.runtime.vocab_size
    del trainable, llm
    show.line("measuring the speed")
    speed = measure_speed(job.model, f"{job.drafter}:{job.out}", texts.held_out, job.dtype, job.device)
    figures = _figures(job, state) | speed
    provenance = _provenance(job, Path(path), texts, state, figures, num_words)
    usage = f"secondguess generate PROMPT --model {public_name(job.model)} --drafter {job.drafter}:FOLDER"
    write_card(job.out, provenance, usage)
    return provenance


def _documents(job: HeadJob) -> Sequence[Document]:
    if not job.data:
        return default_documents(job.num_prompts or DEFAULT_PROMPTS)
    documents = read_documents(job.data, job.as_is)
    return evenly_spaced(documents, job.num_prompts or len(documents))


def _write_texts(
    job: HeadJob, documents: Sequence[Document], folder: Path, show: ProgressDisplay
) -> list[TrainingText]:
    # Our kernels compute in a dtype that cannot be trained through, and are faster.
    writer = load(job.model, "suffix", dtype=job.dtype, device=job.device)
    return write_answers(writer, documents, job.answers, folder, show.writing, show.pause)


def _untrained(job: HeadJob, llm: LLM, token_counts: torch.Tensor) -> tuple[TargetModel, TrainableHead]:
    """Return the target in the form in which heads learn from it, and a head for it."""
    runtime = llm.target.runtime
    target = TargetModel.from_runtime(runtime, frozen_float32_embedding_and_head(runtime))
    config = llm.target.checkpoint.config.to_dict()
    facts = TargetInfo(config=config, model=target, token_counts=token_counts, seed=job.seed)
    trainable = job.recipe.fresh(facts).float().to(runtime.device)
    require_gradients(trainable, target)
    return target, trainable


def require_gradients(trainable: TrainableHead, target: TargetModel) -> None:
    """Check that losses have gradients, which packed weights of the target's LM head do not pass on."""
    states = torch.ones(1, 4, target.width, device=target.device)
    layers = {*trainable.hidden_layers, LAST_HIDDEN}
    tokens = torch.zeros(1, 4, dtype=torch.long, device=target.device)
    batch = TrainingBatch(tokens, tokens == 0, dict.fromkeys(layers, states))
    if not any(loss.requires_grad for loss in trainable.learn(batch, target, objective("kl")).losses):
        raise UnsupportedModelError(
            "cannot train through the target's LM head: its weights are packed. Use --dtype float32."
        )


def _learn(
    job: HeadJob, llm: LLM, texts: TextSplit, run: Path, show: ProgressDisplay
) -> tuple[TrainableHead, RunState]:
    target, trainable = _untrained(job, llm, texts.token_counts(llm.target.runtime.vocab_size))
    layers = trainable.hidden_layers
    captures = (
        _capture(job, llm, texts.training, texts.held_out, layers, run / "states"),
        _capture(job, llm, texts.held_out, texts.training, layers, run / "held-out-states"),
    )
    settings = TrainerSettings(
        job.recipe, objective(job.loss), job.budget, job.seed, job.evaluate_steps, job.patience
    )
    trainer = HeadTrainer(trainable, target, texts, captures, settings, run, show.training, show.pause)
    state = trainer.run()
    if trainer.has_stopped_early:
        show.line(
            f"ended at step {state.step}, as {job.patience} evaluations showed no improvement; the same command with "
            "--patience 0 goes on"
        )
    return trainable, state


def _capture(
    job: HeadJob,
    llm: LLM,
    texts: Sequence[TrainingText],
    others: Sequence[TrainingText],
    layers: Sequence[int],
    folder: Path,
) -> Capture:
    if not job.capture_gb:
        return LiveCapture(llm.target.runtime, layers)
    dtype = torch.bfloat16 if llm.target.dtype == "bfloat16" else torch.float16
    return StoredCapture(folder, texts, layers, llm.target.runtime, dtype, job.capture_gb, others)


def _saved_dtype(config: Mapping[str, Any]) -> torch.dtype:
    """Return the dtype that a configuration names; float32 if it names none or an unknown one."""
    name = str(config.get("dtype") or "float32").removeprefix("torch.")
    found: torch.dtype = getattr(torch, name if name in DTYPE_NAMES else "float32")
    return found


def _figures(job: HeadJob, state: RunState) -> dict[str, Any]:
    accepted = state.best_accepted
    figures: dict[str, Any] = {"held_out_acceptance": [round(value, 4) for value in accepted]}
    if job.recipe.has_one_distribution:
        accepted = [*accepted, *[accepted[-1]] * (PREDICTED_DRAFT_LENGTH - len(accepted))]
    return figures | {
        "predicted_nodes": len(accepted),
        "predicted_acceptance_length": round(acceptance_length(accepted), 3),
    }


def _provenance(
    job: HeadJob,
    target: Path,
    texts: TextSplit,
    state: RunState,
    figures: dict[str, Any],
    vocab_size: int,
) -> Provenance:
    where = collect_provenance(
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
        "loss": job.loss,
        "recipe": asdict(job.recipe),
        "answers": asdict(job.answers),
        "steps": state.step,
        "best_step": state.best_step,
        "tokens": state.tokens,
        "minutes": round(state.seconds / 60, 2),
        "seed": job.seed,
        **{
            name: value
            for name, value in where.as_dict().items()
            if name in ("date", "command", "commit", "dirty", "versions", "processor", "num_threads", "dtype")
        },
    }
    return Provenance(job.kind, public_name(job.model), hash_weights(target), training, figures)
