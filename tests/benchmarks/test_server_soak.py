"""The soak finds what it looks for: wrong texts, internal errors, errors within streams, growing memory."""

from __future__ import annotations

import asyncio

import httpx2
import pytest
from server_soak import CheckError, Findings, Known, Soak

STREAM = b'data: {"choices": [{"text": "a"}]}\n\ndata: {"choices": [{"text": "b"}]}\n\ndata: [DONE]\n\n'
ERROR = b'data: {"choices": [{"text": "a"}]}\n\ndata: {"error": {"code": "internal_error"}}\n\n'


def outcome(kind: str, status: int, content: bytes, text: str = "ab") -> str:
    """Return the outcome of one request to a server that always replies alike."""

    async def send() -> str:
        transport = httpx2.MockTransport(lambda request: httpx2.Response(status, content=content))
        async with httpx2.AsyncClient(base_url="http://server", transport=transport) as http:
            clients = Soak(http, [Known("/v1/completions", {"prompt": "x"}, text)], Findings(), seed=0)
            found: str = await getattr(clients, kind)()
            return found

    return asyncio.run(send())


def test_right_texts_and_refusals_by_design_pass() -> None:
    assert outcome("check_reply", 200, b'{"choices": [{"text": "ab"}]}') == "200"
    assert outcome("check_stream", 200, STREAM) == "200"
    assert outcome("check_reply", 503, b"{}") == "503"
    assert outcome("send_garbage", 400, b"{}") == "400"
    assert outcome("leave_stream", 200, STREAM, text="other") == "left"


@pytest.mark.parametrize(
    ("kind", "status", "content"),
    [
        ("check_reply", 200, b'{"choices": [{"text": "other"}]}'),
        ("check_stream", 200, STREAM.replace(b'"b"', b'"c"')),
        ("check_stream", 200, ERROR),
        ("check_reply", 400, b"{}"),
        ("send_hostile_schema", 500, b"{}"),
        ("send_garbage", 200, b"{}"),
    ],
)
def test_what_is_wrong_is_found(kind: str, status: int, content: bytes) -> None:
    with pytest.raises(CheckError):
        outcome(kind, status, content)


def test_growth_is_that_after_the_first_minute() -> None:
    assert Findings(
        megabytes=[(0, 10), (59, 900), (60, 1000), (90, 1100), (120, 1050)]
    ).growth == pytest.approx(0.1)
