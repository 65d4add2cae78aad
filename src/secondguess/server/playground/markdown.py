"""Markdown as HTML that is safe to insert into the page: text is escaped, addresses are those of the web or of mail."""

from __future__ import annotations

import re
from collections.abc import MutableMapping, Sequence
from functools import cache
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from markdown_it.token import Token
from markdown_it.utils import OptionsDict
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_all_lexers, get_lexer_by_name

MAX_MARKDOWN_BYTES = 2**17
"""Size of a text that is rendered; it takes up to two seconds in the worst case known, without coloured code."""
MAX_COLOURED_TEXT = 2**15
"""Length of a text in which code is coloured."""
MAX_COLOURED_CODE = 4_000
"""Length of a block of code that is coloured. The time for hostile code grows with its square: at this length it is at most a
second for the languages below, by trials with repeated signs."""
LANGUAGES = frozenset([
    "bash", "c", "cpp", "csharp", "css", "diff", "go", "html", "ini", "java", "javascript", "json", "kotlin", "python", "rust",
    "sql", "toml", "typescript", "xml", "yaml",
])  # fmt: skip
_NAMES = {
    name
    for _, names, *_ in get_all_lexers(plugins=False)
    if LANGUAGES.intersection(names[:1])
    for name in names
}
"""Names of the languages, such as `py` and `js`."""


class _Markdown(MarkdownIt):
    def validateLink(self, url: str) -> bool:
        return re.match(r"(https?|mailto):", url, re.IGNORECASE) is not None


def _coloured(code: str, language: str, _attributes: str) -> str:
    """Return code as HTML with the classes of Pygments; an empty text, which leaves it plain, for an unknown language."""
    if language.lower() not in _NAMES or len(code) > MAX_COLOURED_CODE:
        return ""
    lexer = get_lexer_by_name(language, stripnl=False)
    html: str = highlight(code, lexer, HtmlFormatter(nowrap=True))
    return html


def _open_link(
    renderer: RendererHTML,
    tokens: Sequence[Token],
    index: int,
    options: OptionsDict,
    _env: MutableMapping[str, Any],
) -> str:
    tokens[index].attrs |= {"target": "_blank", "rel": "noopener noreferrer"}
    return renderer.renderToken(tokens, index, options, _env)


def _open_cell(
    renderer: RendererHTML,
    tokens: Sequence[Token],
    index: int,
    options: OptionsDict,
    _env: MutableMapping[str, Any],
) -> str:
    """Return the tag of a cell with its alignment as an attribute: the policy of the page refuses inline styles."""
    style = str(tokens[index].attrs.pop("style", ""))
    if style:
        tokens[index].attrs["align"] = style.partition(":")[2]
    return renderer.renderToken(tokens, index, options, _env)


@cache
def _renderer(has_colours: bool) -> MarkdownIt:
    markdown = _Markdown("commonmark", {"html": False, "highlight": _coloured if has_colours else None})
    markdown.enable(["table", "strikethrough"]).disable("image")
    markdown.add_render_rule("link_open", _open_link)
    for cell in ("th_open", "td_open"):
        markdown.add_render_rule(cell, _open_cell)
    return markdown


def to_html(text: str) -> str:
    """Return the HTML of Markdown. HTML in the text is shown as text, images as links."""
    html: str = _renderer(len(text) <= MAX_COLOURED_TEXT).render(text)
    return html
