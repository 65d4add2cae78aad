"""Calls on one runtime from several threads, forks, and the end of the interpreter."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from functools import partial
from itertools import count

import pytest
import torch

from families import FAMILIES, KINDS, needs_kernels, random_tokens, row_of, runtime_of, write_checkpoint
from secondguess.core import Draft
from secondguess.runtime.system import exclusive

SOAK_SECONDS = os.environ.get("SECONDGUESS_SOAK_SECONDS")
SECONDS = {"graphs": 2, "native": 2.0, "fused": 0.5, "transformers": 0.5} | (
    dict.fromkeys(KINDS, float(SOAK_SECONDS)) if SOAK_SECONDS else {}
)
"""Duration of the test with 12 threads by runtime."""
NUM_THREADS = 12


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(FAMILIES["llama"](), tmp_path_factory.mktemp("shared"))


def two_rounds(runtime, number):
    """Logits of two rounds of a row whose length and drafts depend on `number`."""
    tokens = random_tokens(3 + 7 * (number % 10), seed=number)
    row = row_of(tokens)
    runtime.begin([row])
    first = runtime.score([row], Draft.chains([random_tokens(number % 5, seed=number)])).logits
    runtime.rewind([row], [len(tokens)])
    row.tokens += [5, 6]
    second = runtime.score([row], Draft.chains([[7] * (number % 3)])).logits
    runtime.release(row)
    return first, second


@pytest.mark.parametrize("kind", KINDS)
def test_twelve_threads_on_one_runtime_get_the_logits_of_one(kind, checkpoint):
    runtime = runtime_of(checkpoint, kind)
    expected = [two_rounds(runtime, number) for number in range(20)]
    end = time.monotonic() + SECONDS[kind]
    wrong, errors, num_calls = [], [], count()
    # the sums of torch depend on the number of threads
    same = torch.equal if kind == "native" else partial(torch.allclose, atol=1e-4)
    before = torch.get_num_threads()

    def call(thread):
        try:
            for number in count(thread):
                if time.monotonic() > end:
                    return
                found = two_rounds(runtime, number % 20)
                next(num_calls)
                if not all(map(same, found, expected[number % 20])):
                    wrong.append(number)
        except Exception as error:
            errors.append(error)

    try:
        torch.set_num_threads(2)
        threads = [threading.Thread(target=call, args=(number,)) for number in range(NUM_THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        torch.set_num_threads(before)
    assert (errors, wrong) == ([], [])
    assert next(num_calls) > 2, "on a busy machine a round takes long"
    assert runtime.num_live_rows == 0


@needs_kernels
def test_a_table_in_use_outlives_its_replacement(checkpoint, monkeypatch):
    """Runtimes that skip layers share the rotary tables, which one may replace while another computes."""
    runtime = runtime_of(checkpoint, "native")
    rotary = runtime.decoder.rotaries[0]
    run = runtime.forward._kernels.secondguess_run
    held = []

    class Meanwhile:
        secondguess_free = runtime.forward._kernels.secondguess_free

        @staticmethod
        def secondguess_run(*arguments):
            table = weakref.ref(rotary.table(1))
            rotary.table(2 * rotary.table(1).shape[0])
            held.append(table() is not None)
            return run(*arguments)

    expected = two_rounds(runtime, 3)
    monkeypatch.setattr(runtime.forward, "_kernels", Meanwhile)
    assert all(map(torch.equal, two_rounds(runtime, 3), expected))
    assert held == [True] * len(held) != []


@needs_kernels
def test_runtimes_that_share_weights_run_in_two_threads(checkpoint):
    runtime = runtime_of(checkpoint, "native")
    fewer = runtime.skip_layers([0])
    expected = {each: [two_rounds(each, number) for number in range(20)] for each in (runtime, fewer)}
    wrong = []

    def call(each):
        for number in range(200):
            if not all(map(torch.equal, two_rounds(each, number % 20), expected[each][number % 20])):
                wrong.append(number)

    threads = [threading.Thread(target=call, args=(each,)) for each in (runtime, fewer)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_thread_that_is_about_to_call_waits_until_the_process_ends(monkeypatch):
    lock, entered = exclusive.CallLock(), threading.Event()
    monkeypatch.setattr(exclusive, "_all", {lock})
    monkeypatch.setattr(exclusive, "_exiting", False)
    before_exit = lock.exclusive()

    def call():
        with before_exit:
            entered.set()

    exclusive._finish_calls()
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    assert not entered.wait(0.2)
    lock._lock.release()  # so that this process can go on
    assert entered.wait(10)
    thread.join()


SCRIPT = """
import os, sys, threading, time, torch
from secondguess.checkpoint.loader import load_model
from secondguess.checkpoint.plan import Checkpoint
from secondguess.core import (Draft, Row)
from secondguess.sampling import SamplingParams
torch.set_num_threads(2)
runtime = load_model(Checkpoint.resolve(sys.argv[1], dtype="bfloat16", device="cpu", runtime="native")).runtime

def forward(num_tokens):
    row = Row([5] * num_tokens, SamplingParams(max_tokens=64))
    runtime.begin([row])
    logits = runtime.score([row], Draft.empty(1)).logits
    runtime.release(row)
    return logits

expected = forward(40)
threading.Thread(target=lambda: [forward(20) for _ in iter(int, 1)], daemon=True).start()
for _ in range(4):
    time.sleep(0.05)
    child = os.fork()
    if child == 0:
        same = torch.equal(forward(40), expected)
        runtime.free()
        os._exit(0 if same and torch.equal(forward(40), expected) else 1)
    for _ in range(200):
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        time.sleep(0.1)
    else:
        os.kill(child, 9)
        status = "the child hangs"
    print(status)
assert torch.equal(forward(40), expected)

run = runtime.forward._kernels.secondguess_run
class Slow:
    secondguess_free = runtime.forward._kernels.secondguess_free
    @staticmethod
    def secondguess_run(*arguments):
        entered.set()
        time.sleep(0.3)
        failed = run(*arguments)
        print("finished", flush=True)
        return failed
entered = threading.Event()
runtime.forward._kernels = Slow
entered.wait()
"""
"""Forks after forwards with several threads, of the kernels and of torch, and during one of a daemon thread.

The interpreter ends while that thread computes.
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The process of the script, once it has ended."""
    config = FAMILIES["llama"]()
    config.num_key_value_heads, config.head_dim = 4, 64  # a cache that torch fills with several threads
    path = write_checkpoint(config, tmp_path_factory.mktemp("forked"))
    command = [sys.executable, "-c", SCRIPT, str(path)]
    return subprocess.run(command, capture_output=True, text=True, timeout=100)


@needs_kernels
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_process_computes_the_same(finished):
    assert finished.stdout.split("\n")[:4] == ["0"] * 4, finished.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_fork_waits_for_a_checkpoint_that_is_read():
    """Transformers changes the default dtype meanwhile."""
    entered = threading.Event()

    @exclusive.one_at_a_time()
    def read():
        torch.set_default_dtype(torch.bfloat16)
        entered.set()
        time.sleep(0.3)
        torch.set_default_dtype(torch.float32)

    reader = threading.Thread(target=read)
    reader.start()
    entered.wait()
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        with exclusive.one_at_a_time():
            os._exit(0 if torch.get_default_dtype() == torch.float32 else 1)
    _, status = os.waitpid(child, 0)
    reader.join()
    assert status == 0


@needs_kernels
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_the_interpreter_ends_after_the_forward_of_a_daemon_thread(finished):
    found = finished.stdout.split("\n")[4:], finished.stderr, finished.returncode
    assert found == (["finished", ""], "", 0)
