"""`secondguess train`: train models.

`pair` trains a target and a draft model on Python source, `acceptance` a predictor of acceptance
probabilities; `train_heads.py` adds one command per kind of drafter.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

from typer import Option, Typer

from secondguess.cli import options, train_heads
from secondguess.errors import BadInputError

app = Typer(help="Train models.")
train_heads.add_commands(app)
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
    """Train a target and a draft model distilled from it.

    Both are written in Transformers format to DIRECTORY/target and
    DIRECTORY/drafter. After Ctrl-C, the same command continues from the last
    checkpoint, also with more minutes.
    """
    from secondguess.train.files import require_folder

    if minutes is not None and not 0 < minutes <= MOST_MINUTES:
        raise BadInputError(f"expected --minutes above 0 and at most {MOST_MINUTES} (a year), got {minutes}")
    if not 0 <= seed < 2**31:
        raise BadInputError(f"expected --seed from 0 to {2**31 - 1}, got {seed}")
    if not 0 <= most_threads <= 1024:
        raise BadInputError(f"expected --most-threads from 0 to 1024, got {most_threads}")
    if start is not None and not start.is_dir():
        raise BadInputError(f"expected a folder for --start, got {start}, which is none")
    require_folder(directory, "--directory")
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


@app.command()
def acceptance(
    out: Annotated[Path, Option(help="Where the predictor goes, for --controller learned:FILE.")],
    model: options.Model = "builtin",
    drafter: Annotated[
        str | None,
        Option(
            help="The drafter whose nodes are judged: model:PATH.",
            callback=options.check_drafter,
            show_default="builtin-draft for builtin",
        ),
    ] = None,
    prompts: Annotated[
        str,
        Option(
            help="A file with one JSON object with a prompt per line, or stdlib for prompts out of the "
            "standard library."
        ),
    ] = "stdlib",
    num_prompts: Annotated[
        int, Option(help="How many prompts, evenly spread over the file; every fifth is held out.")
    ] = 100,
    max_tokens: Annotated[int, Option(help="Tokens of the target's text behind each prompt.")] = 64,
    temperature: Annotated[
        list[float] | None, Option(help="Of the text; repeatable.", show_default="0 and 1")
    ] = None,
    depth: Annotated[int, Option(help="Nodes guessed at every place of the text.")] = 8,
    reject_weight: Annotated[float, Option(help="Weight of rejections in the loss; 1 for none.")] = 6.0,
    seed: Annotated[int, Option(help="Of the texts and of the network's first weights.")] = 0,
    dtype: options.Dtype = "auto",
) -> int:
    """Train a small predictor of acceptance for the controller learned.

    The target generates text, the drafter drafts at every position of it, and the
    predictor learns from the drafter's probabilities which draft tokens are
    accepted. This takes some minutes; the file is written atomically at the end.
    """
    if out.is_dir() or not out.parent.is_dir():
        raise BadInputError(f"expected a file in an existing folder for --out, got {out}")

    from secondguess.train.files import require_folder, write_atomically

    require_folder(out.parent, "--out")

    from secondguess.jobs.acceptance import AcceptanceRecipe, train_acceptance
    from secondguess.train.acceptance import FitOptions

    given = {
        "drafter": drafter or ("model:builtin-draft" if model == "builtin" else None),
        "temperatures": temperature and tuple(temperature),
    }
    if given["drafter"] is None:
        raise BadInputError(f"expected --drafter model:PATH for the model {model}, got none")
    recipe = AcceptanceRecipe(
        model=model,
        prompts=prompts,
        num_prompts=num_prompts,
        num_tokens=max_tokens,
        depth=depth,
        seed=seed,
        dtype=dtype,
        options=FitOptions(reject_weight=reject_weight),
        **{field: value for field, value in given.items() if value},  # type: ignore[arg-type]
    )
    predictor = train_acceptance(recipe, _report)
    with write_atomically(out) as stream:
        stream.write(predictor.to_json().encode())
    for name, value in predictor.provenance.items():
        if "loss" in name or "calibration" in name:
            _report(f"{name.replace('_', ' ')}: {value}")
    _report(f"wrote {out}")
    return 0


def _report(line: str) -> None:
    print(line, flush=True)
