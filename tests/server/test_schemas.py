"""Validation of bodies: one error per body, however large it is."""

import pytest
from pydantic import ValidationError

from secondguess.server.responses.schemas import ResponseRequest
from secondguess.server.schemas import MAX_DEPTH, ChatRequest, CompletionRequest

MANY = 50_000
PROMPT = {"model": "m", "prompt": "x"}
CASES = {
    "unknown fields": (CompletionRequest, {**PROMPT, **{f"a{number}": 1 for number in range(MANY)}}),
    "tokens": (CompletionRequest, {**PROMPT, "prompt": [5] * MANY + ["x"]}),
    "prompts": (CompletionRequest, {**PROMPT, "prompt": [[5]] * MANY}),
    "biases": (CompletionRequest, {**PROMPT, "logit_bias": {str(number): "x" for number in range(MANY)}}),
    "messages": (ChatRequest, {"model": "m", "messages": [1] * MANY}),
    "parts": (ChatRequest, {"model": "m", "messages": [{"role": "user", "content": [1] * MANY}]}),
    "items": (ResponseRequest, {"model": "m", "input": [1] * MANY}),
}


@pytest.mark.parametrize("name", CASES)
def test_a_large_invalid_body_costs_few_errors(name):
    model, body = CASES[name]
    with pytest.raises(ValidationError) as caught:
        model.model_validate(body)
    assert caught.value.error_count() <= 8  # one per member of a union


def nested(depth):
    schema = {}
    for _ in range(depth - 1):
        schema = {"items": schema}
    return schema


def test_json_as_deep_as_allowed_can_be_written_and_deeper_json_is_refused():
    function = {"name": "f", "parameters": nested(MAX_DEPTH)}
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
    request = ChatRequest.model_validate({**body, "tools": [{"type": "function", "function": function}]})
    assert request.model_dump_json().count("items") == MAX_DEPTH - 1
    function["parameters"] = nested(MAX_DEPTH + 1)
    with pytest.raises(ValidationError, match=f"at most {MAX_DEPTH} levels"):
        ChatRequest.model_validate({**body, "tools": [{"type": "function", "function": function}]})
