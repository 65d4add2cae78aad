"""`secondguess train pair`: a target and a drafter from Python source."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Option, Typer

from secondguess.errors import BadInputError

app = Typer(help="Train models.")


@app.callback()
def train() -> None:
    """Train models."""


@app.command()
def pair(
    directory: Annotated[
        Path, Option(help="Where checkpoints, data and the finished models go; a started run continues.")
    ] = Path("runs/pair"),
    minutes: Annotated[float, Option(help="Training time of both models together.")] = 120.0,
    corpus: Annotated[
        list[Path] | None,
        Option(help="A folder of installed packages to read beside the standard library; repeatable."),
    ] = None,
    exclude_prompts: Annotated[
        Path | None,
        Option(help="A file of evaluation prompts (JSON lines) that must not occur in the text."),
    ] = None,
    seed: Annotated[int, Option(help="Of the weights and of the order of the text.")] = 0,
) -> int:
    """Train a target and its drafter, distil the drafter towards the target, and write both in Transformers format.

    Ctrl-C is safe at any moment: the same command continues from the last checkpoint.
    """
    raise BadInputError("not written yet")
