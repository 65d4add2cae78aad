"""`secondguess train pair`: a target and a drafter from Python source."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

from typer import Option, Typer

from secondguess.errors import BadInputError

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
    start: Annotated[
        Path | None,
        Option(help="The target folder of an earlier pair, whose weights and tokenizer to continue."),
    ] = None,
    seed: Annotated[int, Option(help="Of the weights and of the order of the text.")] = 0,
    most_threads: Annotated[
        int,
        Option(help="At most so many threads, fewer while others need the cores; 0 leaves it to PyTorch."),
    ] = 0,
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
    if not 0 <= most_threads <= 1024:
        raise BadInputError(f"expected --most-threads from 0 to 1024, got {most_threads}")
    if start is not None and not start.is_dir():
        raise BadInputError(f"expected a folder for --start, got {start}, which is none")
    if directory.exists() and not directory.is_dir():
        raise BadInputError(f"expected a folder for --directory, got the file {directory}")
    if exclude_prompts is not None and not exclude_prompts.is_file():
        raise BadInputError(f"expected a file for --exclude-prompts, got {exclude_prompts}, which is none")

    from secondguess.train.pair import PairRecipe, train_pair

    recipe = PairRecipe(
        corpus=tuple(corpus or ()),
        forbidden_prompts=exclude_prompts,
        start=start,
        seed=seed,
        most_threads=most_threads,
    )
    if minutes is not None:
        recipe = recipe.scaled(minutes)
    try:
        train_pair(recipe, directory, _report)
    except KeyboardInterrupt:
        again = f"secondguess train pair --directory {shlex.quote(str(directory))}"
        raise KeyboardInterrupt(
            f"interrupted; `{again}`, with the same options, continues from the last checkpoint"
        ) from None
    return 0


def _report(line: str) -> None:
    print(line, flush=True)
