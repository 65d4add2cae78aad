"""Write the pages of docs/ that list the commands and the routes: `make reference`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import typer
from fastapi.openapi.utils import get_openapi
from typer.cli import get_docs_for_click

from secondguess.cli import app, main
from secondguess.server.app import ROUTERS
from secondguess.server.reference import describe

DOCS = Path(__file__).parents[1] / "docs"
COMMANDS = """
Commands and options, as `secondguess COMMAND --help` shows them. How they are used: [generating](generating.md),
[server](server.md), [training](training.md), [tuning and configuration](tuning.md).
"""
ROUTES = """# HTTP routes

Routes and fields of `secondguess serve`, as `/docs` of a running server shows them. How they are used: [server](server.md).
Fields of OpenAI and of other servers that are used, accepted or refused: [fields of requests](server-fields.md). A field that is
not required may be left out.
"""


def commands_page() -> str:
    """Return the page of the command line."""
    group = typer.main.get_command(app)
    for command in _commands(group):
        command.short_help = (command.help or "").partition("\n")[0]  # else it is cut
    page = get_docs_for_click(obj=group, ctx=typer.Context(group), name="secondguess", title="Command line")
    title, rest = page.split("\n", 1)
    linked = re.sub(r"docs/([\w-]+\.md)", r"[\1](\1)", rest)
    exit_codes = (inspect.getdoc(main) or "").partition("\n\n")[2]
    return f"{title}\n{COMMANDS}\n{exit_codes}\n{linked.rstrip()}\n"


def _commands(group: typer.core.TyperGroup) -> Iterator[typer.core.TyperCommand]:
    for command in group.commands.values():
        yield command
        if isinstance(command, typer.core.TyperGroup):
            yield from _commands(command)


def routes_page() -> str:
    """Return the page of the server's routes."""
    routes = [route for router in ROUTERS for route in router.routes]
    document = get_openapi(title="secondguess", version="", routes=routes)
    types = "|".join(document["components"]["schemas"])
    described = re.sub(
        rf"\b({types})\b(?=.*\|$)",
        lambda match: f"[{match[1]}](#{match[1].lower()})",
        describe(document),
        flags=re.MULTILINE,
    )
    return f"{ROUTES}{described.rstrip()}\n"


PAGES: dict[str, Callable[[], str]] = {"reference-cli.md": commands_page, "reference-http.md": routes_page}

if __name__ == "__main__":
    for name, page in PAGES.items():
        (DOCS / name).write_text(page())
