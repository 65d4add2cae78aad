"""`secondguess tune`: find the fastest drafter and draft length for given prompts and machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Context

from secondguess.cli import options
from secondguess.cli.bench import PROMPTS_DEFAULT, save_and_print, workload_option
from secondguess.cli.option_groups import settings_of
from secondguess.cli.options import model_option, output_option
from secondguess.cli.output import print_note
from secondguess.cli.progress import progress_bar
from secondguess.cli.sampling import TEMPERATURE
from secondguess.errors import BadInputError

CONFIGURATION = Path("secondguess.toml")


def tune(
    context: Context,
    model: Annotated[str, options.model_argument(options.MODEL_NAMES)],
    drafters: Annotated[
        list[str] | None,
        model_option(
            f"A drafter to compare: {options.DRAFTER_NAMES}, or several joined by +; repeatable.",
            "--drafter",
            callback=options.check_drafter,
            show_default="the target's default drafter, its parts, ngram and suffix",
        ),
    ] = None,
    prompts: Annotated[
        str | None,
        workload_option(
            "A file of prompts, as bench takes it, or builtin for a small built-in set.",
            show_default=PROMPTS_DEFAULT,
        ),
    ] = None,
    num_prompts: Annotated[
        int, workload_option("Maximum number of prompts, evenly spread over the file.")
    ] = 12,
    num_tokens: Annotated[
        int, workload_option("Maximum number of new tokens per prompt.", "--max-tokens")
    ] = 96,
    temperature: TEMPERATURE = 0.0,
    batch_sizes: Annotated[
        list[int] | None,
        workload_option(
            "Number of prompts that decode together; repeatable, such as 1, 4 and 16 for a server.",
            "--batch-size",
            show_default="1",
        ),
    ] = None,
    minutes: Annotated[
        float, workload_option("Time budget in minutes; with less, fewer prompts and runs.")
    ] = 5.0,
    seed: Annotated[int, workload_option("Seed of sampling.")] = 0,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    threads: options.Threads = None,
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
    from secondguess.bench.config import TuneConfig

    sizes = sorted(batch_sizes or ())
    config = settings_of(
        context, TuneConfig, batch_sizes=sizes, num_threads=1 if threads is None else threads
    )
    _check_output_paths(output, config_out)

    import torch

    from secondguess.bench import as_markdown, tuning
    from secondguess.bench.recommendation import recommend
    from secondguess.bench.writing import unused_path
    from secondguess.files import write_atomically

    if threads is None:
        config = config.model_copy(update={"num_threads": torch.get_num_threads()})
    doing = "loading"
    try:
        with progress_bar("loading") as bar:

            def progress(done: int, total: int, what: str) -> None:
                nonlocal doing
                doing = f"step {done} of {total}, {what}"
                bar(done, total, what)

            tuned = tuning.run_tune(config, progress)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"interrupted at {doing}; nothing was written") from None
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
