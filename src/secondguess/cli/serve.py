"""`secondguess serve`: an HTTP server with OpenAI's API."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Context

from secondguess.cli import options
from secondguess.cli.option_groups import Group, options_of, panel, settings_of
from secondguess.cli.output import describe_components, print_note
from secondguess.cli.progress import load_with_progress
from secondguess.cli.prompts import read_template
from secondguess.errors import BadInputError
from secondguess.server.settings import ServerSettings, read_api_keys

server_option = panel("Server")
limit_option = panel("Limits per request")

OPTIONS = {
    "api_keys": server_option(
        "File with accepted API keys, one per line; see also SECONDGUESS_API_KEYS.",
        "--api-key-file",
        show_default="none",
    ),
    "model_names": server_option(
        "Name of the model in requests; repeatable.",
        "--served-model-name",
        show_default="that of its folder or file",
    ),
    "chat_template": options.template_option,
    "generation_config": server_option(
        "Use the sampling settings of the model's generation_config.json where a request has none."
    ),
    "cors_origins": server_option(
        "Origin whose pages may call the server from a browser; repeatable.",
        "--cors-origin",
        show_default="none",
    ),
    "image_folder": server_option(
        "Folder of images that requests may name as file: URLs.",
        exists=True,
        file_okay=False,
        show_default="none",
    ),
    "max_body_bytes": limit_option(
        "Size of a request's body.", min=1, show_default="1 MiB and 16 bytes per token of context"
    ),
    "max_samples": limit_option("Samples: prompts times n.", min=1),
    "max_output_tokens": limit_option("Output tokens.", min=1, show_default="the model's context"),
    "request_seconds": limit_option("Time after which a request fails.", show_default="none"),
}


def _server_settings(context: Context) -> ServerSettings:
    _require_libraries()
    keys, template = (context.params[name] for name in ("api_keys", "chat_template"))
    return settings_of(
        context, ServerSettings, api_keys=read_api_keys(keys), chat_template=read_template(template)
    )


SERVER = Group(
    options_of(ServerSettings, OPTIONS, {"api_keys": Path, "chat_template": Path}), _server_settings
)


def serve(
    host: Annotated[str, server_option("Address to listen at; 0.0.0.0 is every network.")] = "127.0.0.1",
    port: Annotated[int, server_option("Port; 0 takes a free one.", min=0, max=65535)] = 8000,
    drain_seconds: Annotated[
        float, server_option("Time to finish requests after the first signal.", min=0, max=86_400)
    ] = 30.0,
    sleep_idle: Annotated[
        float | None,
        server_option(
            "Seconds without a request after which the weights are released; the next request loads them.",
            min=0.001,
            max=2_592_000,
            show_default="never",
        ),
    ] = None,
    max_waiting: Annotated[
        int, server_option("Samples in the queue, from which on requests get status 429.", min=1)
    ] = 256,
    *,
    settings: Annotated[ServerSettings, SERVER],
    loading: Annotated[options.Loading, options.LOADING],
) -> int:
    """Serve a model with OpenAI's API.

    Endpoints: / (a page with chats), /v1/chat/completions, /v1/completions, /v1/responses, /infill,
    /v1/models, /tokenize, /detokenize, /health, /ready, /metrics and /docs. The first signal (Ctrl-C, SIGTERM) finishes the
    requests in progress, a second one ends them.
    """
    from secondguess.server.run import open_socket, serve_until_signal

    # Opened first: a port in use is cheap to find, libraries and weights are expensive to load.
    opened = open_socket(host, port)
    try:
        from secondguess.checkpoint.source import open_source
        from secondguess.engine import Engine
        from secondguess.server.app import create_app
        from secondguess.server.convert import OPENAI_SAMPLING
        from secondguess.server.served_model import recommended_sampling
        from secondguess.server.sleep import SleepingEngine

        load_settings = loading.settings
        if settings.generation_config:
            # Raises an error before weights are loaded.
            recommended_sampling(open_source(load_settings["model"]))

        def make_engine() -> Engine:
            llm = load_with_progress(load_settings)
            print_note(describe_components(llm))
            # A default depends on free memory; wake-ups keep the first.
            load_settings["drafter"] = llm.drafter.name
            return Engine(llm, max_waiting)

        engine = make_engine() if sleep_idle is None else SleepingEngine(make_engine, sleep_idle)
        app = create_app(engine, settings)
        if (defaults := app.state.service.convert.defaults) != OPENAI_SAMPLING:
            listed = ", ".join(f"{name} {value:g}" for name, value in defaults.items())
            print_note(
                f"sampling settings of requests that have none: {listed}; --no-generation-config for OpenAI's"
            )
        if not settings.api_keys and host not in ("127.0.0.1", "localhost", "::1"):
            print_note(f"serving at {host} without an API key: all who reach this address can use the model")
        serve_until_signal(app, engine, opened, drain_seconds)
    finally:
        opened.close()
    return 0


def _require_libraries() -> None:
    """Refuse to start without the libraries of the extra `serve`."""
    from importlib.util import find_spec

    missing = [name for name in ("fastapi", "uvicorn", "prometheus_client") if find_spec(name) is None]
    if missing:
        raise BadInputError(f"serve needs {', '.join(missing)}; run `pip install secondguess[serve]`")
