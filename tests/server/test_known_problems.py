"""The table of known problems in docs/server-measured.md: fifteen rows, each with an answer, a test and a figure."""

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


TESTS = {
    1: "test_the_loss_over_any_stretch_is_within_the_bound",
    2: "test_samples_over_http_follow_the_exact_distribution",
    3: "test_tool_calls_do_not_depend_on_the_number_of_tokens_per_round",
    4: "test_a_drafted_path_has_the_mask_of_the_same_text",
    5: "test_hostile_grammars_do_not_stop_a_stream",
    6: "test_samples_and_requests_together_equal_each_alone",
    7: "test_an_incompatible_drafter_is_refused_before_weights_are_read",
    8: "test_memory_does_not_grow_with_requests_or_long_prompts",
    9: "test_metrics_count_what_was_served_under_the_names_of_vllm",
    10: "test_logprobs_are_those_of_a_teacher_forced_pass_of_the_unmodified_module",
    11: "test_random_arrivals_and_cancellations_do_not_change_other_texts",
    12: "test_the_better_of_two_drafters_is_chosen_for_each_kind_of_candidate",
    13: "test_sleep_and_wake",
    14: "test_a_stream_ends_with_usage_if_requested_and_done",
    15: "test_predictions_are_drafted_from_and_counted",
}
"""Number of a row -> its test."""


def rows():
    """Return the cells of each row of the table by its number."""
    page = (ROOT / "docs/server-measured.md").read_text(encoding="utf-8")
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
    assert re.search(rf"^def {TESTS[number]}\(", source, re.MULTILINE)


@pytest.fixture(scope="module")
def http():
    engine = Engine(load())
    with serving(engine) as url, httpx2.Client(base_url=url, timeout=120, verify=False) as http:
        yield http
    engine.close()


def post(http, **fields):
    return http.post("/v1/completions", json={**BODY, **fields})


def test_hostile_grammars_do_not_stop_a_stream(http):
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
def test_memory_does_not_grow_with_requests_or_long_prompts(http):
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
