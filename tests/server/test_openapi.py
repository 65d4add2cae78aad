"""Requests generated from the application's own description never end in an internal error."""

import json
from collections import Counter

import schemathesis
from fake_engine import FakeEngine
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis.generation.modes import GenerationMode

from secondguess.server.app import create_app

APP = create_app(FakeEngine(reply="x = 1"))
NUM_EXAMPLES = 100
"""Requests to all operations that read a body, half of them valid."""
NUM_WITHOUT_BODY = 10
"""Requests to an operation that reads no body."""


def test_no_request_ends_in_an_internal_error():
    schema = schemathesis.openapi.from_asgi("/openapi.json", APP)
    operations = [found.ok() for found in schema.get_all_operations()]
    num_pairs = len(GenerationMode) * sum(bool(operation.body) for operation in operations)
    statuses = Counter()

    def send(case):
        if isinstance(case.body, dict) and "model" in case.body:
            case.body["model"] = "builtin"  # another name would be refused before anything else is looked at
        reply = case.call()
        statuses[case.operation.label, reply.status_code] += 1
        assert reply.status_code < 500 or reply.status_code == 503, reply.content
        if reply.status_code >= 400:
            assert set(json.loads(reply.content)["error"]) == {"message", "type", "param", "code"}

    for operation in operations:
        for mode in GenerationMode if operation.body else (GenerationMode.POSITIVE,):
            chosen = settings(
                max_examples=-(-NUM_EXAMPLES // num_pairs) if operation.body else NUM_WITHOUT_BODY,
                deadline=None,
                database=None,
                phases=[Phase.generate, Phase.shrink],
                suppress_health_check=list(HealthCheck),
            )
            seed(0)(chosen(given(operation.as_strategy(generation_mode=mode))(send)))()
    assert statuses["POST /v1/chat/completions", 200] > 0
    assert statuses.total() >= NUM_EXAMPLES


def test_every_route_is_described():
    paths = set(APP.openapi()["paths"])
    assert {
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/responses",
        "/v1/models",
        "/health",
        "/metrics",
    } <= paths
