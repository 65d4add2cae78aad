"""`secondguess bench`: compare systems on the same prompts, with measured and predicted speed."""

from __future__ import annotations

from inspect import Parameter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Context

from secondguess.bench.config import BenchConfig
from secondguess.cli import options
from secondguess.cli.exit_codes import INTERRUPTED
from secondguess.cli.option_groups import Group, is_given, option, options_of, panel, settings_of
from secondguess.cli.options import model_option, output_option
from secondguess.cli.output import print_note
from secondguess.cli.progress import progress_bar
from secondguess.errors import BadInputError
from secondguess.names import ALL

if TYPE_CHECKING:
    from secondguess.bench.report import Report

workload_option = panel("What is measured")
PROMPTS_DEFAULT = "humaneval if its file is in the folder SECONDGUESS_DATA, else builtin"
DRAFTERS_DEFAULT = "the target's default drafter, its parts, ngram and suffix"
PLACE_OPTIONS: tuple[Parameter, ...] = (
    option("dtype", options.Dtype, "auto"),
    option("device", options.Device, "auto"),
    option("num_threads", options.Threads),
)


def _check_drafters(names: list[str] | None) -> list[str] | None:
    """Check drafter names; `all`, given alone, stands for every drafter of the target."""
    return names if names == [ALL] else options.check_drafters(names)


WORKLOAD_OPTIONS = {
    "against": workload_option("Library to compare with: transformers; repeatable."),
    "prompts": workload_option(
        "spec-bench, humaneval or gsm8k (its file in the folder SECONDGUESS_DATA, or NAME:PATH), builtin "
        "for a small built-in set, or a file: JSON lines with prompt, question, turns or messages each, or "
        "plain text with blank lines between prompts; repeatable.",
        show_default=PROMPTS_DEFAULT,
    ),
    "tasks": workload_option("Only prompts of this task; repeatable.", "--task", show_default="all"),
    "num_prompts": workload_option("Number of prompts, evenly spread within each task."),
    "num_tokens": workload_option("New tokens per prompt; end tokens do not end a text.", "--max-tokens"),
    "temperatures": workload_option(
        "Temperature, each with its own table; repeatable.", "--temperature", show_default="0 and 1"
    ),
    "batch_sizes": workload_option(
        "Number of prompts that decode together (Transformers decodes one at a time); repeatable.",
        "--batch-size",
        show_default="1",
    ),
    "draft_lengths": workload_option(
        "Constant draft length of draft models, in addition to their default controller; repeatable.",
        "--draft-length",
        show_default="3, 5 and 8",
    ),
    "controllers": workload_option(
        "A controller (choice of draft lengths) for every drafter, in addition to its default one (with --drafters all "
        "instead of it); repeatable.",
        "--controller",
        callback=options.check_controller,
        show_default="none",
    ),
    "seed": workload_option("Seed of sampling and of confidence intervals."),
}
SYSTEM_OPTIONS = {
    "drafters": model_option(
        f"A drafter to compare: {options.DRAFTER_NAMES}; auto, the default one; or all that exist for the target; repeatable.",
        "--drafter",
        "--drafters",
        callback=_check_drafters,
        show_default=DRAFTERS_DEFAULT,
    ),
}
LISTS = {"against": list[str], "prompts": list[str], "drafters": list[str]}
"""Options with several values whose setting has another type."""

BENCH = Group(
    (
        *options_of(BenchConfig, WORKLOAD_OPTIONS, LISTS),
        option("model", options.Model, "builtin"),
        *options_of(BenchConfig, SYSTEM_OPTIONS, LISTS),
        *PLACE_OPTIONS,
        *options_of(BenchConfig, {"name": output_option("Name of the saved files.")}),
    ),
    lambda context: settings_of(context, BenchConfig),
)


def bench(
    *,
    context: Context,
    config: Annotated[BenchConfig, BENCH],
    plot: Annotated[
        list[Path] | None,
        output_option(
            "A stored result (JSON) to draw into --output as PNG and SVG, without a run; needs the extra bench; "
            "repeatable.",
            metavar="FILE",
            show_default="none",
        ),
    ] = None,
    output: Annotated[
        Path, output_option("Folder for the report as JSON and Markdown, or for the pictures of --plot.")
    ] = Path("bench-results"),
    json: options.Json = False,
) -> int:
    """Compare drafters, and other libraries, on the same prompts and weights.

    All take turns on every prompt and generate the same number of tokens.
    Ctrl-C saves a report on the finished prompts.
    """
    from secondguess.files import require_folder

    require_folder(output, "--output")
    if plot:
        return _draw(context, plot, output)

    from secondguess.bench import harness, roster, writing

    if "draft_lengths" in config.model_fields_set:
        roster.require_draft_model(config)
    with progress_bar("loading") as progress:
        report = harness.run_bench(config, progress)
    save_and_print(report, output, report.to_json() if json else writing.as_markdown(report))
    return 0 if report.complete else INTERRUPTED


def _draw(context: Context, results: list[Path], folder: Path) -> int:
    """Draw stored results; options of a run are refused."""
    for parameter in context.command.params:
        name = parameter.name or ""
        if name not in ("plot", "output") and is_given(context, name):
            raise BadInputError(
                f"expected only --output with --plot, which runs nothing, got {parameter.opts[0]}; remove it"
            )

    from secondguess.bench import plots

    for result in results:
        print_note(f"saved {', '.join(map(str, plots.draw(result, folder)))}")
    return 0


def save_and_print(report: Report, folder: Path, text: str) -> None:
    """Write the files of a report and print it; neither a full disk nor a closed pipe loses the results."""
    from secondguess.bench import writing

    try:
        saved = writing.save_report(report, folder)
    finally:
        print(text, end="", flush=True)
    print_note(f"saved {', '.join(map(str, saved))}")
