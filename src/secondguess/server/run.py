"""Serving of an application with uvicorn until a signal; requests in progress are finished first."""

from __future__ import annotations

import errno
import gc
import logging
import socket
import time
from copy import deepcopy
from threading import Thread
from types import FrameType
from typing import TYPE_CHECKING

import anyio
import uvicorn
from fastapi import FastAPI

from secondguess.errors import BadInputError

if TYPE_CHECKING:  # it imports torch, which takes longer than to find that a port is in use
    from secondguess.server.sleep import ServerEngine

logger = logging.getLogger("uvicorn.error")


class DrainingServer(uvicorn.Server):
    """Server that, at the first signal, drains the engine before it closes its sockets.

    While it drains, new requests get 503 and `/ready` says so. A second signal ends it at once.
    """

    def __init__(self, config: uvicorn.Config, engine: ServerEngine, drain_seconds: float) -> None:
        super().__init__(config)
        self._engine = engine
        self._drain_seconds = drain_seconds
        self._is_draining = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        # uvicorn names no address of sockets that it is given.
        host = f"[{self.config.host}]" if ":" in self.config.host else self.config.host
        logger.info("Serving at http://%s:%d (Ctrl-C to stop)", host, self.config.port)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._is_draining:
            super().handle_exit(sig, frame)
            self.force_exit = True
            logger.warning("Ended by a second signal.")
            logger.setLevel(logging.CRITICAL)  # uvicorn would log each request that it cuts off as a failure
            return
        self._is_draining = True
        logger.info(
            "Finishing requests for at most %g seconds; a second signal ends them.", self._drain_seconds
        )
        Thread(target=self._drain, name="secondguess-drain", daemon=True).start()

    def _drain(self) -> None:
        end = time.monotonic() + self._drain_seconds
        try:
            self._engine.drain(self._drain_seconds)
        finally:
            # What is left is for connections whose requests have not come, or whose replies are not read.
            self.config.timeout_graceful_shutdown = max(1, round(end - time.monotonic()))
            self.should_exit = True


def open_socket(host: str, port: int) -> socket.socket:
    """Return a socket that listens at an address; port 0 takes a free one. One in use or of another machine is refused."""
    opened = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        opened = socket.socket(family, kind, protocol)
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.bind(address)
        # At once, so that a second server is refused before it loads its model.
        opened.listen()
    except (OSError, OverflowError) as error:
        if opened is not None:
            opened.close()
        is_taken = isinstance(error, OSError) and error.errno in (errno.EADDRINUSE, errno.EACCES)
        choice = "--port" if is_taken or isinstance(error, OverflowError) else "--host"
        raise BadInputError(
            f"expected a free address to serve at, got {host}:{port}: {error}; choose another {choice}"
        ) from None
    return opened


def serve_until_signal(
    app: FastAPI, engine: ServerEngine, opened: socket.socket, drain_seconds: float
) -> None:
    """Serve an application on a socket until a signal, then close the engine."""
    _prepare_first_requests(app)
    # A full collection visits all objects of the libraries and models, and takes 0.3 s.
    gc.collect()
    gc.freeze()
    host, port, *_ = opened.getsockname()
    log_config = deepcopy(uvicorn.config.LOGGING_CONFIG)
    log_config["loggers"]["secondguess"] = {"handlers": ["default"], "level": "INFO"}
    config = uvicorn.Config(app, host, port, log_config=log_config, server_header=False)
    try:
        DrainingServer(config, engine, drain_seconds).run([opened])
    finally:
        engine.close()


def _prepare_first_requests(app: FastAPI) -> None:
    """Do beforehand what the first stream and the first reader of the schema would stop the event loop for."""
    app.openapi()  # keeps its result
    anyio.run(anyio.sleep, 0)  # imports the backend
