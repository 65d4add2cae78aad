"""`secondguess train KIND`: one command per kind of drafter, with the same options for all."""

from __future__ import annotations

import inspect
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from typer import BadParameter, Context, Option, Typer

from secondguess.cli import options
from secondguess.cli.interruption import DeferredInterrupt
from secondguess.cli.option_groups import is_given, panel
from secondguess.cli.progress import progress_bar
from secondguess.errors import BadInputError

ANSWER_OPTIONS = ("max_tokens", "temperature", "answer_batch")
LOSSES = ("lk", "kl", "tv")
"""Names of `secondguess.train.losses.OBJECTIVES`, which are not imported because they need torch."""

SUMMARIES = {
    "draft": "Train a small draft model for any target.",
    "early-exit": "Train a head that exits the target after an early layer.",
    "medusa": "Train Medusa heads: one prediction per depth from the target's last hidden state.",
    "mtp": "Train a module that predicts several tokens, one after the other.",
    "eagle": "Train an EAGLE-3 head, which reads the target's hidden states.",
    "dspark": "Train a DSpark head, which drafts a block at once.",
}
_MORE = (
    "The target, which is not changed, answers the prompts; the drafter is trained on its answers and hidden states. "
    "The checkpoint that is best on held-out texts is written to OUT with a model card. After Ctrl-C the same command continues."
)

KINDS_WITH_TWO_LAYOUTS = ("eagle", "dspark")

app = Typer(help="Train a drafter for any target.")
data_option, training_option = panel("Training data"), panel("Training")


def _named_folder(text: str) -> Path:
    if not text:  # an empty path would be the current folder
        raise BadParameter("expected a folder")
    return Path(text)


Out = Annotated[
    Path,
    Option(
        help="Folder of the drafter; a run begun there continues.",
        metavar="PATH",
        parser=_named_folder,
        show_default=False,
    ),
]
Data = Annotated[
    list[Path] | None,
    data_option(
        "JSON lines with a prompt, a text or messages each, or plain text; repeatable.",
        show_default="prompts made of Python's standard library",
    ),
]
MaxTokens = Annotated[int, data_option("Maximum number of tokens of an answer.")]
Length = Annotated[int, data_option("Maximum length of a text in tokens, prompt and answer.")]
Temperature = Annotated[
    list[float] | None,
    data_option("Temperature of the answers, in turn; repeatable.", show_default="0, 0.7 and 1"),
]


def _check_loss(name: str) -> str:
    """Refuse an unknown loss before torch is imported."""
    if name not in LOSSES:
        raise BadInputError(f"expected a loss among {', '.join(LOSSES)}, got {name!r}")
    return name


@app.command("layer-skip")
def layer_skip(
    out: Out,
    model: options.Model = "builtin",
    data: Data = None,
    num_prompts: Annotated[
        int, data_option("Number of prompts whose answers the layers are evaluated on.")
    ] = 16,
    max_tokens: MaxTokens = 128,
    length: Length = 256,
    temperature: Temperature = None,
    seed: Annotated[int, data_option("Seed of the answers.")] = 0,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
) -> int:
    """Search for layers of the target to skip while drafting.

    Nothing is trained: layers are removed one at a time, and the rest is evaluated on
    the target's own answers to the prompts. Use the result as layer-skip:OUT.
    """
    from secondguess.train.head_training import ProgressDisplay
    from secondguess.train.skip_search import search_layers
    from secondguess.train.training_texts import DEFAULT_TEMPERATURES, AnswerSettings

    answers = AnswerSettings(
        tuple(temperature or DEFAULT_TEMPERATURES), max_tokens=max_tokens, length=length, seed=seed
    )
    with DeferredInterrupt() as interruption, progress_bar("loading", "percent") as bar:
        show = ProgressDisplay(bar, interruption.raise_if_interrupted)
        found = search_layers(out, model, dtype, device, data or (), num_prompts, answers, show)
    print(f"skipped layers: {', '.join(map(str, found.skipped))}")
    print(
        f"expected at temperature 1: acceptance rate {found.acceptance:.1%}, a draft step takes {found.cost_ratio:.2f} of a "
        f"target pass, speedup {found.speedup:.2f}x"
    )
    print(f"wrote {out}", flush=True)
    return 0


def _command(kind: str) -> Callable[..., int]:
    def train_kind(
        context: Context,
        out: Out,
        model: options.Model = "builtin",
        data: Data = None,
        as_is: Annotated[
            bool,
            data_option("Train on the texts themselves instead of the target's answers.", "--as-is"),
        ] = False,
        num_prompts: Annotated[
            int,
            data_option(
                "Maximum number of texts, evenly spread over the data.", show_default="all; 400 without data"
            ),
        ] = 0,
        max_tokens: MaxTokens = 128,
        length: Length = 512,
        temperature: Temperature = None,
        answer_batch: Annotated[int, data_option("Number of answers generated at a time.")] = 16,
        capture_gb: Annotated[
            float,
            data_option("Disk space for the target's hidden states; 0 recomputes them for every batch."),
        ] = 0.0,
        loss: Annotated[
            str,
            training_option(
                "Loss: kl (KL divergence), tv (total variation distance, which is the rejection rate of sampled drafts) or "
                "lk (hybrid of both, arXiv 2602.23881).",
                callback=_check_loss,
            ),
        ] = "lk",
        minutes: Annotated[
            float | None, training_option("Minutes of training.", show_default="30 without --steps")
        ] = None,
        steps: Annotated[
            int | None, training_option("Training steps.", show_default="as many as fit into --minutes")
        ] = None,
        changes: Annotated[
            list[str] | None,
            training_option(
                "Change a hyperparameter, such as learning_rate=3e-4 or batch_size=4; repeatable.",
                "--set",
                metavar="NAME=VALUE",
            ),
        ] = None,
        evaluate_steps: Annotated[int, training_option("Steps between evaluations on held-out texts.")] = 100,
        patience: Annotated[
            int, training_option("Evaluations without improvement after which the run ends; 0: never.")
        ] = 5,
        seed: Annotated[int, training_option("Seed of initial weights, answers and the order of texts.")] = 0,
        authors_layout: Annotated[
            bool,
            training_option(
                "Write an EAGLE-3 or DSpark head as its authors do, not as speculators does.",
                "--authors-layout",
            ),
        ] = False,
        dtype: options.Dtype = "auto",
        device: options.Device = "auto",
    ) -> int:
        if as_is:
            _refuse_answer_options(context)
        return _train(kind, dict(context.params))

    if kind not in KINDS_WITH_TWO_LAYOUTS:
        signature = inspect.signature(train_kind, eval_str=True)
        kept = [part for part in signature.parameters.values() if part.name != "authors_layout"]
        train_kind.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
    return train_kind


def _refuse_answer_options(context: Context) -> None:
    """Refuse options for generated answers with `--as-is`, which generates none."""
    for name in ANSWER_OPTIONS:
        if is_given(context, name):
            raise BadInputError(
                f"cannot use --{name.replace('_', '-')}: --as-is generates no answers. Leave one of them out."
            )


def _train(kind: str, given: dict[str, Any]) -> int:
    from secondguess.train.head_card import displayed_figures
    from secondguess.train.head_training import HeadJob, ProgressDisplay, train_head
    from secondguess.train.run_folder import Budget
    from secondguess.train.training_texts import DEFAULT_TEMPERATURES, AnswerSettings

    answers = AnswerSettings(
        tuple(given.pop("temperature") or DEFAULT_TEMPERATURES),
        max_tokens=given.pop("max_tokens"),
        length=given.pop("length"),
        batch_size=given.pop("answer_batch"),
    )
    minutes, steps = given.pop("minutes"), given.pop("steps")
    budget = Budget(30.0 if minutes is None and steps is None else minutes, steps)
    for name in ("data", "changes"):
        given[name] = tuple(given[name] or ())
    job = HeadJob(kind, answers=answers, budget=budget, **given)
    with DeferredInterrupt() as interruption, progress_bar("loading", "percent") as bar:
        try:
            provenance = train_head(job, ProgressDisplay(bar, interruption.raise_if_interrupted))
        except KeyboardInterrupt:
            again = f"secondguess train {kind} --out {shlex.quote(str(job.out))}"
            raise KeyboardInterrupt(
                f"interrupted; `{again}`, with the same options, continues from there"
            ) from None
    for name, value in displayed_figures(provenance.figures).items():
        print(f"{name}: {value}", flush=True)
    print(f"wrote {job.out}", flush=True)
    speedup, cost_ratio = (provenance.figures.get(name) for name in ("speedup", "cost_ratio"))
    if isinstance(speedup, float) and speedup < 1:
        advice = (
            "a draft step takes as long as a target pass, which no training makes up for: train a smaller drafter"
            if isinstance(cost_ratio, float) and cost_ratio >= 1
            else "train for longer, or on more texts"
        )
        print(f"{speedup}x is slower than plain decoding: {advice}", file=sys.stderr)
    return 0


for _kind, _summary in SUMMARIES.items():
    app.command(_kind, help=f"{_summary}\n\n{_MORE}")(_command(_kind))
