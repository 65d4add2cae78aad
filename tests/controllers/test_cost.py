"""The controller `cost`: it drafts if that pays, stops if not, and its loss is bounded.

Rounds are played on simulation: a drafter whose nodes are accepted with a given chance, and a clock that runs by given costs.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise

import pytest
from simulation import Chance, FixedConfidences, Simulation

from secondguess.controllers.cost.acceptance import CONFIDENCE_EDGES, Acceptance
from secondguess.controllers.cost.choice import best_count
from secondguess.controllers.cost.controller import CostController, CostOptions
from secondguess.controllers.cost.loss_budget import FIRST_BUDGET, INCOME, MAX_BUDGET, MAX_LOSS, LossBudget
from secondguess.core import Candidate, Draft, Plan, RoundTime, Row, Verdict
from secondguess.sampling import SamplingParams


def loss_bound(num_rounds: int, worst_round: float) -> float:
    """Return the largest loss over any rounds that `loss_budget` promises, in plain rounds."""
    return MAX_BUDGET + MAX_LOSS + INCOME * num_rounds + 4 * worst_round * (1 + INCOME * num_rounds)


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


def test_drafting_resumes_when_acceptance_rises() -> None:
    simulation = Simulation(lambda number, depth: 0.0 if number < 500 else 0.9).play(CostController(), 3000)
    late = [length for (length,) in simulation.drafted[2000:]]
    assert sum(late) / len(late) > 4, "second nodes that were not accepted before are tried again"


def test_drafting_stops_when_acceptance_falls() -> None:
    simulation = Simulation(lambda number, depth: 0.9 if number < 500 else 0.0).play(CostController(), 1500)
    assert sum(length > 0 for (length,) in simulation.drafted[600:]) < 60


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


def a_row() -> Row:
    return Row([0] * 20, SamplingParams(max_tokens=10**6))


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


@pytest.mark.parametrize(("num_rows", "any_node"), [(8, 0.0), (8, 0.8), (32, 0.0), (32, 0.3)])
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
    assert simulation.speed > 0.93 * max(1.0, best_fixed(chance, step, node_of_row * num_rows))


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
    assert controller.times.draft_line(0, 1) is None
    line = controller.times.draft_line(1, 1)
    assert line is not None
    assert line.at(1) == pytest.approx(0.1, rel=0.1)


CHANCES = {"good": 0.9, "poor": 0.4, "none": 0.0}


SHARES = {"good": 0.3, "poor": 0.4, "none": 0.3}


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
        controller.times.add_prefill(0, 100, num_rows, 20.0)
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
    for _ in range(4):  # Plain rounds of other lengths are timed first.
        controller.plan(rows, [(Candidate(deterministic=True),)] * num_rows)
        if controller.measures_plain:
            commit_and_learn(controller, rows, [0] * num_rows, [0] * num_rows, RoundTime(0.0, 0.0, 1.0))
    assert [proposal.length for proposal in controller._proposals] == [limit] * (limit and num_rows)


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
        groups += controller._proposals[0].bins
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


def test_a_hazard_is_not_biased_by_drafts_that_stopped_early() -> None:
    """Every node is accepted with probability 0.8, but most drafts have one node only."""
    acceptance, rng = Acceptance(), random.Random(3)
    for number in range(2000):
        length = 6 if number % 4 == 0 else 1
        acceptance.learn([], length, next((d for d in range(length) if rng.random() >= 0.8), length))
    assert acceptance.survivals(4) == pytest.approx([0.8, 0.64, 0.512, 0.41], abs=0.1)


def test_few_observations_are_shrunk_to_those_of_the_drafter() -> None:
    general = Acceptance()
    kind = Acceptance(general)
    for _ in range(100):
        general.learn([], 1, 0)
    assert kind.survivals(1)[0] < 0.1
    for _ in range(100):
        kind.learn([], 1, 1)
    assert kind.survivals(1)[0] > 0.9
    assert kind.expected_draft[0] > 0.9


def test_drafts_with_an_expected_acceptance_begin_with_it_and_follow_what_is_observed() -> None:
    general = Acceptance()
    for _ in range(50):
        general.learn((), 2, 2)
    unlikely = Acceptance(general, expected=0.2)
    assert unlikely.survivals(2)[0] == pytest.approx(0.2)
    assert unlikely.exploration_bonus == 0 < Acceptance(general).exploration_bonus
    for _ in range(50):
        unlikely.learn((), 2, 2)
    assert unlikely.survivals(2)[0] > 0.9


def test_confidences_without_observations_are_corrected_by_the_mean_error() -> None:
    acceptance, number = Acceptance(), bisect_right(CONFIDENCE_EDGES, 0.75)
    before, _ = acceptance.node_probs()
    for draft in range(200):
        acceptance.learn([number], 1, draft % 4 == 0)
    own, _ = acceptance.node_probs()
    assert own[number] == pytest.approx(0.25, abs=0.05)
    assert own[number + 1] == pytest.approx(before[number + 1] - 0.5, abs=0.05)


def test_prefill_is_charged_over_the_rounds_it_serves_and_when_the_row_ends() -> None:
    budget, row = LossBudget(), a_row()
    budget.defer(row, 8.0, 4)
    for left in (1.5, -0.5):
        budget.record([row], 0.0, 0.0)
        assert budget.balance == pytest.approx(left)
    assert not budget.allows_trials
    budget.release(row)
    assert budget.balance == pytest.approx(FIRST_BUDGET - 8)
    budget.record([row], 100.0, 0.0)
    assert budget.balance == MAX_BUDGET


def test_disturbed_rounds_are_no_losses_unless_they_go_on() -> None:
    budget = LossBudget()
    for excess, charged in ((5.0, 0.0), (5.0, 0.0), (4.0, 0.0), (3.0, 3.0), (0.0, 0.0), (9.0, 0.0)):
        before = budget.balance
        budget.record([], 0.0, 0.0, excess)
        assert before - budget.balance == charged


def test_nothing_is_planned_while_the_budget_is_spent() -> None:
    controller, row = CostController(), a_row()
    assert controller.begin_round([row])
    controller.budget.balance = -MAX_LOSS - 1
    assert not controller.begin_round([row])
    own = Row([0] * 20, SamplingParams(max_tokens=100, draft_length=3))
    assert controller.begin_round([row, own])


@pytest.mark.parametrize(("num_rows", "share"), [(1, 1.0), (8, 0.25)])
def test_a_batch_in_which_nothing_pays_is_planned_in_some_rounds(num_rows: int, share: float) -> None:
    controller = CostController()
    Simulation(lambda number, depth: 0.0, deterministic=True).play(controller, 200, num_rows)
    rows = [a_row() for _ in range(num_rows)]
    num_planned = 0
    for _ in range(40):
        if controller.begin_round(rows):
            num_planned += 1
            controller.plan(rows, [(Candidate(deterministic=True),)] * num_rows)
        commit_and_learn(controller, rows, [0] * num_rows, [0] * num_rows, RoundTime(0.0, 0.0, 1.0))
    assert num_planned == pytest.approx(40 * share, abs=2)
    assert controller.begin_round(rows[:-1] or rows), "a batch of another size is planned at once"


def test_forced_tokens_delay_the_timing_of_plain_rounds_only_for_a_single_row() -> None:
    forced = Candidate(part=-1, longest=3, deterministic=True, certain=True)
    for num_rows in (1, 8):
        controller, rows = CostController(), [a_row() for _ in range(num_rows)]
        controller.plan(rows, [(forced,)] * num_rows)
        assert controller.measures_plain == (num_rows > 1)


def test_rounds_with_certain_drafts_are_not_learned_from() -> None:
    """Tokens that a grammar forces are drafted whatever is planned."""
    controller, rows = CostController(), [a_row(), a_row()]
    forced = Candidate(part=-1, longest=3, deterministic=True, certain=True)
    for _ in range(4):
        controller.plan(rows, [(Candidate(longest=0),)] * 2)
        commit_and_learn(controller, rows, [0, 0], [0, 0], RoundTime(0.0, 0.0, 1.0))
    before = controller.budget.balance
    for _ in range(40):
        plans = controller.plan(rows, [(forced,), (Candidate(longest=0),)])
        assert plans == [Plan(0, 0)] * 2
        commit_and_learn(controller, rows, [3, 0], [3, 0], RoundTime(0.0, 0.0, 4.0))
    assert controller.times.plain(2) == 1.0
    assert controller.budget.balance == before


def test_the_prefill_of_a_drafter_is_no_part_of_a_plain_round() -> None:
    controller, row = CostController(), a_row()
    for _ in range(4):
        controller.plan([row], [(Candidate(longest=0),)])
        commit_and_learn(controller, [row], [0], [0], RoundTime(3.0, 0.0, 4.0))
    assert controller.times.plain(1) == 1.0


@pytest.mark.parametrize("num_tokens", [48, 256])
def test_a_useless_drafter_costs_little(num_tokens: int) -> None:
    """At most 2 % of 256 tokens and 8 % of 48, its prefill and the first drafts included."""
    simulation = Simulation(lambda number, depth: 0.0, step=0.25).play(CostController(), num_tokens)
    assert simulation.seconds / num_tokens < {48: 1.08, 256: 1.02}[num_tokens]


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_a_machine_that_changes_its_speed_does_not_stop_drafting(factor: float) -> None:
    controller = CostController()
    simulation = Simulation(
        lambda number, depth: 0.8,
        step=0.1,
        delay=lambda rng, number, seconds: seconds * (factor if number >= 300 else 1.0),
    )
    simulation.play(controller, 300)
    tokens, seconds = simulation.tokens, simulation.seconds
    simulation.play(controller, 300)
    speed = factor * (simulation.tokens - tokens) / (simulation.seconds - seconds)
    assert speed > 0.94 * best_fixed(0.8, 0.1, 0.05)
    assert controller.times.plain(1) == pytest.approx(factor)


def test_planning_that_takes_long_does_not_stop_trials() -> None:
    controller, row = CostController(), a_row()
    for _ in range(3000):
        controller.begin_round([row])
        controller.plan([row], [(Candidate(longest=0),)])
        commit_and_learn(controller, [row], [0], [0], RoundTime(0.0, 0.0, 1.03, 0.03))
    assert controller.budget.allows_trials


def test_a_single_large_loss_is_forgotten() -> None:
    """A prefill that did not pay off, or four stalled rounds, must not stop drafting for thousands of rounds."""
    budget, row = LossBudget(), a_row()
    budget.defer(row, 500.0, 256)
    budget.release(row)
    for _ in range(4):
        budget.record([], 0.0, 0.0, excess=1000.0)
    assert budget.balance == -MAX_LOSS - 1


def test_requested_drafts_beside_others_do_not_hide_losses() -> None:
    """Rows with a draft length of their own are drafted for in every round, so that no round is plain."""
    controller = CostController()
    rows = [a_row() for _ in range(3)] + [Row([0] * 20, SamplingParams(max_tokens=10**6, draft_length=1))]
    for _ in range(4):
        controller.plan(rows[:3], [(Candidate(longest=0),)] * 3)
        commit_and_learn(controller, rows[:3], [0] * 3, [0] * 3, RoundTime(0.0, 0.0, 1.0))
    num_drafted = 0
    for _ in range(400):
        plans = (
            controller.plan(rows, [(Candidate(),)] * 4) if controller.begin_round(rows) else [Plan(0, 0)] * 4
        )
        lengths = [min(plan.length, 1) for plan in plans[:3]] + [1]
        drafting = 1.0 * any(lengths[:3])
        commit_and_learn(controller, rows, lengths, [0] * 4, RoundTime(0.0, drafting, 1.1 + drafting))
        num_drafted += any(lengths[:3])
    assert 0 < num_drafted < 60


def test_a_drafter_that_has_become_good_is_tried_beside_a_fair_one() -> None:
    controller, row, rng, late = CostController(), a_row(), random.Random(3), []
    for number in range(3000):
        plan = controller.plan([row], [(Candidate(part=0), Candidate(part=1))])[0]
        chance = 0.5 if plan.part == 0 else (0.95 if number > 400 else 0.0)
        length = min(plan.length, 2)
        accepted = next((depth for depth in range(length) if rng.random() >= chance), length)
        row.tokens.extend([0] * (accepted + 1))
        time = RoundTime(0.0, 0.1 * length, 1 + 0.12 * length)
        controller.learn([row], Draft.chains([[0] * length]), Verdict.from_chain([accepted], [0]), time)
        late += [plan.part] if number > 2500 and length else []
    assert late.count(1) > 0.8 * len(late)


def test_models_of_two_kinds_do_not_draft_in_one_round() -> None:
    """One draws after the other, each asking for the whole batch."""
    controller, rows = (
        CostController(),
        [Row([number] * 20, SamplingParams(max_tokens=10**6)) for number in range(2)],
    )
    candidates = [(Candidate(part=0),), (Candidate(part=1),)]
    for _ in range(40):
        plans = controller.plan(rows, candidates)
        lengths = [min(plan.length, 1) for plan in plans]
        assert sum(lengths) <= 1
        time = RoundTime(0.0, 0.1 * max(lengths), 1 + 0.1 * max(lengths))
        commit_and_learn(controller, rows, lengths, lengths, time)


def test_a_clock_that_stands_still_is_no_error() -> None:
    controller, row = CostController(), a_row()
    for _ in range(8):
        plan = controller.plan([row], [(Candidate(),)])[0]
        length = min(plan.length, 1)
        commit_and_learn(controller, [row], [length], [length], RoundTime(0.0, 0.0, 0.0))


def test_equal_values_are_taken_together_only_if_they_pay() -> None:
    assert best_count([0.5] * 64, lambda count: 0.0 if count <= 16 else 40.0) == 0
    assert best_count([0.9, 0.5, 0.5], lambda count: 0.1 * count) == 3
    assert best_count([0.9, 0.5, 0.5], lambda count: 0.6 * count) == 1
