"""`secondguess export`: speculative decoding settings in another engine's configuration format."""

from __future__ import annotations

from typing import Annotated

from typer import Context

from secondguess.cli import options
from secondguess.cli.options import model_option, output_option
from secondguess.cli.output import print_json, print_note


def export(
    context: Context,
    to: Annotated[
        str,
        output_option(
            "vllm, sglang or llama.cpp.",
            metavar="ENGINE",
            callback=options.check_engine,
        ),
    ],
    json: options.Json = False,
    config: options.Config = None,
    # Not checked, so that models which only the other engine can download may be exported.
    model: Annotated[str, model_option(options.MODEL_NAMES)] = "builtin",
    drafter: Annotated[
        str | None,
        model_option(
            options.DRAFTER_HELP,
            callback=options.check_drafter,
            show_default="suffix+model:builtin-draft for builtin; else suffix",
        ),
    ] = None,
    draft_length: Annotated[
        int | None,
        model_option("Tokens to draft in every round.", show_default="of the file, else 5"),
    ] = None,
    dtype: options.Dtype = "auto",
    quantize: options.Quantize = None,
    drafter_quantize: options.DrafterQuantize = None,
) -> int:
    """Print a target and its drafter as a configuration for another engine.

    Standard output gets command lines; standard error gets notes on where that engine differs.
    No model is loaded, and the engine need not be installed.
    """
    from secondguess.configuration import LoadSettings
    from secondguess.export import export as export_to
    from secondguess.export.base import recommend

    settings, tuned = options.load_settings_and_tuned(context, config)
    exported = export_to(recommend(LoadSettings(**settings), tuned, draft_length), to)
    if json:
        print_json({"engine": to, "text": exported.text, "notes": exported.notes})
        return 0
    for note in exported.notes:
        print_note(f"note: {note}")
    print(exported.text, end="")
    return 0
