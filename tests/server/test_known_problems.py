"""The table of known problems in docs/server.md: fifteen rows, each with an answer, a test and a figure."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import pytest
from test_prompt_limits import TEXT

from conftest import serving
from secondguess import load
from secondguess.engine import Engine

BODY = {"model": "builtin", "prompt": "def f(x):\n", "temperature": 0, "max_tokens": 60}
MOST_GROWTH = 60
"""In MB. Tokenizing one prompt of 1 MB took 110 MB."""
ROOT = Path(__file__).parents[2]
HOSTILE = (
    {"json": {"anyOf": [{"const": "x" * length} for length in range(1, 300)]}},
    {"json": {"type": "array", "minItems": 100_000, "items": {"type": "integer"}}},
    {"regex": "((a{0,100}){0,100}){0,100}"},
    {"regex": "(a?){2000}a{2000}"},
    {"grammar": "start: start start | "},
)


def rows():
    """Return the cells of each row of the table by its number."""
    page = (ROOT / "docs/server.md").read_text(encoding="utf-8")
    table = page.partition("## Known problems of servers")[2]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    return {int(number): rest for number, *rest in cells if number.isdecimal()}


def test_the_table_has_every_row():
    assert list(rows()) == list(range(1, 16))


@pytest.mark.parametrize("number", range(1, 16))
def test_a_row_names_a_test_that_exists_and_a_figure(number):
    problem, answer, test, figure = rows()[number]
    assert problem
    assert answer
    assert figure
    (path,) = re.findall(r"`([\w/]+\.py)`", test)
    source = (ROOT / "tests" / path).read_text(encoding="utf-8")
    assert re.search(rf"^def test_row_{number:02d}_", source, re.MULTILINE)


@pytest.fixture(scope="module")
def http():
    engine = Engine(load())
    with serving(engine) as url, httpx2.Client(base_url=url, timeout=120, verify=False) as http:
        yield http
    engine.close()


def post(http, **fields):
    return http.post("/v1/completions", json={**BODY, **fields})


def test_row_05_hostile_grammars_do_not_stop_a_stream(http):
    expected = post(http).json()["choices"][0]["text"]
    with http.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as stream:
        lines = stream.iter_lines()
        read = [next(lines)]
        for outputs in HOSTILE:
            assert post(http, max_tokens=4, structured_outputs=outputs).status_code in (200, 400)
            read.append(next(lines))
        read += lines
    events = [json.loads(line.removeprefix("data: ")) for line in read if line.startswith("data: {")]
    assert "".join(event["choices"][0]["text"] for event in events) == expected


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc to read resident memory")
def test_row_08_memory_does_not_grow_with_requests_or_long_prompts(http):
    def resident_megabytes():
        (line,) = re.findall(r"VmRSS:\s+(\d+)", Path("/proc/self/status").read_text())
        return int(line) / 1024

    def send_many():
        with ThreadPoolExecutor(8) as clients:
            list(clients.map(lambda seed: post(http, seed=seed, temperature=1.0), range(40)))

    send_many()
    before = resident_megabytes()
    for _ in range(3):
        assert post(http, prompt=TEXT).status_code == 400
    send_many()
    assert resident_megabytes() - before < MOST_GROWTH
