"""What the benchmark concludes from what handlers wrote down."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.ledger import (
    HandlerLedger,
    Started,
    free_slot_gaps,
    most_at_once,
    ran_otherwise,
    read_ledger,
    shares,
    too_many_starts,
    violations,
)


def starts(*spans: tuple[int, int], key: int = 0) -> list[Started]:
    return [Started(number, key, began, ended) for number, (began, ended) in enumerate(spans)]


def test_spans_that_only_touch_do_not_overlap() -> None:
    assert most_at_once([(0, 5), (5, 9)]) == 1
    assert most_at_once([(0, 6), (5, 9), (5, 7)]) == 3
    assert most_at_once([]) == 0


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ([0, 0, 0], 0),
        ([0, 0, 0, 0], 1),
        ([0, 0, 0, 10], 0),
        ([0, 0, 0, 9], 1),
        ([0, 10, 20, 30, 40], 0),
        ([0, 0, 0, 10, 20, 25], 1),
    ],
)
def test_a_start_beyond_the_burst_is_counted_once(times: list[int], expected: int) -> None:
    assert too_many_starts(times, burst=3, interval=10) == expected


def test_limits_hold_for_each_key_by_itself() -> None:
    both = [*starts((0, 10), (0, 10)), *starts((0, 10), (0, 10), key=1)]
    assert violations(both, concurrency=2, burst=2, interval=100) == 0
    assert violations(both, concurrency=1, burst=2, interval=100) == 2
    assert violations(both, concurrency=2, burst=1, interval=100) == 2


def test_jobs_that_ran_twice_or_never_are_found() -> None:
    ran = [Started(number, 0, 0, 0) for number in (0, 1, 1, 3)]
    assert ran_otherwise(ran, 4) == 2
    assert ran_otherwise(ran[:2], 2) == 0


def test_the_slot_that_was_freed_first_is_the_one_used_first() -> None:
    two_slots = starts((0, 10), (0, 12), (13, 20), (17, 30))
    assert free_slot_gaps(two_slots) == [3, 5]


def test_a_ledger_is_read_as_it_was_left(tmp_path: Path) -> None:
    ledger = HandlerLedger()
    ledger.note(7, 3, 100, 200)
    ledger.note(8, 4, 150, 250)
    ledger.leave(str(tmp_path))
    (entry,) = read_ledger(tmp_path)
    assert entry.runs == 2
    assert list(entry.starts) == [Started(7, 3, 100, 200), Started(8, 4, 150, 250)]


def test_a_worker_that_ran_nothing_leaves_nothing(tmp_path: Path) -> None:
    HandlerLedger().leave(str(tmp_path))
    assert read_ledger(tmp_path) == []


def test_shares_are_counted_while_all_processes_work() -> None:
    early = [Started(0, 0, time, time) for time in (0, 1, 2, 10, 11, 12, 13)]
    late = [Started(0, 0, time, time) for time in (10, 13, 20, 25)]
    found = shares([early, late])
    assert found.least == 2 / 3  # 4 and 2 of the 6 that started from 10 to 13
    assert found.longest_wait == 3
    assert found.jobs_per_second == 6 / 3 * 1e9


def test_processes_that_never_worked_together_shared_nothing() -> None:
    assert shares([[Started(0, 0, 1, 1)], [Started(0, 0, 2, 2)]]).least == 0.0
