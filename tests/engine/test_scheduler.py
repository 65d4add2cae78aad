"""Admission of rows: order, limits, and no row that waits for ever."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from secondguess.engine.shared_batch import Scheduler

CAPACITY, MAX_ROWS = 100, 4


def fits(num_rows: int, longest: int) -> bool:
    return num_rows * longest <= CAPACITY


def test_rows_join_in_the_order_of_the_queue_until_one_does_not_fit() -> None:
    scheduler: Scheduler[str] = Scheduler(fits, MAX_ROWS)
    for row, longest in {"a": 30, "b": 30, "c": 80, "d": 5}.items():
        scheduler.add(row, longest)
    assert scheduler.admit(0) == ["a", "b"]
    assert scheduler.admit(2) == [], "d does not overtake c"
    scheduler.remove("a")
    scheduler.remove("b")
    assert scheduler.admit(0) == ["c"]
    scheduler.remove("c")
    assert scheduler.admit(0) == ["d"]


def test_a_row_that_never_fits_is_admitted_alone() -> None:
    scheduler: Scheduler[str] = Scheduler(fits, MAX_ROWS)
    scheduler.add("long", 1000)
    scheduler.add("short", 1)
    assert scheduler.admit(0) == ["long"]


def test_a_row_does_not_wait_for_rows_that_make_no_progress() -> None:
    scheduler: Scheduler[str] = Scheduler(fits, 1)
    scheduler.add("paused", 10)
    assert scheduler.admit(0) == ["paused"]
    scheduler.add("next", 10)
    assert scheduler.admit(1) == []
    assert scheduler.admit(0) == ["next"]


events = st.lists(
    st.one_of(
        st.tuples(st.just("arrive"), st.integers(1, 150)),
        st.tuples(st.just("finish"), st.integers(0, 9)),
        st.tuples(st.just("cancel"), st.integers(0, 9)),
        st.tuples(st.just("admit"), st.just(0)),
    ),
    max_size=60,
)


@given(events)
def test_any_arrivals_completions_and_cancellations_keep_the_invariants(
    events: list[tuple[str, int]],
) -> None:
    scheduler: Scheduler[int] = Scheduler(fits, MAX_ROWS)
    lengths: dict[int, int] = {}
    waiting: list[int] = []
    running: list[int] = []

    def admit() -> None:
        joining = scheduler.admit(len(running))
        assert joining == waiting[: len(joining)], "first come, first served"
        del waiting[: len(joining)]
        running.extend(joining)
        if len(running) > 1:
            assert len(running) <= MAX_ROWS
            assert fits(len(running), max(lengths[row] for row in running))
        assert running or not waiting, "a row waits for nothing"

    for kind, number in events:
        if kind == "arrive":
            row = len(lengths)
            lengths[row] = number
            waiting.append(row)
            scheduler.add(row, number)
        elif kind == "admit":
            admit()
        else:
            rows = running if kind == "finish" else waiting
            if number < len(rows):
                scheduler.remove(rows.pop(number))
        assert (scheduler.num_waiting, scheduler.num_admitted) == (len(waiting), len(running))
    while waiting or running:
        admit()
        scheduler.remove(running.pop(0))
    assert (scheduler.num_waiting, scheduler.num_admitted) == (0, 0)


def test_a_row_that_is_removed_while_it_waits_is_not_admitted() -> None:
    scheduler: Scheduler[str] = Scheduler(fits, max_rows=1)
    for row in ("first", "second"):
        scheduler.add(row, 1)
    scheduler.remove("first")
    assert scheduler.admit(0) == ["second"]
    assert (scheduler.num_waiting, scheduler.num_admitted) == (0, 1)
