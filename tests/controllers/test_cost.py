"""The controller `cost`: it drafts if that pays, stops if not, and its loss is bounded.

Rounds are played on simulation: a drafter whose nodes are accepted with a given chance, and a clock that runs by given costs.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections.abc import Hashable, Sequence
from itertools import pairwise

import pytest
from simulation import Chance, FixedConfidences, Simulation

from secondguess.controllers.cost.acceptance_stats import AcceptanceStats
from secondguess.controllers.cost.averages import CostCurve, LinearCost, PlainTime
from secondguess.controllers.cost.controller import CostController, CostOptions
from secondguess.controllers.cost.cost_model import CostModel
from secondguess.controllers.cost.expectations import CONFIDENCE_EDGES, Expectations
from secondguess.controllers.cost.load_detector import LoadDetector
from secondguess.controllers.cost.loss_limits import (
    GRANT,
    GRANT_INTERVAL,
    MAX_BALANCE,
    MAX_LOSS,
    MAX_PROBE_BALANCE,
    NUM_REVIEWED,
    PROBE_INCOME,
    STOP_ROUNDS,
    LossGuard,
    ProbeBudget,
)
from secondguess.controllers.cost.round_buffers import MAX_DRAFTED_ROUNDS
from secondguess.controllers.cost.round_times import (
    MAX_PLAIN_AGE,
    NUM_CHECKS,
    NUM_DEVIATIONS,
    LinearSeconds,
    RoundTimes,
)
from secondguess.core import Candidate, Draft, Plan, RoundTime, Row, Verdict
from secondguess.sampling import SamplingParams


def loss_bound(num_rounds: int, worst_round: float) -> float:
    """Return the largest loss over any rounds that `loss_limits` promises, in plain rounds."""
    num_further_stops = math.log2(1 + num_rounds / STOP_ROUNDS)
    return MAX_BALANCE + MAX_LOSS + worst_round + (MAX_LOSS / 2 + worst_round) * num_further_stops


def best_fixed(chance: float, step: float, node: float, any_node: float = 0.0) -> float:
    """Speed of the best constant draft length where every node is accepted with one chance."""
    return max(
        sum(chance**depth for depth in range(length + 1))
        / (1 + length * (step + node) + (any_node if length else 0))
        for length in range(17)
    )


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("chance", "step"), [(0.95, 0.05), (0.9, 0.15), (0.8, 0.05), (0.7, 0.15), (0.5, 0.1), (0.5, 0.02)]
)
def test_cost_finds_the_best_constant_length(chance: float, step: float, deterministic: bool) -> None:
    simulation = Simulation(lambda number, depth: chance, step, deterministic=deterministic).play(
        CostController(), 3000
    )
    assert simulation.speed > 0.96 * best_fixed(chance, step, 0.05)


def test_cost_distinguishes_drafts_by_confidence() -> None:
    """Half of the rounds have confident drafts that are accepted, half unconfident ones that are not."""
    controller = CostController()
    simulation = Simulation(lambda number, depth: 0.97 if number % 2 else 0.1, step=0.1)
    rng = random.Random(1)
    lengths: dict[bool, list[int]] = {True: [], False: []}
    for number in range(2000):
        simulation.confidence = 0.9 if number % 2 else 0.15
        simulation.chance = lambda _, depth, number=number: 0.97 if number % 2 else 0.1
        simulation.play(controller, 1, seed=rng.randrange(10**9))
        lengths[bool(number % 2)].append(simulation.drafted[-1][0])
    assert sum(lengths[True][500:]) > 4 * sum(lengths[False][500:])


@pytest.mark.parametrize("deterministic", [False, True])
def test_drafting_of_noise_stops(deterministic: bool) -> None:
    simulation = Simulation(lambda number, depth: 0.0, deterministic=deterministic).play(
        CostController(), 4000
    )
    assert sum(length > 0 for (length,) in simulation.drafted[:100]) <= 40
    assert sum(length > 0 for (length,) in simulation.drafted[1000:]) <= 40
    assert simulation.speed > 0.985


def test_perfect_drafts_as_expensive_as_the_target_are_stopped() -> None:
    simulation = Simulation(lambda number, depth: 1.0, step=1.0, confidence=0.99).play(CostController(), 2000)
    assert simulation.speed > 0.98


class CountingTimes(RoundTimes):
    """Counts how often somebody wants to know."""

    num_asked = 0

    def draft_seconds(self, part: Hashable, num_rows: int) -> LinearSeconds:
        self.num_asked += 1
        return super().draft_seconds(part, num_rows)

    def rests(self, num_rows: int, num_cells: int) -> list[float]:
        self.num_asked += 1
        return super().rests(num_rows, num_cells)


@pytest.mark.parametrize("num_rows", [1, 4])
def test_costs_are_not_recomputed_in_every_round(num_rows: int) -> None:
    """A decision takes time too: compared with a pass of a millisecond it is to be cheap."""
    controller = CostController()
    controller.times = CountingTimes()
    simulation = Simulation(lambda number, depth: 0.8, step=0.05).play(controller, 100, num_rows)
    before, known = sum(map(sum, simulation.drafted)), controller.times.num_asked
    simulation.play(controller, 160, num_rows)
    assert sum(map(sum, simulation.drafted)) - before > 2 * 160 * num_rows
    assert controller.times.num_asked - known < 0.5 * 160


def test_known_costs_are_renewed() -> None:
    model = CostModel()
    for _ in range(3):
        model.times.add_plain(1, 20, [1.0])
    model.enter(1, None)
    for cost in [1.2] * 60 + [1.5] * 60:
        model.times.add(1, 2, cost)
        model.record(None, cost, 2.0, worthwhile=True)
        model.renew()
        known = model.extra_pass_seconds(0, 2)
    assert known == pytest.approx(0.5, abs=0.1)


def test_drafts_are_compared_with_recent_rounds_of_the_same_kind() -> None:
    model = CostModel()
    for _ in range(3):
        model.times.add_plain(1, 20, [1.0])
    for _ in range(300):
        model.record("match", 1.5, 3.0, worthwhile=True)
    model.enter(1, "match")
    assert model.rate == pytest.approx(2.0, rel=0.02)
    model.enter(1, "other")
    assert model.rate == 1.0
    model.record("match", 100.0, 3.0, worthwhile=True)
    model.enter(1, "match")
    assert model.rate == pytest.approx(2.0, rel=0.05), "one disturbed round"
    model.record("match", 1.5, 3.0, worthwhile=False)
    for expected in (15 / 8, 1 + 7 / 8 * 7 / 8):
        model.enter(1, "match")
        assert model.rate == pytest.approx(expected, rel=0.05), "rounds without a good draft"
        model.record("match", 1.5, 3.0, worthwhile=False)


def test_drafting_resumes_when_acceptance_rises() -> None:
    simulation = Simulation(lambda number, depth: 0.0 if number < 500 else 0.9).play(CostController(), 3000)
    late = [length for (length,) in simulation.drafted[2000:]]
    assert sum(late) / len(late) > 4, "second nodes that were not accepted before are tried again"


def test_drafting_stops_when_acceptance_falls() -> None:
    simulation = Simulation(lambda number, depth: 0.9 if number < 500 else 0.0).play(CostController(), 1500)
    assert sum(length > 0 for (length,) in simulation.drafted[600:]) < 60


@pytest.mark.parametrize("saved", [-100.0, MAX_PROBE_BALANCE])
@pytest.mark.parametrize("seed", range(3))
def test_the_required_rate_decays_towards_plain_decoding(saved: float, seed: int) -> None:
    """Good drafts, but less good than such drafts were in other texts: plain decoding and probes would gain less.

    Args:
        saved: for probes. With nothing saved nothing is drafted unless it is good enough.
    """

    def scene() -> Simulation:
        kinds = Simulation(lambda number, depth: 0.95, step=0.0, node=0.3, deterministic=True, prefill=0.5)
        kinds.kind = lambda number: str(number // 8 % 6)
        return kinds

    controller = CostController()
    scene().play(controller, 600)
    for pace in controller._cost_model._recent_speeds.values():
        pace.tokens *= 1.5
    controller.probe_budget.balance = saved
    best = max(sum(0.95**depth for depth in range(k + 1)) / (1.5 + 0.3 * k) for k in range(1, 17))
    assert scene().play(controller, 100, seed=seed).speed > 0.7 * best


def test_more_expensive_draft_steps_are_detected() -> None:
    """The same drafts stop paying when draft steps take longer."""
    controller = CostController()
    cheap = Simulation(lambda number, depth: 0.6, step=0.05).play(controller, 500)
    dear = Simulation(lambda number, depth: 0.6, step=1.5).play(controller, 500)
    mean = lambda simulation: sum(length for (length,) in simulation.drafted[100:]) / 400  # noqa: E731
    assert mean(cheap) > 1
    assert mean(dear) < 0.2


ADVERSARIES: dict[str, Chance] = {
    "noise": lambda number, depth: 0.0,
    "good, then noise": lambda number, depth: float(number % 400 < 200),
    "good while it is tried": lambda number, depth: float(number % 10 < 3),
    "first node only": lambda number, depth: float(depth == 0) * 0.3,
    "coin": lambda number, depth: 0.25,
}


@pytest.mark.parametrize("adversary", ADVERSARIES)
@pytest.mark.parametrize("step", [0.02, 0.3, 2.0])
@pytest.mark.parametrize(("deterministic", "num_rows"), [(False, 1), (False, 4), (True, 1)])
def test_the_loss_over_any_stretch_is_within_the_bound(
    adversary: str, step: float, deterministic: bool, num_rows: int
) -> None:
    simulation = Simulation(ADVERSARIES[adversary], step=step, deterministic=deterministic, confidence=0.9)
    lost = simulation.play(CostController(), 1500, num_rows).lost
    for start in range(0, 1500, 50):
        for stretch in (10, 50, 128, 400, 1000):
            if start + stretch <= 1500:
                assert lost[start + stretch] - lost[start] <= loss_bound(stretch, 16 * (step + 0.05))


def record(guard: LossGuard, gain: float, *rows: Row) -> bool:
    """Run a round that gains the given time if drafting is allowed; return whether it was."""
    if guard.is_stopped:
        guard.record_plain(rows)
        return False
    guard.record(gain, rows)
    return True


def test_the_guard_stops_losses_that_estimates_miss() -> None:
    """A drafter whose cost is not in its draft steps: only the wall-clock time contains it."""
    guard = LossGuard()
    lost = sum(record(guard, -1.0) for _ in range(10_000))
    assert lost <= loss_bound(10_000, 1.0)


@pytest.mark.parametrize(
    "gains", [[-1.0] * 8, [-MAX_LOSS], [9.0, *[-6.0] * 7], [-5.0, 6.0, *[-5.0] * 4], [1.0] * 8]
)
@pytest.mark.parametrize("before", [0.0, -12.0, MAX_BALANCE])
def test_rounds_recorded_together_stop_drafting_as_if_recorded_one_by_one(
    gains: list[float], before: float
) -> None:
    guard = LossGuard()
    guard.record(before)
    foretold = guard.would_stop(gains)
    stopped = False
    for gain in gains:
        guard.record(gain)
        stopped |= guard.is_stopped
    assert foretold is stopped


def test_partly_recovered_losses_do_not_raise_the_limit() -> None:
    """An adversary that wins a little after each stop, and then loses on."""
    guard, total, worst, lows = LossGuard(), 0.0, 0.0, [0.0]
    for number in range(50_000):
        allowed = not guard.is_stopped
        gain = (1.0 if number % 12 < 4 else -1.0) if allowed else 0.0
        record(guard, gain)
        total += gain
        lows.append(total)
    for stretch in (50, 500, 5_000, 50_000):
        for start in range(0, 50_001 - stretch, stretch):
            worst = max(worst, lows[start] - lows[start + stretch])
        assert worst <= loss_bound(stretch, 1.0)


def test_the_guard_is_reset_once_the_loss_is_recovered() -> None:
    guard = LossGuard()
    while not guard.is_stopped:
        record(guard, -1.0)
    while guard.is_stopped:
        record(guard, 0.0)
    for _ in range(60):
        record(guard, 1.0)
    for _ in range(int(MAX_BALANCE + MAX_LOSS)):
        record(guard, -1.0)
    waits = 0
    while guard.is_stopped:
        record(guard, 0.0)
        waits += 1
    assert waits == STOP_ROUNDS


def a_row() -> Row:
    return Row([0] * 20, SamplingParams(max_tokens=10**6))


def test_each_further_stop_takes_twice_as_long() -> None:
    guard, waits = LossGuard(), []
    for _ in range(4):
        while not guard.is_stopped:
            record(guard, -1.0)
        waits.append(next(count for count in range(10_000) if record(guard, 0.0)))
    assert waits == [STOP_ROUNDS, 2 * STOP_ROUNDS, 4 * STOP_ROUNDS, 8 * STOP_ROUNDS]


def test_prefill_is_amortised_over_the_rounds_it_serves() -> None:
    """A text that takes longer to read than the guard's patience, and drafts that earn it back twice."""
    guard, row = LossGuard(), a_row()
    guard.amortise(row, MAX_LOSS + 4, 100)
    for _ in range(100):
        assert record(guard, 0.4, row)
    for _ in range(int(MAX_BALANCE + MAX_LOSS) - 1):
        assert record(guard, -1.0, row), "all is paid, and nothing falls due twice"
    at_once = LossGuard()
    at_once.record(-MAX_LOSS - 4)
    assert at_once.is_stopped


def test_unamortised_prefill_is_recorded_when_the_row_ends() -> None:
    guard, row, other = LossGuard(), a_row(), a_row()
    guard.amortise(row, MAX_LOSS + 1, 100)
    guard.amortise(other, 1.0, 100)
    guard.release(other)
    assert record(guard, 0.0, row)
    guard.release(row)
    assert guard.is_stopped
    guard.release(row)


def test_prefill_recorded_before_a_stop_does_not_cause_another_stop() -> None:
    """It is lost already, and the row is still decoded."""
    guard, row = LossGuard(), a_row()
    guard.amortise(row, 30.0, 40)
    assert record(guard, -MAX_LOSS, row)
    while guard.is_stopped:
        record(guard, 0.0, row)
    for _ in range(60):
        assert record(guard, -0.1, row)


def test_prefill_is_amortised_in_plain_rounds_too() -> None:
    guard, row = LossGuard(), a_row()
    guard.amortise(row, MAX_LOSS + 4, 100)
    waits = next(count for count in range(200) if guard.is_stopped or guard.record_plain([row]))
    assert 70 < waits < 100


@pytest.mark.parametrize("adversary", ["ends", "wins", "waits", "stays"])
@pytest.mark.parametrize("reading", [2.0, 12.0, 50.0])
@pytest.mark.parametrize("num_rounds", [1, 30, 10**6])
def test_amortised_prefill_stays_within_the_bound(adversary: str, reading: float, num_rounds: int) -> None:
    """Rows of two texts are read for as often as the guard allows; what is lost counts when it is spent."""
    rng = random.Random(5)
    guard, total, lows, rows = LossGuard(), 0.0, [0.0], [a_row(), a_row()]
    num_uncached = set(rows)
    for number in range(12_000):
        gain = 0.0
        if guard.is_stopped or (adversary == "waits" and number % 7):
            guard.record_plain(rows)
        else:
            for row in [row for row in rows if row in num_uncached]:
                gain -= reading
                num_uncached.discard(row)
                guard.amortise(row, reading, num_rounds)
            earned = {"ends": -1.0, "wins": 1.5 if number % 40 < 30 else -1.0}.get(
                adversary, rng.choice((-1.0, 0.2))
            )
            guard.record(earned, rows)
            gain += earned
        if {"ends": number % 3 == 0, "stays": number % 500 == 0}.get(adversary, number % 40 == 39):
            place = rng.randrange(2)
            guard.release(rows[place])
            rows[place] = a_row()
            num_uncached.add(rows[place])
        total += gain
        lows.append(total)
    for stretch in (1, 5, 20, 100, 1_000, 12_000):
        worst = max(lows[start] - lows[start + stretch] for start in range(0, 12_001 - stretch))
        assert worst <= loss_bound(stretch, 1.0 + 2 * reading)


def test_the_prefill_of_a_long_prompt_that_pays_does_not_stop_drafting() -> None:
    """Reading takes 20 plain rounds, more than the guard's patience; drafts win it back several times in every text."""
    controller, rng = CostController(), random.Random(4)
    drafted = plain = 0
    for _ in range(8):
        row = Row([0] * 600, SamplingParams(max_tokens=300))
        num_uncached = 600
        while not row.finished:
            length = controller.plan([row], [(Candidate(num_uncached=num_uncached),)])[0].length
            reading = 20.0 * num_uncached / 600 if length else 0.0
            num_uncached = 0 if length else num_uncached
            wanted = length
            length = min(length, 1)
            while length < wanted and controller.keep_drafting([row], FixedConfidences([0.8]), length - 1)[0]:
                length += 1
            accepted = next((depth for depth in range(length) if rng.random() >= 0.8), length)
            row.commit([0] * accepted, 0)
            verdict = Verdict.from_chain([accepted], [0])
            time = RoundTime(reading, 0.05 * length, 1 + reading + 0.08 * length)
            controller.learn([row], Draft.chains([[0] * length]), verdict, time)
            drafted, plain = drafted + (length > 0), plain + (length == 0)
        controller.release(row)
    assert drafted > 10 * plain


def test_probes_cost_no_more_than_their_budget() -> None:
    controller = CostController()
    simulation = Simulation(lambda number, depth: 0.0, step=0.3).play(controller, 200)
    before = simulation.seconds
    simulation.play(controller, 5000)
    lost = simulation.seconds - before - 5000
    assert 0 < lost <= PROBE_INCOME * 5000 + MAX_PROBE_BALANCE


def test_failed_probes_reduce_the_probing_rate() -> None:
    simulation = Simulation(lambda number, depth: 0.0, step=0.3).play(CostController(), 8000)
    probe_budget = [number for number, (length,) in enumerate(simulation.drafted) if length]
    early = sum(200 <= number < 1200 for number in probe_budget)
    late = sum(7000 <= number < 8000 for number in probe_budget)
    assert early > 2 * late


def test_the_probe_budget_is_halved_by_failures_and_restored_by_success() -> None:
    probe_budget = ProbeBudget()
    for change, halves in (
        (lambda: None, 1),
        (probe_budget.record_failure, 2),
        (probe_budget.record_success, 1),
    ):
        change()
        before = probe_budget.balance
        probe_budget.earn(10.0)
        assert probe_budget.balance - before == pytest.approx(10 * PROBE_INCOME / halves)
    probe_budget.earn(1e6)
    assert probe_budget.balance == MAX_PROBE_BALANCE


def test_grants_of_probes_have_an_interval() -> None:
    """A grant before its end is made then, unless probes have shown what they pay meanwhile."""
    probe_budget = ProbeBudget()
    for _ in range(10):
        probe_budget.grant()
        probe_budget.pay(probe_budget.balance)
        probe_budget.record_failure()
    assert probe_budget.balance == 0.0
    probe_budget.earn(GRANT_INTERVAL)
    assert probe_budget.balance < GRANT / 2
    probe_budget.grant()
    assert probe_budget.balance == GRANT
    probe_budget.pay(GRANT)
    probe_budget.grant()
    assert probe_budget.balance == 0.0
    probe_budget.earn(GRANT_INTERVAL / 2)
    assert probe_budget.balance < GRANT / 2
    probe_budget.earn(GRANT_INTERVAL / 2)
    assert probe_budget.balance >= GRANT


def test_a_changed_machine_speed_grants_a_series_of_probes() -> None:
    """A series of usual cost, but not one of the target as its own drafter, which prefills the prompt first."""
    probe_budget = ProbeBudget()
    probe_budget.pay(MAX_PROBE_BALANCE)
    assert not probe_budget.may_begin(1.5)
    probe_budget.grant()
    assert probe_budget.may_begin(1.5)
    assert not probe_budget.may_begin(100.0)
    probe_budget.pay(GRANT)
    assert not probe_budget.may_continue(0.25)


def test_the_budget_of_a_series_is_saved_for_any_expected_cost() -> None:
    probe_budget = ProbeBudget()
    probe_budget.earn(1e6)
    assert probe_budget.may_begin(1e9)


def test_a_hazard_is_not_biased_by_drafts_that_stopped_early() -> None:
    """Nodes are accepted with chance 0.8 at every depth, drafts mostly have one node."""
    controller = CostController()
    rng = random.Random(3)
    row = Row([0], SamplingParams(max_tokens=10**6))
    share_of_lengths, shares = [], []
    for _ in range(6000):
        length = 1 if rng.random() < 0.8 else 6
        accepted = next((depth for depth in range(length) if rng.random() >= 0.8), length)
        controller.plan([row], [(Candidate(longest=0),)])
        nothing = Verdict.from_chain([0], [0])
        controller.learn([row], Draft.chains([[]]), nothing, RoundTime(0, 0, 1))
        kind = controller.expectations.kind(row, Candidate(deterministic=True))
        controller.expectations.learn(row, kind, [], True, length, accepted)
        share_of_lengths.append(accepted)
        chances = [1.0, *controller.expectations.survivals(kind, 4)]
        shares.append([after / before for before, after in pairwise(chances)])
    for depth in range(4):
        late = [each[depth] for each in shares[1500:]]
        assert sum(late) / len(late) == pytest.approx(0.8, abs=0.04)
    # By the average accepted length a second node would hardly ever be accepted.
    assert sum(accepted >= 2 for accepted in share_of_lengths) / 6000 < 0.2


def test_rows_with_good_drafts_are_drafted_for_and_others_are_not() -> None:
    controller = CostController()
    rng = random.Random(5)
    rows = [Row([0] * 20, SamplingParams(max_tokens=10**6, temperature=1.0)) for _ in range(4)]
    drafted = [0] * 4
    for number in range(1200):
        kinds = ["good", "good", "bad", "bad"]
        plans = controller.plan(rows, [(Candidate(kind=kind, deterministic=True),) for kind in kinds])
        lengths = [plan.length for plan in plans]
        accepted = [
            next((d for d in range(length) if rng.random() >= (0.9 if kind == "good" else 0.05)), length)
            for length, kind in zip(lengths, kinds, strict=True)
        ]
        widest = max(lengths)
        time = RoundTime(0.0, 0.0, 1 + 0.2 * widest)
        draft = Draft.chains([[0] * length for length in lengths])
        controller.learn(rows, draft, Verdict.from_chain(accepted, [0] * 4), time)
        if number >= 600:
            drafted = [total + length for total, length in zip(drafted, lengths, strict=True)]
    assert min(drafted[:2]) > 5 * max(drafted[2:])


@pytest.mark.parametrize("any_node", [0.0, 0.8])
@pytest.mark.parametrize("num_rows", [8, 32])
def test_batches_find_the_best_length_in_few_rounds(num_rows: int, any_node: float) -> None:
    """With equal confidences the best policy has one length, which follows from the highest rate, not the recent one.

    A drafter is tried on more rows in each round, and its steps are not taken for free in batches of new sizes. Passes
    over any nodes may take longer than those over none, so that drafts of a single one do not pay.
    """
    controller, rng, chance, step = CostController(), random.Random(1), 0.8, 0.1
    rows = [
        Row([number] * 20, SamplingParams(max_tokens=10**6, temperature=1.0)) for number in range(num_rows)
    ]
    confidences = FixedConfidences([chance] * num_rows)
    tokens, seconds = [], []
    for _ in range(60):
        plans = controller.plan(rows, [(Candidate(),)] * num_rows)
        lengths = [min(plan.length, 1) for plan in plans]
        for depth in range(max(plan.length for plan in plans) - 1):
            kept = controller.keep_drafting(rows, confidences, depth)
            if not any(kept):
                break
            lengths = [length + continues for length, continues in zip(lengths, kept, strict=True)]
        accepted = [
            next((depth for depth in range(length) if rng.random() >= chance), length) for length in lengths
        ]
        drafting = step * max(lengths)
        time = RoundTime(0.0, drafting, 1 + drafting + (any_node if any(lengths) else 0))
        draft, verdict = (
            Draft.chains([[0] * length for length in lengths]),
            Verdict.from_chain(accepted, [0] * num_rows),
        )
        controller.learn(rows, draft, verdict, time)
        tokens.append(num_rows + sum(accepted))
        seconds.append(time.total)
    found = sum(tokens[20:]) / sum(seconds[20:]) / num_rows
    assert found > 0.9 * best_fixed(chance, step, 0.0, any_node)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("chance", [0.3, 0.6, 0.9])
@pytest.mark.parametrize(("num_rows", "node_of_row"), [(4, 0.02), (4, 0.2), (16, 0.01), (16, 0.05)])
def test_batches_find_the_best_constant_length(
    num_rows: int, node_of_row: float, chance: float, deterministic: bool
) -> None:
    step = 0.0 if deterministic else 0.05
    simulation = Simulation(
        lambda number, depth: chance, step, 0.0, node_of_row, deterministic, confidence=chance
    ).play(CostController(), 800, num_rows)
    assert simulation.speed > 0.95 * max(1.0, best_fixed(chance, step, node_of_row * num_rows))


@pytest.mark.parametrize(("size", "num_rows"), [(7, 8), (8, 7), (12, 11), (15, 16), (16, 15), (2, 3)])
def test_costs_of_the_nearest_batch_size_are_taken_per_level(size: int, num_rows: int) -> None:
    """One row more or less does not change what a level adds to a pass."""
    model = CostModel()
    for each in (size, num_rows):
        for _ in range(4):
            model.times.add_plain(each, 20, [0.1 * each])
    for _ in range(40):
        for levels in (1, 2, 3):
            model.times.add(size, levels * size, 0.1 * size + 0.02 * levels * size)
            model.times.add_plain(size, 20, [0.1 * size])
    model.enter(num_rows, None)
    for levels in (1, 2, 3):
        added = model.extra_pass_seconds(0, levels * num_rows)
        assert added == pytest.approx(0.02 * levels * num_rows, rel=0.25)


def test_a_single_level_in_a_batch_costs_what_any_draft_does() -> None:
    """It is not interpolated from a plain round, as a pass over any draft takes a fixed time."""
    model = CostModel()
    for _ in range(40):
        model.times.add_plain(16, 20, [1.0])
        model.times.add(16, 4, 1.5)
    model.enter(16, None)
    assert model.extra_pass_seconds(0, 1) == model.extra_pass_seconds(0, 4) == pytest.approx(0.5, abs=0.05)


def commit_and_learn(
    controller: CostController,
    rows: Sequence[Row],
    lengths: Sequence[int],
    accepted: Sequence[int],
    time: RoundTime,
) -> None:
    """End a round with drafts of these lengths and of these numbers of accepted nodes."""
    for row, gained in zip(rows, accepted, strict=True):
        row.tokens.extend([0] * (gained + 1))
    draft = Draft.chains([[0] * length for length in lengths])
    controller.learn(rows, draft, Verdict.from_chain(accepted, [0] * len(rows)), time)


def test_rounds_with_certain_drafts_are_no_plain_rounds() -> None:
    """Tokens that a grammar forces are drafted whatever is planned: their rounds only count towards the end of a stop."""
    controller, rows = CostController(), [a_row(), a_row()]
    forced = Candidate(part=-1, longest=3, deterministic=True, certain=True)
    for _ in range(40):
        controller.plan(rows, [(Candidate(longest=0),)] * 2)
        commit_and_learn(controller, rows, [0, 0], [0, 0], RoundTime(0.0, 0.0, 1.0))
    controller._learn_buffered()
    for _ in range(4):
        controller.guard.record(-MAX_LOSS / 4, seconds=5.0)
    num_stopped = 0
    while controller.guard.is_stopped:
        assert controller.plan(rows, [(forced,), (Candidate(),)]) == [Plan(0, 0)] * 2
        commit_and_learn(controller, rows, [3, 0], [3, 0], RoundTime(0.0, 0.0, 4.0))
        num_stopped += 1
    assert num_stopped == STOP_ROUNDS
    assert controller.times.plain(2) == 1.0
    assert not controller.expectations.row_histories


def test_a_lookup_is_not_drafted_for_what_a_model_might_gain() -> None:
    """The model's drafts are few, as they cost too much, so that its gain stays uncertain."""
    controller, rng, num_rows = CostController(), random.Random(1), 4
    rows = [Row([0] * 50, SamplingParams(max_tokens=10**6)) for _ in range(num_rows)]
    num_drafted = 0
    for _ in range(1000):
        choices = [
            (
                Candidate(kind="match", deterministic=True, longest=16 * (rng.random() < 0.5)),
                Candidate(part=1),
            )
            for _ in rows
        ]
        plans = [Plan(0, 0)] * num_rows
        if controller.begin_round(rows):
            plans = controller.plan(rows, choices)
        lengths = [plan.length if plan.part == 0 else min(plan.length, 1) for plan in plans]
        accepted = [
            next((depth for depth in range(length) if rng.random() >= 0.3), length) for length in lengths
        ]
        drafting = 4.0 * any(plan.part == 1 and plan.length for plan in plans)
        time = RoundTime(0.0, drafting, 1 + drafting + 0.1 * sum(lengths))
        commit_and_learn(controller, rows, lengths, accepted, time)
        num_drafted += any(lengths)
    assert num_drafted < 100


def test_draft_steps_are_those_of_the_model_where_lookups_are_drafted_too() -> None:
    controller, rows = CostController(), [a_row(), a_row()]
    candidates = [(Candidate(part=0, deterministic=True),), (Candidate(part=1),)]
    for _ in range(40):
        plans = controller.plan(rows, candidates)
        lengths = [plans[0].length, min(plans[1].length, 1)]
        drafting = 0.1 * lengths[1]
        commit_and_learn(controller, rows, lengths, lengths, RoundTime(0.0, drafting, 1 + drafting))
    assert controller.times.draft_seconds(0, 1).at(1) < 0.01
    assert controller.times.draft_seconds(1, 1).at(1) == pytest.approx(0.1, rel=0.1)


CHANCES = {"good": 0.9, "poor": 0.4, "none": 0.0}
"""Chance of a lookup node by kind of match."""
SHARES = {"good": 0.3, "poor": 0.4, "none": 0.3}
"""Share of rows and rounds with each kind of match."""


def best_of_kinds(node: float) -> float:
    """Speed of the best constant lengths for each kind of match, where a node of every row costs `node`."""
    gained, added = {}, {}
    for kind, chance in CHANCES.items():
        gained[kind] = [SHARES[kind] * sum(chance**depth for depth in range(1, n + 1)) for n in range(17)]
        added[kind] = [SHARES[kind] * node * length for length in range(17)]
    return max(
        (1 + gained["good"][good] + gained["poor"][poor]) / (1 + added["good"][good] + added["poor"][poor])
        for good in range(17)
        for poor in range(17)
    )


@pytest.mark.parametrize(
    ("num_rows", "node_of_row"), [(4, 0.02), (4, 0.2), (8, 0.05), (16, 0.005), (16, 0.02), (16, 0.05)]
)
def test_the_nodes_of_a_batch_are_drafted_where_they_pay(num_rows: int, node_of_row: float) -> None:
    """The pass is limited by arithmetic: its time grows with the nodes of all rows, of which different ones have matches."""
    controller, rng = CostController(), random.Random(1)
    rows = [Row([0] * 50, SamplingParams(max_tokens=10**6)) for _ in range(num_rows)]
    num_tokens, seconds = 0, 0.0
    for _ in range(600):
        kinds = rng.choices(list(SHARES), list(SHARES.values()), k=num_rows)
        lengths = [0] * num_rows
        if controller.begin_round(rows):
            candidates = [
                (Candidate(kind=kind, deterministic=True, longest=16 if CHANCES[kind] else 0),)
                for kind in kinds
            ]
            lengths = [plan.length for plan in controller.plan(rows, candidates)]
        accepted = [
            next((depth for depth in range(length) if rng.random() >= CHANCES[kind]), length)
            for kind, length in zip(kinds, lengths, strict=True)
        ]
        time = RoundTime(0.0, 0.0, 1 + node_of_row * sum(lengths))
        commit_and_learn(controller, rows, lengths, accepted, time)
        num_tokens += num_rows + sum(accepted)
        seconds += time.total
    assert num_tokens / num_rows / seconds > 0.95 * best_of_kinds(num_rows * node_of_row)


@pytest.mark.parametrize("num_rows", [4, 16])
def test_batches_notice_that_a_drafter_has_become_good(num_rows: int) -> None:
    """A series of probes is only begun with a budget for all of them: one that ends early does not find out."""

    def chance(number: int, depth: int) -> float:
        return 0.02 if number < 3000 else 0.95

    drafted = Simulation(chance, step=0.1).play(CostController(), 4500, num_rows).drafted
    assert sum(map(any, drafted[4000:])) > 450


def first_plans(
    texts: Sequence[Sequence[int]], accepted: bool = True, num_rounds: int = 1
) -> list[list[int]]:
    """Return the plans for a batch of unknown rows, round by round, after plain rounds have been timed."""
    controller = CostController()
    rows = [Row(list(text), SamplingParams(max_tokens=10**6, temperature=1.0)) for text in texts]
    planned: list[list[int]] = []
    while len(planned) < num_rounds:
        plans = controller.plan(rows, [(Candidate(num_uncached=len(row.tokens)),) for row in rows])
        lengths = [min(plan.length, 1) for plan in plans]
        kept = [length * accepted for length in lengths]
        verdict = Verdict.from_chain(kept, [0] * len(rows))
        drafting = 0.01 * max(lengths)
        time = RoundTime(0.0, drafting, 1 + drafting)
        controller.learn(rows, Draft.chains([[0] * length for length in lengths]), verdict, time)
        if any(lengths):
            planned.append(lengths)
    return planned


@pytest.mark.parametrize("num_rows", [1, 4])
@pytest.mark.parametrize(("max_tokens", "is_drafted"), [(30, False), (1000, True)])
def test_rows_are_prefilled_only_where_they_last(max_tokens: int, is_drafted: bool, num_rows: int) -> None:
    """A drafter that pays for others is not prefilled, but for a probe, for rows that end before that has paid."""
    controller = CostController()
    Simulation(lambda number, depth: 0.8, step=0.02).play(controller, 200, num_rows)
    for _ in range(4):
        controller.times.add_prefill(0, 100, 20.0)
    rows = [Row([0] * 100, SamplingParams(max_tokens=max_tokens, temperature=1.0)) for _ in range(num_rows)]
    num_drafted = 0
    for _ in range(10):
        plans = controller.plan(rows, [(Candidate(num_uncached=100),)] * num_rows)
        num_drafted += any(plan.length for plan in plans)
        commit_and_learn(controller, rows, [0] * num_rows, [0] * num_rows, RoundTime(0.0, 0.0, 1.0))
    assert (num_drafted > 1) == is_drafted


def test_a_new_drafter_is_tried_on_one_row_first_in_any_order() -> None:
    texts = [[number] * 20 for number in range(6)]
    (forwards,), (backwards,) = first_plans(texts), first_plans(texts[::-1])
    assert sum(forwards) == 1
    assert backwards == forwards[::-1], "a row's place in the batch does not decide"


def test_equal_rows_are_tried_together() -> None:
    """Branches of one row, which an enumeration puts into one batch, must be treated alike while they are equal."""
    (planned,) = first_plans([[7] * 20, [9] * 20, [7] * 20, [9] * 20, [7] * 20])
    assert planned in ([1, 0, 1, 0, 1], [0, 1, 0, 1, 0])
    for texts in ([[7] * 20] * 5, [[1]] + [[0]] * 4):
        for lengths in first_plans(texts, accepted=False, num_rounds=12):
            assert len({lengths[place] for place in range(1, 5)}) == 1


def test_the_better_of_two_drafters_is_chosen_for_each_kind_of_candidate() -> None:
    controller = CostController()
    rng = random.Random(7)
    row = Row([0] * 20, SamplingParams(max_tokens=10**6, temperature=1.0))
    chosen: dict[str, list[int]] = {"long": [], "short": []}
    for number in range(3000):
        match = "long" if number % 3 == 0 else "short"
        look_up = Candidate(part=0, kind=match, deterministic=True)
        plan = controller.plan([row], [(look_up, Candidate(part=1))])[0]
        chance = (0.95 if match == "long" else 0.1) if plan.part == 0 else 0.7
        length = plan.length
        if plan.part == 1:
            length = min(length, 1)
            while (
                length < plan.length
                and controller.keep_drafting([row], FixedConfidences([0.7]), length - 1)[0]
            ):
                length += 1
        accepted = next((d for d in range(length) if rng.random() >= chance), length)
        drafting = 0.0 if plan.part == 0 else 0.1 * length
        verdict = Verdict.from_chain([accepted], [0])
        controller.learn(
            [row],
            Draft.chains([[0] * length]),
            verdict,
            RoundTime(0.0, drafting, 1 + drafting + 0.03 * length),
        )
        if number > 1500 and length:
            chosen[match].append(plan.part)
    assert sum(part == 0 for part in chosen["long"]) > 0.9 * len(chosen["long"])
    assert sum(part == 1 for part in chosen["short"]) > 0.9 * len(chosen["short"])


def test_ended_rows_are_released() -> None:
    controller = CostController()
    row = Row([0] * 20, SamplingParams(max_tokens=10**6))
    for _ in range(3 * MAX_DRAFTED_ROUNDS):
        plan = controller.plan([row], [(Candidate(deterministic=True),)])[0]
        verdict = Verdict.from_chain([0], [0])
        controller.learn([row], Draft.chains([[0] * plan.length]), verdict, RoundTime(0.0, 0.0, 1.0))
    assert controller.expectations.row_histories
    controller.release(row)
    assert not controller.expectations.row_histories


def test_the_length_option_limits_the_nodes() -> None:
    simulation = Simulation(lambda number, depth: 1.0, step=0.001, node=0.001, deterministic=True)
    simulation.play(CostController(CostOptions(5)), 300)
    assert max(length for (length,) in simulation.drafted) == 5
    for deterministic in (False, True):
        simulation = Simulation(lambda number, depth: 1.0, step=0.001, deterministic=deterministic)
        simulation.play(CostController(CostOptions(0)), 50)
        assert sum(length for (length,) in simulation.drafted) == 0


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("limit", [0, 1, 3])
def test_rows_are_drafted_for_up_to_their_own_limit(limit: int, num_rows: int) -> None:
    """Also in the estimate of what a draft gains, which is made for the nodes that the limit leaves."""
    controller = CostController()
    Simulation(lambda number, depth: 1.0, step=0.0, node=0.01, deterministic=True).play(
        controller, 100, num_rows
    )
    rows = [Row([0] * 50, SamplingParams(max_tokens=100, max_draft_length=limit)) for _ in range(num_rows)]
    controller.plan(rows, [(Candidate(deterministic=True),)] * num_rows)
    assert [proposal.length for proposal in controller._decision.proposals] == [limit] * (limit and num_rows)


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize(("length", "factor", "longest"), [(5, 2, 10), (16, 2, 32), (40, 2, 64), (0, 2, 0)])
def test_a_candidate_may_have_longer_drafts_than_others(
    length: int, factor: int, longest: int, num_rows: int
) -> None:
    simulation = Simulation(
        lambda number, depth: 1.0, step=0.0, node=0.001, deterministic=True, length_factor=factor
    )
    simulation.play(CostController(CostOptions(length)), 300, num_rows)
    assert max(map(max, simulation.drafted)) == longest


@pytest.mark.parametrize("num_failed", [0, 1])
def test_accepted_lookups_are_longer_in_the_next_round(num_failed: int) -> None:
    """Without drafts of two nodes, whose cost needs no trial, nor rounds that repeat a decision."""
    simulation = Simulation(
        lambda number, depth: float(number >= 2 + num_failed), step=0.0, node=0.02, deterministic=True
    )
    simulation.play(CostController(), 8)
    lengths = [length for (length,) in simulation.drafted[2:]]  # two plain rounds are timed first
    assert all(before < length or length == 16 for before, length in pairwise(lengths[num_failed:]))
    assert lengths[-1] == 16


@pytest.mark.parametrize("num_rows", [1, 8])
def test_useless_first_lookups_lose_little_where_nodes_are_expensive(num_rows: int) -> None:
    simulation = Simulation(lambda number, depth: 0.0, step=0.0, node=1.0, deterministic=True)
    assert simulation.play(CostController(), 300, num_rows).speed > 0.97


def test_costs_of_rounds_are_learned_by_batch_size_and_length() -> None:
    times = RoundTimes()
    assert times.needs_plain(1, 10)
    for _ in range(3):
        times.add_plain(1, 10, [1.0])
        times.add_plain(8, 10, [2.0])
        times.add(1, 2, 1.2)
        times.add(1, 6, 2.0)
        times.add_draft_steps("part", 1, 2, 0.5)
    assert not times.needs_plain(1, 13)
    assert times.needs_plain(1, 21), "the rows have doubled"
    assert times.needs_plain(3, 10), "no batch size near three was seen"
    assert not times.needs_plain(7, 10)
    assert times.plain(4) == pytest.approx(1 + 3 / 7)
    assert times.rests(1, 0)[-1] == 1.0
    assert [times.rests(1, width)[-1] for width in (1, 2, 4, 6, 8)] == pytest.approx(
        [1.1, 1.2, 1.6, 2.0, 2.2], abs=0.06
    )
    assert times.draft_seconds("part", 1).at(2) == pytest.approx(0.5)
    for _ in range(30):
        for num_steps in (1, 2, 4):
            times.add_draft_steps("part", 1, num_steps, 0.1 + 0.2 * num_steps)
    assert times.draft_seconds("part", 1).step == pytest.approx(0.2, rel=0.03)
    assert times.draft_seconds("part", 1).at(3) == pytest.approx(0.7, rel=0.03)
    assert (times.draft_seconds("other", 1).step, times.draft_seconds("other", 1).at(3)) == (0, 0)
    for _ in range(5):
        times.add_prefill("part", 100, 5.5)
        times.add_prefill("part", 20, 1.5)
    assert times.prefill_seconds("part", 40) == pytest.approx(2.5)
    assert (times.prefill_seconds("part", 0), times.prefill_seconds("other", 20)) == (0, 0)


def test_one_slow_round_does_not_fix_the_cost_of_a_length() -> None:
    curve = CostCurve()
    curve.add(4, 9.0, curve.at(4))
    assert curve.at(4) < 3, "far from what is expected: it counts for less"
    for _ in range(150):
        curve.add(1, 1.05, curve.at(1))
    assert curve.at(4) < 1.6, "other lengths say how much a token costs"
    for _ in range(3):
        curve.add(4, 1.2, curve.at(4))
    assert curve.at(4) < 1.3, "a faster round shows that the earlier one was disturbed"


@pytest.mark.parametrize("length", [1, 4])
def test_two_fast_passes_show_that_the_earlier_ones_were_disturbed(length: int) -> None:
    curve, line = CostCurve(), LinearCost()
    for cost in [3.0] * 30 + [1.5] * 4:
        curve.add(length, cost, curve.at(length))
        line.add(length, cost)
    assert curve.at(length) < 2.1
    assert line.at(length) < 2.1


def test_costs_of_a_length_follow_slowly_where_single_rounds_are_fast() -> None:
    curve, line = CostCurve(), LinearCost()
    for cost in [3.0] * 30 + [1.5, 3.0] * 3:
        curve.add(4, cost, curve.at(4))
        line.add(4, cost)
    assert curve.at(4) > 2.5
    assert line.at(4) > 2.5


def test_passes_over_drafts_that_are_cheaper_than_plain_rounds_are_checked_once() -> None:
    """Such as with AVX-512, where a pass over five tokens was seen to take 0.88 of one over a single token."""
    times, rng = RoundTimes(), random.Random(0)
    plain = 0
    for _ in range(400):
        if times.needs_plain(1, 10):
            plain += 1
            times.add_plain(1, 10, [rng.uniform(0.95, 1.05)])
        else:
            times.add(1, 4, rng.uniform(0.8, 0.88))
    assert plain <= 400 / MAX_PLAIN_AGE + 4 * NUM_CHECKS
    for _ in range(8):
        times.add(1, 4, 0.42)
        while times.needs_plain(1, 10):
            times.add_plain(1, 10, [0.5])
    assert times.plain(1) == pytest.approx(0.5, rel=0.1), "a machine that became faster is noticed"


@pytest.mark.parametrize("factor", [0.4, 2.5])
def test_changed_draft_step_times_start_a_check(factor: float) -> None:
    """Their cost was measured in other rounds, such as disturbed ones."""
    times = RoundTimes()
    for _ in range(4):
        times.add_plain(1, 10, [1.0])
    for _ in range(40):
        times.add(1, 5, 1.5)
        times.add_draft_steps("part", 1, 5, 0.5)
    assert not times.needs_plain(1, 10)
    for _ in range(NUM_DEVIATIONS):
        times.add(1, 5, 1.5)
        times.add_draft_steps("part", 1, 5, 0.5 * factor)
    assert times.needs_plain(1, 10)
    times.add_plain(1, 10, [1.0, 1.0])
    for _ in range(12):
        times.add_draft_steps("part", 1, 5, 0.5 * factor)
    assert times.draft_seconds("part", 1).at(5) == pytest.approx(0.5 * factor, rel=0.25)


def test_costs_are_kept_when_the_machine_changes_its_speed() -> None:
    times = RoundTimes()
    for _ in range(8):
        times.add_plain(1, 10, [1.0])
        times.add_plain(4, 10, [2.0])
        times.add(1, 2, 1.2)
        times.add_draft_steps("part", 1, 2, 0.5)
        times.add_prefill("part", 100, 5.0)
    changes = [times.add_plain(1, 10, [3.0]) for _ in range(4)]
    assert changes == [False, False, False, True]
    assert times.plain(1) == pytest.approx(3.0)
    assert times.plain(4) == pytest.approx(6.0, rel=0.1), "every batch size"
    assert times.rests(1, 2)[-1] == pytest.approx(3.6, rel=0.02)
    assert times.draft_seconds("part", 1).at(2) == pytest.approx(1.5)
    assert times.prefill_seconds("part", 100) == pytest.approx(15.0)
    changes = [times.add_plain(1, 10, [1.0]) for _ in range(2)]
    assert changes == [False, True], "nothing makes rounds faster by accident"
    assert times.plain(1) == pytest.approx(1.0)


def test_slow_drafted_rounds_are_compared_with_plain_ones() -> None:
    """They show whether the machine has become slower or drafts have become more expensive."""
    times = RoundTimes()
    for _ in range(20):
        times.add_plain(1, 10, [1.0])
        times.add(1, 2, 1.2)
    assert not times.needs_plain(1, 10)
    for _ in range(4):
        times.add(1, 2, 2.4)
    known = times.rests(1, 2)[-1]
    assert known < 1.6
    for _ in range(NUM_CHECKS):
        assert times.needs_plain(1, 10)
        times.add_plain(1, 10, [1.0])
    assert not times.needs_plain(1, 10)
    for _ in range(4):
        times.add(1, 2, 2.4)
    assert times.rests(1, 2)[-1] > known + 0.3, (
        "the machine was not the cause: the new cost is learned quickly"
    )


def test_a_pass_cheaper_than_a_plain_round_causes_plain_rounds() -> None:
    times = RoundTimes()
    for _ in range(5):
        times.add_plain(1, 10, [3.0])
    times.add(1, 2, 1.2)
    assert times.needs_plain(1, 10)
    assert times.rests(1, 2)[-1] > 3.0, "nothing is learned from it"


def test_a_busy_machine_is_distinguished_from_a_slow_one() -> None:
    disturbance = LoadDetector()
    assert not any(disturbance.add(ratio) for ratio in [1.0, 1.0, 7.0] * 6)
    assert disturbance.is_busy
    assert disturbance.slowdown == pytest.approx(3.0, rel=0.2)
    became_quiet = [disturbance.add(1.0) for _ in range(20)]
    assert sum(became_quiet) == 1
    assert disturbance.slowdown < 1.2
    assert not any(disturbance.add(1.0) for _ in range(20)), "it is told once"


def test_a_quiet_machine_is_detected_by_the_next_plain_round() -> None:
    times = RoundTimes()
    for seconds in [1.0] * 20 + [1.0, 1.0, 7.0] * 6:
        times.add_plain(1, 10, [seconds])
    for _ in range(20):
        times.add(1, 2, 1.06)
    assert times.add_plain(1, 10, [1.0])
    assert not times.add_plain(1, 10, [1.0])


def test_the_prefill_cost_does_not_depend_on_later_batch_sizes() -> None:
    times = RoundTimes()
    for _ in range(3):
        times.add_plain(8, 10, [4.0])
        times.add_prefill("part", 100, 8.0)
    before = times.prefill_seconds("part", 100)
    times.add_plain(1, 10, [1.0])
    assert times.prefill_seconds("part", 100) == before > 0


def test_noise_does_not_bias_the_cost_of_drafts() -> None:
    times, dice = RoundTimes(), random.Random(0)
    for _ in range(60):
        times.add_plain(1, 10, [1 + dice.gauss(0, 0.1)])
        for _ in range(64):
            times.add(1, 4, 1.2 + dice.gauss(0, 0.1))
            times.add_draft_steps("part", 1, 4, 0.4 + dice.gauss(0, 0.04))
    assert times.rests(1, 4)[-1] / times.plain(1) == pytest.approx(1.2, abs=0.04)
    assert times.draft_seconds("part", 1).at(4) / times.plain(1) == pytest.approx(0.4, abs=0.02)


def test_a_stop_caused_by_the_machine_is_reverted() -> None:
    slow, drafter = LossGuard(), LossGuard()
    for guard in (slow, drafter):
        while not guard.is_stopped:
            guard.record(-4.0, seconds=6.0, plain=1.0)
        for _ in range(NUM_REVIEWED):
            assert guard.is_stopped
            guard.record_plain(seconds=4.0 if guard is slow else 1.0)
    assert not slow.is_stopped
    assert drafter.is_stopped


def test_one_outlier_hardly_changes_an_average() -> None:
    times = RoundTimes()
    for _ in range(20):
        times.add_plain(1, 10, [1.0])
    times.add_plain(1, 10, [100.0])
    assert times.plain(1) < 1.03


def test_slow_first_rounds_are_tolerated() -> None:
    times = RoundTimes()
    for seconds in (7.0, 1.5, 1.0, 1.0):
        times.add_plain(1, 10, [seconds])
    assert times.plain(1) == 1.0


def test_the_plain_round_reference_is_renewed() -> None:
    times = RoundTimes()
    for _ in range(3):
        times.add_plain(1, 1000, [1.0])
    assert not times.needs_plain(1, 1000)
    assert times.needs_plain(1, 400), "a short text after a long one"
    for _ in range(MAX_PLAIN_AGE):
        times.add(1, 2, 1.2)
    assert times.needs_plain(1, 1000), "too long ago"


def add_plain(times: RoundTimes, lengths: Sequence[float], noise: float = 0.0, seed: int = 0) -> None:
    """Plain rounds that take 1 second and a quarter for every 500 tokens."""
    rng = random.Random(seed)
    for length in lengths:
        hiccup = 2.0 if noise and rng.random() < 0.05 else 1.0
        seconds = hiccup * (1 + length / 2000) * (1 + noise * rng.uniform(-1, 1))
        times.add_plain(1, length, [seconds])


def plain_at(times: RoundTimes, length: float) -> float:
    times.context = length
    return times.plain(1)


def test_the_time_of_a_plain_round_is_linear_in_the_row_length() -> None:
    times = RoundTimes()
    add_plain(times, [100, 101, 102, 500, 501, 900, 901])
    for length in (60, 100, 300, 700, 1000):
        assert plain_at(times, length) == pytest.approx(1 + length / 2000, rel=0.02)


def test_the_linear_fit_holds_for_changing_lengths_and_noise() -> None:
    times = RoundTimes()
    for text in range(12):
        start = 600 if text % 2 else 50
        add_plain(times, range(start, start + 60), noise=0.05, seed=text)
    assert plain_at(times, 80) == pytest.approx(1.04, rel=0.05)
    assert plain_at(times, 640) == pytest.approx(1.32, rel=0.05)
    add_plain(times, range(600, 640), noise=0.05)
    add_plain(times, [620] * 400, noise=0.05, seed=1)
    assert plain_at(times, 80) == pytest.approx(1.04, rel=0.08), (
        "one length for long does not unlearn the slope"
    )


def test_disturbed_rounds_of_short_rows_are_not_extrapolated() -> None:
    """Rounds were slower as the rows grew from 16 to 32 tokens; that attention takes so long is implausible."""
    plain = PlainTime(16)
    for length in range(16, 33):
        plain.add(length, 1 + (length - 16) / 40)
    assert plain.at(128) < 2 * plain.at(24)


def test_noise_at_one_length_gives_no_slope() -> None:
    times = RoundTimes()
    add_plain(times, [400 + number % 20 for number in range(300)], noise=0.1)
    assert plain_at(times, 560) == pytest.approx(plain_at(times, 400), rel=0.12)


def test_lengths_that_were_seen_are_not_timed_again() -> None:
    """Short and long texts in turn: each new length is timed twice, and once only."""
    times = RoundTimes()
    forced = []
    for text in range(20):
        start = 600 if text % 2 else 50
        forced.append(0)
        for length in range(start, start + 128):
            if times.needs_plain(1, length):
                add_plain(times, [length])
                forced[-1] += 1
            else:
                times.context = length
                times.add(1, 2, 1.2 * (1 + length / 2000))
    ages = 20 * 128 // MAX_PLAIN_AGE
    assert sum(forced[:2]) <= 10
    assert sum(forced[2:]) <= ages
    assert plain_at(times, 50) == pytest.approx(1.025, rel=0.02)
    assert plain_at(times, 700) == pytest.approx(1.35, rel=0.02)


def test_one_outlier_at_a_new_length_is_corrected() -> None:
    times = RoundTimes()
    add_plain(times, [100] * 6)
    times.add_plain(1, 600, [9.0])
    assert times.needs_plain(1, 600)
    add_plain(times, [601])
    assert not times.needs_plain(1, 602)
    assert plain_at(times, 600) < 1.2 * 1.3


def test_a_candidate_without_a_draft_is_replaced_by_one_with_a_draft() -> None:
    """A look-up that announces something and then has nothing must not outbid a model for ever."""
    controller, rng = CostController(), random.Random(2)
    row = Row([0] * 20, SamplingParams(max_tokens=10**6, temperature=1.0))
    parts = []
    for _ in range(600):
        plan = controller.plan([row], [(Candidate(deterministic=True), Candidate(part=1))])[0]
        parts.append(plan.part if plan.length else None)
        length = plan.length and plan.part  # the model drafts one node, the lookup none
        accepted = int(length and rng.random() < 0.8)
        verdict = Verdict.from_chain([accepted], [0])
        time = RoundTime(0.0, 0.1 * length, 1 + 0.15 * length)
        controller.learn([row], Draft.chains([[0] * length]), verdict, time)
    assert parts[200:].count(1) > 300


def test_statistics_are_shrunk_from_general_to_specific() -> None:
    experience = AcceptanceStats(memory=50)
    path, whole, own = experience.path("all", "own"), experience.path("all"), experience.path("own")
    assert experience.mean(path, 0.3) == 0.3
    for _ in range(100):
        experience.add(whole, 1.0)
    assert experience.mean(path, 0.3) > 0.9
    for _ in range(100):
        experience.add(own, 0.0)
    assert experience.mean(path, 0.3) < 0.1
    for _ in range(100):
        experience.add(own, 1.0)
    assert experience.mean(path, 0.3) > 0.8, "what is long past is forgotten"


def test_confidences_without_observations_are_corrected_by_the_mean_error() -> None:
    expectations, row = Expectations(), a_row()
    kind, group = expectations.kind(row, Candidate()), bisect_right(CONFIDENCE_EDGES, 0.75)
    before, _ = expectations.node_probs(kind)
    for number in range(200):
        expectations.learn(row, kind, [group], False, 1, number % 4 == 0)
    own, _ = expectations.node_probs(kind)
    assert own[group] == pytest.approx(0.25, abs=0.05)
    assert own[group + 1] == pytest.approx(before[group + 1] - 0.5, abs=0.05)


def test_unplanned_drafts_do_not_affect_the_statistics() -> None:
    """Requests may set their own draft lengths, from the very first round on."""
    controller = CostController()
    row = Row([0] * 20, SamplingParams(max_tokens=10**6, draft_length=3))
    for _ in range(5):
        controller.plan([row], [(Candidate(),)])
        assert controller.keep_drafting([row], FixedConfidences([0.9]), 0) == [False]
        verdict = Verdict.from_chain([2], [0])
        controller.learn([row], Draft.chains([[0, 0, 0]]), verdict, RoundTime(0.0, 0.3, 1.3))
    assert Simulation(lambda number, depth: 0.9).play(controller, 500).speed > 1.5


def test_cost_learns_from_predicted_acceptance_probabilities() -> None:
    """A node is recorded under its predicted acceptance probability, not under its distribution."""
    controller, row = CostController(), Row([0] * 20, SamplingParams(max_tokens=100))
    groups: list[int] = []
    acceptance_probs = FixedConfidences([0.9])
    acceptance_probs.acceptance_probs = [0.3]
    for draft_probs in (FixedConfidences([0.9]), acceptance_probs):
        while not controller.plan([row], [(Candidate(),)])[0].length:
            verdict = Verdict.from_chain([0], [0])
            controller.learn([row], Draft.empty(1), verdict, RoundTime(0.0, 0.0, 1.0))
        controller.keep_drafting([row], draft_probs, 0)
        groups += controller._decision.proposals[0].confidence_bins
    assert groups == [bisect_right(CONFIDENCE_EDGES, chance) for chance in (0.9, 0.3)]


@pytest.mark.parametrize("seed", range(8))
def test_drafting_starts_although_the_first_drafts_fail_beside_other_load(seed: int) -> None:
    """A series of probes follows at once, instead of after the hundreds of rounds that would earn it."""

    def disturbed(rng: random.Random, number: int, seconds: float) -> float:
        return seconds * (1 + 2 * rng.random()) if 1 < number < 25 else seconds

    simulation = Simulation(
        lambda number, depth: 0.0 if number < 8 else 0.82,
        step=0.08,
        node=0.01,
        confidence=0.8,
        delay=disturbed,
    )
    simulation.play(CostController(), 300, seed=seed)
    assert sum(length > 0 for (length,) in simulation.drafted) > 200
