"""`secondguess serve`: an HTTP server with OpenAI's API."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Context

from secondguess.cli import options
from secondguess.cli.options import panel
from secondguess.cli.output import describe_components, print_note
from secondguess.cli.prompts import read_template
from secondguess.errors import BadInputError

server_option = panel("Server")
limit_option = panel("Limits per request")


def serve(
    context: Context,
    host: Annotated[str, server_option("Address to listen at; 0.0.0.0 is every network.")] = "127.0.0.1",
    port: Annotated[int, server_option("Port; 0 takes a free one.", min=0, max=65535)] = 8000,
    api_key_file: Annotated[
        Path | None,
        server_option(
            "File with accepted API keys, one per line; see also SECONDGUESS_API_KEYS.", show_default="none"
        ),
    ] = None,
    served_model_name: Annotated[
        list[str] | None,
        server_option(
            "Name of the model in requests; repeatable.", show_default="that of its folder or file"
        ),
    ] = None,
    chat_template: options.ChatTemplate = None,
    generation_config: Annotated[
        bool,
        server_option(
            "Use the sampling settings of the model's generation_config.json where a request has none."
        ),
    ] = True,
    cors_origin: Annotated[
        list[str] | None,
        server_option(
            "Origin whose pages may call the server from a browser; repeatable.", show_default="none"
        ),
    ] = None,
    image_folder: Annotated[
        Path | None,
        server_option(
            "Folder of images that requests may name as file: URLs.",
            exists=True,
            file_okay=False,
            show_default="none",
        ),
    ] = None,
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
    max_body_bytes: Annotated[
        int | None,
        limit_option(
            "Size of a request's body.", min=1, show_default="1 MiB and 16 bytes per token of context"
        ),
    ] = None,
    max_waiting: Annotated[
        int, server_option("Samples in the queue, from which on requests get status 429.", min=1)
    ] = 256,
    max_samples: Annotated[int, limit_option("Samples: prompts times n.", min=1)] = 64,
    max_output_tokens: Annotated[
        int | None, limit_option("Output tokens.", min=1, show_default="the model's context")
    ] = None,
    request_seconds: Annotated[
        float | None, limit_option("Time after which a request fails.", show_default="none")
    ] = None,
    config: options.Config = None,
    model: options.Model = "builtin",
    drafter: options.Drafter = None,
    verifier: options.Verifier = "auto",
    controller: options.Controller = None,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    quantize: options.Quantize = None,
    drafter_quantize: options.DrafterQuantize = None,
    runtime: options.Runtime = "auto",
    share_history: options.ShareHistory = False,
) -> int:
    """Serve a model with OpenAI's API.

    Endpoints: / (a page with chats), /v1/chat/completions, /v1/completions, /v1/responses, /infill,
    /v1/models, /tokenize, /detokenize, /health, /ready, /metrics and /docs. The first signal (Ctrl-C, SIGTERM) finishes the
    requests in progress, a second one ends them.
    """
    _require_libraries()
    from secondguess.server.settings import ServerSettings, read_api_keys

    settings = options.settings_of(
        context,
        ServerSettings,
        model_names=served_model_name,
        api_keys=read_api_keys(api_key_file),
        cors_origins=cors_origin,
        chat_template=read_template(chat_template),
    )
    from secondguess.server.run import open_socket, serve_until_signal

    # Opened first: a port in use is cheap to find, libraries and weights are expensive to load.
    opened = open_socket(host, port)
    try:
        from secondguess.checkpoint.source import open_source
        from secondguess.cli.progress import load_with_progress
        from secondguess.engine import Engine
        from secondguess.server.app import create_app
        from secondguess.server.convert import OPENAI_SAMPLING
        from secondguess.server.model import recommended_sampling
        from secondguess.server.sleep import SleepingEngine

        loading = options.load_settings_and_tuned(context, config)[0]
        if settings.generation_config:
            recommended_sampling(open_source(loading["model"]))  # raises an error before weights are loaded

        def make_engine() -> Engine:
            llm = load_with_progress(loading)
            print_note(describe_components(llm))
            loading["drafter"] = llm.drafter.name  # a default depends on free memory; wake-ups keep the first
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
