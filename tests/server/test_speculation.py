"""`speculation` of a request over HTTP, with the built-in pair: on, off, limits, and the drafter."""

import openai
import pytest

from conftest import openai_client, serving
from secondguess import load
from secondguess.engine import Engine

PROMPT = "def area(width, height):\n    return width * height\n\ndef volume(width, height, depth):\n"


@pytest.fixture(scope="module")
def client():
    engine = Engine(load(drafter="suffix+model:builtin-draft"))
    with serving(engine) as url, openai_client(url) as client:
        yield client
    engine.close()


def complete(client, speculation, **extra):
    return client.completions.create(
        model="builtin",
        prompt=PROMPT,
        max_tokens=60,
        seed=1,
        extra_body={"speculation": speculation, "report": True, **extra},
    )


def drafted(reply):
    return reply.secondguess["samples"][0]["num_drafted"]


def test_the_controllers_draft_length_can_be_limited(client):
    reply = complete(client, {"max_draft": 1})
    assert len(reply.secondguess["samples"][0]["drafted_per_position"]) <= 1


def test_a_request_chooses_among_the_drafters_and_its_text_stays_the_same(client):
    expected = complete(client, "off").choices[0].text
    counts = {}
    for name in ("none", "suffix", "model", "suffix+model", "ngram", "ngram+model"):
        reply = complete(client, {"drafter": name, "draft_length": 4})
        assert reply.choices[0].text == expected
        counts[name] = drafted(reply)
    assert counts["none"] == 0
    # Look-ups draft where the text repeats itself, a model always.
    assert 0 < counts["ngram"] < counts["model"]
    assert 0 < counts["suffix"] < counts["model"]


def test_rows_with_different_drafters_decode_together(client):
    prompts = [PROMPT] * 2
    alone = complete(client, {"drafter": "model"}).choices[0].text
    reply = client.completions.create(
        model="builtin",
        prompt=prompts,
        max_tokens=60,
        seed=1,
        extra_body={"speculation": {"drafter": "none"}},
    )
    assert [choice.text for choice in reply.choices] == [alone] * 2


def test_without_a_drafter_predictions_are_still_drafted_from(client):
    text = complete(client, "off").choices[0].text
    prediction = {"type": "content", "content": text}
    reply = complete(client, {"drafter": "none", "draft_length": 8}, prediction=prediction)
    assert reply.usage.completion_tokens_details.accepted_prediction_tokens > 30


@pytest.mark.parametrize("name", ["eagle", "none+model", "model:other", "", "suffix+suffix"])
def test_another_drafter_is_refused_with_the_names_of_those_that_there_are(client, name):
    with pytest.raises(openai.BadRequestError) as caught:
        complete(client, {"drafter": name})
    assert caught.value.param == "speculation.drafter"
    assert "none, suffix, model, ngram" in caught.value.message
