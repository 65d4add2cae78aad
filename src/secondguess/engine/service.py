"""Requests of a server: a bounded queue, cancellation, deadlines and a drain, on one thread."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from weakref import WeakSet

from secondguess.checkpoint import memory
from secondguess.engine.generation import Generation, NewPiece, Output
from secondguess.engine.models import MEMORY_SHARE, Models
from secondguess.errors import SecondGuessError
from secondguess.names import check_range
from secondguess.prompts import Prompt
from secondguess.sampling import SamplingParams
from secondguess.stats import Stats

logger = logging.getLogger(__name__)

RESERVED_ROWS, RESERVED_POSITIONS = 16, 2048
"""Size of the KV cache for which an engine makes room at its start, if memory allows."""
RESERVED_SHARE = 0.1
"""Maximum share of the available memory that this room may take once it is used."""


class QueueFullError(SecondGuessError):
    """More requests are waiting than the engine accepts; there may be room in `retry_after` seconds."""

    def __init__(self, limit: int, retry_after: float) -> None:
        super().__init__(
            f"cannot queue a request: {limit} samples are waiting. Retry in {retry_after:.0f} s."
        )
        self.limit, self.retry_after = limit, retry_after

    def __reduce__(self) -> tuple[type[QueueFullError], tuple[int, float]]:
        return type(self), (self.limit, self.retry_after)


class DrainingError(SecondGuessError):
    """The engine finishes the requests that it has and accepts no others."""


class DeadlineError(SecondGuessError):
    """The deadline of a request passed before its output was complete."""


@dataclass(frozen=True)
class Finished:
    """Last event of a request: its outputs, and the time that it waited; outputs of a cancelled request are incomplete."""

    outputs: list[Output]
    queue_seconds: float = 0.0


@dataclass(frozen=True)
class Failed:
    """Last event of a request that failed."""

    error: Exception


Event = NewPiece | Finished | Failed
"""Event of a request: text that a round added, or its end."""


@dataclass(frozen=True)
class EngineStatus:
    """State of an engine.

    Args:
        num_running, num_waiting: rows that decode, and rows that wait for admission.
        num_requests: requests that are not finished.
        is_draining: True if no request is accepted any more.
        is_asleep: True if the models are released until the next request.
    """

    num_running: int
    num_waiting: int
    num_requests: int
    is_draining: bool
    is_asleep: bool = False


class Request:
    """Request for `params.n` samples of each of its prompts, which decode together, from submission to its last event.

    Args:
        prompts: texts, token ids or messages.
        params: sampling settings.
        deadline: value of `time.monotonic()` after which the request fails; None for no limit.
        owner: sender of the request, whose outputs alone it may draft from.
    """

    generation: Generation

    def __init__(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        deadline: float | None = None,
        owner: str = "",
    ) -> None:
        self.prompts = prompts
        self.params = params
        self.deadline = deadline
        self.owner = owner
        self.is_cancelled = False
        self._wake: Callable[[], None] = lambda: None
        self._submitted_at = time.monotonic()

    def receive(self, event: Event) -> None:
        """Take an event, on the engine's thread; it must not block, and its exceptions are logged."""

    def begin(self, models: Models, wake: Callable[[], None]) -> None:
        """Make the rows; `wake` tells the engine that the request is cancelled."""
        self._wake = wake
        self._submitted_at = time.monotonic()
        self.generation = Generation(models, self.prompts, [self.params] * len(self.prompts), self.owner)
        self.generation.group.is_eager = True

    def cancel(self) -> None:
        """Stop decoding after the round in progress; the last event has the text so far."""
        self.is_cancelled = True
        self._wake()

    @property
    def is_late(self) -> bool:
        """True if the deadline has passed."""
        return self.deadline is not None and time.monotonic() > self.deadline

    def deliver(self) -> bool:
        """Receive the events so far; return True if the request has ended."""
        group = self.generation.group
        is_done = group.is_done  # read first: the last results precede it
        while group.results:
            for piece in group.results.popleft():
                self._send(piece)
        if not is_done:
            return False
        if isinstance(group.error, Exception):
            self._send(Failed(group.error))
        elif group.is_cancelled and self.is_late and not self.is_cancelled:
            self._send(Failed(DeadlineError("the deadline of the request has passed")))
        else:
            waited = (group.admitted_at or time.monotonic()) - self._submitted_at
            self._send(Finished(self.generation.outputs(), waited))
        return True

    def _send(self, event: Event) -> None:
        try:
            self.receive(event)
        except Exception:
            logger.exception("the callback of a request failed")


def reserve_cache(llm: Models) -> None:
    """Make room in the KV cache for a usual load, so that it is not copied while rows decode.

    On a CPU, memory that no row has used yet is not taken.
    """
    runtime = llm.target.runtime
    available = memory.available_memory(runtime.device)
    if runtime.device.type != "cpu" or available is None or not llm.cache_bytes:
        return
    num_positions = min(RESERVED_POSITIONS, runtime.context_length)
    num_rows = int(RESERVED_SHARE * available / (num_positions * llm.cache_bytes))
    if num_rows:
        runtime.reserve(min(num_rows, RESERVED_ROWS), num_positions)


class Engine:
    """Thread that decodes requests, which join and leave between rounds.

    It starts with the first request. A forked process has an engine without requests, with a thread of its own. An
    engine that is no longer needed keeps its models until `close` is called.

    Args:
        llm: models; calls of `llm.generate` from other threads decode in the same batch.
        max_waiting: number of waiting rows from which on requests are refused; at least 1.
    """

    def __init__(self, llm: Models, max_waiting: int = 256) -> None:
        self.llm = llm
        check_range("max_waiting", max_waiting, 1, 1_000_000)
        self._max_waiting = max_waiting
        self._is_draining = self._is_closed = False
        self._seconds_per_request, self.last_end = 1.0, time.monotonic()
        self._reset()
        reserve_cache(llm)
        self.totals = Stats()
        _all.add(self)

    def _reset(self) -> None:
        """Forget all requests and the thread, which a forked process does not have."""
        self._requests: list[Request] = []
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def submit(self, request: Request) -> None:
        """Queue a request, which receives its events on the engine's thread.

        Raises:
            BadInputError: a request that cannot be decoded.
            QueueFullError: too many requests are waiting.
            DrainingError: the engine is shutting down.
            OutOfMemoryError: the prompt's KV cache does not fit into memory.
        """
        self._check_accepting()
        request.begin(self.llm, self._wake)
        with self._changed:
            self._check_accepting()
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="secondguess-engine", daemon=True)
                thread.start()  # may fail
                self._thread = thread
            if not self._requests:
                self.last_end = time.monotonic()  # idle time is no time per request
            self._requests.append(request)
            self.llm.shared_batch.submit(request.generation.group)
            self._changed.notify()

    def _check_accepting(self) -> None:
        if self._is_draining:
            raise DrainingError("the server is shutting down; retry at another one")
        if self.llm.shared_batch.num_waiting >= self._max_waiting:
            raise QueueFullError(self._max_waiting, max(self._seconds_per_request, 1.0))

    def status(self) -> EngineStatus:
        shared = self.llm.shared_batch
        return EngineStatus(shared.num_admitted, shared.num_waiting, len(self._requests), self._is_draining)

    @property
    def totals(self) -> Stats:
        """Counters of all rounds so far, those of running and of cancelled requests included."""
        totals = self.llm.shared_batch.components.recorder.totals
        assert totals is not None
        return totals

    @totals.setter
    def totals(self, totals: Stats) -> None:
        self.llm.shared_batch.components.recorder.totals = totals

    def cache_usage(self) -> float:
        """Return the share of the target's KV cache that running requests use.

        The whole is the size to which the memory that is free now lets the cache grow, as for admission.
        """
        runtime = self.llm.target.runtime
        available = memory.available_memory(runtime.device)
        growth = 0.0
        if available is not None and self.llm.cache_bytes:
            growth = MEMORY_SHARE * available / self.llm.cache_bytes
        return runtime.num_live_tokens / max(runtime.num_allocated_tokens + growth, 1.0)

    def drain(self, seconds: float) -> None:
        """Accept no more requests, and wait for those in progress; cancel them after `seconds`."""
        with self._changed:
            self._is_draining = True
            self._changed.wait_for(lambda: not self._requests, seconds)
            for request in self._requests:
                request.is_cancelled = True
            self._changed.notify_all()

    def close(self) -> None:
        """Cancel all requests and end the thread."""
        self.drain(0)
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():  # a callback may close the engine
            thread.join()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._requests or self._is_closed)
                if not self._requests:
                    return
                requests = list(self._requests)
            try:
                for request in requests:
                    if request.is_cancelled or request.is_late:
                        self.llm.shared_batch.cancel(request.generation.group)
                self.llm.shared_batch.step()
            except Exception as error:  # errors of rounds end groups, so this is one of releasing rows
                logger.exception("the engine failed")
                for request in requests:
                    request.generation.group.error = error
                    with suppress(Exception):
                        self.llm.shared_batch.cancel(request.generation.group)
            self._end([request for request in requests if request.deliver()])

    def _end(self, ended: Sequence[Request]) -> None:
        """Forget requests that have ended."""
        if not ended:
            return
        now = time.monotonic()
        seconds = (now - self.last_end) / len(ended)
        self._seconds_per_request += (seconds - self._seconds_per_request) / 8
        self.last_end = now
        with self._changed:
            self._requests = [request for request in self._requests if request not in ended]
            self._changed.notify_all()


_all: WeakSet[Engine] = WeakSet()


def _reset_after_fork() -> None:
    for engine in _all:
        engine._reset()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_after_fork)
