"""`secondguess train KIND`: one command per kind of drafter, with the same options for all."""

import shlex
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from typer import Context, Option, Typer

from secondguess.cli import options
from secondguess.cli.interruption import DeferredInterrupt
from secondguess.cli.progress import SECONDS_PER_LINE
from secondguess.errors import BadInputError

if TYPE_CHECKING:
    from secondguess.train.head_trainer import Progress as Step

DATA, TRAINING = "Training data", "How it learns"
SHOWN_DEPTHS = 5
ANSWER_OPTIONS = ("max_tokens", "temperature", "answer_batch")

SUMMARIES = {
    "draft": "Train a small draft model for any target.",
    "early-exit": "Train a head that exits the target after an early layer.",
    "medusa": "Train Medusa heads: one prediction per depth from the target's last hidden state.",
    "mtp": "Train a module that predicts several tokens, one after the other.",
    "eagle": "Train an EAGLE-3 head, which reads the target's hidden states.",
    "dspark": "Train a DSpark head, which drafts a block at once.",
}

Out = Annotated[Path, Option(help="Folder of the drafter; a run begun there continues.", show_default=False)]
Data = Annotated[
    list[Path] | None,
    Option(
        help="JSON lines with a prompt, a text or messages each, or plain text; repeatable.",
        show_default="prompts out of the standard library",
        rich_help_panel=DATA,
    ),
]
AsIs = Annotated[
    bool,
    Option(
        "--as-is", help="Train on the texts themselves instead of the target's answers.", rich_help_panel=DATA
    ),
]
NumPrompts = Annotated[
    int,
    Option(
        help="Maximum number of texts, evenly spread over the data.",
        show_default="all; 400 without data",
        rich_help_panel=DATA,
    ),
]
MaxTokens = Annotated[int, Option(help="Of an answer.", rich_help_panel=DATA)]
Length = Annotated[int, Option(help="Length of a text in tokens, prompt and answer.", rich_help_panel=DATA)]
Temperature = Annotated[
    list[float] | None,
    Option(
        help="Temperature of the answers, in turn; repeatable.",
        show_default="0, 0.7 and 1",
        rich_help_panel=DATA,
    ),
]
AnswerBatch = Annotated[int, Option(help="Number of answers generated at a time.", rich_help_panel=DATA)]
CaptureGb = Annotated[
    float,
    Option(
        help="Disk space for the target's hidden states; 0 recomputes them for every batch.",
        rich_help_panel=DATA,
    ),
]
Loss = Annotated[
    str,
    Option(
        help="lk (hybrid), kl, tv or ce.",
        show_default="lk; kl for --whole",
        rich_help_panel=TRAINING,
    ),
]
Minutes = Annotated[
    float | None, Option(help="Of training.", show_default="30 without --steps", rich_help_panel=TRAINING)
]
Steps = Annotated[
    int | None, Option(help="Of training.", show_default="as many as fit", rich_help_panel=TRAINING)
]
Set = Annotated[
    list[str] | None,
    Option(
        "--set",
        metavar="NAME=VALUE",
        help="Change the recipe, such as learning_rate=3e-4 or batch_size=4; repeatable.",
        rich_help_panel=TRAINING,
    ),
]
EvaluateSteps = Annotated[
    int, Option(help="Steps between evaluations on held-out texts.", rich_help_panel=TRAINING)
]
Patience = Annotated[
    int,
    Option(
        help="Evaluations without improvement after which the run ends; 0: never.", rich_help_panel=TRAINING
    ),
]
CheckpointSeconds = Annotated[float, Option(help="Between checkpoints.", rich_help_panel=TRAINING)]
CheckpointSteps = Annotated[
    int, Option(help="Steps between checkpoints; 0: by time only.", rich_help_panel=TRAINING)
]
Seed = Annotated[int, Option(help="Seed of weights, answers and order.", rich_help_panel=TRAINING)]


def add_commands(app: Typer) -> None:
    """Add one command per kind of drafter to `secondguess train`."""
    for kind, summary in SUMMARIES.items():
        app.command(kind, help=f"{summary}\n\n{_MORE}")(_command(kind))
    app.command("layer-skip")(_layer_skip)


_MORE = (
    "The target answers the prompts, the drafter learns from its states with the target frozen, and what was best on "
    "held-out texts is written to OUT with a card. Ctrl-C is safe: the same command continues."
)


def _layer_skip(
    out: Out,
    model: options.Model = "builtin",
    data: Data = None,
    num_prompts: Annotated[
        int, Option(help="Number of prompts to answer and to search on.", rich_help_panel=DATA)
    ] = 16,
    max_tokens: MaxTokens = 128,
    length: Length = 256,
    temperature: Temperature = None,
    seed: Annotated[int, Option(help="Of the answers.", rich_help_panel=DATA)] = 0,
    dtype: options.Dtype = "auto",
) -> int:
    """Search for layers of the target to skip while drafting.

    Nothing is trained: layers are removed one at a time, and the rest is evaluated on
    the target's own answers to the prompts. Use the result as layer-skip:OUT.
    """
    from secondguess.train.skip_training import SkipJob, search_layers
    from secondguess.train.training_texts import DEFAULT_TEMPERATURES, AnswerSettings

    answers = AnswerSettings(
        tuple(temperature or DEFAULT_TEMPERATURES), max_tokens=max_tokens, length=length, seed=seed
    )
    job = SkipJob(out, model, dtype, tuple(data or ()), num_prompts, answers)
    with DeferredInterrupt() as interruption, _shown(interruption) as show:
        found = search_layers(job, show)
    print(f"skipped layers: {', '.join(map(str, found.skipped))}")
    print(
        f"expected: {found.acceptance:.1%} accepted at temperature 1, c = {found.cost_ratio:.2f}, {found.speedup:.2f}x"
    )
    print(f"wrote {out}", flush=True)
    return 0


def _command(kind: str) -> Callable[..., int]:
    whole_option = Option(
        "--whole",
        help="Train the target itself to exit early (LayerSkip); OUT is a new model.",
        hidden=kind != "early-exit",
    )

    def train_kind(
        context: Context,
        out: Out,
        model: options.Model = "builtin",
        data: Data = None,
        as_is: AsIs = False,
        num_prompts: NumPrompts = 0,
        max_tokens: MaxTokens = 128,
        length: Length = 512,
        temperature: Temperature = None,
        answer_batch: AnswerBatch = 16,
        capture_gb: CaptureGb = 0.0,
        loss: Loss = "",
        minutes: Minutes = None,
        steps: Steps = None,
        changes: Set = None,
        evaluate_steps: EvaluateSteps = 100,
        patience: Patience = 5,
        checkpoint_seconds: CheckpointSeconds = 120.0,
        checkpoint_steps: CheckpointSteps = 0,
        seed: Seed = 0,
        dtype: options.Dtype = "auto",
        device: options.Device = "auto",
        whole: Annotated[bool, whole_option] = False,
    ) -> int:
        _refuse_answer_options(context)
        return _train(kind, context.params)

    return train_kind


def _refuse_answer_options(context: Context) -> None:
    """Refuse options for generated answers with `--as-is`, which generates none."""
    names = [name for name in ANSWER_OPTIONS if options.is_given(context, name)]
    if context.params["as_is"] and names:
        raise BadInputError(
            f"expected nothing about answers with --as-is, got --{names[0].replace('_', '-')}; leave one of them out"
        )


def _train(kind: str, given: dict[str, Any]) -> int:
    from secondguess.train.head_card import displayed_figures
    from secondguess.train.head_training import HeadJob, train_head
    from secondguess.train.schedule import Budget
    from secondguess.train.training_texts import DEFAULT_TEMPERATURES, AnswerSettings

    options_of_job = dict(given)
    answers = AnswerSettings(
        tuple(options_of_job.pop("temperature") or DEFAULT_TEMPERATURES),
        max_tokens=options_of_job.pop("max_tokens"),
        length=options_of_job.pop("length"),
        batch_size=options_of_job.pop("answer_batch"),
    )
    minutes, steps = options_of_job.pop("minutes"), options_of_job.pop("steps")
    budget = Budget(30.0 if minutes is None and steps is None else minutes, steps)
    for name in ("data", "changes"):
        options_of_job[name] = tuple(options_of_job[name] or ())
    job = HeadJob(kind, answers=answers, budget=budget, **options_of_job)
    with DeferredInterrupt() as interruption, _shown(interruption) as show:
        try:
            provenance = train_head(job, show)
        except KeyboardInterrupt:
            again = f"secondguess train {kind} --out {shlex.quote(str(job.out))}"
            raise KeyboardInterrupt(
                f"interrupted; `{again}`, with the same options, continues from there"
            ) from None
    for name, value in displayed_figures(provenance.figures).items():
        print(f"{name.replace('_', ' ')}: {value}", flush=True)
    print(f"wrote {job.out}", flush=True)
    return 0


class _ProgressDisplay:
    """Progress of training: a bar on a terminal, otherwise lines at intervals."""

    def __init__(self, bars: Progress, interruption: DeferredInterrupt) -> None:
        self._bars = bars
        self._interruption = interruption
        self._live = bars.console.is_terminal
        self._task = bars.add_task("", total=None)
        self._last_line = -SECONDS_PER_LINE

    def line(self, text: str) -> None:
        self._bars.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def writing(self, done: int, total: int) -> None:
        self._update(done, total, "texts generated by the target")

    def training(self, progress: "Step") -> None:
        accepted = " ".join(f"{each:.2f}" for each in progress.accepted[:SHOWN_DEPTHS])
        left = "" if self._live else f", {progress.seconds_left:.0f} s left"
        words = (
            f"step {progress.step}: loss {progress.loss:.3f}, accepted {accepted}, "
            f"{progress.tokens_per_second:.0f} tokens/s{left}"
        )
        self._update(round(1000 * progress.share), 1000, words)

    def pause(self) -> None:
        self._interruption.raise_if_interrupted()

    def _update(self, done: int, total: int, words: str) -> None:
        self._bars.update(self._task, completed=done, total=total, description=words)
        now = time.monotonic()
        if not self._live and (now - self._last_line >= SECONDS_PER_LINE or done == total):
            self._last_line = now
            self.line(f"{100 * done / total:.0f} %: {words}")


@contextmanager
def _shown(interruption: DeferredInterrupt) -> Iterator[_ProgressDisplay]:
    columns = (BarColumn(), TaskProgressColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        yield _ProgressDisplay(bars, interruption)
