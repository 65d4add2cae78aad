"""Models, health, metrics, tokenization."""

import threading

import openai
import pytest
from fake_engine import QUEUE_SECONDS, REPLY, FakeEngine
from starlette.testclient import TestClient

from conftest import metrics_of, openai_client, serving
from secondguess.server.app import create_app
from secondguess.server.served_model import ServedModel, short_name
from secondguess.server.settings import ServerSettings


def test_the_model_is_listed_with_its_context(client):
    (model,) = client.models.list().data
    assert (model.id, model.max_model_len) == ("builtin", 2048)
    assert client.models.retrieve("builtin") == model


def test_the_playground_is_told_what_the_model_takes():
    settings = ServerSettings(model_names=("org/model", "alias"), max_output_tokens=100)
    engine = FakeEngine()
    with TestClient(create_app(engine, settings)) as client:
        assert client.get("/playground/model").json() == {
            "name": "org/model",
            "context_length": 2048,
            "has_chat_template": True,
            "takes_images": False,
            "sampling": {"temperature": 1.0, "top_p": 1.0},
            "max_tokens": 100,
        }
    engine.llm.target.tokenizer.chat_template = None
    with TestClient(create_app(engine)) as client:
        assert client.get("/playground/model").json()["has_chat_template"] is False
    with TestClient(create_app(engine, ServerSettings(chat_template="{{ messages }}"))) as client:
        assert client.get("/playground/model").json()["has_chat_template"] is True


def test_a_server_can_have_several_names_with_slashes():
    names = ("org/model", "alias")
    with serving(FakeEngine(), ServerSettings(model_names=names)) as url, openai_client(url) as client:
        assert [model.id for model in client.models.list().data] == list(names)
        assert client.models.retrieve("org/model").id == "org/model"
        for name in names:
            assert client.completions.create(model=name, prompt="x").model == name
        with pytest.raises(
            openai.BadRequestError, match="tokenizer of org/model has no fill-in-the-middle tokens"
        ):
            client.completions.create(model="alias", prompt="x", suffix="y")


def test_texts_and_conversations_become_tokens_and_back(http, engine):
    tokenizer = engine.llm.target.tokenizer
    found = http.post("/tokenize", json={"prompt": "def f():"}).json()
    assert found == {
        "count": len(found["tokens"]),
        "max_model_len": 2048,
        "tokens": tokenizer("def f():").input_ids,
    }
    assert http.post("/detokenize", json={"tokens": found["tokens"]}).json() == {"prompt": "def f():"}
    messages = [{"role": "user", "content": "x"}]
    tokens = http.post("/tokenize", json={"messages": messages}).json()["tokens"]
    http.post("/v1/chat/completions", json={"model": "builtin", "messages": messages})
    assert engine.last_prompt == tokens
    for wrong in ({}, {"prompt": "x", "messages": messages}, {"prompt": "x", "model": "other"}):
        assert http.post("/tokenize", json=wrong).status_code in (400, 404)
    assert http.post("/detokenize", json={"tokens": [10**9]}).status_code == 400
    assert http.post("/tokenize", json={"prompt": ""}).json()["tokens"] == []


def test_metrics_count_what_was_served_under_the_names_of_vllm():
    engine = FakeEngine(round_size=4)
    with TestClient(create_app(engine)) as client:
        for _ in range(2):
            client.post("/v1/completions", json={"model": "builtin", "prompt": "x", "n": 2})
        client.post("/v1/completions", json={"model": "builtin"})
        found = metrics_of(client)
    num_tokens = len(engine.llm.target.tokenizer(REPLY).input_ids) + 1
    assert found["vllm:generation_tokens_total",] == 4 * num_tokens
    assert found["vllm:prompt_tokens_total",] == 2
    assert found["vllm:request_success_total", "stop"] == 4
    rounds = -(-num_tokens // 4)
    assert found["secondguess:rounds_total",] == found["vllm:spec_decode_num_drafts_total",] == 4 * rounds
    drafted, accepted = (
        found[f"vllm:spec_decode_num_{kind}_tokens_total",] for kind in ("draft", "accepted")
    )
    assert 0 < accepted <= drafted
    by_position = [
        found["vllm:spec_decode_num_accepted_tokens_per_pos_total", str(each)] for each in range(3)
    ]
    assert sum(by_position) == accepted
    assert by_position == sorted(by_position, reverse=True)
    assert found["vllm:request_queue_time_seconds_count",] == 2
    assert found["vllm:request_queue_time_seconds_sum",] == 2 * QUEUE_SECONDS
    assert found["vllm:engine_sleep_state", "awake"] == 1
    assert found["vllm:time_to_first_token_seconds_count",] == 2
    assert found["vllm:inter_token_latency_seconds_count",] > 0
    assert found["vllm:e2e_request_latency_seconds_count",] == 2
    assert found["secondguess:draft_length_count",] == 4 * rounds
    assert found["secondguess:draft_length_sum",] == drafted
    assert found["secondguess:draft_length_bucket", "2.0"] < found["secondguess:draft_length_bucket", "3.0"]
    assert found["secondguess:draft_length_bucket", "64.0"] == 4 * rounds
    assert found["vllm:kv_cache_usage_perc",] == 0.25
    assert (found["vllm:num_requests_running",], found["vllm:num_requests_waiting",]) == (1, 2)
    assert found["secondguess:http_requests_total", "/v1/completions", "200"] == 2
    assert found["secondguess:http_requests_total", "/v1/completions", "400"] == 1


def test_tokenization_leaves_the_event_loop_free(http, monkeypatch):
    begun, may_end = threading.Event(), threading.Event()
    encode = ServedModel.encode

    def slow(self, text):
        begun.set()
        assert may_end.wait(10)
        return encode(self, text)

    monkeypatch.setattr(ServedModel, "encode", slow)
    replies = []
    body = {"model": "builtin", "prompt": "x"}
    sender = threading.Thread(target=lambda: replies.append(http.post("/v1/completions", json=body)))
    sender.start()
    assert begun.wait(10)
    assert http.get("/health").status_code == 200  # while the prompt is still being encoded
    may_end.set()
    sender.join(10)
    assert replies[0].status_code == 200


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
def test_infill_tokens_are_needed_for_a_suffix(http, path):
    reply = http.post(path, json={"model": "builtin", "prompt": "x", "suffix": "y"})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "suffix")


def test_a_model_is_named_without_its_folder(tmp_path):
    assert short_name(str(tmp_path)) == tmp_path.name
    assert short_name("Qwen/Qwen3-8B") == "Qwen/Qwen3-8B"
    assert short_name(str(tmp_path / "mine.Q4_K_M.gguf")) == "mine.Q4_K_M"


def test_the_documentation_of_the_routes_is_a_page(http):
    page = http.get("/docs")
    assert page.status_code == 200
    assert "/openapi.json" in page.text
    assert "<script" not in page.text
    assert "default-src 'none'" in page.headers["content-security-policy"]
    for word in (
        "POST /v1/completions",
        "POST /infill",
        "GET /health",
        "continue_final_message",
        "input_prefix",
    ):
        assert word in page.text
