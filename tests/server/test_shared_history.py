"""`--share-history` over HTTP: outputs are shared within an API key, and never change a text."""

from __future__ import annotations

from itertools import count

import pytest
from starlette.testclient import TestClient

from secondguess import load
from secondguess.engine import Engine
from secondguess.server.app import create_app
from secondguess.server.settings import ServerSettings

PROMPT = "def volume(width, height):\n"
FIELDS = {"model": "builtin", "prompt": PROMPT, "max_tokens": 60, "report": True}
KEYS, NUM_TESTS = ("alice", "bob"), 8


@pytest.fixture(scope="module")
def client():
    engine = Engine(load(drafter="suffix", controller="fixed:6", share_history=True))
    keys = tuple(f"{key}-{number}" for key in KEYS for number in range(NUM_TESTS))
    with TestClient(create_app(engine, ServerSettings(api_keys=keys))) as client:
        yield client, count()
    engine.close()


@pytest.fixture
def ask(client):
    """Function that sends a request with a key of this test; gives its text and its number of target passes."""
    http, numbers = client
    number = next(numbers)

    def post(key, path="/v1/completions", **fields):
        headers = {"Authorization": f"Bearer {key}-{number}"}
        reply = http.post(path, json=FIELDS | fields, headers=headers)
        assert reply.status_code == 200, reply.text
        found = reply.json()
        return found["choices"][0]["text"], found["secondguess"]["samples"][0]["num_rounds"]

    return post


@pytest.mark.parametrize("settings", [{"temperature": 0}, {"temperature": 0.8, "seed": 5}])
def test_a_key_drafts_from_its_own_outputs_alone(ask, settings):
    text, alone = ask("alice", **settings)
    assert ask("bob", **settings) == (text, alone)
    again, rounds = ask("alice", **settings)
    assert again == text
    assert rounds < 0.6 * alone


def test_a_request_that_declines_neither_reads_nor_adds(ask):
    declined = {"temperature": 0, "speculation": {"history": False}}
    text, alone = ask("alice", **declined)
    assert ask("alice", temperature=0) == (text, alone), "nothing was added"
    assert ask("alice", temperature=0)[1] < alone
    assert ask("alice", **declined) == (text, alone), "nothing is read"


def test_plain_decoding_adds_its_output(ask):
    text, _ = ask("alice", temperature=0, speculation="off")
    again, rounds = ask("alice", temperature=0)
    assert again == text
    assert rounds < 30
