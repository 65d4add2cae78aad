"""Engine that releases its models while no requests come (`--sleep-idle`)."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from threading import Condition, Thread

import torch

from secondguess.engine import DrainingError, Engine, EngineStatus, Request
from secondguess.engine.models import Models
from secondguess.stats import Stats

logger = logging.getLogger(__name__)


class SleepingEngine:
    """Engine with the interface of `Engine`, whose models are loaded, by `make`, only while they are needed.

    After `idle_seconds` without a request, the models and their caches are released; the next
    request loads them again and waits for it. Cold start and wake-up run the same code.
    """

    def __init__(self, make: Callable[[], Engine], idle_seconds: float) -> None:
        self._make = make
        self._idle_seconds = idle_seconds
        self._changed = Condition()  # held while the models are loaded or released
        self._engine: Engine | None = make()
        self._totals = Stats()
        self._num_submitting = 0
        self._last_used = time.monotonic()
        self._is_draining = self._is_closed = False
        self._thread = Thread(target=self._release_when_idle, name="secondguess-sleep", daemon=True)
        self._thread.start()

    @property
    def llm(self) -> Models:
        """The models; loads them if they are released."""
        with self._changed:
            return self._awake().llm

    def submit(self, request: Request) -> None:
        """Queue a request, as `Engine.submit` does; loads the models first if they are released."""
        with self._changed:
            engine = self._awake()
            self._num_submitting += 1
        try:
            engine.submit(request)
        finally:
            with self._changed:
                self._num_submitting -= 1
                self._last_used = time.monotonic()

    def status(self) -> EngineStatus:
        engine = self._engine
        if engine is None:
            return EngineStatus(0, 0, 0, self._is_draining, is_asleep=True)
        # An engine that ends because its models are released drains, too.
        return replace(engine.status(), is_draining=self._is_draining)

    @property
    def totals(self) -> Stats:
        """Counters of all rounds so far, those before the models were released included."""
        engine = self._engine
        return self._totals if engine is None else engine.totals

    def cache_usage(self) -> float:
        """Return the share of the target's KV cache that running requests use; 0 while it is released."""
        engine = self._engine
        return 0.0 if engine is None else engine.cache_usage()

    def drain(self, seconds: float) -> None:
        """Accept no more requests, and wait for those in progress; cancel them after `seconds`."""
        self._is_draining = True
        with self._changed:
            engine = self._engine
        if engine is not None:
            engine.drain(seconds)

    def close(self) -> None:
        """Cancel all requests and end the threads."""
        self.drain(0)
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join()
        if self._engine is not None:
            self._engine.close()

    def _awake(self) -> Engine:
        """Return the engine, loading the models if needed."""
        if self._is_draining:
            raise DrainingError("the server is shutting down; retry at another one")
        if self._engine is None:
            start = time.monotonic()
            engine = self._make()
            engine.totals = self._totals
            self._engine = engine
            logger.info("loaded the models again in %.1f s", time.monotonic() - start)
        return self._engine

    def _release_when_idle(self) -> None:
        with self._changed:
            while not self._is_closed:
                last_end = 0.0 if self._engine is None else self._engine.last_end
                left = max(self._last_used, last_end) + self._idle_seconds - time.monotonic()
                if self._engine is None or left > 0:
                    self._changed.wait(self._idle_seconds if self._engine is None else left)
                elif self._num_submitting or self._engine.status().num_requests:
                    self._last_used = time.monotonic()
                else:
                    self._release(self._engine)

    def _release(self, engine: Engine) -> None:
        engine.close()
        self._totals = engine.totals
        del engine
        self._engine = None
        gc.unfreeze()
        gc.collect()  # models are part of reference cycles
        gc.freeze()
        torch.cuda.empty_cache()
        logger.info("released the models after %g s without a request", self._idle_seconds)


ServerEngine = Engine | SleepingEngine
