from __future__ import annotations

from itertools import pairwise
from threading import Thread
from uuid import RFC_4122, UUID

from hypothesis import given, settings
from hypothesis import strategies as st

from fairlane.job import State, new_job_ids

NOW = 1_900_000_000_000_000


@settings(deadline=None, max_examples=100)
@given(st.lists(st.tuples(st.integers(-(10**9), 10**9), st.integers(0, 50)), min_size=1, max_size=10))
def test_ids_rise_and_are_version_7_also_when_the_clock_steps_back(batches: list[tuple[int, int]]) -> None:
    ids = [each for step, count in batches for each in new_job_ids(NOW + step, count)]
    assert len(ids) == sum(count for _, count in batches)
    assert all(before < after for before, after in pairwise(ids))
    assert all((each.version, each.variant) == (7, RFC_4122) for each in ids)


def test_more_ids_than_a_millisecond_has_numbers_still_rise() -> None:
    ids = new_job_ids(NOW, 10_000)
    assert ids == sorted(set(ids))


def test_an_id_carries_its_millisecond() -> None:
    later = NOW + 10**13  # beyond what other tests have pushed the counter to
    (job,) = new_job_ids(later, 1)
    assert job.int >> 80 == later // 1_000


def test_threads_that_make_ids_at_once_never_make_the_same() -> None:
    made: list[list[UUID]] = []
    threads = [Thread(target=lambda: made.append(new_job_ids(NOW, 500))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({each for ids in made for each in ids}) == 4_000


def test_done_dead_and_cancelled_are_the_final_states() -> None:
    assert [str(state) for state in State if state.is_final] == ["done", "dead", "cancelled"]
