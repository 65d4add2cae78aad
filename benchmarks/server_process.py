"""`secondguess serve` as a process of a benchmark."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

COMMAND = [sys.executable, "-c", "import sys; from secondguess.cli import main; sys.exit(main())", "serve"]
END_SECONDS = 60
"""Time in which a server must end after SIGTERM."""


@dataclass
class ServerProcess:
    """A server that runs.

    Args:
        process: the process; its children, if it has any, are not part of it.
        address: its URL.
    """

    process: subprocess.Popen[bytes]
    address: str


@contextmanager
def serve(options: Sequence[str]) -> Iterator[ServerProcess]:
    """Run `secondguess serve` with these options, and a free port, until the context ends; its output is discarded."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    process = subprocess.Popen(
        [*COMMAND, "--port", port, *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    server = ServerProcess(process, f"http://127.0.0.1:{port}")
    try:
        _wait_until_ready(server)
        yield server
    finally:
        process.terminate()
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_until_ready(server: ServerProcess) -> None:
    """Wait until a server answers; it may still load its weights."""
    while server.process.poll() is None:
        try:
            with urllib.request.urlopen(f"{server.address}/ready", timeout=5):
                return
        except OSError:
            time.sleep(0.2)
    raise SystemExit(f"the server ended with code {server.process.returncode}")
