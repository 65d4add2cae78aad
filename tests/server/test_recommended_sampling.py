"""Sampling settings of `generation_config.json` as the defaults of requests."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_engine import FakeEngine, fake_target
from starlette.testclient import TestClient

from secondguess.checkpoint.loaded import LoadedModel
from secondguess.checkpoint.source import FolderSource
from secondguess.errors import CheckpointError
from secondguess.sampling import SamplingParams
from secondguess.server.app import create_app
from secondguess.server.settings import ServerSettings

QWEN = {"do_sample": True, "eos_token_id": 5, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": None}
BODIES = {
    "/v1/completions": {"prompt": "x", "max_tokens": 4},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4},
    "/v1/responses": {"input": "x", "max_output_tokens": 4},
}


@pytest.fixture
def recommending(tmp_path):
    """Returns a client and the engine of a model with a generation configuration."""

    def make(values, **settings):
        (tmp_path / "generation_config.json").write_text(json.dumps(values))
        target = fake_target()
        checkpoint = SimpleNamespace(name="builtin", source=FolderSource(tmp_path))
        target = LoadedModel(checkpoint, target.runtime, target.tokenizer, target.end_tokens)
        engine = FakeEngine(target)
        return TestClient(create_app(engine, ServerSettings(**settings))), engine

    return make


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("settings", "given", "expected"),
    [
        ({}, {}, {"temperature": 0.6, "top_k": 20, "top_p": 0.95}),
        ({}, {"temperature": 0, "top_p": 0.5}, {"temperature": 0, "top_k": 20, "top_p": 0.5}),
        ({"generation_config": False}, {}, {"temperature": 1.0}),
    ],
)
def test_what_a_request_leaves_out_is_the_models(path, settings, given, expected, recommending):
    http, engine = recommending(QWEN, **settings)
    reply = http.post(path, json=BODIES[path] | given)
    assert reply.status_code == 200, reply.text
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    params = engine.requests[0].params
    default = SamplingParams(**expected)
    assert {name: getattr(params, name) for name in names} == {name: getattr(default, name) for name in names}
    if path == "/v1/responses":
        assert (reply.json()["temperature"], reply.json()["top_p"]) == (params.temperature, params.top_p)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"temperature": 1e-6, "repetition_penalty": 1.05}, {"temperature": 0, "repetition_penalty": 1.05}),
        ({"top_k": -1}, {"temperature": 1.0, "top_k": 0}),
        ({"top_k": 50.0}, {"temperature": 1.0, "top_k": 50}),
    ],
)
def test_published_values_have_the_meaning_that_other_servers_give_them(values, expected, recommending):
    http, engine = recommending(values)
    http.post("/v1/completions", json=BODIES["/v1/completions"])
    params = engine.requests[0].params
    assert {name: getattr(params, name) for name in expected} == expected


def test_settings_out_of_range_are_refused_before_weights_are_loaded(
    secondguess_command, tiny_checkpoint, tmp_path, monkeypatch
):
    for file in Path(tiny_checkpoint).iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    (tmp_path / "generation_config.json").write_text('{"top_p": 7}')
    monkeypatch.setattr("secondguess.api.load", lambda **_: pytest.fail("loaded"))
    done = secondguess_command("serve", "--model", tmp_path, "--port", "0")
    assert done.code == 2
    assert "got 7; use 1 to turn it off; correct generation_config.json" in done.err


def test_a_request_without_top_k_can_say_so(recommending):
    http, engine = recommending(QWEN)
    http.post("/v1/completions", json=BODIES["/v1/completions"] | {"top_k": -1})
    assert engine.requests[0].params.top_k == 0


@pytest.mark.parametrize("values", [{"temperature": -1}, {"top_p": "high"}, {"top_k": 2.5}])
def test_settings_out_of_range_are_refused_when_the_server_starts(values, recommending):
    with pytest.raises(CheckpointError, match=r"correct generation_config\.json .*--no-generation-config"):
        recommending(values)
    recommending(values, generation_config=False)
