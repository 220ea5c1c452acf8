from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlane.clock import SECOND
from fairlane.errors import ConfigurationError
from fairlane.task import Backoff


def test_each_attempt_waits_a_factor_longer_up_to_the_cap() -> None:
    backoff = Backoff("1s", factor=3, cap="20s", jitter=0)
    assert [backoff.delay(attempt, 0.5) // SECOND for attempt in range(1, 6)] == [1, 3, 9, 20, 20]


def test_the_jitter_comes_after_the_cap() -> None:
    backoff = Backoff("1s", cap="10s", jitter=0.5)
    assert backoff.delay(50, 0.0) == 10 * SECOND
    assert 14_900_000 < backoff.delay(50, 0.999) < 15 * SECOND


@pytest.mark.parametrize("factor", [1.0, 2.0, 100.0])
def test_attempt_five_thousand_is_the_cap_and_not_an_overflow(factor: float) -> None:
    backoff = Backoff("1s", factor=factor, cap="1h", jitter=0)
    assert backoff.delay(5_000, 0.9) == (SECOND if factor == 1.0 else 3_600 * SECOND)


@given(
    st.integers(0, 10_000),
    st.floats(0, 1, exclude_max=True),
    st.floats(1, 100),
    st.integers(0, 100),
    st.integers(0, 10**6),
    st.floats(0, 1),
)
def test_a_delay_lies_between_first_and_the_cap_with_its_jitter(
    attempt: int, chance: float, factor: float, first: int, more: int, jitter: float
) -> None:
    delay = Backoff(first, factor=factor, cap=first + more, jitter=jitter).delay(attempt, chance)
    assert first * SECOND <= delay <= round((first + more) * SECOND * (1 + jitter))


@given(st.integers(1, 200), st.floats(1, 10))
def test_no_attempt_waits_less_than_the_one_before(attempt: int, factor: float) -> None:
    backoff = Backoff("1s", factor=factor, cap="1d", jitter=0)
    assert backoff.delay(attempt, 0.0) <= backoff.delay(attempt + 1, 0.0)


@pytest.mark.parametrize(
    ("declare", "named"),
    [
        (lambda: Backoff("-1s"), "not a duration"),
        (lambda: Backoff(-1), "first"),
        (lambda: Backoff("2h", cap="1h"), "cap"),
        (lambda: Backoff(factor=0.5), "factor"),
        (lambda: Backoff(factor=float("nan")), "factor"),
        (lambda: Backoff(jitter=1.5), "jitter"),
        (lambda: Backoff(jitter=-0.1), "jitter"),
    ],
)
def test_a_backoff_that_cannot_work_is_refused_and_named(declare: object, named: str) -> None:
    assert callable(declare)
    with pytest.raises(ConfigurationError, match=named):
        declare()
