"""Requests generated from the application's own description never end in an internal error."""

import schemathesis
from fake_engine import FakeEngine
from hypothesis import HealthCheck, Phase, settings

from secondguess.server.app import create_app

APP = create_app(FakeEngine(reply="x = 1"))
# The coverage phase sends thousands of requests, most of them refused for their first wrong field.
CONFIG = schemathesis.Config.from_dict({"phases": {"coverage": {"enabled": False}}})
SCHEMA = schemathesis.openapi.from_asgi("/openapi.json", APP, config=CONFIG)


@SCHEMA.parametrize()
@settings(
    max_examples=20,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
def test_no_request_ends_in_an_internal_error(case):
    if isinstance(case.body, dict) and "model" in case.body:
        case.body["model"] = "builtin"  # another one is refused before anything else is looked at
    reply = case.call()
    assert reply.status_code < 500, reply.text
    if reply.status_code >= 400:
        assert set(reply.json()["error"]) == {"message", "type", "param", "code"}


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
