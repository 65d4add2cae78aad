"""`secondguess tune`: find the fastest drafter and draft length for given prompts and machine."""

from __future__ import annotations

from inspect import Parameter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from secondguess.bench.config import TuneConfig
from secondguess.cli import options, sampling
from secondguess.cli.bench import (
    DRAFTERS_DEFAULT,
    PLACE_OPTIONS,
    PROMPTS_DEFAULT,
    save_and_print,
    workload_option,
)
from secondguess.cli.option_groups import Group, option, options_of, settings_of
from secondguess.cli.options import model_option, output_option
from secondguess.cli.output import print_note
from secondguess.cli.progress import progress_bar
from secondguess.errors import BadInputError

if TYPE_CHECKING:
    from secondguess.bench.tuning import Tuning

CONFIGURATION = Path("secondguess.toml")

TUNE_OPTIONS = {
    "drafters": model_option(
        f"A drafter to compare: {options.DRAFTER_NAMES}, several joined by +, or auto, the default one; repeatable.",
        "--drafter",
        callback=options.check_drafters,
        show_default=DRAFTERS_DEFAULT,
    ),
    "prompts": workload_option(
        "A file of prompts, as bench takes it, or builtin for a small built-in set.",
        show_default=PROMPTS_DEFAULT,
    ),
    "num_prompts": workload_option("Maximum number of prompts, evenly spread over the file."),
    "num_tokens": workload_option("Maximum number of new tokens per prompt.", "--max-tokens"),
    "temperature": sampling.OPTIONS["temperature"],
    "batch_sizes": workload_option(
        "Number of prompts that decode together; repeatable, such as 1, 4 and 16 for a server.",
        "--batch-size",
        show_default="1",
    ),
    "minutes": workload_option("Time budget in minutes; with less, fewer prompts and runs."),
    "seed": workload_option("Seed of sampling."),
}
TUNE = Group(
    (
        option("model", Annotated[str, options.model_argument(options.MODEL_NAMES)], Parameter.empty),
        *options_of(TuneConfig, TUNE_OPTIONS, {"drafters": list[str]}),
        *PLACE_OPTIONS,
    ),
    lambda context: settings_of(context, TuneConfig),
)


def tune(
    *,
    config: Annotated[TuneConfig, TUNE],
    output: Annotated[
        Path | None, output_option("Folder for the report as JSON and Markdown.", show_default="none")
    ] = None,
    config_out: Annotated[Path, output_option("Where to write the configuration.")] = CONFIGURATION,
    json: options.Json = False,
) -> int:
    """Find the fastest settings for your prompts and write them to a configuration file.

    Runs all drafters on a few prompts, drops the slower half and repeats with more prompts;
    then the same with the controllers (choices of draft lengths) of the best drafters.
    Ctrl-C writes nothing.
    """
    _check_output_paths(output, config_out)

    from secondguess.bench.recommendation import recommend
    from secondguess.bench.writing import as_markdown, unused_path
    from secondguess.files import write_atomically

    tuned = _run(config)
    page = tuned.report.to_json() if json else as_markdown(tuned.report)
    if config_out == CONFIGURATION:  # not named by the user, so that an earlier one is kept
        config_out = unused_path(config_out)
    try:
        with write_atomically(config_out) as stream:
            stream.write(tuned.to_toml().encode())
    finally:
        if output is None:
            print(page, end="", flush=True)
        else:
            save_and_print(tuned.report, output, page)
    print_note("\n".join([*recommend(tuned.speedups), f"saved {config_out}"]))
    return 0


def _run(config: TuneConfig) -> Tuning:
    """Run the tuning with a progress bar; the message of an interruption names the step."""
    from secondguess.bench import tuning

    doing = "loading"
    try:
        with progress_bar("loading") as bar:

            def progress(done: int, total: int, what: str) -> None:
                nonlocal doing
                doing = f"step {done} of {total}, {what}"
                bar(done, total, what)

            return tuning.run_tune(config, progress)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"interrupted at {doing}; nothing was written") from None


def _check_output_paths(output: Path | None, config_out: Path) -> None:
    """Refuse output paths that cannot be written to, before the measurement starts."""
    from secondguess.files import require_folder

    if output is not None:
        require_folder(output, "--output")
    if config_out.is_dir():
        raise BadInputError(
            f"expected a file for --config-out, got the folder {config_out}; name a file in it"
        )
    if config_out.exists() and not config_out.is_file():
        raise BadInputError(
            f"expected a file for --config-out, got {config_out}, which is a pipe or a device; name a file"
        )
    folder = config_out.resolve().parent  # of the file that a link leads to
    if not folder.is_dir():
        raise BadInputError(
            f"expected --config-out in a folder that exists, got {config_out}; make {folder} first"
        )
    require_folder(folder, "--config-out")
