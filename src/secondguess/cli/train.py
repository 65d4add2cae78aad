"""`secondguess train pair`: a target and a drafter from Python source."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option, Typer

from secondguess.errors import BadInputError

if TYPE_CHECKING:
    from secondguess.train.pair import PairRecipe

app = Typer(help="Train models.")
MOST_MINUTES = 60 * 24 * 365


@app.callback()
def train() -> None:
    """Train models."""


@app.command()
def pair(
    directory: Annotated[
        Path, Option(help="Where data, checkpoints and the finished models go; a run begun there continues.")
    ] = Path("runs/pair"),
    minutes: Annotated[
        float | None,
        Option(help="Training time of all stages together.", show_default="that of the recipe"),
    ] = None,
    corpus: Annotated[
        list[Path] | None,
        Option(help="A folder of installed packages to read beside the standard library; repeatable."),
    ] = None,
    exclude_prompts: Annotated[
        Path | None, Option(help="Evaluation prompts (JSON lines) that must not occur in the text.")
    ] = None,
    seed: Annotated[int, Option(help="Of the weights and of the order of the text.")] = 0,
) -> int:
    """Train a target and a drafter that is distilled towards it.

    Both are written in Transformers format to DIRECTORY/target and
    DIRECTORY/drafter. Ctrl-C is safe at any moment: the same command continues
    from the last checkpoint, also with more minutes.
    """
    if minutes is not None and not 0 < minutes <= MOST_MINUTES:
        raise BadInputError(f"expected --minutes above 0 and at most {MOST_MINUTES} (a year), got {minutes}")
    if not 0 <= seed < 2**31:
        raise BadInputError(f"expected --seed from 0 to {2**31 - 1}, got {seed}")
    if directory.exists() and not directory.is_dir():
        raise BadInputError(f"expected a folder for --directory, got the file {directory}")
    if exclude_prompts is not None and not exclude_prompts.is_file():
        raise BadInputError(f"expected a file for --exclude-prompts, got {exclude_prompts}, which is none")

    from secondguess.train import pair as stages

    recipe = stages.PairRecipe(corpus=tuple(corpus or ()), forbidden_prompts=exclude_prompts, seed=seed)
    if minutes is not None:
        recipe = scaled(recipe, minutes)
    try:
        for stage in (stages.train_target, stages.train_drafter, stages.distil_drafter):
            stage(recipe, directory, _report)
        for name in ("target", "drafter"):
            stages.export_checkpoint(directory, name, directory / name)
    except KeyboardInterrupt:
        again = f"secondguess train pair --directory {shlex.quote(str(directory))}"
        raise KeyboardInterrupt(
            f"interrupted; `{again}`, with the same options, continues from the last checkpoint"
        ) from None
    _report(f"finished: {directory / 'target'} and {directory / 'drafter'}")
    return 0


def scaled(recipe: PairRecipe, minutes: float) -> PairRecipe:
    """The recipe with its stages' budgets in the same proportion, but so many minutes together."""
    stages = ("target_budget", "drafter_budget", "distill_budget")
    budgets = {name: getattr(recipe, name) for name in stages}
    total = sum(budget.minutes for budget in budgets.values())
    shares = {
        name: replace(budget, minutes=minutes * budget.minutes / total) for name, budget in budgets.items()
    }
    return replace(recipe, **shares)


def _report(line: str) -> None:
    print(line, flush=True)
