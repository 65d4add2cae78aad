"""Requests generated from the application's own description never end in an internal error."""

import sys
from pathlib import Path

import schemathesis
from fake_engine import FakeEngine

from secondguess.server.app import create_app

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from server_fuzz import fuzz

APP = create_app(FakeEngine(reply="x = 1"))


def test_no_request_ends_in_an_internal_error():
    """More requests, to the real engine: `benchmarks/server_fuzz.py`."""
    statuses = fuzz(schemathesis.openapi.from_asgi("/openapi.json", APP), "builtin", num_examples=100)
    assert statuses["POST /v1/chat/completions", 200] > 0
    assert statuses.total() >= 100


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
