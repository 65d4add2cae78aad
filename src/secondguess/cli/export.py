"""`secondguess export`: what to tell another engine, so that it speculates as it was found best here."""

from __future__ import annotations

from typing import Annotated

from typer import Context, Option

from secondguess.cli import options
from secondguess.cli.output import aside, print_json


def export(
    context: Context,
    to: Annotated[
        str,
        Option(
            metavar="ENGINE",
            help="vllm, sglang, llama.cpp, transformers or tensorrt-llm.",
            callback=options.check_engine,
            rich_help_panel=options.OUTPUT,
        ),
    ],
    json: options.Json = False,
    config: options.Config = None,
    # Not checked: a model that only the other engine will fetch can be exported.
    model: Annotated[str, Option(help=options.MODEL_NAMES, rich_help_panel=options.TEAM)] = "builtin",
    drafter: options.Drafter = None,
    draft_length: Annotated[
        int | None,
        Option(
            help="Tokens to draft in every round.",
            show_default="of the file, else 5",
            rich_help_panel=options.TEAM,
        ),
    ] = None,
    dtype: options.Dtype = "auto",
    quantize: options.Quantize = None,
    drafter_quantize: options.DrafterQuantize = None,
) -> int:
    """Print a target with its drafter as another engine's own configuration.

    A command line, a file or a script on standard output; on standard error what
    that engine does otherwise. Nothing is loaded, and no engine needs to be there.
    """
    from secondguess.configuration import LoadSettings
    from secondguess.export import export as export_to
    from secondguess.export.base import recommend

    settings, tuned = options.settings_and_measurements(context, config)
    exported = export_to(recommend(LoadSettings(**settings), tuned, draft_length), to)
    if json:
        print_json({"engine": to, "text": exported.text, "notes": exported.notes})
        return 0
    for note in exported.notes:
        aside(f"note: {note}")
    print(exported.text, end="")
    return 0
