"""`secondguess bench`: systems in turn on the same prompts, and what their speeds should have been."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Option

from secondguess.cli import options
from secondguess.cli.output import aside, progress_bar
from secondguess.errors import BadInputError

WORKLOAD = "What is measured"
INTERRUPTED = 130


def bench(
    against: Annotated[
        list[str] | None,
        Option(
            help="Another library to run beside ours: transformers; repeatable.", rich_help_panel=WORKLOAD
        ),
    ] = None,
    prompts: Annotated[
        str | None,
        Option(
            help="A file with one JSON object with a prompt per line, or builtin for a small set of our own.",
            show_default="../shared/data/humaneval.jsonl if it exists, else builtin",
            rich_help_panel=WORKLOAD,
        ),
    ] = None,
    num_prompts: Annotated[
        int, Option(help="How many prompts, evenly spread over the file.", rich_help_panel=WORKLOAD)
    ] = 40,
    max_tokens: Annotated[
        int, Option(help="New tokens per prompt, exactly.", rich_help_panel=WORKLOAD)
    ] = 128,
    temperature: Annotated[
        list[float] | None,
        Option(
            help="Each is a table of its own; repeatable.", show_default="0 and 1", rich_help_panel=WORKLOAD
        ),
    ] = None,
    draft_length: Annotated[
        list[int] | None,
        Option(
            help="Constant lengths to try beside the default controller; repeatable.",
            show_default="3, 5 and 8",
            rich_help_panel=WORKLOAD,
        ),
    ] = None,
    seed: Annotated[int, Option(help="Of sampled texts and intervals.", rich_help_panel=WORKLOAD)] = 0,
    model: options.Model = "builtin",
    drafter: Annotated[
        list[str] | None,
        Option(
            help="A drafter to compare; repeatable.",
            show_default="the target's own, ngram and suffix",
            rich_help_panel=options.TEAM,
        ),
    ] = None,
    dtype: options.Dtype = "bfloat16",
    device: options.Device = "cpu",
    threads: Annotated[int, Option(help="CPU threads, for everybody.", rich_help_panel=options.TEAM)] = 2,
    output: Annotated[
        Path, Option(help="Folder for the report as JSON and Markdown.", rich_help_panel=options.OUTPUT)
    ] = Path("benchmarks/results"),
    name: Annotated[str, Option(help="Name of the saved files.", rich_help_panel=options.OUTPUT)] = "bench",
    json: options.Json = False,
) -> int:
    """Compare drafters, and other libraries, on the same prompts and weights.

    Everybody runs in turn within one process, with the same number of tokens.
    Ctrl-C saves a report over the prompts that were finished.
    """
    if output.exists() and not output.is_dir():
        raise BadInputError(f"expected a folder for --output, got the file {output}")

    from secondguess.bench import BenchConfig, run_bench

    given = {
        "drafters": drafter and tuple(drafter),
        "temperatures": temperature and tuple(temperature),
        "draft_lengths": draft_length and tuple(draft_length),
    }
    config = BenchConfig(
        model=model,
        against=tuple(against or ()),
        prompts=prompts,
        num_prompts=num_prompts,
        num_tokens=max_tokens,
        dtype=dtype,
        device=device,
        num_threads=threads,
        seed=seed,
        name=name,
        **{field: values for field, values in given.items() if values},  # type: ignore[arg-type]
    )
    with progress_bar("loading") as progress:
        report = run_bench(config, progress)
    saved = report.save(output)
    print(report.to_json() if json else report.to_markdown(), end="")
    aside(f"saved {' and '.join(map(str, saved))}")
    return 0 if report.complete else INTERRUPTED
