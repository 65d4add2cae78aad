"""Blocks of the documentation: the tutorial runs as it is written, and commands name options that exist."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer
from released_models import RELEASES

import secondguess
from docs_site import indent_lists, link_to_repository, on_page_markdown
from families import needs_kernels
from reference_pages import PAGES as GENERATED_PAGES
from secondguess.cli import app
from secondguess.train.training_texts import read_documents

ROOT = Path(__file__).parents[1]
PINNED = (ROOT / "constraints.txt").read_text().splitlines()
PAGES = [
    ROOT / "README.md",
    *(page for page in sorted((ROOT / "docs").glob("*.md")) if page.name not in GENERATED_PAGES),
]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
TUTORIAL = [(kind, code) for kind, code in BLOCK.findall((ROOT / "docs" / "tutorial.md").read_text())]
COMMANDS = typer.main.get_command(app)


def run_in_shell(code: str) -> str:
    """Return the output of commands of the environment that runs the tests."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    run = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", code],
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


@needs_kernels
@pytest.mark.released
def test_every_block_of_the_tutorial_runs(tmp_path, monkeypatch, capsys):
    model = RELEASES["smollm2"]
    for needed in (model.path, model.folder):
        if not needed.exists():
            pytest.skip(f"{needed.name} is not here: python tools/released smollm2 --folders")
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("SECONDGUESS_CACHE", str(tmp_path))  # each file is checked once
    names: dict[str, object] = {}
    for kind, code in TUTORIAL:
        if kind == "python":
            exec(compile(code, "docs/tutorial.md", "exec"), names)
            assert capsys.readouterr().out or "print" not in code
        elif kind == "bash":
            assert run_in_shell(code)


def test_the_tutorial_compares_speculative_with_plain_text():
    kinds = [kind for kind, _ in TUTORIAL]
    assert (kinds.count("python"), kinds.count("bash")) == (5, 3)
    assert set(kinds) == {"python", "bash", "text", ""}
    assert sum("assert fast.token_ids == plain.token_ids" in code for _, code in TUTORIAL) == 2


def commands_on(page: Path) -> Iterator[str]:
    """Yield the commands of a page, in shell blocks and between the text, with continued lines joined and without comments."""
    text = page.read_text()
    for kind, code in BLOCK.findall(text):
        if kind in ("", "bash", "console"):
            lines = re.sub(r"(^|\s)#.*$", "", re.sub(r"\\\n\s*", "", code), flags=re.MULTILINE)
            yield from re.findall(r"(?:^|[\s|;&])(secondguess [a-z][^|;&>\n]*)", lines)
    yield from re.findall(r"`(secondguess [a-z][^`\n]*)`", BLOCK.sub("", text))


def unknown_options(command: str) -> set[str]:
    """Return the options of a command that it does not have; the command itself, if it does not exist."""
    words, group = shlex.split(command)[1:], COMMANDS
    while words and words[0] in getattr(group, "commands", {}):
        group = group.commands[words.pop(0)]  # type: ignore[attr-defined]
    if words and hasattr(group, "commands"):
        return {words[0]}
    options = {name for parameter in group.params for name in (*parameter.opts, *parameter.secondary_opts)}
    given = {word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)}
    return given - options - {"--help"}


def test_commands_of_the_pages_have_the_options_that_they_name():
    commands = [(page.name, command) for page in PAGES for command in commands_on(page)]
    wrong = [(page, command, unknown) for page, command in commands if (unknown := unknown_options(command))]
    assert not wrong
    assert len(commands) > 80


@pytest.mark.parametrize("command", ["secondguess generate x --modle y", "secondguess train egale --out x"])
def test_a_misspelt_command_is_found(command):
    assert unknown_options(command)


def test_extras_that_the_pages_install_exist():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = {
        extra
        for page in PAGES
        for extras in re.findall(r"pip install [^`\n]*(?:\.|secondguess)\[([\w,]+)\]", page.read_text())
        for extra in extras.split(",")
    }
    assert "serve" in named
    assert named <= set(project["optional-dependencies"])


def block_of(page: str, kind: str) -> str:
    """Return the first block of a kind of a page."""
    return next(code for found, code in BLOCK.findall((ROOT / "docs" / page).read_text()) if found == kind)


def test_queries_of_the_page_on_serving_name_metrics_of_the_server():
    names = set(re.findall(r"vllm:\w+", (ROOT / "docs" / "howto-serve.md").read_text()))
    source = (ROOT / "src/secondguess/server/metrics.py").read_text()
    assert len(names) > 5
    assert [name for name in names if f'"{re.sub(r"_(total|bucket)$", "", name)}"' not in source] == []


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_the_unit_of_systemd_is_valid(tmp_path):
    unit = tmp_path / "secondguess.service"
    unit.write_text(
        block_of("howto-serve.md", "ini").replace("/opt/secondguess/bin/secondguess", "/bin/true")
    )
    run = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr) == (0, "")


def test_prompts_of_the_page_on_training_can_be_read(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text(block_of("howto-train-a-head.md", "json"))
    assert [bool(document.messages) for document in read_documents([file], as_is=False)] == [True, False]


def test_lists_of_the_site_are_those_of_the_pages():
    """Formulas outside of lists are indented by four spaces; a fence in a list keeps the indentation inside it."""
    page = (
        "text\n- item\n  more\n\n  | a |\n- next\n  - inner\n    rest\n  ```\n    code\n  ```\n"
        "1. one\n   more\n\ntext\n\n    y = x\n```\n  - z\n- z\n```"
    )
    site = (
        "text\n\n- item\n    more\n\n    | a |\n\n- next\n    - inner\n        rest\n    ```\n      code\n    ```\n"
        "1. one\n    more\n\ntext\n\n    y = x\n```\n  - z\n- z\n```"
    )
    assert indent_lists(page) == site


def test_links_out_of_docs_lead_to_the_repository():
    links = "[a](../src/secondguess/core.py) [b](../benchmarks/results/) [c](faq.md) [d](../nothing.py)"
    assert link_to_repository(links, "", ROOT / "docs", "URL") == (
        "[a](URL/blob/main/src/secondguess/core.py) [b](URL/tree/main/benchmarks/results) [c](faq.md) [d](../nothing.py)"
    )


def test_comments_become_directives_of_the_site():
    page = SimpleNamespace(file=SimpleNamespace(src_uri="page.md"))
    config = {"docs_dir": "docs", "repo_url": "URL"}
    text = "<!-- ::: secondguess.load -->\n<!-- ::: secondguess.LLM -->\n<!-- tree -->"
    site = on_page_markdown(text, page=page, config=config)
    assert site.split("\n") == [
        "",
        "::: secondguess.load",
        "",
        "",
        "::: secondguess.LLM",
        "",
        "<!-- tree -->",
    ]


@pytest.mark.skipif(
    any(f"{package}=={version(package)}" not in PINNED for package in ("typer", "fastapi", "pydantic")),
    reason="the pages are made by the pinned releases",
)
@pytest.mark.parametrize("name", GENERATED_PAGES)
def test_generated_pages_are_up_to_date(name):
    is_same = (ROOT / "docs" / name).read_text() == GENERATED_PAGES[name]()
    assert is_same, "run `make reference`"


def test_the_page_of_the_python_api_has_the_public_names():
    page = (ROOT / "docs" / "reference-python.md").read_text()
    assert sorted(re.findall(r"^<!-- ::: secondguess\.(\w+) -->$", page, re.MULTILINE)) == sorted(
        secondguess.__all__
    )
    assert sorted(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)) == sorted(secondguess.__all__)
