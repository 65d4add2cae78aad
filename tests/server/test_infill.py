"""Fill-in-the-middle prompts, of completions and of llama.cpp's route."""

import json

import httpx2
import pytest
from fake_engine import CONTEXT, REPLY, FakeEngine, fake_target

from checkpoints import read_tokenizer
from conftest import openai_client, serving
from secondguess.builtin import builtin_paths
from secondguess.server.infill_prompts import FORMATS


@pytest.mark.parametrize("tokens", FORMATS)
def test_prefix_and_suffix_stand_between_their_tokens(tokens):
    tokenizer = read_tokenizer(str(builtin_paths().target))
    tokenizer.add_special_tokens({"additional_special_tokens": list(tokens)})
    engine = FakeEngine(fake_target(tokenizer, "coder"))
    with serving(engine) as url, openai_client(url) as client:
        client.completions.create(model="coder", prompt="def f(", suffix=" pass")
    first, second, third = tokens
    assert tokenizer.decode(engine.last_prompt) == f"{first}def f({second} pass{third}"


def test_the_suffix_is_first_for_codestral():
    tokenizer = read_tokenizer(str(builtin_paths().target))
    tokenizer.add_special_tokens({"additional_special_tokens": ["[SUFFIX]", "[PREFIX]"], "bos_token": "<s>"})
    engine = FakeEngine(fake_target(tokenizer, "coder"))
    with serving(engine) as url, openai_client(url) as client:
        client.completions.create(model="coder", prompt="def f(", suffix=" pass")
    assert tokenizer.decode(engine.last_prompt) == "<s>[SUFFIX] pass[PREFIX]def f("


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_the_middle_ends_at_the_tokens_of_another_file(ignore_eos):
    tokenizer = read_tokenizer(str(builtin_paths().target))
    tokenizer.add_special_tokens({"additional_special_tokens": [*FORMATS[0], "<|file_sep|>", "<|fim_pad|>"]})
    ends = set(tokenizer.convert_tokens_to_ids(["<|file_sep|>", "<|fim_pad|>"]))
    engine = FakeEngine(fake_target(tokenizer, "coder"))
    with serving(engine) as url, openai_client(url) as client:
        more = {"stop_token_ids": [5], "ignore_eos": ignore_eos}
        client.completions.create(model="coder", prompt="def f(", suffix=" pass", extra_body=more)
        found = set(engine.last.params.stop_token_ids)
        assert 5 in found
        assert (ends <= found) is not ignore_eos
        client.completions.create(model="coder", prompt="def f(")
        assert not engine.last.params.stop_token_ids


# as llama.vim sends it
BODY = {
    "id_slot": 0,
    "input_prefix": "import os\n",
    "input_suffix": "\n\nprint(f(1))\n",
    "input_extra": [],
    "prompt": "def f(",
    "n_predict": 128,
    "stop": [],
    "n_indent": 0,
    "top_k": 40,
    "top_p": 0.9,
    "samplers": ["top_k", "top_p", "infill"],
    "stream": False,
    "cache_prompt": True,
    "t_max_prompt_ms": 500,
    "t_max_predict_ms": 1000,
}
MIDDLE = "<|fim_prefix|>import os\ndef f(<|fim_suffix|>\n\nprint(f(1))\n<|fim_middle|>"


@pytest.fixture(scope="module")
def coder():
    """Engine with Qwen's tokens and an HTTP client."""
    tokenizer = read_tokenizer(str(builtin_paths().target))
    names = [*FORMATS[0], "<|repo_name|>", "<|file_sep|>", "<|fim_pad|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": names})
    engine = FakeEngine(fake_target(tokenizer, "coder"))
    with serving(engine) as url, httpx2.Client(base_url=url, timeout=20, verify=False) as http:
        yield engine, http


def infill(coder, **fields):
    """Return the reply to a request, and the prompt that it became."""
    engine, http = coder
    reply = http.post("/infill", json=BODY | fields)
    assert reply.status_code == 200, reply.text
    return reply, engine.llm.target.tokenizer.decode(engine.last_prompt)


def test_the_route_of_llama_cpp_fills_in_the_middle(coder):
    engine = coder[0]
    reply, prompt = infill(coder)
    assert prompt == MIDDLE
    params, tokenizer = engine.last.params, engine.llm.target.tokenizer
    assert (params.max_tokens, params.top_k, params.top_p, params.stop) == (128, 40, 0.9, ())
    assert {*tokenizer.convert_tokens_to_ids(["<|file_sep|>", "<|fim_pad|>"])} <= {*params.stop_token_ids}
    found = reply.json()
    num_tokens = len(tokenizer(REPLY).input_ids) + 1
    assert (found["content"], found["stop"], found["stop_type"], found["model"]) == (
        REPLY,
        True,
        "eos",
        "coder",
    )
    assert (found["tokens_predicted"], found["tokens_evaluated"]) == (num_tokens, len(engine.last_prompt))
    timings = found["timings"]
    assert (timings["predicted_n"], timings["prompt_n"]) == (num_tokens, len(engine.last_prompt))
    assert timings["draft_n_accepted"] > 0


def test_a_stream_of_the_route_has_the_same_text(coder):
    reply, _ = infill(coder, stream=True)
    events = [json.loads(line.removeprefix("data: ")) for line in reply.text.splitlines() if line]
    assert "".join(event["content"] for event in events) == REPLY
    assert [event["stop"] for event in events] == [False] * (len(events) - 1) + [True]
    whole = infill(coder)[0].json()
    assert events[-1].keys() == whole.keys()
    assert events[-1]["tokens_predicted"] == whole["tokens_predicted"]


def test_a_reply_of_the_route_tells_what_ended_it(coder):
    stopped = infill(coder, stop=["\n\n", "return"])[0].json()
    assert stopped["content"] == REPLY.partition("return")[0]
    assert (stopped["stop_type"], stopped["stopping_word"]) == ("word", "return")
    stopped = infill(coder, stop=["\n\n", "return"], include_stop_str_in_output=True)[0].json()
    assert (stopped["content"][-8:], stopped["stopping_word"]) == ("  return", "return")
    cut = infill(coder, n_predict=3)[0].json()
    assert (cut["stop_type"], cut["tokens_predicted"]) == ("limit", 3)
    assert infill(coder, n_predict=-1)[0].json()["content"] == REPLY


def test_a_request_without_tokens_reads_the_prompt_only(coder):
    """As editors send it to have their files in the cache."""
    for stream in (False, True):
        reply, prompt = infill(coder, n_predict=0, stream=stream)
        found = json.loads(reply.text.removeprefix("data: "))
        assert (prompt, found["content"], found["tokens_predicted"]) == (MIDDLE, "", 0)


def test_the_fields_of_a_reply_can_be_chosen(coder):
    fields = ["content", "timings/predicted_n", "truncated", "timings/x", "content/x", ""]
    found = infill(coder, response_fields=fields)[0].json()
    assert found.keys() == {"content", "timings/predicted_n", "truncated"}


def test_other_files_come_first_as_far_as_they_fit(coder):
    engine = coder[0]
    files = [
        {"filename": "a.py", "text": "a = 1\n", "time": 5},
        {"text": "b = 2\n"},
    ]
    _, prompt = infill(coder, input_extra=files)
    start = "<|repo_name|>project\n<|file_sep|>a.py\na = 1\n<|file_sep|>file\nb = 2\n<|file_sep|>file\n"
    assert prompt == start + MIDDLE
    files[0]["text"] *= CONTEXT
    _, prompt = infill(coder, input_extra=files)
    assert prompt.endswith("a = 1\n<|file_sep|>file\nb = 2\n<|file_sep|>file\n" + MIDDLE)
    assert len(engine.last_prompt) == CONTEXT - 1 - BODY["n_predict"]


@pytest.mark.parametrize("tokens", FORMATS[1:])
def test_files_have_their_names_without_tokens_for_them(tokens):
    tokenizer = read_tokenizer(str(builtin_paths().target))
    tokenizer.add_special_tokens({"additional_special_tokens": list(tokens)})
    engine = FakeEngine(fake_target(tokenizer, "coder"))
    with serving(engine) as url, httpx2.Client(base_url=url, timeout=20, verify=False) as http:
        _, prompt = infill((engine, http), input_extra=[{"filename": "a.py", "text": "a = 1\n"}])
    assert prompt.startswith("\n\n--- a.py ---\n\na = 1\n\n\n--- file ---\n\n" + tokens[0])


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"mirostat": 1}, "mirostat"),
        ({"n_predict": -2}, "n_predict"),
        ({"input_prefix": None}, "input_prefix"),
        ({"n": 2}, "n"),
        ({"input_extra": [{"filename": "a.py"}]}, "input_extra"),
    ],
    ids=str,
)
def test_the_route_refuses_other_fields_by_name(coder, fields, name):
    reply = coder[1].post("/infill", json=BODY | fields)
    assert reply.status_code == 400
    assert name in reply.json()["error"]["message"]


def test_a_model_without_tokens_for_the_middle_is_refused(http):
    reply = http.post("/infill", json=BODY)
    assert reply.status_code == 400
    assert "Use /v1/completions" in reply.json()["error"]["message"]


@pytest.mark.parametrize("limit", [{}, {"n_predict": -1}, {"n_predict": None}], ids=str)
def test_without_a_limit_other_files_leave_a_quarter_of_the_context(coder, limit):
    body = {name: value for name, value in BODY.items() if name != "n_predict"}
    files = [{"filename": "a.py", "text": "a = 1\n" * 2000}]
    assert coder[1].post("/infill", json={**body, **limit, "input_extra": files}).status_code == 200
    assert len(coder[0].last_prompt) == CONTEXT - 1 - CONTEXT // 4
