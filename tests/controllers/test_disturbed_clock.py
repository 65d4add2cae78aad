"""The controller `cost` while other processes take processor time: it recovers, and keeps drafting where that pays."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import lru_cache
from statistics import mean

import pytest
from simulation import Simulation

from secondguess.controllers.cost.controller import CostController

Delay = Callable[[random.Random, float], float]
"""Seconds of a phase on a disturbed machine, given those on a quiet one."""

DISTURBANCES: dict[str, Delay] = {
    "slower": lambda rng, seconds: 3 * seconds,
    "preempted": lambda rng, seconds: seconds + 6 * (rng.random() < 0.3 * seconds),
    "slower and preempted": lambda rng, seconds: 2 * seconds + 8 * (rng.random() < 0.4 * seconds),
    "stalled": lambda rng, seconds: seconds + rng.expovariate(1.0) * 20 * (rng.random() < 0.2 * seconds),
}
NUM_QUIET, NUM_DISTURBED, NUM_SEEDS = 300, 700, 3
PAIRS = {
    "strong drafter": {"chance": lambda number, depth: 0.8, "step": 0.1, "node": 0.05},
    "weak drafter": {"chance": lambda number, depth: 0.65, "step": 0.12, "node": 0.04},
}


def run(
    pair: str, num_quiet: int, disturbance: Delay, num_disturbed: int, seed: int
) -> tuple[Simulation, CostController]:
    """Rounds on a quiet machine, and then on a disturbed one."""

    def delay(rng: random.Random, number: int, seconds: float) -> float:
        disturbed = num_quiet <= number < num_quiet + num_disturbed
        return disturbance(rng, seconds) if disturbed else seconds

    controller = CostController()
    simulation = Simulation(**PAIRS[pair], delay=delay)
    simulation.play(controller, num_quiet + num_disturbed, seed=seed)
    return simulation, controller


def speed_after(simulation: Simulation, controller: CostController, num_skipped: int, seed: int) -> float:
    """Tokens per second on a quiet machine, the first tokens left out."""
    start = simulation.tokens
    while simulation.tokens < start + num_skipped:
        simulation.play(controller, 1, seed=simulation.tokens + seed)
    seconds, tokens = simulation.seconds, simulation.tokens
    simulation.play(controller, 400, seed=seed)
    return (simulation.tokens - tokens) / (simulation.seconds - seconds)


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("disturbance", DISTURBANCES)
@pytest.mark.parametrize("num_quiet", [0, NUM_QUIET])
def test_speed_recovers_within_200_tokens_after_a_burst_of_load(
    pair: str, disturbance: str, num_quiet: int
) -> None:
    speeds = []
    for seed in range(NUM_SEEDS):
        disturbed = run(pair, num_quiet, DISTURBANCES[disturbance], NUM_DISTURBED, seed)
        speeds.append(speed_after(*disturbed, num_skipped=200, seed=seed))
    # The speeds of single runs vary by 4 % of their mean.
    assert mean(speeds) > 0.93 * quiet_speed(pair)
    assert min(speeds) > 0.85 * quiet_speed(pair)


@lru_cache
def quiet_speed(pair: str) -> float:
    """Mean speed on a machine that was never disturbed."""
    return mean(
        speed_after(*run(pair, NUM_QUIET, DISTURBANCES["slower"], 0, seed), num_skipped=0, seed=seed)
        for seed in range(NUM_SEEDS)
    )


@pytest.mark.parametrize("disturbance", ["slower", "preempted", "slower and preempted"])
def test_drafting_continues_on_a_disturbed_machine(disturbance: str) -> None:
    """Drafts pay on a busy machine too: rounds are compared with plain rounds of the same moments."""
    for seed in range(4):
        simulation, _ = run("strong drafter", NUM_QUIET, DISTURBANCES[disturbance], 1500, seed)
        lengths = [length for (length,) in simulation.drafted[NUM_QUIET + 300 :]]
        assert sum(length > 0 for length in lengths) > 0.5 * len(lengths), f"seed {seed}"


@pytest.mark.parametrize("disturbance", ["slower", "preempted", "slower and preempted"])
def test_a_useless_drafter_is_not_used_for_long_after_a_burst(disturbance: str) -> None:
    for seed in range(4):
        simulation = Simulation(
            lambda number, depth: 0.0,
            step=0.3,
            delay=lambda rng, number, seconds: (
                DISTURBANCES[disturbance](rng, seconds) if 300 <= number < 1000 else seconds
            ),
        )
        simulation.play(CostController(), 3000, seed=seed)
        assert sum(length > 0 for (length,) in simulation.drafted[1000:2000]) < 60, f"seed {seed}"
