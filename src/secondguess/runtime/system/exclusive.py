"""Lock around the calls on a runtime: safe in several threads, across a fork and at exit.

A runtime's cache, slots and buffers belong to one call at a time. Calls of other threads wait. A
fork waits for calls in progress, so that the child finds every runtime between two calls, and for the
reading of checkpoints, which changes the state of libraries for a while. The
interpreter exits after the calls in progress; daemon threads stop at their next call.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar, cast
from weakref import WeakSet

import torch

from secondguess.runtime.system import machine

EXIT_TIMEOUT = 30.0
"""Seconds that the interpreter waits at exit for the calls in progress."""


class CallLock:
    """Reentrant lock of one runtime."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        with _registry:
            _all.add(self)

    def exclusive(self) -> threading.RLock:
        """Return a context in which this thread holds the lock."""
        # only daemon threads are left when the interpreter exits
        is_daemon = threading.current_thread() is not threading.main_thread()
        if _exiting and is_daemon and not self._lock._is_owned():  # type: ignore[attr-defined]
            threading.Event().wait()  # until the process ends
        return self._lock


Method = TypeVar("Method", bound=Callable[..., Any])


def exclusive(method: Method) -> Method:
    """Run a method while holding the `lock` of its object, a `CallLock`."""

    @wraps(method)
    def call(self: Any, *arguments: Any, **options: Any) -> Any:
        with self.lock.exclusive():
            return method(self, *arguments, **options)

    return cast(Method, call)


loading = threading.RLock()
"""Held while a checkpoint is read. A thread that holds it may call runtimes, but not the other way round."""
_registry = threading.RLock()
_all: WeakSet[CallLock] = WeakSet()
_held: list[CallLock] = []
_exiting = False


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """Return a context that one thread at a time is in.

    While it loads a model, Transformers replaces functions of its own and of torch, and the default dtype. A fork
    waits until it has restored them.
    """
    with loading:
        yield


def _before_fork() -> None:
    loading.acquire()
    _registry.acquire()
    for lock in list(_all):
        lock._lock.acquire()
        _held.append(lock)


def _after_fork() -> None:
    while _held:
        _held.pop()._lock.release()
    _registry.release()
    loading.release()


def _after_fork_in_child() -> None:
    if _held:
        # The parent's OpenMP threads are missing here: torch would wait for them forever.
        machine.keep_num_threads()
        torch.set_num_threads(1)
    _after_fork()


def _finish_calls() -> None:
    """Wait for the calls in progress, and keep the locks: a thread that calls now waits until the process ends.

    A thread that is ended within an operation of torch, when it takes the interpreter's lock again, aborts the process.
    Freeing a tensor is such an operation, so the threads are not unwound.
    """
    global _exiting
    _exiting = True
    for lock in list(_all):
        lock._lock.acquire(timeout=EXIT_TIMEOUT)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child)
atexit.register(_finish_calls)
