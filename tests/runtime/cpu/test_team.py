"""Number of threads of the kernels on a busy machine (`cpu/team.h`)."""

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

import secondguess.runtime.cpu

SOURCE = """
#include "team.h"
extern "C" int threads_of_next_call(int wanted, int64_t busy, int64_t now) {
    static ThreadLimit limit;
    return limit.of(wanted, 4, busy, now);
}
"""
MILLISECOND = 1_000_000
START = 1_000 * MILLISECOND
FIRST_HOLD, LONGEST_HOLD = 20, 640  # ms


class Machine:
    """Calls on a team of four threads at times that the test sets."""

    def __init__(self, threads_of_next_call: Callable[[int, int, int], int]) -> None:
        self._ask = threads_of_next_call
        self.busy_until, self.now, self.used = 0, START, 4

    def call_after(self, milliseconds: int, finds_busy: bool = False, wanted: int = 4) -> int:
        """Return the number of threads of a call, before which threads found the machine busy or not."""
        self.now += milliseconds * MILLISECOND
        if finds_busy:
            self.busy_until = self.now + FIRST_HOLD * MILLISECOND
        self.used = self._ask(wanted, self.busy_until, self.now)
        return self.used


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    source, built = tmp_path / "team.cpp", tmp_path / "team.so"
    source.write_text(SOURCE)
    folder = Path(secondguess.runtime.cpu.__file__).parent
    command = [compiler, "-std=c++17", "-shared", "-fPIC", "-pthread", f"-I{folder}", str(source)]
    subprocess.run([*command, "-o", str(built)], check=True)
    function = ctypes.CDLL(str(built)).threads_of_next_call
    function.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    return Machine(function)


def test_a_machine_that_stays_busy_gets_one_thread_fewer_at_a_time(machine):
    assert machine.call_after(1) == 4
    assert machine.call_after(1, finds_busy=True) == 4, "a burst that may be over"
    assert [machine.call_after(21, finds_busy=True) for _ in range(4)] == [3, 2, 1, 1]


def test_small_calls_neither_lower_nor_end_the_limit(machine):
    """As a product of one block, which wants one thread."""
    machine.call_after(1, finds_busy=True)
    machine.call_after(1, wanted=1)
    assert machine.call_after(20, finds_busy=True) == 3
    assert machine.call_after(25, wanted=1) == 1
    assert machine.call_after(1) == 4, "one more is tried after the hold"
    assert machine.call_after(1, finds_busy=True) == 3
    assert [machine.call_after(1, wanted=wanted) for wanted in (1, 4, 2, 4)] == [1, 3, 2, 3]


def test_threads_return_one_by_one_on_a_quiet_machine(machine):
    for _ in range(3):
        machine.call_after(15, finds_busy=True)
    assert machine.used == 2
    held = [machine.call_after(10) for _ in range(12)]
    assert held == sorted(held)
    assert held[0] == 2
    assert held[-1] == 4


def test_trials_of_another_thread_become_rare_while_the_machine_stays_busy(machine):
    for _ in range(4):
        machine.call_after(21, finds_busy=True)
    assert machine.used == 1
    holds = []
    for _ in range(8):
        waited = 0
        while machine.call_after(1) == 1:
            waited += 1
        holds.append(waited)
        machine.call_after(1, finds_busy=True)
    assert holds == sorted(holds)
    assert holds[-1] == pytest.approx(LONGEST_HOLD, abs=2)
    for _ in range(4 * LONGEST_HOLD):
        machine.call_after(1)
    assert machine.used == 4
