"""The playground in headless Chromium: against an application that speaks the API's events, and against the API itself.

`SECONDGUESS_SCREENSHOTS=docs` writes the screenshots of the documentation to that folder. They are of a model that writes
Markdown, such as Qwen2.5-Coder-0.5B-Instruct: `SECONDGUESS_SCREENSHOTS_MODEL` is its path.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from base64 import b64decode, b64encode
from collections.abc import Iterator
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the playground is served with FastAPI")
pytest.importorskip("uvicorn", reason="the playground is served with uvicorn")

from fastapi import FastAPI
from playground_server import ANSWER, REJECTED, TEXT, FakeServer, serve
from starlette.testclient import TestClient

from secondguess.server.playground import PATHS, content_type, playground_routes
from secondguess.server.playground.markdown import (
    LANGUAGES,
    MAX_COLOURED_CODE,
    MAX_COLOURED_TEXT,
    MAX_MARKDOWN_BYTES,
    to_html,
)

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = ("--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync")
SCREENSHOTS = os.environ.get("SECONDGUESS_SCREENSHOTS")
SCREENSHOTS_MODEL = os.environ.get("SECONDGUESS_SCREENSHOTS_MODEL", "builtin")
MAX_SCREENSHOT_BYTES = 150_000

browser_test = pytest.mark.skipif(
    find_spec("playwright") is None or CHROMIUM is None,
    reason="needs Playwright (`pip install playwright`) and Chromium (Debian's package `chromium`)",
)


# --- Files and headers ---


@pytest.fixture
def files_client() -> TestClient:
    app = FastAPI()
    app.include_router(playground_routes())
    return TestClient(app)


@pytest.mark.parametrize(("path", "name"), PATHS.items())
def test_files_have_their_types_and_a_strict_policy(files_client, path, name):
    reply = files_client.get(path)
    assert reply.status_code == 200
    assert reply.headers["content-type"] == f"{content_type(name)}; charset=utf-8"
    assert reply.headers["x-content-type-options"] == "nosniff"
    policy = dict(part.strip().split(" ", 1) for part in reply.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == "'none'"
    assert "unsafe" not in reply.headers["content-security-policy"]
    assert files_client.head(path).status_code == 200


def test_the_page_refers_to_files_that_exist_and_to_no_other_host(files_client):
    page = files_client.get("/").text
    named = re.findall(r'(?:src|href)="(?!data:|#)([^"]+)"', page)
    assert sorted(named) == [
        "playground/playground.css",
        "playground/playground.js",
        "playground/theme.js",
    ]
    for path in named:
        assert files_client.get(f"/{path}").status_code == 200
    # Namespaces of XML are names, not addresses that are loaded.
    texts = [files_client.get(path).text.replace("http://www.w3.org/2000/svg", "") for path in PATHS]
    assert not re.search(r"https?://", "".join(texts))


def scripts(files_client) -> dict[str, str]:
    return {name: files_client.get(path).text for path, name in PATHS.items() if name.endswith(".js")}


def test_html_is_inserted_in_one_module_alone(files_client):
    for name, script in scripts(files_client).items():
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|setHTML", script
        )
        assert ("DOMParser" in script) == (name == "markdown.js")


def test_every_module_that_is_imported_is_served(files_client):
    imported = {
        name for script in scripts(files_client).values() for name in re.findall(r"from '\./([^']+)'", script)
    }
    assert imported | {"playground.js", "theme.js"} == set(scripts(files_client))


def test_every_id_of_the_scripts_is_in_the_page(files_client):
    page, script = files_client.get("/").text, "".join(scripts(files_client).values())
    ids = set(re.findall(r'id="([^"]+)"', page))
    assert set(re.findall(r"\$\('([^']+)'\)", script)) <= ids
    targets = re.findall(r'(?:for|aria-labelledby|aria-describedby|aria-controls)="([^"]+)"', page)
    assert set(targets) <= ids


def test_the_files_are_part_of_the_package():
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert '"server/playground/*.*"' in project


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    server = FakeServer()
    with serve(server.app()) as server.port:
        yield server


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu", *FLAGS]
        )
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser) -> Iterator[Any]:
    """Opens addresses in fresh contexts; a test fails if a page has logged an error that it did not expect."""
    contexts, problems = [], []

    def open_at(url: str, **settings: Any) -> Any:
        context = browser.new_context(**({"viewport": {"width": 1120, "height": 860}} | settings))
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(15_000)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda message: message.type == "error" and problems.append(message.text))
        page.goto(url)
        return page

    yield open_at
    for context in contexts:
        context.close()
    # Chromium logs every refused or unanswered request; those are the subject of tests.
    assert [problem for problem in problems if "Failed to load resource" not in problem] == []


def screenshot(page: Any, name: str, **settings: Any) -> None:
    """Write a screenshot for the documentation, if the environment asks for it."""
    if SCREENSHOTS:
        path = Path(SCREENSHOTS) / f"playground-{name}.png"
        page.screenshot(path=path, animations="disabled", caret="hide", **settings)
        assert path.stat().st_size < MAX_SCREENSHOT_BYTES


def is_ready(page: Any) -> None:
    page.wait_for_selector('#server[data-state="ready"]')


def wait_for_end(page: Any, mode: str = "completion") -> None:
    page.wait_for_selector(f"#{mode} [data-run][aria-disabled=false]")


def say(page: Any, message: str) -> None:
    """Send a message and wait for the end of the reply."""
    page.fill("#chat-prompt", message)
    page.press("#chat-prompt", "Enter")
    wait_for_end(page, "chat")


def text_of(page: Any, selector: str) -> str:
    found: str = page.locator(selector).inner_text()
    return found


def origins(page: Any, output: str) -> list[list[Any]]:
    """Texts of an output with their origin, adjacent equal ones joined."""
    spans = page.locator(f"{output} span").evaluate_all(
        "all => all.map(each => [each.textContent, each.className])"
    )
    joined: list[list[Any]] = []
    for text, kind in spans:
        if kind in ("drafted", "sampled"):
            if joined and joined[-1][1] == (kind == "drafted"):
                joined[-1][0] += text
            else:
                joined.append([text, kind == "drafted"])
    return joined


def joined_answer() -> list[list[Any]]:
    joined: list[list[Any]] = []
    for text, drafted in ANSWER:
        if joined and joined[-1][1] == drafted:
            joined[-1][0] += text
        else:
            joined.append([text, drafted])
    return joined


# --- Behaviour ---


@browser_test
def test_a_completion_shows_origins_rejected_drafts_and_the_numbers_of_the_server(fake, open_page):
    fake.finish_reason = "length"
    page = open_page(f"{fake.url}#completion")
    is_ready(page)
    assert text_of(page, "#model") == "tiny, context 512"
    page.check("#ghosts")
    page.click("[data-run=completion]")
    wait_for_end(page)
    assert origins(page, "#completion-output") == joined_answer()
    ghost = page.locator("#completion-output .rejected")
    assert ghost.all_text_contents() == [REJECTED.replace("\n", "⏎")]
    assert ghost.evaluate("each => [each.nextSibling.textContent, each.ariaHidden]") == [ANSWER[2][0], "true"]
    page.uncheck("#ghosts")
    assert not ghost.is_visible()
    assert text_of(page, "#gauge-speed") == "97"
    assert text_of(page, "#gauge-share") == "53 %"  # 34 of 64 tokens
    assert text_of(page, "#gauge-pass") == "2.13"
    assert text_of(page, "#gauge-acceptance") == "68 %"
    assert page.locator("#positions-bars li").all_inner_texts() == ["1\n77 %", "2\n63 %", "3\n50 %"]
    assert text_of(page, "#status") == "Finished: 64 tokens, max tokens reached."


@browser_test
def test_settings_are_sent_under_the_names_of_the_api(fake, open_page):
    page = open_page(f"{fake.url}#completion")
    is_ready(page)
    page.fill("#temperature", "-1")
    page.press("#completion-prompt", "Control+Enter")
    wait_for_end(page)
    assert fake.bodies == []
    assert page.evaluate("document.activeElement.id") == "temperature"
    settings = {
        "temperature": "0.7",
        "top-p": "0.9",
        "max-tokens": "32",
        "seed": "5",
        "stop": "END\n\\n\\n\n",
    }
    for name, value in settings.items():
        page.fill(f"#{name}", value)
    page.select_option("#speculation", "bounded")
    page.fill("#completion-prompt", "x = ")
    for typed, max_draft in (("3", 3), ("", 4)):
        page.fill("#max-draft", typed)
        page.press("#completion-prompt", "Control+Enter")
        wait_for_end(page)
        assert fake.bodies[-1] == {
            "model": "tiny",
            "prompt": "x = ",
            "stream": True,
            "stream_options": {"include_usage": True},
            "report": True,
            "temperature": 0.7,
            "top_p": 0.9,
            "max_tokens": 32,
            "seed": 5,
            "stop": ["END", "\n\n"],
            "speculation": {"max_draft": max_draft},
        }


@browser_test
def test_a_chat_sends_the_whole_conversation(fake, open_page):
    page = chat_page(fake, open_page)
    page.check("#ghosts")
    for message in ("Sort a list.", "Shorter."):
        say(page, message)
    assert [message["role"] for message in fake.bodies[1]["messages"]] == ["user", "assistant", "user"]
    assert fake.bodies[1]["messages"][1] == {"role": "assistant", "content": TEXT}  # without rejected drafts
    assert page.locator("#messages .rejected").count() == 2
    assert page.locator(".message").count() == 4
    assert origins(page, ".message:last-child .reply") == joined_answer()
    page.uncheck("#ghosts")
    fake.seconds_per_chunk = 0.2
    page.fill("#chat-prompt", "Old.")
    page.keyboard.press("Control+Enter")
    page.wait_for_selector(".reply.running > *")
    page.click("#new-chat")
    wait_for_end(page, "chat")
    fake.seconds_per_chunk = 0
    say(page, "New.")
    assert [message["content"] for message in fake.bodies[-1]["messages"]] == ["New."]


HOSTILE = {
    "image": "<img src=x onerror=\"document.title='injected'\">",
    "script": "<script>document.title='injected'</script>",
    "script in a block": "<div>\n\n<script>document.title='injected'</script>\n\n</div>",
    "link to a script": "[click](javascript:document.title='injected')",
    "link in capitals": "[click](JaVaScRiPt:document.title='injected')",
    "link with entities": "[click](&#106;avascript&colon;document.title='injected')",
    "link of data": "[click](data:text/html,<script>alert(1)</script>)",
    "automatic link": "<javascript:alert(1)>",
    "reference": "[click][x]\n\n[x]: vbscript:alert(1)",
    "title": '[click](https://a.example "x" onmouseover=alert(1) ")',
    "picture": "![alt](https://a.example/picture.png)",
    "language": '```"><img/src=x/onerror=alert(1)>\ncode\n```',
    "highlighted": "```html\n<script>alert(1)</script>\n```",
    "frame": "<iframe srcdoc=\"<script>parent.document.title='injected'</script>\"></iframe>",
    "form": "<form action=https://a.example><button>send</button></form>",
    "style": "<style>body{display:none}</style><b style='color:red'>x</b>",
    "table": "| a |\n| :-: |\n| <svg onload=alert(1)> |",
    "comment": "<!-- --!><img src=x onerror=alert(1)> -->",
    "broken tag": '<a href="x`"<img src=y onerror=alert(1)//',
}

TEXT_TAGS = {"a", "blockquote", "br", "code", "em", "hr", "li", "ol", "p", "pre", "s", "span", "strong", "ul"}
ALLOWED_TAGS = (
    TEXT_TAGS | {"table", "tbody", "td", "th", "thead", "tr"} | {f"h{level}" for level in range(1, 7)}
)
ALLOWED_ATTRIBUTES = {"align", "class", "href", "rel", "start", "target", "title"}


class TagCollector(HTMLParser):
    """Parser that notes all tags and attributes of HTML."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: dict[str, str | None] = {}
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes.update(attrs)


@pytest.mark.parametrize("markdown", HOSTILE.values(), ids=HOSTILE)
def test_hostile_markdown_becomes_harmless_html(markdown):
    found = TagCollector(to_html(markdown))
    assert found.tags <= ALLOWED_TAGS
    assert found.attributes.keys() <= ALLOWED_ATTRIBUTES
    assert re.match(r"(https?|mailto):", found.attributes.get("href") or "https:")


def test_markdown_is_rendered_with_tables_and_coloured_code():
    html = to_html(
        "# Title\n\n| a |\n| -: |\n| 1 |\n\n~~old~~ [mail](mailto:a@b.example)\n\n```python\ndef f(): pass\n```"
    )
    for part in (
        "<h1>Title</h1>",
        '<td align="right">1</td>',
        "<s>old</s>",
        '<a href="mailto:a@b.example" target="_blank" rel="noopener noreferrer">mail</a>',
        '<span class="k">def</span>',
    ):
        assert part in html


def test_code_is_plain_in_other_languages_and_in_long_texts():
    block = "```{}\ndef f(): pass\n```\n"
    assert "<span" in to_html(block.format("Py"))
    assert "<span" not in to_html(block.format("brainfuck"))
    assert "<span" not in to_html(block.format("python") + "word " * MAX_COLOURED_TEXT)
    assert "<span" not in to_html(f"```python\n{'x = 1' * MAX_COLOURED_CODE}\n```")


@pytest.mark.parametrize("language", sorted(LANGUAGES))
def test_the_time_for_coloured_code_is_bounded(language):
    for unit in ("\n", "x\n ", '"\\', "a."):
        code = (unit * MAX_COLOURED_CODE)[: MAX_COLOURED_CODE - 9]
        start = time.process_time()
        assert "<span" in to_html(f"```{language}\n+0 <a>\n{code}\n```")
        assert time.process_time() - start < 5


def test_the_route_of_markdown_replies_with_json_and_has_a_limit(files_client):
    reply = files_client.post("/playground/markdown", content="*é*".encode())
    assert reply.headers["content-type"] == "application/json"
    assert reply.json() == {"html": "<p><em>é</em></p>\n"}
    assert files_client.post("/playground/markdown", content=b"\xff*").status_code == 200
    refused = files_client.post("/playground/markdown", content=b"a" * (MAX_MARKDOWN_BYTES + 1))
    assert refused.status_code == 413
    assert "expected at most" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    "text", ["[" * 50_000, "*a **b " * 9_000, "![[]()" * 9_000, "> " * 30_000, "`" * 60_000]
)
def test_the_time_for_markdown_is_bounded(text):
    start = time.process_time()
    to_html(text)
    assert time.process_time() - start < 5


@browser_test
def test_markup_in_prompts_and_replies_is_shown_as_text(fake, open_page):
    markup = "<img src=x onerror=\"document.title='injected'\"><b>&amp;</b>"
    fake.answer = [[markup, True]]
    page = open_page(f"{fake.url}#chat")
    is_ready(page)
    say(page, markup)
    page.wait_for_selector(".reply p")
    assert text_of(page, ".said") == markup
    assert text_of(page, ".reply") == markup.replace("&amp;", "&")  # an entity, as Markdown has them
    page.check("#ghosts")
    assert text_of(page, ".reply") == markup
    assert page.locator(".messages img, .messages b").count() == 0
    assert page.title() == "secondguess playground"


@browser_test
def test_hostile_markdown_runs_nothing_in_the_page(fake, open_page):
    fake.answer = [["\n\n".join([*HOSTILE.values(), "The end."]), True]]
    page = open_page(f"{fake.url}#chat")
    is_ready(page)
    say(page, "Hello")
    page.get_by_text("The end.").wait_for()
    for link in page.locator(".reply a").all():
        assert re.match(r"https?:", link.get_attribute("href"))
    assert page.locator(".reply :is(img, script, iframe, form, style, svg, [onerror], [style])").count() == 0
    assert page.title() == "secondguess playground"


@browser_test
def test_escape_stops_the_request_and_keeps_the_text(fake, open_page):
    fake.seconds_per_chunk = 0.2
    page = open_page(f"{fake.url}#completion")
    is_ready(page)
    page.keyboard.press("Control+Enter")
    page.wait_for_selector("#completion-output .drafted")
    page.keyboard.press("Escape")
    wait_for_end(page)
    kept = "".join(text for text, _ in origins(page, "#completion-output"))
    assert kept
    assert TEXT.startswith(kept)
    assert kept != TEXT
    assert page.locator("#notice").is_hidden()
    deadline = time.monotonic() + 10
    while not fake.num_disconnected and time.monotonic() < deadline:
        page.wait_for_timeout(50)
    assert fake.num_disconnected == 1


@browser_test
@pytest.mark.parametrize("has_template", [True, False])
def test_a_race_runs_both_sides_alone_and_compares_them(fake, open_page, has_template):
    fake.has_chat_template = has_template
    fake.seconds_per_chunk = 0.02
    page = open_page(f"{fake.url}#race")
    is_ready(page)
    page.click("[data-run=race]")
    page.wait_for_selector("#lane-speculative .drafted")
    wait_for_end(page, "race")
    warm_up, plain, speculative = fake.bodies
    assert (warm_up["max_tokens"], warm_up["speculation"], plain["speculation"]) == (1, "off", "off")
    assert speculative == plain | {"speculation": "auto"}
    prompt = page.input_value("#race-prompt")
    asked = {"messages": [{"role": "user", "content": prompt}]} if has_template else {"prompt": prompt}
    assert asked.items() <= plain.items()
    assert prompt.startswith("Show this function" if has_template else "def read_settings(path):")
    assert isinstance(plain["seed"], int)  # the same noise, so that the texts can be compared
    verdict = text_of(page, "#verdict")
    ratio = float(
        re.fullmatch(r"Speculative decoding had ([\d.]+)\W .* for the same 64 tokens\.", verdict)[1]
    )
    assert 1.5 < ratio < 20  # a quarter of the chunks
    for lane in ("plain", "speculative"):
        assert "".join(text for text, _ in origins(page, f"#lane-{lane} .output")) == TEXT
    assert "68 % of drafts accepted" in text_of(page, "#lane-speculative .detail")


@browser_test
def test_a_server_that_is_busy_or_drains_is_asked_again(fake, open_page):
    fake.mood = "draining"
    page = open_page(f"{fake.url}#completion")
    page.wait_for_selector('#server[data-state="draining"]')
    page.keyboard.press("Control+Enter")
    page.wait_for_selector("#notice:not([hidden])")
    assert text_of(page, "#notice").startswith("The server is shutting down")
    fake.mood = "busy"
    is_ready(page)
    page.keyboard.press("Control+Enter")
    page.wait_for_selector("#notice:not([hidden])")
    assert text_of(page, "#notice") == "The server is busy. Trying again in 1 s; Esc cancels."
    fake.mood = "ready"
    wait_for_end(page)
    assert page.locator("#notice").is_hidden()
    assert origins(page, "#completion-output") == joined_answer()


@browser_test
def test_a_server_that_is_gone_is_named_and_found_again(open_page):
    fake = FakeServer()
    with serve(fake.app()) as fake.port:
        page = open_page(f"{fake.url}#completion")
        is_ready(page)
    page.keyboard.press("Control+Enter")
    page.wait_for_selector('#server[data-state="gone"]')
    assert text_of(page, "#notice").startswith("The server does not answer.")
    wait_for_end(page)
    with serve(fake.app(), fake.port):
        is_ready(page)
        assert page.locator("#notice").is_hidden()
        page.keyboard.press("Control+Enter")
        page.wait_for_selector("#completion-output .drafted")
        wait_for_end(page)
        assert origins(page, "#completion-output") == joined_answer()


FAILURES = {
    "cut": "The connection ended before the reply was complete. The text so far is kept.",
    "failing": "out of memory",
    "refusing": "expected top_p above 0, got 0; use a share",
}


@browser_test
def test_a_failed_reply_says_why(fake, open_page):
    page = open_page(f"{fake.url}#completion")
    is_ready(page)
    for fake.mood, message in FAILURES.items():
        page.keyboard.press("Control+Enter")
        page.locator("#notice", has_text=message).wait_for()
        wait_for_end(page)
        kept = "".join(text for text, _ in origins(page, "#completion-output"))
        assert kept == ("" if fake.mood == "refusing" else "".join(text for text, _ in ANSWER[:4]))
    page.click("#tab-chat")
    page.fill("#chat-prompt", "Hello")
    page.press("#chat-prompt", "Enter")
    page.wait_for_selector("#notice:not([hidden])")
    wait_for_end(page, "chat")
    assert page.input_value("#chat-prompt") == "Hello"  # a refused message returns to its box
    assert page.locator(".message, #conversation-list li").count() == 0


@browser_test
def test_the_api_key_is_asked_for_sent_and_not_stored(fake, open_page):
    fake.api_key = "secret-key"
    page = open_page(f"{fake.url}#completion")
    page.wait_for_selector('#server[data-state="locked"]')
    page.fill("#key", "secret-key")
    page.press("#key", "Tab")
    is_ready(page)
    page.keyboard.press("Control+Enter")
    wait_for_end(page)
    assert origins(page, "#completion-output") == joined_answer()
    stored = page.evaluate(
        "JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie, location.href])"
    )
    assert "secret-key" not in stored
    fake.api_key = "new-key"
    page.keyboard.press("Control+Enter")
    page.wait_for_selector("#notice:not([hidden])")
    assert text_of(page, "#notice") == "The server needs an API key. Enter it in the settings."
    wait_for_end(page)
    page.reload()
    page.wait_for_selector('#server[data-state="locked"]')
    assert page.input_value("#key") == ""


@browser_test
def test_choices_of_the_page_are_kept(fake, open_page):
    page = open_page(f"{fake.url}#completion", color_scheme="light")
    is_ready(page)
    background = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(background)
    page.click("#theme")
    dark = page.evaluate(background)
    assert dark != light
    page.click("#tab-chat")
    page.uncheck("#colours")
    reload(page)
    assert page.evaluate(background) == dark
    assert not page.is_checked("#colours")


@browser_test
@pytest.mark.parametrize("mode", ["completion", "chat", "race"])
def test_nothing_is_wider_than_a_phone(fake, open_page, mode):
    page = open_page(f"{fake.url}#{mode}", viewport={"width": 360, "height": 740}, has_touch=True)
    is_ready(page)
    if mode == "chat":
        wide = "wide" * 30
        fake.answer = [[f"{wide}\n\n`{wide}`\n\n| {wide} | {wide} |\n|-|-|\n\n```\n{wide}\n```", True]]
        page.fill("#chat-prompt", wide)
    page.click(f"[data-run={mode}]")
    wait_for_end(page, mode)
    if mode == "chat":
        page.wait_for_selector(".reply .code")
        assert page.evaluate(
            "(box => box.scrollWidth <= box.clientWidth)(document.getElementById('messages'))"
        )
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    label = page.locator(f"label[for={mode}-prompt]")
    assert label.evaluate("each => getComputedStyle(each).display") != "none"  # else it names nothing


# --- Chat ---


def chat_page(fake, open_page, **settings):
    page = open_page(f"{fake.url}#chat", **settings)
    is_ready(page)
    return page


def reload(page):
    page.reload()
    is_ready(page)


def marked(page, kind):
    """Texts that are coloured as of this origin in Markdown, joined."""
    return page.evaluate(
        """kind => [...CSS.highlights.get(kind)]
          .map((range) => range.startContainer.data.slice(range.startOffset, range.endOffset)).join('|')""",
        kind,
    )


MARKDOWN = [
    ["Use **", True],
    ["json", False],
    ["** to [read](https://a.example) `x`:\n\n```python\ndef f():\n", True],
    ["    pass", False],
    ["\n```\n", True],
]


@browser_test
@pytest.mark.parametrize("has_template", [True, False])
def test_chat_is_first_for_a_model_with_a_chat_template(fake, open_page, has_template):
    fake.has_chat_template = has_template
    page = open_page(fake.url)
    is_ready(page)
    assert page.locator("#chat").is_visible() == page.locator("#tab-chat").is_visible() == has_template
    page.click("#tab-completion")
    page.keyboard.press("ArrowLeft")
    assert page.locator("#chat" if has_template else "#race").is_visible()


@browser_test
def test_replies_are_markdown_coloured_by_origin(fake, open_page):
    fake.answer = MARKDOWN
    page = chat_page(fake, open_page, permissions=["clipboard-read", "clipboard-write"])
    say(page, "Hello")
    page.wait_for_selector(".reply .code .k")
    assert text_of(page, ".reply strong") == "json"
    assert page.get_attribute(".reply a", "href") == "https://a.example"
    assert marked(page, "sampled") == "json|    |pass"
    assert marked(page, "drafted").replace("|", "") == "Use  to read x:def f():"
    page.uncheck("#colours")
    assert marked(page, "drafted") == marked(page, "sampled") == ""
    page.check("#colours")
    page.check("#ghosts")
    assert "".join(text for text, _ in origins(page, ".reply")) == "".join(text for text, _ in MARKDOWN)
    page.uncheck("#ghosts")
    page.click("[data-copy-code]")
    page.get_by_text("Copied").first.wait_for()
    assert page.evaluate("navigator.clipboard.readText()") == "def f():\n    pass\n"
    # Pages of another machine without HTTPS have no `navigator.clipboard`.
    page.evaluate("window.kept = navigator.clipboard")
    page.evaluate("Object.defineProperty(navigator, 'clipboard', { value: undefined, configurable: true })")
    page.click(".from-user [data-action=copy]")
    page.wait_for_timeout(100)
    assert page.evaluate("kept.readText()") == "Hello"


@browser_test
def test_a_reply_is_text_while_markdown_cannot_be_rendered(fake, open_page):
    fake.answer = MARKDOWN
    page = chat_page(fake, open_page)
    page.route("**/playground/markdown", lambda route: route.abort())
    say(page, "Hello")
    page.wait_for_selector(".reply .plain")
    assert text_of(page, ".reply") == "".join(text for text, _ in MARKDOWN)


@browser_test
def test_a_reply_that_max_tokens_cut_off_goes_on(fake, open_page):
    fake.finish_reason = "length"
    page = chat_page(fake, open_page)
    say(page, "Sort a list.")
    assert "Cut off: max tokens reached." in text_of(page, ".from-assistant .ending")
    assert "97 tokens/s, 53 % drafted" in text_of(page, ".from-assistant .stats")
    fake.mood = "refusing"
    page.click("[data-action=continue]")
    page.wait_for_selector("#notice:not([hidden])")
    assert "Cut off: max tokens reached." in text_of(page, ".from-assistant .ending")
    fake.mood, fake.finish_reason = "ready", "stop"
    page.click("[data-action=continue]")
    wait_for_end(page, "chat")
    body = fake.bodies[-1]
    assert body["messages"] == [
        {"role": "user", "content": "Sort a list."},
        {"role": "assistant", "content": TEXT},
    ]
    assert (body["continue_final_message"], body["add_generation_prompt"]) == (True, False)
    assert page.locator(".message").count() == 2
    assert page.locator(".ending").count() == 0
    fake.finish_reason = "context"
    say(page, "Thanks.")
    assert fake.bodies[-1]["messages"][1]["content"] == TEXT + TEXT
    assert "continue_final_message" not in fake.bodies[-1]
    assert text_of(page, ".ending") == "Cut off: the context is full."
    assert page.locator("[data-action=continue]").count() == 0


@browser_test
def test_enter_sends_and_shift_enter_does_not(fake, open_page):
    page = chat_page(fake, open_page)
    page.fill("#chat-prompt", "one")
    page.press("#chat-prompt", "Shift+Enter")
    page.keyboard.type("two")
    page.evaluate(
        """() => document.getElementById('chat-prompt').dispatchEvent(
          new KeyboardEvent('keydown', { key: 'Enter', isComposing: true, bubbles: true, cancelable: true }))"""
    )
    assert fake.bodies == []
    page.press("#chat-prompt", "Enter")
    wait_for_end(page, "chat")
    assert fake.bodies[0]["messages"] == [{"role": "user", "content": "one\ntwo"}]
    assert page.input_value("#chat-prompt") == ""


@browser_test
def test_a_stopped_reply_is_kept_and_says_so(fake, open_page):
    fake.seconds_per_chunk = 0.2
    page = chat_page(fake, open_page)
    page.fill("#chat-prompt", "Sort a list.")
    page.press("#chat-prompt", "Enter")
    page.wait_for_selector(".reply.running > *")
    page.click("#chat [data-stop]")
    wait_for_end(page, "chat")
    assert text_of(page, ".ending").startswith("Stopped.")
    assert page.locator("#chat [data-stop]").is_hidden()
    fake.seconds_per_chunk = 0
    say(page, "Go on.")
    kept = fake.bodies[-1]["messages"][1]["content"]
    assert kept
    assert TEXT.startswith(kept)


@browser_test
def test_the_last_reply_is_generated_again(fake, open_page):
    page = chat_page(fake, open_page)
    say(page, "Sort a list.")
    fake.answer = [["Another.", False]]
    page.click("[data-action=regenerate]")
    wait_for_end(page, "chat")
    assert fake.bodies[1]["messages"] == fake.bodies[0]["messages"]
    page.get_by_text("Another.").wait_for()
    assert page.locator(".message").count() == 2
    fake.mood = "refusing"
    page.click("[data-action=regenerate]")
    page.wait_for_selector("#notice:not([hidden])")
    wait_for_end(page, "chat")
    assert text_of(page, ".reply") == "Another."  # the reply before stays


@browser_test
def test_an_edited_message_replaces_what_follows(fake, open_page):
    page = chat_page(fake, open_page)
    for message in ("One.", "Two.", "Three."):
        say(page, message)
    page.locator("[data-action=edit]").nth(1).click()
    box = page.get_by_label("Message", exact=True).first
    assert box.input_value() == "Two."
    box.fill("2.")
    box.press("Enter")
    wait_for_end(page, "chat")
    assert [each["content"] for each in fake.bodies[-1]["messages"]] == ["One.", TEXT, "2."]
    assert page.locator(".said").all_inner_texts() == ["One.", "2."]
    page.locator("[data-action=edit]").first.click()
    page.keyboard.press("Escape")
    assert page.locator(".said").all_inner_texts() == ["One.", "2."]
    assert len(fake.bodies) == 4


@browser_test
def test_conversations_survive_a_reload_and_can_be_deleted(fake, open_page):
    page = chat_page(fake, open_page)
    page.on("dialog", lambda dialog: dialog.accept())
    say(page, "First.")
    page.click("#new-chat")
    say(page, "Second.")
    reload(page)
    titles = page.locator("#conversation-list .title")
    assert titles.all_inner_texts() == ["Second.", "First."]
    assert page.locator("[aria-current=true]").inner_text() == "Second."
    titles.nth(1).click()
    assert text_of(page, ".said") == "First."
    page.wait_for_selector(".reply > *")
    assert marked(page, "drafted") != ""
    page.get_by_label("Delete conversation: First.").click()
    assert page.locator(".message").count() == 0
    reload(page)
    assert titles.all_inner_texts() == ["Second."]


@browser_test
def test_a_reload_during_a_reply_keeps_what_came(fake, open_page):
    fake.seconds_per_chunk = 0.2
    page = chat_page(fake, open_page)
    page.fill("#chat-prompt", "Sort a list.")
    page.press("#chat-prompt", "Enter")
    assert page.locator("#conversation-list .title").all_inner_texts() == ["Sort a list."]
    page.wait_for_selector(".reply.running > *")
    reload(page)
    assert text_of(page, ".said") == "Sort a list."
    assert page.locator(".ending [data-action=continue]").is_visible()
    page.wait_for_selector(".reply > *")


FILL_STORAGE = """() => {
  for (let size = 2 ** 22; size > 1000; size /= 2) {
    try {
      for (let place = 0; ; place += 1) localStorage.setItem(`other-${size}-${place}`, 'x'.repeat(size));
    } catch { /* no room for this size */ }
  }
}"""


@browser_test
def test_a_conversation_takes_the_room_of_the_oldest_one(fake, open_page):
    page = chat_page(fake, open_page)
    fake.answer = [["first " * 10_000, True]]
    say(page, "First.")
    page.evaluate(FILL_STORAGE)
    page.click("#new-chat")
    fake.answer = [["second " * 5_000, True]]
    say(page, "Second.")
    assert page.locator("#notice").is_hidden()
    reload(page)
    assert page.locator("#conversation-list .title").all_inner_texts() == ["Second."]


@browser_test
@pytest.mark.parametrize("stored", ["{", '{"id": "x", "messages": [{"role": "user"}]}'])
def test_what_another_version_stored_does_no_harm(fake, open_page, stored):
    page = chat_page(fake, open_page)
    page.evaluate("text => localStorage.setItem('secondguess-conversation-x', text)", stored)
    page.evaluate("text => localStorage.setItem('secondguess-settings', text)", stored)
    reload(page)
    assert page.locator("#conversation-list li").count() == 0
    say(page, "Hello")
    assert len(fake.bodies) == 1


@browser_test
def test_empty_settings_are_not_sent_and_show_the_models_own(fake, open_page):
    page = chat_page(fake, open_page)
    assert page.get_attribute("#temperature", "placeholder") == "0.7"
    assert page.get_attribute("#top-p", "placeholder") == "0.8"
    page.fill("#system", "Be brief.")
    page.press("#system", "Tab")
    say(page, "Hello")
    assert fake.bodies[0].keys() == {
        "model",
        "messages",
        "stream",
        "stream_options",
        "report",
        "speculation",
    }
    assert fake.bodies[0]["messages"][0] == {"role": "system", "content": "Be brief."}
    reload(page)
    assert page.input_value("#system") == "Be brief."


PICTURE = b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


@browser_test
def test_images_are_sent_to_a_model_that_takes_them(fake, open_page):
    page = chat_page(fake, open_page)
    assert page.locator("#attach").is_hidden()
    fake.takes_images = True
    reload(page)
    file = {"name": "picture.png", "mimeType": "image/png", "buffer": PICTURE}
    page.click("#attach")
    page.set_input_files("#image-files", [file, file])
    page.get_by_label("Remove image 2").click()
    say(page, "Describe it.")
    url = "data:image/png;base64," + b64encode(PICTURE).decode()
    assert fake.bodies[0]["messages"] == [
        {
            "role": "user",
            "content": [
                {"type": "image_url", "image_url": {"url": url}},
                {"type": "text", "text": "Describe it."},
            ],
        }
    ]
    assert page.locator("#images").is_hidden()
    reload(page)
    assert page.get_attribute(".from-user img", "src") == url


@browser_test
def test_calls_of_tools_are_shown_and_answered_in_order(fake, open_page):
    fake.calls = [("weather", '{"city": "Paris"}'), ("time", "{}")]
    page = chat_page(fake, open_page)
    page.fill("#tools", "[{")
    page.fill("#chat-prompt", "Is it warm?")
    page.press("#chat-prompt", "Enter")
    assert page.evaluate("document.activeElement.id") == "tools"
    assert fake.bodies == []
    tools = [{"type": "function", "function": {"name": name}} for name, _ in fake.calls]
    page.fill("#tools", json.dumps(tools))
    say(page, "Is it warm?")
    assert fake.bodies[0]["tools"] == tools
    assert text_of(page, ".calls pre") == 'weather({"city": "Paris"})\ntime({})'
    reload(page)  # with the calls and the tools
    page.get_by_label("Result of weather").fill("21")
    page.keyboard.press("Enter")
    page.get_by_label("Result of time").fill("noon")
    page.keyboard.press("Enter")
    page.wait_for_selector(".reply :text('pivot')")
    wait_for_end(page, "chat")
    calls = [
        {"id": f"call-{index}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for index, (name, arguments) in enumerate(fake.calls)
    ]
    assert len(fake.bodies) == 2
    assert fake.bodies[1]["tools"] == tools
    assert fake.bodies[1]["messages"][1:] == [
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "call-0", "content": "21"},
        {"role": "tool", "tool_call_id": "call-1", "content": "noon"},
    ]
    assert page.locator(".message > h2").all_text_contents() == [
        "You", "Model", "Result of weather", "Result of time", "Model",
    ]  # fmt: skip
    assert page.get_by_label("Message", exact=True).is_visible()


@browser_test
def test_a_schema_is_sent_with_chats_alone(fake, open_page):
    page = chat_page(fake, open_page)
    page.fill("#schema", '{"type": "array"}')
    say(page, "Name three rivers.")
    assert fake.bodies[0]["response_format"] == {
        "type": "json_schema",
        "json_schema": {"name": "reply", "schema": {"type": "array"}},
    }
    page.fill("#schema", "no JSON")
    page.click("#tab-completion")
    page.click("[data-run=completion]")
    wait_for_end(page)
    assert "response_format" not in fake.bodies[1]


@browser_test
def test_reasoning_is_apart_from_the_reply_and_not_sent_again(fake, open_page):
    fake.reasoning = "I think."
    page = chat_page(fake, open_page)
    say(page, "Hello")
    assert text_of(page, ".reasoning summary").startswith("Reasoning")
    page.click(".reasoning summary")
    assert text_of(page, ".reasoning p") == "I think."
    say(page, "More.")
    assert fake.bodies[1]["messages"][1] == {"role": "assistant", "content": TEXT}


# --- The API itself ---


@pytest.fixture(scope="module")
def real_url() -> Iterator[str]:
    """Address of the API with the built-in pair."""
    app = pytest.importorskip("secondguess.server.app", reason="the API is not part of this package")
    import secondguess
    from secondguess.engine import Engine

    # The default controller decides by measured times and may draft nothing, which the screenshots may show.
    engine = Engine(
        secondguess.load(SCREENSHOTS_MODEL) if SCREENSHOTS else secondguess.load(controller="fixed:4")
    )
    try:
        with serve(app.create_app(engine)) as port:
            yield f"http://127.0.0.1:{port}"
    finally:
        engine.close()


@browser_test
def test_a_completion_of_the_api(real_url, open_page):
    page = open_page(f"{real_url}#completion")
    is_ready(page)
    page.fill("#max-tokens", "48")
    page.keyboard.press("Control+Enter")
    wait_for_end(page)
    assert page.locator("#notice").is_hidden(), text_of(page, "#notice")
    kinds = {drafted for _, drafted in origins(page, "#completion-output")}
    assert kinds == {True, False}
    assert text_of(page, "#status") == "Finished: 48 tokens, max tokens reached."
    assert text_of(page, "#gauge-share-unit") == "of 48 tokens"
    for gauge in ("speed", "share", "pass", "acceptance"):
        assert re.match(r"[\d.]+", text_of(page, f"#gauge-{gauge}"))
    assert page.locator("#positions-bars li").count() > 0


@browser_test
def test_a_chat_with_the_api(real_url, open_page):
    page = open_page(f"{real_url}#chat")
    is_ready(page)
    page.fill("#max-tokens", "24")
    for message in ("sort a list", "now in reverse"):
        page.fill("#chat-prompt", message)
        page.keyboard.press("Control+Enter")
        wait_for_end(page, "chat")
        assert page.locator("#notice").is_hidden(), text_of(page, "#notice")
    assert page.locator(".reply").count() == 2
    page.check("#ghosts")
    assert all(page.locator(".reply").all_text_contents())


@browser_test
@pytest.mark.parametrize("temperature", ["0", "0.8"])
def test_a_race_of_the_api_writes_the_same_text_twice(real_url, open_page, temperature):
    page = open_page(f"{real_url}#race")
    is_ready(page)
    page.fill("#max-tokens", "64")
    page.fill("#temperature", temperature)
    page.click("[data-run=race]")
    wait_for_end(page, "race")
    texts = [
        "".join(part for part, _ in origins(page, f"#lane-{lane} .output"))
        for lane in ("plain", "speculative")
    ]
    assert texts[0] == texts[1] != ""
    assert "tokens/s" in text_of(page, "#lane-plain .detail")
    assert "drafts accepted" in text_of(page, "#lane-speculative .detail")
    assert re.match(
        r"Speculative decoding had [\d.]+\W the speed of plain decoding: ", text_of(page, "#verdict")
    )


@browser_test
@pytest.mark.skipif(
    not SCREENSHOTS, reason="writes the screenshots of the documentation: set SECONDGUESS_SCREENSHOTS"
)
def test_screenshots_for_the_documentation(real_url, open_page):
    def open_mode(mode: str, **settings: Any) -> Any:
        page = open_page(f"{real_url}#{mode}", **({"color_scheme": "light"} | settings))
        is_ready(page)
        page.set_default_timeout(120_000)
        page.evaluate("document.getElementById('temperature').value = '0'")
        return page

    page = open_mode("chat", viewport={"width": 1120, "height": 760})
    page.fill("#max-tokens", "150")
    say(page, "Show a short class for a stack in Python, then list its methods.")
    page.wait_for_timeout(1000)  # for the last rendering
    page.evaluate("document.getElementById('messages').scrollTo(0, 0)")
    screenshot(page, "chat")

    page = open_mode("completion")
    page.fill("#max-tokens", "128")
    page.check("#ghosts")
    page.keyboard.press("Control+Enter")
    wait_for_end(page)
    screenshot(page, "completion", full_page=True)

    page = open_mode("race", viewport={"width": 1120, "height": 760})
    page.click("[data-run=race]")
    # Not `wait_for_function`, which the page's policy refuses.
    while page.evaluate("document.querySelector('#lane-speculative progress').value") < 0.6:
        pass
    screenshot(page, "race")
    page.keyboard.press("Escape")

    page = open_mode("chat", color_scheme="dark", viewport={"width": 1120, "height": 760})
    page.uncheck("#colours")
    page.fill("#max-tokens", "110")
    say(page, "Show a function that reads a JSON file in Python.")
    page.wait_for_timeout(1000)
    screenshot(page, "dark")

    page = open_mode("chat", viewport={"width": 390, "height": 844}, device_scale_factor=1.5)
    page.evaluate("document.getElementById('max-tokens').value = '100'")
    say(page, "Name three uses of a queue in programs, as a list.")
    page.wait_for_timeout(1000)
    screenshot(page, "phone")

    page = open_mode("completion")
    page.keyboard.press("Control+Enter")
    page.wait_for_selector("#completion-output .drafted")
    page.keyboard.press("Escape")
    wait_for_end(page)
    page.route("**/*", lambda route: route.abort())
    page.click("[data-run=completion]")
    page.wait_for_selector('#server[data-state="gone"]')
    page.evaluate("scrollTo(0, 0)")
    screenshot(page, "no-server")
