"""The playground in headless Chromium: against an application that speaks the API's events, and against the API itself.

`SECONDGUESS_SCREENSHOTS=docs` writes the screenshots of the documentation to that folder.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the playground is served with FastAPI")
pytest.importorskip("uvicorn", reason="the playground is served with uvicorn")

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse
from starlette.testclient import TestClient

from secondguess.server.playground import CONTENT_TYPES, PATHS, playground_routes

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = ("--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync")
SCREENSHOTS = os.environ.get("SECONDGUESS_SCREENSHOTS")
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
    assert reply.headers["content-type"] == f"{CONTENT_TYPES[name]}; charset=utf-8"
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
    assert sorted(named) == ["playground/playground.css", "playground/playground.js"]
    for path in named:
        assert files_client.get(f"/{path}").status_code == 200
    # Namespaces of XML are names, not addresses that are loaded.
    texts = [files_client.get(path).text.replace("http://www.w3.org/2000/svg", "") for path in PATHS]
    assert not re.search(r"https?://", "".join(texts))


def test_text_is_never_inserted_as_html(files_client):
    script = files_client.get("/playground/playground.js").text
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", script
    )


def test_every_id_of_the_script_is_in_the_page(files_client):
    page, script = files_client.get("/").text, files_client.get("/playground/playground.js").text
    ids = set(re.findall(r'id="([^"]+)"', page))
    assert set(re.findall(r"\$\('([^']+)'\)", script)) <= ids
    targets = re.findall(r'(?:for|aria-labelledby|aria-describedby|aria-controls)="([^"]+)"', page)
    assert set(targets) <= ids


def test_the_files_are_part_of_the_package():
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert '"server/playground/*.*"' in project


# --- A server that speaks the events of the API ---

REJECTED = " elements\n"
"""Draft that the third segment was sampled instead of."""
ANSWER: list[list[Any]] = [
    ["\n", False],
    ["    if len(items) <= 1:\n        return", True],
    [" items\n", False],
    ["    pivot = items", True],
    ["[0]\n", False],
    ["    smaller = [item for item in items[1:] if item", True],
    [" < pivot]\n", False],
    ["    larger = [item for item in items[1:] if item >= pivot]\n", True],
    ["    return quicksort(smaller) + [pivot]", True],
    [" + quicksort(larger)", False],
]
TEXT = "".join(part for part, _ in ANSWER)
NUM_TOKENS = 64
STATS = {
    "index": 0,
    "finish_reason": "length",
    "exactness": "lossless",
    "num_rounds": 30,
    "num_tokens": NUM_TOKENS,
    "num_drafted": 50,
    "num_accepted": 34,
    "acceptance_rate": 0.68,
    "acceptance_length": 64 / 30,
    "accepted_per_position": [20, 10, 4],
    "drafted_per_position": [26, 16, 8],
    "tokens_per_second": 97.3,
}


@dataclass
class FakeServer:
    """Application with the routes that the page calls; `mood` is the failure that it shows."""

    mood: str = "ready"
    seconds_per_chunk: float = 0.01
    api_key: str | None = None
    answer: list[list[Any]] = field(default_factory=lambda: ANSWER)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    num_disconnected: int = 0
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def app(self) -> FastAPI:
        app = FastAPI()
        app.include_router(playground_routes())
        app.add_api_route("/ready", self.ready)
        app.add_api_route("/metrics", self.metrics)
        app.add_api_route("/v1/models", self.models)
        for path in ("/v1/completions", "/v1/chat/completions"):
            app.add_api_route(path, self.generate, methods=["POST"])
        return app

    async def ready(self) -> Any:
        return self._draining() if self.mood == "draining" else {"status": "ready"}

    async def metrics(self) -> Any:
        lines = [
            f'vllm:num_requests_{name}{{model_name="tiny"}} {n}.0'
            for name, n in (("running", 0), ("waiting", 0))
        ]
        return PlainTextResponse("\n".join(lines))

    async def models(self, http: Request) -> Any:
        return self._refusal(http) or {"object": "list", "data": [{"id": "tiny", "max_model_len": 512}]}

    async def generate(self, http: Request) -> Any:
        body = await http.json()
        self.bodies.append(body)
        return self._refusal(http) or StreamingResponse(
            self._events(body, http), media_type="text/event-stream"
        )

    def _refusal(self, http: Request) -> JSONResponse | None:
        if self.api_key and http.headers.get("authorization") != f"Bearer {self.api_key}":
            return self._error(401, "expected an API key", "invalid_api_key")
        if http.method == "GET":
            return None
        if self.mood == "busy":
            return self._error(
                429, "expected fewer waiting samples", "rate_limit_exceeded", {"Retry-After": "1"}
            )
        if self.mood == "draining":
            return self._draining()
        if self.mood == "refusing":
            return self._error(400, "expected top_p above 0, got 0; use a share", "invalid_value")
        return None

    def _draining(self) -> JSONResponse:
        return self._error(503, "the server drains", "draining", {"Retry-After": "5"})

    @staticmethod
    def _error(status: int, message: str, code: str, headers: dict[str, str] | None = None) -> JSONResponse:
        error = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
        return JSONResponse({"error": error}, status, headers)

    async def _events(self, body: dict[str, Any], http: Request) -> AsyncIterator[bytes]:
        # Plain decoding has one token per pass: more and shorter chunks.
        segments = (
            self.answer
            if body["speculation"] != "off"
            else [[TEXT[at : at + 6], False] for at in range(0, len(TEXT), 6)]
        )
        key = "messages" in body
        try:
            for count, segment in enumerate(segments):
                await asyncio.sleep(self.seconds_per_chunk)
                origin = {"segments": [segment], "rejected": REJECTED if segment is ANSWER[2] else ""}
                choice = {"index": 0, "finish_reason": None, "secondguess": origin}
                choice |= {"delta": {"content": segment[0]}} if key else {"text": segment[0]}
                yield self._event({"choices": [choice], "usage": None})
                if count == 3 and self.mood == "cut":
                    return
                if count == 3 and self.mood == "failing":
                    yield self._event({"error": {"message": "out of memory", "code": "out_of_memory"}})
                    break
            else:
                yield self._event(
                    {
                        "choices": [{"index": 0, "finish_reason": "length", "text": "", "delta": {}}],
                        "usage": None,
                    }
                )
                usage = {"completion_tokens": min(NUM_TOKENS, body["max_tokens"])}
                yield self._event(
                    {"choices": [], "usage": usage, "secondguess": {"samples": [self._stats(body)]}}
                )
            yield b"data: [DONE]\n\n"
        except asyncio.CancelledError:
            self.num_disconnected += 1
            raise

    @staticmethod
    def _stats(body: dict[str, Any]) -> dict[str, Any]:
        plain = {"num_drafted": 0, "num_accepted": 0, "acceptance_rate": None, "acceptance_length": 1.0}
        plain |= {"drafted_per_position": [], "accepted_per_position": []}
        return STATS | (plain if body["speculation"] == "off" else {})

    @staticmethod
    def _event(value: dict[str, Any]) -> bytes:
        return b"data: " + json.dumps(value).encode() + b"\n\n"


@contextmanager
def serve(app: FastAPI, port: int = 0) -> Iterator[int]:
    """Serve an application on a thread; yields the port."""
    server = uvicorn.Server(
        uvicorn.Config(app, "127.0.0.1", port, log_level="error", timeout_graceful_shutdown=1)
    )
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        deadline = time.monotonic() + 30
        while not server.started and time.monotonic() < deadline:
            time.sleep(0.01)
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        thread.join()


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
def test_a_completion_is_coloured_by_origin_and_ends_with_the_servers_numbers(fake, open_page):
    page = open_page(fake.url)
    is_ready(page)
    assert text_of(page, "#model") == "tiny, context 512"
    page.click("[data-run=completion]")
    wait_for_end(page)
    assert origins(page, "#completion-output") == joined_answer()
    assert text_of(page, "#gauge-speed") == "97"
    assert text_of(page, "#gauge-share") == "53 %"  # 34 of 64 tokens
    assert text_of(page, "#gauge-pass") == "2.13"
    assert text_of(page, "#gauge-acceptance") == "68 %"
    assert page.locator("#positions-bars li").all_inner_texts() == ["1\n77 %", "2\n63 %", "3\n50 %"]
    assert text_of(page, "#status") == "Finished: 64 tokens, max tokens reached."


@browser_test
def test_rejected_drafts_are_ghosts_before_the_token_in_their_place(fake, open_page):
    page = open_page(fake.url)
    is_ready(page)
    page.click("[data-run=completion]")
    wait_for_end(page)
    ghost = page.locator("#completion-output .rejected")
    assert ghost.all_text_contents() == [REJECTED.replace("\n", "⏎")]
    assert ghost.evaluate("each => [each.nextSibling.textContent, each.ariaHidden]") == [ANSWER[2][0], "true"]
    assert origins(page, "#completion-output") == joined_answer()
    page.uncheck("#ghosts")
    assert not ghost.is_visible()
    page.click("#tab-chat")
    page.check("#ghosts")
    page.fill("#chat-prompt", "Sort a list.")
    page.click("[data-run=chat]")
    wait_for_end(page, "chat")
    page.fill("#chat-prompt", "Shorter.")
    page.click("[data-run=chat]")
    wait_for_end(page, "chat")
    assert page.locator("#messages .rejected").count() == 2
    assert fake.bodies[-1]["messages"][1] == {"role": "assistant", "content": TEXT}  # without the ghost


@browser_test
def test_settings_are_sent_under_the_names_of_the_api(fake, open_page):
    page = open_page(fake.url)
    is_ready(page)
    for name, value in {
        "temperature": "0.7",
        "top-p": "0.9",
        "max-tokens": "32",
        "seed": "5",
        "stop": "END\n\\n\\n\n",
    }.items():
        page.fill(f"#{name}", value)
    page.select_option("#speculation", "bounded")
    page.fill("#max-draft", "3")
    page.fill("#completion-prompt", "x = ")
    page.press("#completion-prompt", "Control+Enter")
    wait_for_end(page)
    assert fake.bodies == [
        {
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
            "speculation": {"max_draft": 3},
        }
    ]


@browser_test
def test_an_invalid_setting_is_not_sent(fake, open_page):
    page = open_page(fake.url)
    is_ready(page)
    page.fill("#temperature", "-1")
    page.keyboard.press("Control+Enter")
    wait_for_end(page)
    assert fake.bodies == []
    assert page.evaluate("document.activeElement.id") == "temperature"


@browser_test
def test_a_chat_sends_the_whole_conversation(fake, open_page):
    page = open_page(f"{fake.url}#chat")
    is_ready(page)
    for message in ("Sort a list.", "Shorter."):
        page.fill("#chat-prompt", message)
        page.keyboard.press("Control+Enter")
        wait_for_end(page, "chat")
    assert [each["role"] for each in fake.bodies[1]["messages"]] == ["user", "assistant", "user"]
    assert fake.bodies[1]["messages"][1]["content"] == TEXT
    assert page.locator(".message").count() == 4
    assert origins(page, ".message:last-child .reply") == joined_answer()
    page.click("#new-chat")
    page.fill("#chat-prompt", "Again.")
    page.keyboard.press("Control+Enter")
    wait_for_end(page, "chat")
    assert [each["content"] for each in fake.bodies[2]["messages"]] == ["Again."]


@browser_test
def test_a_new_conversation_during_a_reply_begins_empty(fake, open_page):
    fake.seconds_per_chunk = 0.2
    page = open_page(f"{fake.url}#chat")
    is_ready(page)
    page.fill("#chat-prompt", "Old.")
    page.keyboard.press("Control+Enter")
    page.wait_for_selector(".reply .drafted")
    page.click("#new-chat")
    wait_for_end(page, "chat")
    fake.seconds_per_chunk = 0
    page.fill("#chat-prompt", "New.")
    page.keyboard.press("Control+Enter")
    wait_for_end(page, "chat")
    assert [each["content"] for each in fake.bodies[-1]["messages"]] == ["New."]


@browser_test
def test_an_empty_maximum_draft_length_is_that_of_the_page(fake, open_page):
    page = open_page(fake.url)
    is_ready(page)
    page.select_option("#speculation", "bounded")
    page.fill("#max-draft", "")
    page.keyboard.press("Control+Enter")
    wait_for_end(page)
    assert fake.bodies[-1]["speculation"] == {"max_draft": 4}


@browser_test
def test_markup_in_prompts_and_replies_is_shown_as_text(fake, open_page):
    markup = "<img src=x onerror=\"document.title='injected'\"><b>&amp;</b>"
    fake.answer = [[markup, True]]
    page = open_page(f"{fake.url}#chat")
    is_ready(page)
    page.fill("#chat-prompt", markup)
    page.keyboard.press("Control+Enter")
    wait_for_end(page, "chat")
    assert text_of(page, ".said") == text_of(page, ".reply") == markup
    assert page.locator(".messages img, .messages b").count() == 0
    assert page.title() == "secondguess playground"


@browser_test
def test_escape_stops_the_request_and_keeps_the_text(fake, open_page):
    fake.seconds_per_chunk = 0.2
    page = open_page(fake.url)
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
def test_a_race_runs_both_sides_alone_and_compares_them(fake, open_page):
    fake.seconds_per_chunk = 0.02
    page = open_page(f"{fake.url}#race")
    is_ready(page)
    page.fill("#temperature", "0.8")
    page.click("[data-run=race]")
    page.wait_for_selector("#lane-speculative .drafted")
    wait_for_end(page, "race")
    warm_up, plain, speculative = fake.bodies
    assert (warm_up["max_tokens"], warm_up["speculation"], plain["speculation"]) == (1, "off", "off")
    assert speculative == plain | {"speculation": "auto"}
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
def test_a_busy_server_is_asked_again(fake, open_page):
    fake.mood = "busy"
    page = open_page(fake.url)
    is_ready(page)
    page.keyboard.press("Control+Enter")
    page.wait_for_selector("#notice:not([hidden])")
    assert text_of(page, "#notice") == "The server is busy. Trying again in 1 s; Esc cancels."
    assert text_of(page, "#server") == "Busy"
    fake.mood = "ready"
    wait_for_end(page)
    assert page.locator("#notice").is_hidden()
    assert origins(page, "#completion-output") == joined_answer()


@browser_test
def test_a_draining_server_is_named(fake, open_page):
    fake.mood = "draining"
    page = open_page(fake.url)
    page.wait_for_selector('#server[data-state="draining"]')
    page.keyboard.press("Control+Enter")
    page.wait_for_selector("#notice:not([hidden])")
    assert text_of(page, "#notice").startswith("The server is shutting down")
    fake.mood = "ready"
    is_ready(page)
    assert page.locator("#notice").is_hidden()


@browser_test
def test_a_server_that_is_gone_is_named_and_found_again(open_page):
    fake = FakeServer()
    with serve(fake.app()) as fake.port:
        page = open_page(fake.url)
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


@browser_test
@pytest.mark.parametrize(
    ("mood", "message"),
    [
        ("cut", "The connection ended before the reply was complete. The text so far is kept."),
        ("failing", "out of memory"),
        ("refusing", "expected top_p above 0, got 0; use a share"),
    ],
)
def test_a_failed_reply_says_why(fake, open_page, mood, message):
    fake.mood = mood
    page = open_page(fake.url)
    is_ready(page)
    page.keyboard.press("Control+Enter")
    page.wait_for_selector("#notice:not([hidden])")
    wait_for_end(page)
    assert text_of(page, "#notice") == message
    kept = "".join(text for text, _ in origins(page, "#completion-output"))
    assert kept == ("" if mood == "refusing" else "".join(text for text, _ in ANSWER[:4]))


@browser_test
def test_a_refused_message_returns_to_its_box(fake, open_page):
    fake.mood = "refusing"
    page = open_page(f"{fake.url}#chat")
    is_ready(page)
    page.fill("#chat-prompt", "Hello")
    page.keyboard.press("Control+Enter")
    page.wait_for_selector("#notice:not([hidden])")
    wait_for_end(page, "chat")
    assert page.input_value("#chat-prompt") == "Hello"
    assert page.locator(".message").count() == 0


@browser_test
def test_the_api_key_is_sent_and_not_stored(fake, open_page):
    fake.api_key = "secret-key"
    page = open_page(fake.url)
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
    page.reload()
    page.wait_for_selector('#server[data-state="locked"]')
    assert page.input_value("#key") == ""


@browser_test
def test_a_key_that_is_no_longer_valid_is_asked_for(fake, open_page):
    page = open_page(fake.url)
    is_ready(page)
    fake.api_key = "new-key"
    page.keyboard.press("Control+Enter")
    page.wait_for_selector("#notice:not([hidden])")
    wait_for_end(page)
    page.wait_for_timeout(300)  # the state of the server is asked for after each run
    assert text_of(page, "#notice") == "The server needs an API key. Enter it in the settings."
    page.fill("#key", "new-key")
    page.press("#key", "Tab")
    is_ready(page)
    assert page.locator("#notice").is_hidden()


@browser_test
def test_tabs_follow_the_arrow_keys(fake, open_page):
    page = open_page(fake.url)
    is_ready(page)
    page.focus("#tab-completion")
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.id") == "tab-chat"
    assert page.locator("#chat").is_visible()
    assert page.locator("#completion").is_hidden()
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    assert page.locator("#race").is_visible()


@browser_test
def test_the_chosen_theme_is_kept(fake, open_page):
    page = open_page(fake.url, color_scheme="light")
    background = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(background)
    page.click("#theme")
    dark = page.evaluate(background)
    assert dark != light
    page.reload()
    assert page.evaluate(background) == dark
    assert text_of(page, "#theme") == "Light colours"


@browser_test
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_have_contrast(fake, open_page, scheme):
    """WCAG 2 AA: 4.5 to 1 for every text, against the background that it stands on."""
    fake.mood = "refusing"
    page = open_page(fake.url, color_scheme=scheme)
    is_ready(page)
    page.keyboard.press("Control+Enter")
    page.wait_for_selector("#notice:not([hidden])")
    wait_for_end(page)
    fake.mood = "ready"
    selectors = "#notice, label, small, .hint, .model, .server, .legend span, .gauges dd, .gauges dt, .tabs button, .primary"
    low = page.evaluate(CONTRAST, selectors)
    assert low == []


CONTRAST = """selectors => {
  const canvas = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
  const channels = (color) => {
    canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = color; canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const luminance = (color) => {
    const [r, g, b] = channels(color).map((c) => c / 255).map((c) => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (element) => {
    const color = getComputedStyle(element).backgroundColor;
    return channels(color)[3] === 255 ? color : behind(element.parentElement);
  };
  return [...document.querySelectorAll(selectors)].filter((each) => each.offsetParent).map((each) => {
    const pair = [luminance(getComputedStyle(each).color), luminance(behind(each))].sort((a, b) => b - a);
    return [each.id || each.className || each.tagName, (pair[0] + 0.05) / (pair[1] + 0.05)];
  }).filter(([, ratio]) => ratio < 4.5);
}"""


@browser_test
@pytest.mark.parametrize("mode", ["completion", "chat", "race"])
def test_nothing_is_wider_than_a_phone(fake, open_page, mode):
    page = open_page(f"{fake.url}#{mode}", viewport={"width": 360, "height": 740}, has_touch=True)
    is_ready(page)
    if mode == "chat":
        page.fill("#chat-prompt", "Sort a list of numbers.")
    page.click(f"[data-run={mode}]")
    wait_for_end(page, mode)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360


# --- The API itself ---


@pytest.fixture(scope="module")
def real_url() -> Iterator[str]:
    """Address of the API with the built-in pair."""
    app = pytest.importorskip("secondguess.server.app", reason="the API is not part of this package")
    import secondguess
    from secondguess.engine import Engine

    # The default controller decides by measured times and may draft nothing, which the screenshots may show.
    engine = Engine(secondguess.load(controller=None if SCREENSHOTS else "fixed:4"))
    try:
        with serve(app.create_app(engine)) as port:
            yield f"http://127.0.0.1:{port}"
    finally:
        engine.close()


@browser_test
def test_a_completion_of_the_api(real_url, open_page):
    page = open_page(real_url)
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
def test_a_limited_draft_of_the_api(real_url, open_page):
    page = open_page(real_url)
    is_ready(page)
    page.fill("#max-tokens", "48")
    page.select_option("#speculation", "bounded")
    page.fill("#max-draft", "2")
    page.keyboard.press("Control+Enter")
    wait_for_end(page)
    assert page.locator("#notice").is_hidden(), text_of(page, "#notice")
    assert page.locator("#positions-bars li").count() <= 2


@browser_test
@pytest.mark.skipif(
    not SCREENSHOTS, reason="writes the screenshots of the documentation: set SECONDGUESS_SCREENSHOTS"
)
def test_screenshots_for_the_documentation(real_url, open_page):
    page = open_page(real_url, color_scheme="light")
    is_ready(page)
    screenshot(page, "idle")
    page.keyboard.press("Control+Enter")
    wait_for_end(page)
    screenshot(page, "completion", full_page=True)

    page = open_page(f"{real_url}#race", color_scheme="light")
    is_ready(page)
    page.fill("#max-tokens", "240")
    page.click("[data-run=race]")
    # Not `wait_for_function`, which the page's policy refuses.
    while page.evaluate("document.querySelector('#lane-speculative progress').value") < 0.2:
        pass
    screenshot(page, "race", full_page=True)
    page.keyboard.press("Escape")

    page = open_page(f"{real_url}#chat", color_scheme="dark")
    is_ready(page)
    page.fill("#max-tokens", "96")
    page.fill("#chat-prompt", "return the first n prime numbers")
    page.keyboard.press("Control+Enter")
    wait_for_end(page, "chat")
    screenshot(page, "dark", full_page=True)

    page = open_page(
        real_url, color_scheme="light", viewport={"width": 390, "height": 844}, device_scale_factor=2
    )
    is_ready(page)
    page.click("[data-run=completion]")
    wait_for_end(page)
    page.evaluate("scrollTo(0, 0)")
    screenshot(page, "phone")

    page = open_page(real_url, color_scheme="light")
    is_ready(page)
    page.keyboard.press("Control+Enter")
    wait_for_end(page)
    page.route("**/*", lambda route: route.abort())
    page.click("[data-run=completion]")
    page.wait_for_selector('#server[data-state="gone"]')
    page.evaluate("scrollTo(0, 0)")
    screenshot(page, "no-server")
