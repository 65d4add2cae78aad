"""`secondguess export`: speculative decoding settings in another engine's configuration format."""

from __future__ import annotations

from typing import Annotated

from secondguess.cli import options
from secondguess.cli.option_groups import option
from secondguess.cli.options import model_option, output_option
from secondguess.cli.output import print_json, print_note

LOADING = options.LOADING.only("config", "model", "drafter", "dtype", "quantize", "drafter_quantize").replace(
    # Not checked, so that models which only the other engine can download may be exported.
    option("model", Annotated[str, model_option(options.MODEL_NAMES)], "builtin"),
    options.drafter_option("suffix+model:builtin-draft for builtin; else suffix"),
)


def export(
    to: Annotated[
        str,
        output_option(
            "vllm, sglang or llama.cpp.",
            metavar="ENGINE",
            callback=options.check_engine,
        ),
    ],
    json: options.Json = False,
    draft_length: Annotated[
        int | None,
        model_option("Tokens to draft in every round.", show_default="of the file, else 5"),
    ] = None,
    *,
    loading: Annotated[options.Loading, LOADING],
) -> int:
    """Print a target and its drafter as a configuration for another engine.

    Standard output gets command lines; standard error gets notes on where that engine differs.
    No model is loaded, and the engine need not be installed.
    """
    from secondguess.configuration import LoadSettings
    from secondguess.export import export as export_to
    from secondguess.export.base import recommend

    exported = export_to(recommend(LoadSettings(**loading.settings), loading.tuned, draft_length), to)
    if json:
        print_json({"engine": to, "text": exported.text, "notes": exported.notes})
        return 0
    for note in exported.notes:
        print_note(f"note: {note}")
    print(exported.text, end="")
    return 0
