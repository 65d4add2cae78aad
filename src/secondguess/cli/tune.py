"""`secondguess tune`: find the fastest drafter and draft length for given prompts and machine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from secondguess.cli import options
from secondguess.cli.output import print_note
from secondguess.cli.progress import progress_bar
from secondguess.errors import BadInputError

if TYPE_CHECKING:
    from secondguess.bench.tune_report import TuneReport

WORKLOAD = "What is measured"
CONFIGURATION = Path("secondguess.toml")


def tune(
    model: Annotated[
        str,
        Argument(
            metavar="MODEL",
            help="A directory, a cached model's name, or builtin.",
            callback=options.check_model,
            show_default=False,
        ),
    ],
    drafter: Annotated[
        list[str] | None,
        Option(
            help=f"A drafter to compare: {options.DRAFTER_NAMES}, or several joined by +; repeatable.",
            callback=options.check_drafter,
            show_default="the target's own, suffix, ngram, and suffix+model:PATH",
            rich_help_panel=options.MODEL_OPTIONS,
        ),
    ] = None,
    prompts: Annotated[
        str | None,
        Option(
            help="A file of prompts, as bench takes it, or builtin for a small built-in set.",
            show_default="humaneval if its file is in the folder SECONDGUESS_DATA, else builtin",
            rich_help_panel=WORKLOAD,
        ),
    ] = None,
    num_prompts: Annotated[
        int, Option(help="Maximum number of prompts, evenly spread over the file.", rich_help_panel=WORKLOAD)
    ] = 12,
    max_tokens: Annotated[
        int, Option(help="Maximum number of new tokens per prompt.", rich_help_panel=WORKLOAD)
    ] = 96,
    temperature: options.Temperature = 0.0,
    batch_size: Annotated[
        list[int] | None,
        Option(help="Batch size; repeatable.", show_default="1, 4 and 16", rich_help_panel=WORKLOAD),
    ] = None,
    minutes: Annotated[
        float, Option(help="Time budget; with less, fewer prompts and runs.", rich_help_panel=WORKLOAD)
    ] = 5.0,
    verify: Annotated[
        int,
        Option(
            help="How many of the best of each batch size enter the final runs, beside plain decoding and the default.",
            rich_help_panel=WORKLOAD,
        ),
    ] = 3,
    int8: Annotated[
        bool, Option(help="Run the best with weights in 8 bits too.", rich_help_panel=WORKLOAD)
    ] = True,
    seed: Annotated[int, Option(help="Of sampled texts.", rich_help_panel=WORKLOAD)] = 0,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    threads: Annotated[
        int | None,
        Option(help="CPU threads.", show_default="all cores", rich_help_panel=options.MODEL_OPTIONS),
    ] = None,
    output: Annotated[
        Path | None,
        Option(help="Folder for the JSON report and charts.", rich_help_panel=options.OUTPUT),
    ] = None,
    config_out: Annotated[
        Path, Option(help="Where to write the configuration.", rich_help_panel=options.OUTPUT)
    ] = CONFIGURATION,
    json: options.Json = False,
) -> int:
    """Find the fastest settings for your prompts and write them to a configuration file.

    Runs all drafters on a few prompts, drops the slower half and repeats with more prompts;
    then the same with the controllers of the best drafters. Ctrl-C writes nothing.
    """
    from secondguess.bench.config import TuneConfig

    config = TuneConfig(
        model=model,
        drafters=tuple(drafter or ()),
        prompts=prompts,
        num_prompts=num_prompts,
        num_tokens=max_tokens,
        temperature=temperature,
        batch_sizes=tuple(sorted(batch_size)) if batch_size else (1, 4, 16),
        dtype=dtype,
        device=device,
        num_threads=threads if threads is not None else os.cpu_count() or 1,
        minutes=minutes,
        num_verified=verify,
        int8=int8,
        seed=seed,
    )

    _check_output_paths(output, config_out)

    from secondguess.bench.charts import MATPLOTLIB_HINT, can_draw
    from secondguess.bench.tune_report import make_report
    from secondguess.bench.tuning import run_tune

    doing = "loading"
    try:
        with progress_bar("loading") as bar:

            def progress(done: int, total: int, what: str) -> None:
                nonlocal doing
                doing = f"step {done} of {total}, {what}"
                bar(done, total, what)

            report = make_report(run_tune(config, progress))
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"interrupted at {doing}; nothing was written") from None
    # Print before saving, so that a full disk does not lose the results.
    print(report.to_json() if json else report.to_text(), end="", flush=True)
    saved = _save(report, output, config_out)
    if output is not None and not can_draw():
        print_note(MATPLOTLIB_HINT)
    print_note(f"saved {', '.join(map(str, saved))}")
    return 0


def _check_output_paths(output: Path | None, config_out: Path) -> None:
    """Refuse output paths that cannot be written to, before the measurement starts."""
    from secondguess.train.files import require_folder

    if output is not None:
        require_folder(output, "--output")
    if config_out.is_dir():
        raise BadInputError(
            f"expected a file for --config-out, got the folder {config_out}; name a file in it"
        )
    if not config_out.parent.is_dir():
        raise BadInputError(
            f"expected --config-out in a folder that exists, got {config_out}; make {config_out.parent} first"
        )
    require_folder(config_out.parent, "--config-out")


def _save(report: TuneReport, output: Path | None, config_out: Path) -> list[Path]:
    """Write the configuration and, with an output folder, the JSON report and a chart; return the paths."""
    from secondguess.bench.charts import can_draw, to_png
    from secondguess.train.files import write_atomically

    files = {config_out: report.to_toml().encode()}
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        if can_draw():
            files[output / "tune-speedups.png"] = to_png(report.draw())
        files[output / "tune.json"] = report.to_json().encode()
    for path, content in files.items():
        with write_atomically(path) as stream:
            stream.write(content)
    return list(files)
