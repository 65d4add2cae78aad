"""Hook of MkDocs: pages are written for GitHub, and this makes the two readings agree.

Links from a page to files outside docs/ lead to the repository. Directives of mkdocstrings are comments, which GitHub does
not show. Text below an item of a list is indented by four spaces, as Python-Markdown reads it.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

LINK = re.compile(r"\]\((\.\./[^)\s]+)\)")
ITEM = re.compile(r"(-|\d+\.) ")
DIRECTIVE = re.compile(r"^<!-- (::: [\w.]+) -->$", re.MULTILINE)
FENCE = "```"
BRANCH = "main"


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Return the Markdown of a page as the site is built from it."""
    markdown = DIRECTIVE.sub(r"\n\1\n", markdown)
    folder = posixpath.dirname(page.file.src_uri)
    return indent_lists(link_to_repository(markdown, folder, Path(config["docs_dir"]), config["repo_url"]))


def link_to_repository(markdown: str, folder: str, docs: Path, address: str) -> str:
    """Return Markdown whose links to files outside docs/ are replaced; the strict build reports those that lead nowhere."""

    def replace(match: re.Match[str]) -> str:
        path, _, anchor = match[1].partition("#")
        inside = posixpath.normpath(posixpath.join("docs", folder, path))
        target = docs.parent / inside
        if inside.startswith("docs/") or not target.exists():
            return match[0]
        kind = "tree" if target.is_dir() else "blob"
        return f"]({address}/{kind}/{BRANCH}/{inside}{f'#{anchor}' if anchor else ''})"

    return LINK.sub(replace, markdown)


def indent_lists(markdown: str) -> str:
    """Return Markdown with four spaces for each level of a list, and an empty line before a list and after an item with one.

    Lines of a block of code move with its first line, and what is outside of lists is not changed.
    """
    lines: list[str] = []
    in_list, has_paragraphs, in_code, added = False, False, False, 0
    for line in markdown.split("\n"):
        text = line.lstrip(" ")
        depth = len(line) - len(text)
        if not in_code:
            is_item = ITEM.match(line) is not None
            if is_item and lines and lines[-1] and (has_paragraphs or not in_list):
                lines.append("")
            in_list = is_item or (in_list and (depth > 0 or not text))
            has_paragraphs = in_list and not is_item and (has_paragraphs or not text)
            added = 4 * (depth // 2) - depth if in_list else 0
        if text.startswith(FENCE):
            in_code = not in_code
        lines.append(" " * added + line if text else line)
    return "\n".join(lines)
