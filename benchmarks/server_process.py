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
from pathlib import Path

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

    def resident_megabytes(self) -> float:
        """Return the physical memory that the process has."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text(encoding="utf-8").splitlines()
        (kilobytes,) = (line.split()[1] for line in lines if line.startswith("VmRSS"))
        return int(kilobytes) / 1024

    def gauges(self) -> dict[str, float]:
        """Return the values of `/metrics` that have no label but the model's name."""
        with urllib.request.urlopen(f"{self.address}/metrics", timeout=30) as reply:
            lines = reply.read().decode().splitlines()
        values = [line.rsplit(" ", 1) for line in lines if not line.startswith("#") and "," not in line]
        return {name.partition("{")[0]: float(value) for name, value in values}


def free_port() -> int:
    """Return a port of this machine that nothing listens at."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    return port


@contextmanager
def serve(
    options: Sequence[str], port: int | None = None, log: Path | None = None
) -> Iterator[ServerProcess]:
    """Run `secondguess serve` with these options until the context ends.

    Args:
        options: options of the command, without the port.
        port: the port; None takes a free one.
        log: file that the server's output is appended to; None discards it.
    """
    port = port or free_port()
    with (log or Path("/dev/null")).open("ab") as output:
        process = subprocess.Popen(
            [*COMMAND, "--port", str(port), *options], stdout=output, stderr=subprocess.STDOUT
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
