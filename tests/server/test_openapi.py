"""Requests generated from the application's own description never end in an internal error."""

import pytest
import schemathesis
from fake_engine import FakeEngine
from hypothesis import HealthCheck, settings

from secondguess.server.app import create_app

APP = create_app(FakeEngine(reply="x = 1"))
SCHEMA = schemathesis.openapi.from_asgi("/openapi.json", APP)


@SCHEMA.parametrize()
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
def test_no_request_ends_in_an_internal_error(case):
    reply = case.call(timeout=10)
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


pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
