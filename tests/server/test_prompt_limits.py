"""Texts that cannot fit into the context are refused before all of them is tokenized."""

import pytest

from secondguess.server.served_model import CHARACTERS_PER_TOKEN

MOST = 2048 * CHARACTERS_PER_TOKEN
TEXT = "def add(first, second):\n    return first + second\n\n" * 20_000
BODIES = {
    "/v1/completions": {"prompt": TEXT},
    "/infill": {"input_prefix": TEXT, "input_suffix": ""},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": TEXT}]},
    "/v1/responses": {"input": TEXT},
    "/tokenize": {"prompt": TEXT},
}


@pytest.fixture
def lengths(engine, monkeypatch):
    """Numbers of characters of the texts that are tokenized."""
    tokenizer, found = engine.llm.target.tokenizer, []
    encode = type(tokenizer)._encode_plus

    def counting(self, text, *arguments, **options):
        found.append(len(text))
        return encode(self, text, *arguments, **options)

    monkeypatch.setattr(type(tokenizer), "_encode_plus", counting)
    return found


@pytest.mark.parametrize(("path", "body"), BODIES.items())
def test_a_text_that_cannot_fit_is_refused_after_its_beginning(http, lengths, path, body):
    reply = http.post(path, json={"model": "builtin", **body})
    error = reply.json()["error"]
    assert (reply.status_code, error["code"]) == (400, "context_length_exceeded")
    assert f"of which the first {MOST} have" in error["message"]
    assert lengths == [MOST]


def test_a_long_text_of_few_tokens_is_not_refused_for_its_characters(http, lengths):
    text = " " * (MOST + 1)
    reply = http.post("/tokenize", json={"prompt": text})
    assert reply.status_code == 200
    assert reply.json()["count"] < 2048 * 2
    assert lengths[-1] == len(text)


def test_a_prediction_is_cut_to_what_could_fit(http, engine):
    prediction = {"type": "content", "content": TEXT}
    http.post("/v1/completions", json={"model": "builtin", "prompt": "x", "prediction": prediction})
    assert engine.last.params.prediction == TEXT[:MOST]
