"""A server on a free port with a fake engine, and OpenAI's client for it."""

import socket
import threading
import time
from contextlib import contextmanager

import httpx2
import openai
import pytest
import uvicorn
from fake_engine import FakeEngine
from prometheus_client.parser import text_string_to_metric_families

from secondguess.server.app import create_app


class LiveServer:
    """An application that uvicorn serves on a free port of this machine, in a thread."""

    def __init__(self, app):
        # With its protocol, so that asyncio sends replies without waiting for acknowledgements of 40 ms.
        self.socket = socket.socket(proto=socket.IPPROTO_TCP)
        self.socket.bind(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        self.uvicorn = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
        self._thread = threading.Thread(target=self.uvicorn.run, args=([self.socket],), daemon=True)
        self._thread.start()
        wait_for(lambda: self.uvicorn.started)

    def close(self):
        self.uvicorn.should_exit = True
        self._thread.join(10)
        self.socket.close()


def wait_for(condition, seconds=10.0):
    """Wait until a condition holds, and fail if it does not."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)


@contextmanager
def serving(engine, settings=None):
    """Serve an engine; yields the URL."""
    server = LiveServer(create_app(engine, settings))
    try:
        yield server.url
    finally:
        server.close()


@pytest.fixture(scope="session")
def live():
    """An engine and the URL of its server; `engine` restores the engine's defaults."""
    engine = FakeEngine()
    with serving(engine) as url:
        yield engine, url


@pytest.fixture
def engine(live):
    defaults = dict(vars(live[0]), requests=[])
    vars(live[0]).update(requests=[])
    yield live[0]
    vars(live[0]).update(defaults)


@pytest.fixture(scope="session")
def clients(live):
    """HTTP's client and OpenAI's; made once, because each loads the system's certificates."""
    with httpx2.Client(base_url=live[1], timeout=20) as http, openai_client(live[1]) as client:
        yield http, client


@pytest.fixture
def http(clients, engine):
    """HTTP client without OpenAI's types."""
    return clients[0]


@pytest.fixture
def client(clients, engine):
    return clients[1]


def metrics_of(http):
    """Return the values of `/metrics` by name and labels other than the model's."""
    families = text_string_to_metric_families(http.get("/metrics").text)
    return {
        (sample.name, *(value for name, value in sample.labels.items() if name != "model_name")): sample.value
        for family in families
        for sample in family.samples
    }


def openai_client(url):
    """OpenAI's client for a server without certificates."""
    http = openai.DefaultHttpxClient(verify=False, timeout=20)
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, http_client=http)
