"""torch's OpenMP threads do not spin for long, whichever of torch and secondguess is imported first."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SCRIPT = """
import {first}
import {second}
import time

import torch

from secondguess.runtime.system.openmp import bound_spinning

torch.set_num_threads(2)
bound_spinning()
values = torch.ones(2**18)
values.add_(1)
taken = []
for _ in range(3):  # other load can only add to the time
    start = time.process_time()
    for _ in range(50):
        values.add_(1)
        time.sleep(0.01)
    taken.append(time.process_time() - start)
print(min(taken))
"""
VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OMP_NUM_THREADS")


@pytest.mark.skipif(
    (os.cpu_count() or 1) != 2, reason="libgomp shortens spins if there are more threads than processors"
)
@pytest.mark.parametrize(("first", "second"), [("torch", "secondguess"), ("secondguess", "torch")])
def test_threads_of_torch_do_not_spin_for_long(first: str, second: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    script = SCRIPT.format(first=first, second=second)
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    assert float(done.stdout) < 0.05  # processor seconds, of which 50 operations take about 0.01
