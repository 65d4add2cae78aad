"""Hook of MkDocs: links from a page to files outside docs/ lead to the repository, as they do on GitHub."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

LINK = re.compile(r"\]\((\.\./[^)\s]+)\)")
BRANCH = "main"


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Return a page's text with such links replaced; a file that does not exist is left for the strict build to report."""
    docs = Path(config["docs_dir"])

    def replace(match: re.Match[str]) -> str:
        path, _, anchor = match[1].partition("#")
        inside = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page.file.src_uri), path))
        target = docs.parent / inside
        if inside.startswith("docs/") or not target.exists():
            return match[0]
        kind = "tree" if target.is_dir() else "blob"
        return f"]({config['repo_url']}/{kind}/{BRANCH}/{inside}{f'#{anchor}' if anchor else ''})"

    return LINK.sub(replace, markdown)
