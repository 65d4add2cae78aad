"""Architecture: imports between layers, public names, and the tree in the README."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from importlib import import_module
from pathlib import Path

import pytest

import secondguess

PACKAGE = Path(secondguess.__file__).parent
REPOSITORY = PACKAGE.parents[1]

FLOORS = (
    "errors", "preparation", "images", "files", "names", "validation", "builtin", "params", "tensors", "core",
    "runtime", "sampling", "stats", "checkpoint", "prompts", "verifiers", "controllers", "heads", "drafters", "decode",
    "workloads", "configuration", "pairing", "engine", "api", "beyond", "proof", "drop_in", "export", "server",
    "bench", "train", "cli", "__main__",
)  # fmt: skip
"""Packages and modules, of which each may import those before it."""
PACKED_SUFFIXES = {".py", ".md", ".png", ".cpp", ".h", ".mjs", ".sh", ".json", ".safetensors"}
FOLDERS_OF_VARIANTS = {
    "drafters": "DRAFTERS",
    "verifiers": "VERIFIERS",
    "controllers": "CONTROLLERS",
    "export": "ENGINES",
}
"""Folder -> its dict of names."""


def imports(tree: ast.Module) -> Iterator[str]:
    """Dotted names imported anywhere in a module, inside functions and for types as well."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def modules() -> list[tuple[str, ast.Module]]:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")
        if name != "__init__":
            found.append((name, ast.parse(path.read_text())))
    return found


def own_imports(tree: ast.Module) -> set[tuple[str, ...]]:
    return {tuple(name.split(".")[1:]) for name in imports(tree) if name.startswith("secondguess.")}


MODULES = modules()


def test_modules_import_only_lower_floors():
    above = [
        f"{name} imports secondguess.{'.'.join(target)}"
        for name, tree in MODULES
        for target in own_imports(tree)
        if target[0] in FLOORS and FLOORS.index(target[0]) > FLOORS.index(name.split(".")[0])
    ]
    assert not above
    assert {name.split(".")[0] for name, _ in MODULES} == set(FLOORS)


def test_no_modules_import_each_other():
    names = {name for name, _ in MODULES}

    def module_of(target: tuple[str, ...]) -> str:
        return next(
            (".".join(target[:end]) for end in range(len(target), 0, -1) if ".".join(target[:end]) in names),
            "",
        )

    graph = {name: {module_of(target) for target in own_imports(tree)} - {name, ""} for name, tree in MODULES}
    try:
        tuple(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


def variants_of(folder: str) -> set[str]:
    """The modules that a folder's dict of names leads to; its other modules are what variants share."""
    names = getattr(import_module(f"secondguess.{folder}"), FOLDERS_OF_VARIANTS[folder])
    return {
        place.removeprefix(f"secondguess.{folder}.").partition(":")[0].partition(".")[0]
        for place in names.values()
    }


def test_sibling_variants_never_import_each_other():
    for name, tree in MODULES:
        parts = name.split(".")
        # `auto` is a composition of verifiers and not another variant.
        if parts[0] not in FOLDERS_OF_VARIANTS or len(parts) < 2 or name == "verifiers.auto":
            continue
        siblings = variants_of(parts[0]) - {parts[1]}
        for target in own_imports(tree):
            assert not (target[0] == parts[0] and len(target) > 1 and target[1] in siblings), (name, target)


def test_docstrings_begin_with_a_statement():
    questions = []
    for name, tree in MODULES:
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                first = (ast.get_docstring(node) or "").partition("\n")[0]
                if re.match(r"(What|Who|Whose|Whether|Which|How|When|Where|Why)\b", first):
                    questions.append(f"{name}: {first}")
    assert not questions, "\n".join(questions)


@pytest.mark.parametrize(
    ("library", "homes"),
    [
        ("transformers", {"runtime", "checkpoint", "heads", "train", "bench", "drop_in", "beyond"}),
        ("fastapi", {"server"}),
        ("typer", {"cli"}),
    ],
)
def test_third_party_libraries_are_imported_only_in_their_packages(library, homes):
    users = {
        name.split(".")[0]
        for name, tree in MODULES
        if any(imported.split(".")[0] == library for imported in imports(tree))
    }
    assert users <= homes


def test_the_public_surface_is_sorted_complete_and_importable():
    assert secondguess.__all__ == sorted(secondguess.__all__, key=lambda name: (not name.isupper(), name))
    for name in secondguess.__all__:
        assert getattr(secondguess, name).__name__ == name


def test_version_changelog_and_project_file_agree():
    project = (REPOSITORY / "pyproject.toml").read_text()
    changelog = (REPOSITORY / "CHANGELOG.md").read_text()
    assert 'version = { attr = "secondguess.__version__" }' in project
    newest = next(line for line in changelog.splitlines() if line.startswith("## "))
    assert newest.startswith(f"## [{secondguess.__version__}] - ")
    sections = re.split(r"^## ", changelog, flags=re.MULTILINE)
    assert all(len(section.splitlines()) <= 60 for section in sections)


def test_the_readme_lists_the_existing_tree():
    readme = (REPOSITORY / "README.md").read_text()
    assert len(readme.splitlines()) <= 110
    named = set(re.findall(r"([a-z_]+(?:\.py|/))(?= )", readme.split("<!-- tree -->")[1]))
    folders = {f"{path.name}/" for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    assert folders <= named
    assert all((PACKAGE / name).exists() for name in named)


def test_the_source_distribution_has_what_the_pages_and_targets_of_make_refer_to(tmp_path):
    """By the list that setuptools packs, without that of an earlier build, which it would add."""
    command = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", tmp_path]
    subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True)
    packed = set((tmp_path / "secondguess.egg-info" / "SOURCES.txt").read_text().splitlines())
    folders = ("docs", "examples", "benchmarks", "tests", "tools", "src")
    files = [path.relative_to(REPOSITORY) for folder in folders for path in (REPOSITORY / folder).rglob("*")]
    needed = {path.as_posix() for path in files if path.suffix in PACKED_SUFFIXES}
    assert len(needed) > 500
    assert {*needed, "constraints.txt", "Makefile", "CONTRIBUTING.md", "CHANGELOG.md"} <= packed


def test_committed_files_do_not_name_this_machine():
    text = "".join(
        path.read_text()
        for folder in ("src", "tools", "docs", "examples", "benchmarks")
        for suffix in ("*.py", "*.md", "*.json")
        for path in (REPOSITORY / folder).rglob(suffix)
    )
    assert not re.search(r"(?<![\w.])/(?:work|root|home)/", text)


def pages():
    folders = [REPOSITORY / name for name in ("docs", "benchmarks", "tools", "src")]
    found = [*REPOSITORY.glob("*.md"), *(page for folder in folders for page in folder.rglob("*.md"))]
    assert len(found) > 20
    return found


def test_pages_have_no_merge_conflicts():
    marked = [page.name for page in pages() if re.search(r"^(<{7}|>{7}) ", page.read_text(), re.MULTILINE)]
    assert not marked, "resolve the conflict"


def headings(page):
    """Return the anchors of a page's headings, as GitHub forms them."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-") for title in titles}


def test_links_between_pages_lead_somewhere():
    broken = []
    for page in pages():
        for link in re.findall(r"\]\((?!https?:|mailto:)([^)\s]+)\)", page.read_text()):
            path, _, anchor = link.partition("#")
            target = page.parent / path if path else page
            if not target.exists() or (anchor and anchor not in headings(target)):
                broken.append(f"{page.name}: {link}")
    assert not broken
