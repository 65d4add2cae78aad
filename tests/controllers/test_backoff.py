"""Backoff of the controller `cost`: candidates that do not pay are skipped, and their rounds are learned from later."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from simulation import Simulation

from secondguess.controllers.cost.backoff import MAX_DOUBLINGS, SHORTEST, Backoffs
from secondguess.controllers.cost.controller import CostController
from secondguess.controllers.cost.loss_limits import MAX_LOSS, STOP_ROUNDS
from secondguess.controllers.cost.round_buffers import GROUP_SIZE, MAX_PLAIN_ROUNDS
from secondguess.controllers.cost.round_times import MAX_PLAN_SHARE, RoundTimes
from secondguess.core import Candidate, Draft, RoundTime, Row, Verdict
from secondguess.decode import Components, decode
from secondguess.drafters.row_sources import Prediction
from secondguess.proof.fakes import ScriptedDrafter, TableModel
from secondguess.sampling import SamplingParams
from secondguess.verifiers import make_verifier

NOTHING = (Candidate(longest=0),)
LOOKUP = Candidate(kind="match", deterministic=True)


def make_rows(number: int, **params: object) -> list[Row]:
    return [Row([0] * 50, SamplingParams(max_tokens=10**6, **params)) for _ in range(number)]  # type: ignore[arg-type]


def on_offer(*kinds: str) -> tuple[Candidate, ...]:
    """One row's prospects."""
    return tuple(Candidate(kind=kind) for kind in kinds)


def play(
    controller: CostController,
    rows: Sequence[Row],
    candidates: Sequence[Sequence[Candidate]],
    price: float = 0.5,
    accepted: bool = False,
    planning: float = 0.0,
) -> list[int]:
    """One round in which a node and planning cost the given plain rounds; gives the draft lengths, one node at most."""
    plans = controller.plan(rows, candidates)
    lengths = [min(plan.length, 1) for plan in plans]
    kept = [length * accepted for length in lengths]
    for row, gained in zip(rows, kept, strict=True):
        row.tokens.extend([0] * (gained + 1))
    draft = Draft.chains([[0] * length for length in lengths])
    verdict = Verdict.from_chain(kept, [0] * len(rows))
    drafting = price * max(lengths)
    controller.learn(rows, draft, verdict, RoundTime(0.0, drafting, 1 + drafting + planning, planning))
    return lengths


@pytest.mark.parametrize("num_rows", [1, 4])
def test_backoff_rounds_are_learned_from_later_and_none_is_lost(
    num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    controller = CostController()
    earned: list[float] = []
    contexts: list[float] = []
    earn, add_plain = controller.probe_budget.earn, controller.times.add_plain

    def note_income(elapsed: float) -> None:
        earned.append(elapsed)
        earn(elapsed)

    def note_context(num_rows: int, context: float, seconds: Sequence[float]) -> bool:
        contexts.append(context)
        return add_plain(num_rows, context, seconds)

    monkeypatch.setattr(controller.probe_budget, "earn", note_income)
    monkeypatch.setattr(controller.times, "add_plain", note_context)
    rows = make_rows(num_rows)
    seconds = 0.0
    for _ in range(400):
        seconds += 1 + 0.5 * max(play(controller, rows, [on_offer("model")] * num_rows))
        assert seconds - sum(earned) <= (SHORTEST + num_rows) << MAX_DOUBLINGS
    controller.release(rows[0])
    assert sum(earned) == pytest.approx(seconds)
    assert len(earned) < 120
    # The positions of the rounds are known as if each had been recorded at once.
    assert len(rows[0].tokens) - contexts[-1] <= GROUP_SIZE
    assert contexts == sorted(contexts)


def rest_length(backoffs: Backoffs, row: Row, kind: str) -> int:
    return next(number for number in range(1000) if not backoffs.cover([row], [on_offer(kind)]))


def test_backoff_grows_if_a_candidate_does_not_pay_again() -> None:
    backoffs, rows = Backoffs(lambda row: 0), make_rows(1)
    short = [on_offer("short")]
    assert not backoffs.cover(rows, short)
    for doublings in (0, 1, 2, 3, 3):
        backoffs.begin()
        assert rest_length(backoffs, rows[0], "short") == (SHORTEST + 1) << doublings
    backoffs.end()
    assert not backoffs.cover(rows, short)
    backoffs.begin()
    assert rest_length(backoffs, rows[0], "short") == SHORTEST + 1


def test_a_new_candidate_is_evaluated_at_once_and_does_not_prolong_backoff() -> None:
    backoffs, rows = Backoffs(lambda row: 0), make_rows(1)
    backoffs.cover(rows, [on_offer("short")])
    backoffs.begin()
    assert backoffs.cover(rows, [on_offer("short")])
    assert not backoffs.cover(rows, [on_offer("long", "short")])
    backoffs.begin()
    # Each has its own: both at once pass unasked while both last.
    assert backoffs.cover(rows, [on_offer("long", "short")])
    assert rest_length(backoffs, rows[0], "short") == SHORTEST + 1 - 3
    assert not backoffs.cover(rows, [on_offer("short", "long")])


def test_backoff_is_kept_per_part() -> None:
    backoffs, rows = Backoffs(lambda row: 0), make_rows(1)
    backoffs.cover(rows, [(Candidate(part=1), Candidate(part=0, longest=0))])
    backoffs.begin()
    assert not backoffs.cover(rows, [(Candidate(part=0), Candidate(part=1))])


def test_backoff_of_one_row_does_not_affect_another() -> None:
    """One match may not be worth that all rows wait; several may be, and a row has a temperature of its own."""
    backoffs, rows = Backoffs(lambda row: 0), make_rows(3)
    backoffs.cover(rows, [on_offer("match"), NOTHING, NOTHING])
    backoffs.begin()
    assert backoffs.cover(rows, [on_offer("match"), NOTHING, NOTHING])
    assert not backoffs.cover(rows, [on_offer("match"), on_offer("match"), NOTHING])


def test_rows_of_a_batch_that_are_alike_share_a_backoff() -> None:
    """A match that another row has now pays no more than before, unless its drafts were accepted more."""
    levels = {}
    backoffs, rows = Backoffs(lambda row: levels.get(row, 0)), make_rows(3)
    backoffs.cover(rows, [on_offer("match"), NOTHING, NOTHING])
    backoffs.begin()
    assert backoffs.cover(rows, [NOTHING, NOTHING, on_offer("match")])
    levels[rows[2]] = 3
    assert not backoffs.cover(rows, [NOTHING, NOTHING, on_offer("match")])
    warmer = [*rows[:2], *make_rows(1, temperature=0.5)]
    backoffs.cover(warmer, [on_offer("match"), NOTHING, NOTHING])
    backoffs.begin()
    assert not backoffs.cover(warmer, [NOTHING, NOTHING, on_offer("match")])


def test_a_row_that_takes_the_place_of_another_is_evaluated_once() -> None:
    backoffs, rows = Backoffs(lambda row: 0), make_rows(3)
    backoffs.cover(rows, [on_offer("match")] * 3)
    backoffs.begin()
    backoffs.forget(rows[0])
    rows = [*rows[1:], *make_rows(1)]
    assert not backoffs.cover(rows, [on_offer("match")] * 3)
    backoffs.begin()
    assert backoffs.cover(rows, [on_offer("match")] * 3)


def test_a_row_without_candidates_is_not_evaluated() -> None:
    assert Backoffs(lambda row: 0).cover(make_rows(1), [NOTHING])
    assert not Backoffs(lambda row: 0).cover(make_rows(2), [NOTHING, on_offer("short")])


def test_backoff_ends_when_the_batch_size_changes() -> None:
    backoffs, rows = Backoffs(lambda row: 0), make_rows(2)
    backoffs.cover(rows, [on_offer("short")] * 2)
    backoffs.begin()
    assert backoffs.cover(rows, [on_offer("short")] * 2)
    assert not backoffs.cover(rows[:1], [on_offer("short")])


def test_a_row_with_its_own_draft_length_does_not_affect_others() -> None:
    """Its candidates are never evaluated, so none of them is in backoff."""
    controller = CostController()
    (own,), (other,) = make_rows(1, draft_length=0), make_rows(1)
    rows = [own, other]
    for _ in range(20):
        assert play(controller, rows, [on_offer("match"), NOTHING]) == [0, 0]
    assert play(controller, rows, [on_offer("match"), on_offer("match")]) == [0, 1]


def test_ended_rows_are_removed() -> None:
    """The next one may be of another temperature, at which drafts pay: it is asked about at once, and soon again."""
    controller = CostController()
    (row,) = make_rows(1)
    for _ in range(600):
        play(controller, [row], [on_offer("model")])
    assert controller._in_backoff
    controller.release(row)
    (other,) = make_rows(1)
    asked = []
    for number in range(SHORTEST + 3):
        controller.plan([other], [on_offer("model")])
        if not controller._in_backoff:
            asked.append(number)
    assert asked == [0, SHORTEST + 2]
    ended = weakref.ref(row)
    del row
    gc.collect()
    assert ended() is None


def test_backoff_of_other_candidates_ends_when_one_pays() -> None:
    controller, rows = CostController(), make_rows(1)
    poor, good = [(LOOKUP._replace(kind="poor"),)], [(LOOKUP._replace(kind="good"),)]
    for _ in range(100):
        play(controller, rows, poor)
    while not controller._in_backoff:
        play(controller, rows, poor)
    assert play(controller, rows, good, price=0.0, accepted=True) == [1]
    play(controller, rows, poor)
    assert not controller._in_backoff


def test_a_probe_does_not_end_backoff() -> None:
    controller = CostController()
    (row,) = make_rows(1)
    for _ in range(3000):
        play(controller, [row], [on_offer("model")])
    drafted, rested = [], []
    for _ in range(6000):
        drafted.append(play(controller, [row], [on_offer("model")])[0])
        rested.append(controller._in_backoff)
    probe_budget = [number for number, length in enumerate(drafted) if length]
    assert len(probe_budget) >= 3
    assert any(after == before + 1 for before, after in pairwise(probe_budget))
    longest = (SHORTEST + 1) << MAX_DOUBLINGS
    for number in probe_budget:
        if number + 1 < len(drafted) and not drafted[number + 1]:  # the end of a series
            following = rested[number + 2 : number + 2 + longest]
            assert all(following), "backoff is not shorter after another failure"


def test_a_series_of_probes_is_completed_after_its_first_candidate_is_gone() -> None:
    controller = CostController()
    (row,) = make_rows(1)
    model, match = Candidate(part=1), Candidate(part=0, kind="match", deterministic=True)
    was_probing, num_probes = False, 0
    for number in range(6000):
        choices = (match, model) if number % 7 == 0 else (model,)
        length = play(controller, [row], [choices])[0]
        assert not (was_probing and controller._in_backoff)
        was_probing = controller._decision.is_probe
        num_probes += length
    assert num_probes > 10


def test_skipped_rounds_are_learned_from_in_small_groups() -> None:
    """A look-up may have nothing to offer for a whole book."""
    controller = CostController()
    rows = make_rows(1)
    for _ in range(1000):
        play(controller, rows, [NOTHING])
        assert len(controller._buffered) <= MAX_PLAIN_ROUNDS
    assert controller.times.plain(1) == 1.0


@pytest.mark.parametrize("num_rows", [1, 4])
@pytest.mark.parametrize("step", [0.1, 1.0])
def test_paused_rounds_change_no_decision(num_rows: int, step: float) -> None:
    """Paused or planned one by one: the same rounds have drafts, also while the machine changes its speed."""

    def delay(rng: random.Random, number: int, seconds: float) -> float:
        return 3 * seconds if number // 500 % 2 else seconds

    drafted = [
        Simulation(lambda number, depth: 0.1, step=step, delay=delay, pauses=pauses)
        .play(CostController(), 5000, num_rows)
        .drafted
        for pauses in (True, False)
    ]
    assert drafted[0] == drafted[1]
    assert sum(map(any, drafted[0])) > 10


class CountingDrafter(ScriptedDrafter):
    """Drafter that is never right and counts the rounds in which it is asked for candidates."""

    deterministic = False
    num_asked = 0

    def __init__(self) -> None:
        super().__init__(lambda row: [0])

    def candidates(self, rows: Sequence[Row]) -> Sequence[Sequence[Candidate]]:
        self.num_asked += 1
        return super().candidates(rows)


@pytest.mark.parametrize(
    ("settings", "asked"),
    [({}, False), ({"sources": (Prediction([0, 0]),)}, True), ({"draft_length": 0}, True)],
)
def test_the_drafter_is_not_called_in_paused_rounds(settings: dict[str, object], asked: bool) -> None:
    """A row with a draft length or draft sources of its own is asked about in every round."""
    params = {"draft_length": settings.pop("draft_length")} if "draft_length" in settings else {}
    target = TableModel(4, lambda context: torch.tensor([0.0, 0.0, 0.0, 1.0]))
    drafter, controller = CountingDrafter(), CostController()
    for _ in range(200):  # the clock of the rounds below is the machine's own
        play(controller, make_rows(1), [on_offer("")])
    row = Row([1], SamplingParams(max_tokens=400, temperature=0, **params), **settings)
    components = Components(target, drafter, make_verifier("greedy"), controller)
    num_rounds = sum(1 for _ in decode(components, [row]))
    assert num_rounds == 400
    assert (drafter.num_asked > 300) == asked


@pytest.mark.parametrize("change", ["row", "second row", "end"])
def test_a_pause_ends_with_its_rows(change: str) -> None:
    controller, (row, other) = CostController(), make_rows(2)
    while controller.begin_round([row]):
        play(controller, [row], [on_offer("model")])
    controller.learn([row], Draft.empty(1), Verdict.from_chain([0], [0]), RoundTime(0.0, 0.0, 1.0))
    if change == "end":
        controller.release(row)
    assert controller.begin_round({"row": [other], "second row": [row, other], "end": [row]}[change])


@pytest.mark.parametrize("num_rows", [1, 16])
def test_lookups_are_not_paused_where_planning_takes_little_time(num_rows: int) -> None:
    """Their candidates depend on the text, so each round may have a better one."""
    controller, rows = CostController(), make_rows(num_rows)
    for _ in range(300):
        assert controller.begin_round(rows)
        play(controller, rows, [(LOOKUP, Candidate(part=1))] * num_rows, planning=0.9 * MAX_PLAN_SHARE)


def run_paused_rounds(controller: CostController, rows: Sequence[Row]) -> int:
    """Run the rounds that are paused now and return their number."""
    num_paused = 0
    while not controller.begin_round(rows):
        verdict = Verdict.from_chain([0] * len(rows), [0] * len(rows))
        controller.learn(rows, Draft.empty(len(rows)), verdict, RoundTime(0.0, 0.0, 1.0))
        num_paused += 1
    return num_paused


@pytest.mark.parametrize("num_rows", [1, 16])
@pytest.mark.parametrize("kinds", [["match"], ["match", "another"]])
def test_rounds_without_drafts_are_planned_rarely_where_planning_takes_long(
    kinds: list[str], num_rows: int
) -> None:
    """Their candidates are in backoff, or new ones that are evaluated."""
    controller, rows = CostController(), make_rows(num_rows)
    num_paused, is_timed = 0, False
    for number in range(300):
        candidates = [(LOOKUP._replace(kind=kinds[number // 40 % len(kinds)]),)] * num_rows
        drafted = any(play(controller, rows, candidates, price=2.0, planning=3.5 * MAX_PLAN_SHARE))
        paused = run_paused_rounds(controller, rows)
        is_planned = drafted or controller.measures_plain
        assert paused == (3 if is_timed and not is_planned else 0)
        is_timed |= not is_planned
        num_paused += paused
    assert num_paused > 800
    assert controller.times.plain(num_rows) == pytest.approx(1.0), "planning is no part of a plain round"


def test_paused_rounds_fit_the_buffer() -> None:
    controller, rows = CostController(), make_rows(1)
    for _ in range(100):
        play(controller, rows, [(LOOKUP,)], price=2.0, planning=10.5 * MAX_PLAN_SHARE)
        run_paused_rounds(controller, rows)
        assert len(controller._buffered) <= MAX_PLAIN_ROUNDS


def test_the_prefill_of_a_drafter_is_no_part_of_a_plain_round() -> None:
    controller, rows = CostController(), make_rows(1)
    for _ in range(40):
        controller.plan(rows, [NOTHING])
        verdict = Verdict.from_chain([0], [0])
        controller.learn(rows, Draft.empty(1), verdict, RoundTime(3.0, 0.0, 4.0))
    controller.release(rows[0])
    assert controller.times.plain(1) == 1.0


@pytest.mark.parametrize("num_rows", [4, 16])
def test_a_batch_probes_a_lookup_that_was_never_right(num_rows: int) -> None:
    """Once it is right, it is drafted again."""
    controller, rows = CostController(), make_rows(num_rows)
    for _ in range(200):
        play_or_pause(controller, rows, accepted=False)
    drafted = [any(play_or_pause(controller, rows, accepted=True)) for _ in range(1000)]
    assert sum(drafted[-100:]) > 50


def play_or_pause(controller: CostController, rows: Sequence[Row], accepted: bool) -> list[int]:
    """Run one round in which a lookup costs little; returns the draft lengths."""
    if run_paused_rounds(controller, rows):
        return []
    return play(controller, rows, [(LOOKUP,)] * len(rows), price=0.05, accepted=accepted)


def test_all_planning_of_rounds_without_drafts_counts() -> None:
    """Also rare long planning, and what is learned in paused rounds; not planning of rounds with drafts."""
    times = RoundTimes()
    for number in range(64):
        times.add_plain(4, 20, [1.0])
        times.add_plan(4, False, 0.4 if number % 8 == 0 else 0.02)
        times.add_plan(4, True, 10.0)
    assert times.num_unplanned(4) in range(1, 4)
    controller, rows = CostController(), make_rows(1)
    for _ in range(20):
        play(controller, rows, [(LOOKUP,)], price=2.0, planning=1.5 * MAX_PLAN_SHARE)
        while not controller.begin_round(rows):
            time = RoundTime(0.0, 0.0, 1.2, 0.2)
            controller.learn(rows, Draft.empty(1), Verdict.from_chain([0], [0]), time)
    assert controller.times.num_unplanned(1) > 4


@pytest.mark.parametrize("num_rows", [1, 16])
def test_rounds_are_paused_while_the_guard_has_stopped_drafting(num_rows: int) -> None:
    controller, rows = CostController(), make_rows(num_rows)
    for _ in range(20):
        play(controller, rows, [(LOOKUP,)] * num_rows, price=2.0, planning=3.5 * MAX_PLAN_SHARE)
        run_paused_rounds(controller, rows)
    controller.guard.record(-2 * MAX_LOSS)
    num_planned = 0
    while controller.guard.is_stopped:
        play(controller, rows, [(LOOKUP,)] * num_rows, planning=3.5 * MAX_PLAN_SHARE)
        run_paused_rounds(controller, rows)
        num_planned += 1
    assert num_planned < STOP_ROUNDS / 3


@pytest.mark.parametrize(("sources", "draft_length"), [((Prediction([0, 0]),), None), ((), 0)])
def test_a_row_with_drafts_of_its_own_is_planned_in_every_round(
    sources: tuple[Prediction, ...], draft_length: int | None
) -> None:
    own = Row([0], SamplingParams(draft_length=draft_length), sources=sources)
    controller, rows = CostController(), [own, *make_rows(16)]
    for _ in range(300):
        assert controller.begin_round(rows)
        play(controller, rows, [(LOOKUP,)] * len(rows), planning=1.0)


@pytest.fixture
def plain_rounds(monkeypatch: pytest.MonkeyPatch) -> tuple[CostController, list[tuple[int, float]]]:
    """A controller, and of how many rows and tokens the plain rounds were that it has learnt from."""
    controller = CostController()
    seen: list[tuple[int, float]] = []
    add_plain = controller.times.add_plain

    def note(num_rows: int, context: float, seconds: Sequence[float]) -> bool:
        seen.append((num_rows, context))
        return add_plain(num_rows, context, seconds)

    monkeypatch.setattr(controller.times, "add_plain", note)
    return controller, seen


def test_rounds_of_different_rows_are_learned_from_separately(
    plain_rounds: tuple[CostController, list[tuple[int, float]]],
) -> None:
    controller, seen = plain_rounds
    rows = make_rows(2)
    held: list[Row] = []
    for now in (rows[:1], rows, rows[:1]):
        held[:] = now  # as a server's batch changes
        play(controller, held, [NOTHING] * len(held))
    controller.release(rows[0])
    assert [num_rows for num_rows, _ in seen] == [1, 2, 1]


def test_skipped_rounds_keep_their_order_among_drafted_ones(
    plain_rounds: tuple[CostController, list[tuple[int, float]]],
) -> None:
    controller, seen = plain_rounds
    (own,), (other,) = make_rows(1, draft_length=9), make_rows(1)
    rows = [own, other]
    for _ in range(5):
        play(controller, rows, [NOTHING, NOTHING])
    controller.plan(rows, [NOTHING, NOTHING])
    own.tokens.extend([0] * 1000)
    verdict = Verdict.from_chain([9, 0], [0] * 2)
    controller.learn(rows, Draft.chains([[0] * 9, []]), verdict, RoundTime(0.0, 0.0, 1.0))
    for _ in range(5):
        play(controller, rows, [NOTHING, NOTHING])
    controller.release(own)
    assert all(50 < context < 60 or 550 < context < 570 for _, context in seen)
    assert {context > 500 for _, context in seen} == {False, True}
