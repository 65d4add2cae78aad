"""`secondguess bench`: compare systems on the same prompts, with measured and predicted speed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Context, Option, Typer

from secondguess.cli import options
from secondguess.cli.exit_codes import INTERRUPTED
from secondguess.cli.output import print_note
from secondguess.cli.progress import progress_bar
from secondguess.errors import BadInputError
from secondguess.names import ALL

WORKLOAD = "What is measured"


def _check_drafters(names: list[str] | None) -> list[str] | None:
    """Check drafter names; `all`, given alone, stands for every drafter of the target."""
    if names != [ALL]:
        options.check_drafter(names)
    return names


app = Typer()


@app.callback(invoke_without_command=True)
def bench(
    context: Context,
    against: Annotated[
        list[str] | None,
        Option(
            help="System to compare with: transformers, or a server that speaks OpenAI's protocol, "
            "http://HOST:PORT[,model=NAME] (its key in OPENAI_API_KEY); repeatable.",
            rich_help_panel=WORKLOAD,
        ),
    ] = None,
    prompts: Annotated[
        list[str] | None,
        Option(
            help="spec-bench, humaneval or gsm8k (its file in the folder SECONDGUESS_DATA, or NAME:PATH), builtin "
            "for a small built-in set, or a file: JSON lines with prompt, question, turns or messages each, or "
            "plain text with blank lines between prompts; repeatable.",
            show_default="humaneval if its file is in the folder SECONDGUESS_DATA, else builtin",
            rich_help_panel=WORKLOAD,
        ),
    ] = None,
    task: Annotated[
        list[str] | None,
        Option(help="Only prompts of this task; repeatable.", show_default="all", rich_help_panel=WORKLOAD),
    ] = None,
    num_prompts: Annotated[
        int, Option(help="Number of prompts, evenly spread within each task.", rich_help_panel=WORKLOAD)
    ] = 40,
    max_tokens: Annotated[
        int, Option(help="New tokens per prompt, exactly.", rich_help_panel=WORKLOAD)
    ] = 128,
    temperature: Annotated[
        list[float] | None,
        Option(
            help="Temperature, each with its own table; repeatable.",
            show_default="0 and 1",
            rich_help_panel=WORKLOAD,
        ),
    ] = None,
    batch_size: Annotated[
        list[int] | None,
        Option(
            help="Batch size of secondguess (other systems run at 1); repeatable.",
            show_default="1",
            rich_help_panel=WORKLOAD,
        ),
    ] = None,
    draft_length: Annotated[
        list[int] | None,
        Option(
            help="Constant draft length to measure beside the default controller; repeatable.",
            show_default="3, 5 and 8",
            rich_help_panel=WORKLOAD,
        ),
    ] = None,
    controller: Annotated[
        list[str] | None,
        Option(
            help="A controller to try with every drafter, beside its default one (with --drafters all instead of it); "
            "repeatable.",
            callback=options.check_controller,
            show_default="none",
            rich_help_panel=WORKLOAD,
        ),
    ] = None,
    seed: Annotated[int, Option(help="Seed of sampled texts and intervals.", rich_help_panel=WORKLOAD)] = 0,
    model: options.Model = "builtin",
    drafter: Annotated[
        list[str] | None,
        Option(
            "--drafter",
            "--drafters",
            help=f"A drafter to compare: {options.DRAFTER_NAMES}; or all for every one that there is for the target; "
            "repeatable.",
            callback=_check_drafters,
            show_default="the target's own, ngram and suffix",
            rich_help_panel=options.MODEL_OPTIONS,
        ),
    ] = None,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    threads: Annotated[
        int | None,
        Option(
            help="CPU threads, for all systems.",
            show_default="PyTorch's own",
            rich_help_panel=options.MODEL_OPTIONS,
        ),
    ] = None,
    output: Annotated[
        Path,
        Option(help="Folder for the report as JSON, Markdown and charts.", rich_help_panel=options.OUTPUT),
    ] = Path("benchmarks/results"),
    name: Annotated[str, Option(help="Name of the saved files.", rich_help_panel=options.OUTPUT)] = "bench",
    json: options.Json = False,
) -> int:
    """Compare drafters, and other libraries, on the same prompts and weights.

    Systems take turns on every prompt and generate the same number of tokens.
    Ctrl-C saves a report on the finished prompts.
    """
    if context.invoked_subcommand is not None:
        _refuse_options(context)
        return 0

    from secondguess.bench import BenchConfig, as_markdown, run_bench, save_report
    from secondguess.train.files import require_folder

    given = {
        "drafters": drafter,
        "temperatures": temperature,
        "draft_lengths": draft_length,
        "prompts": prompts,
        "batch_sizes": batch_size,
    }
    config = BenchConfig(
        model=model,
        against=tuple(against or ()),
        num_prompts=num_prompts,
        num_tokens=max_tokens,
        dtype=dtype,
        device=device,
        num_threads=threads,
        seed=seed,
        name=name,
        tasks=tuple(task or ()),
        controllers=tuple(controller or ()),
        **{field: tuple(values) for field, values in given.items() if values},  # type: ignore[arg-type]
    )
    require_folder(output, "--output")
    if draft_length and config.runs_all and "transformers" not in config.against:
        raise BadInputError(
            f"expected --controller fixed:K with --drafters all, got --draft-length {draft_length[0]}, which only "
            "Transformers would read there"
        )
    with progress_bar("loading") as progress:
        report = run_bench(config, progress)
    # Print before saving, so that a full disk does not lose the results.
    print(report.to_json() if json else as_markdown(report), end="", flush=True)
    saved = save_report(report, output)
    *others, last = map(str, saved)
    print_note(f"saved {', '.join(others)} and {last}")
    if not any(path.suffix == ".png" for path in saved):
        from secondguess.bench.charts import MATPLOTLIB_HINT

        print_note(MATPLOTLIB_HINT)
    return 0 if report.complete else INTERRUPTED


@app.command()
def compare(
    before: Annotated[Path, Argument(metavar="A.json", help="A stored report.")],
    after: Annotated[Path, Argument(metavar="B.json", help="Report to compare it with.")],
    json: options.Json = False,
) -> int:
    """Show what changed beyond measurement noise between two stored reports."""
    from secondguess.bench.compare import compare_files

    comparison = compare_files(before, after)
    print(comparison.to_json() if json else comparison.to_markdown(), end="")
    return 0


def _refuse_options(context: Context) -> None:
    """Refuse options of `bench` before a subcommand, where they would be ignored."""
    for name in context.params:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            option = f"--{name.replace('_', '-')}"
            raise BadInputError(
                f"expected no options between bench and {context.invoked_subcommand}, got {option}; put it behind "
                f"{context.invoked_subcommand} or leave it out"
            )
