"""What the demo counts, on ledgers small enough to count by hand."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlane.demo.app import LedgerReader, LedgerWriter
from fairlane.demo.scenarios import (
    NANOSECONDS,
    Run,
    backlogged_until,
    most_in_flight,
    rate_excess,
    shares_over_time,
    worker_time,
)
from fairlane.simulation.measures import jain_index, most_within


def run(tenant: str, started_at: int, ended_at: int, number: int = 0) -> Run:
    return Run(number, tenant, "endpoint", started_at, ended_at, started_at)


def test_jain_is_one_when_all_have_the_same() -> None:
    assert jain_index([3.0] * 7) == pytest.approx(1.0)


def test_jain_is_one_nth_when_one_has_everything() -> None:
    assert jain_index([5.0, 0, 0, 0]) == pytest.approx(0.25)


def test_jain_of_nothing_at_all_is_equal() -> None:
    assert jain_index([0, 0]) == 1.0


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50))
def test_jain_lies_between_one_nth_and_one(values: list[float]) -> None:
    assert 1 / len(values) - 1e-9 <= jain_index(values) <= 1 + 1e-9


def test_tenants_are_compared_until_the_first_of_them_starts_its_last_job() -> None:
    runs = [run("a", 0, 10), run("a", 10, 20), run("b", 0, 10), run("b", 30, 40)]
    assert backlogged_until(runs) == 10
    assert worker_time(runs, 10) == {"a": 10, "b": 10}


def test_a_run_counts_up_to_the_end_of_the_window_and_not_beyond() -> None:
    assert worker_time([run("a", 0, 100), run("b", 60, 90), run("c", 80, 90)], 70) == {"a": 70, "b": 10, "c": 0}


def test_overlapping_runs_are_counted_at_their_worst_instant() -> None:
    runs = [run("a", 0, 10), run("a", 5, 15), run("a", 9, 12)]
    assert most_in_flight(runs) == 3
    assert most_in_flight([]) == 0


def test_a_slot_that_is_handed_over_is_not_counted_twice() -> None:
    assert most_in_flight([run("a", 0, 10), run("a", 10, 20)]) == 1


def test_a_burst_and_its_refill_leave_no_excess() -> None:
    assert rate_excess([0, 0, 0, 10, 20, 30], burst=3, interval=10) == pytest.approx(0)


def test_one_start_too_early_is_an_excess_by_its_share() -> None:
    assert rate_excess([0, 0, 0, 5], burst=3, interval=10) == pytest.approx(0.5)


def test_an_excess_in_the_middle_of_a_long_quiet_time_is_found() -> None:
    assert rate_excess([0, 1_000, 1_000, 1_000, 5_000], burst=2, interval=10) == pytest.approx(1)


def test_starts_may_come_in_any_order() -> None:
    assert rate_excess([5, 0, 0, 0], burst=3, interval=10) == rate_excess([0, 0, 0, 5], burst=3, interval=10)


@given(st.lists(st.integers(0, 1_000), min_size=1, max_size=30), st.integers(1, 5), st.integers(1, 50))
def test_the_worst_excess_is_that_of_the_worst_of_all_windows(starts: list[int], burst: int, interval: int) -> None:
    ordered = sorted(starts)
    windows = [
        (last - first + 1) - burst - (ordered[last] - ordered[first]) / interval
        for first in range(len(ordered))
        for last in range(first, len(ordered))
    ]
    assert rate_excess(starts, burst=burst, interval=interval) == pytest.approx(max(windows))


def test_the_busiest_second_may_begin_at_any_start() -> None:
    half = NANOSECONDS // 2
    starts = [0, half, half + 1, NANOSECONDS, NANOSECONDS + half - 1, 3 * NANOSECONDS]
    assert most_within(starts, NANOSECONDS) == (4, half)


def test_a_second_does_not_hold_its_own_end() -> None:
    assert most_within([0, NANOSECONDS], NANOSECONDS) == (1, 0)
    assert most_within([], NANOSECONDS) == (0, 0)


def test_the_chart_spreads_a_run_over_the_stretches_it_touches() -> None:
    columns = shares_over_time([run("whale", 0, 15), run("a", 10, 20)], columns=2)
    assert columns == [{"whale": pytest.approx(1.0)}, {"whale": pytest.approx(0.5), "small": pytest.approx(1.0)}]


def test_a_ledger_gives_back_what_was_written(tmp_path: Path) -> None:
    reader = LedgerReader(tmp_path)
    writer = LedgerWriter(tmp_path)
    with writer.record(7, "acme", "api.acme.com", 123):
        assert reader.follow()
        assert [(each.number, each.tenant, each.endpoint) for each in reader.running.values()] == [
            (7, "acme", "api.acme.com")
        ]
        assert reader.runs == []
    assert reader.follow()
    assert reader.running == {}
    (ran,) = reader.runs
    assert (ran.number, ran.admitted_at) == (7, 123)
    assert 0 < ran.started_at <= ran.ended_at
    assert not reader.follow()


def test_a_handler_that_raises_has_ended_too(tmp_path: Path) -> None:
    reader = LedgerReader(tmp_path)
    with pytest.raises(RuntimeError), LedgerWriter(tmp_path).record(1, "a", "e", 0):
        raise RuntimeError
    reader.follow()
    assert [each.number for each in reader.runs] == [1]


def test_half_a_line_is_left_for_the_next_look(tmp_path: Path) -> None:
    reader = LedgerReader(tmp_path)
    file = tmp_path / f"{os.getpid()}.ledger"
    file.write_text("+ 10 1 a e 5\n- 20 ")
    reader.follow()
    assert len(reader.running) == 1
    with file.open("a") as more:
        more.write("1\n")
    reader.follow()
    assert reader.runs == [Run(1, "a", "e", 10, 20, 5)]
    assert reader.elapsed == pytest.approx(10 / NANOSECONDS)


def test_the_same_job_in_two_processes_is_two_runs(tmp_path: Path) -> None:
    (tmp_path / "1.ledger").write_text("+ 10 1 a e 5\n- 20 1\n")
    (tmp_path / "2.ledger").write_text("+ 15 1 a e 5\n- 25 1\n")
    reader = LedgerReader(tmp_path)
    reader.follow()
    assert len(reader.runs) == 2
