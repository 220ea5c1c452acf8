"""What limits allow, to the microsecond."""

from __future__ import annotations

import math
from datetime import timedelta
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fairlane.errors import InvalidPolicy
from fairlane.policy import BoundLimit, Concurrency, Level, Rate
from fairlane.policy.gates import GateState
from fairlane.scheduler.board import Gate
from fairlane.scheduler.snapshot import GateRow
from tests.scheduler.ledger import too_fast

NOW = 1_900_000_000_000_000
rates = st.builds(
    Rate,
    st.sampled_from([1, 2, 3, 7, 10, 100, 0.5, 0.3, 1 / 3, 2.5, 99.9]),
    per=st.sampled_from([0.001, 1, "7s", "1m", "1h", timedelta(days=1)]),
    burst=st.sampled_from([None, 1, 2, 5, 50]),
)
gaps = st.integers(0, 5) | st.integers(0, 10_000_000) | st.integers(0, 100_000_000_000)


@settings(deadline=None, max_examples=400)
@given(rates, st.lists(st.tuples(gaps, st.integers(1, 30)), max_size=25))
def test_no_window_holds_more_starts_than_burst_plus_rate_times_its_length(
    rate: Rate, calls: list[tuple[int, int]]
) -> None:
    now, tat, starts = NOW, 0, []
    for gap, asked in calls:
        now += gap
        count = min(asked, rate.room(tat, now))
        tat = rate.charged(tat, now, count) if count else tat
        starts += [now] * count
    assert too_fast(rate, starts) == []


@settings(deadline=None, max_examples=400)
@given(rates, st.integers(0, 250_000), st.lists(st.tuples(gaps, st.integers(1, 30), st.floats(0, 1)), max_size=25))
def test_no_window_is_overfilled_for_whoever_counts_starts_that_come_some_time_after_their_claim(
    rate: Rate, lag: int, calls: list[tuple[int, int, float]]
) -> None:
    gate, now = Gate(GateRow(b"", "", [], 0, 0, 0, 0, None), BoundLimit("", rate, Level.LANE), rate), NOW
    starts: list[int] = []
    for gap, asked, late in calls:
        now += gap
        before, count = gate.tat, min(asked, rate.room_at(gate, now))
        if count:
            rate.take(gate, now, count)
            rate.postpone(gate, before, now, lag)
            starts += [now + int(late * lag)] * count
    assert too_fast(rate, sorted(starts)) == []


@settings(deadline=None, max_examples=400)
@given(rates, st.lists(st.tuples(gaps, st.integers(1, 4), st.booleans()), max_size=25))
def test_no_window_is_overfilled_by_tokens_that_were_held_and_given_back(
    rate: Rate, calls: list[tuple[int, int, bool]]
) -> None:
    now, tat = NOW, 0
    held: list[int] = []
    started: list[int] = []
    for gap, asked, gives_back in calls:
        now += gap
        if gives_back and held:
            charged_at = held.pop(0)
            tat = rate.refunded(tat, 1, now - charged_at)
        for _ in range(min(asked, rate.room(tat, now))):
            tat = rate.charged(tat, now, 1)
            (held if gives_back else started).append(now)
    assert too_fast(rate, started) == []


@settings(deadline=None, max_examples=300)
@given(rates, st.integers(0, 10**12), st.integers(0, 10**6))
def test_room_is_exactly_how_many_single_starts_succeed(rate: Rate, ahead: int, late: int) -> None:
    tat = NOW + ahead % (rate.burst * rate.interval + 1) - late
    room, passed = rate.room(tat, NOW), 0
    while passed <= rate.burst and rate.room(tat, NOW) > 0:
        tat = rate.charged(tat, NOW, 1)
        passed += 1
    assert passed == room <= rate.burst


@settings(deadline=None, max_examples=300)
@given(rates, st.integers(0, 10**7), st.integers(1, 60))
def test_a_shut_rate_opens_at_its_time_and_not_a_microsecond_before(rate: Rate, gap: int, asked: int) -> None:
    tat = rate.charged(0, NOW, min(asked, rate.burst))
    tat = rate.charged(tat, NOW + gap, rate.room(tat, NOW + gap))
    opens = rate.opens_at(tat)
    assert opens is not None
    assert opens > NOW + gap
    assert rate.room(tat, opens) >= 1
    assert rate.room(tat, opens - 1) == 0


@settings(deadline=None, max_examples=200)
@given(rates, st.integers(0, 10**9), st.integers(1, 50))
def test_a_refund_gives_back_exactly_what_was_charged(rate: Rate, used: int, asked: int) -> None:
    tat = NOW + used % (rate.burst * rate.interval)
    count = min(asked, rate.room(tat, NOW))
    assert rate.refunded(rate.charged(tat, NOW, count), count, held=0) == tat


def test_a17_a_refund_never_lifts_a_full_bucket_above_its_burst() -> None:
    rate = Rate(10, per="1m")
    tat = rate.charged(0, NOW, 1)
    assert rate.room(rate.refunded(tat, 1, held=0), NOW + 3_600_000_000) == 10


def test_a_token_held_until_the_bucket_has_refilled_is_worth_nothing() -> None:
    rate = Rate(1, per="1s", burst=2)
    tat = rate.charged(0, NOW, 1)  # held
    later = NOW + 1_000_000
    tat = rate.charged(tat, later, 2)  # a full bucket, emptied
    assert rate.room(rate.refunded(tat, 1, held=1_000_000), later) == 0


@pytest.mark.parametrize("passes", [1, 2, 7, 20])
def test_a01_a_rate_with_seven_tokens_left_admits_seven_however_often_it_is_asked(passes: int) -> None:
    rate = Rate(10, per="1m")
    tat, admitted = rate.charged(0, NOW, 3), 0
    for _ in range(passes):
        count = min(math.ceil(20 / passes), rate.room(tat, NOW))
        tat, admitted = rate.charged(tat, NOW, count), admitted + count
    assert admitted == 7


def test_a05_ten_a_minute_and_a_hundred_an_hour_have_gates_of_their_own() -> None:
    assert Rate(10, per="1m", by="a").identity != Rate(600, per="1h", by="a").identity


def test_a26_a_rate_whose_interval_is_no_whole_number_still_opens_and_is_never_too_fast() -> None:
    rate = Rate(3, per="1s", burst=1)  # one every 333,333.3… µs
    now, tat, starts = NOW, 0, []
    for _ in range(1_000):
        assert rate.room(tat, now) == 1
        tat = rate.charged(tat, now, 1)
        starts.append(now)
        opens = rate.opens_at(tat)
        assert opens is not None
        now = opens
    assert (now - NOW) * 3 >= 1_000 * 1_000_000
    assert (now - NOW) - 1_000 * 1_000_000 // 3 <= 1_000
    assert too_fast(rate, starts[:100]) == []


@given(st.sampled_from([0.1, 0.3, 1 / 3, 0.7, 12.5, 1e-3]))
def test_a_fraction_is_taken_as_it_is_written_and_rounded_to_the_slow_side(limit: float) -> None:
    rate = Rate(limit, per="1s")
    assert rate.interval == math.ceil(Fraction(1_000_000) / Fraction(str(limit)))
    assert rate.burst == max(1, math.floor(limit))


def test_a_bucket_that_was_emptied_under_a_larger_burst_is_empty_and_not_in_debt() -> None:
    large, small = Rate(1, per="1m", burst=1_000), Rate(1, per="1m", burst=1)
    tat = small.carried_over(large.charged(0, NOW, 1_000), NOW)
    assert small.room(tat, NOW) == 0
    assert small.opens_at(tat) == NOW + 60_000_000


@pytest.mark.parametrize(("in_flight", "room"), [(0, 5), (4, 1), (5, 0), (9, 0)])
def test_concurrency_has_room_for_the_rest_and_never_less_than_none(in_flight: int, room: int) -> None:
    assert Concurrency(5).room_at(GateState(in_flight), NOW) == room


def test_concurrency_neither_charges_tokens_nor_opens_by_time() -> None:
    limit, gate = Concurrency(1), GateState(tat=7)
    limit.take(gate, NOW, 3)
    limit.carry_over(gate, NOW)
    assert (gate.in_flight, gate.tat) == (3, 7)
    assert limit.opens_again_at(gate) is None


def test_a_concurrency_of_zero_is_allowed_and_has_no_room() -> None:
    assert Concurrency(0, by="account").room_at(GateState(), NOW) == 0


@pytest.mark.parametrize(
    ("declare", "named"),
    [
        (lambda: Concurrency(-1), r"Concurrency\(-1\)"),
        (lambda: Concurrency(True), r"Concurrency\(True\)"),
        (lambda: Concurrency(2.0), r"Concurrency\(2.0\)"),  # type: ignore[arg-type]
        (lambda: Concurrency("5"), r"Concurrency\('5'\)"),  # type: ignore[arg-type]
        (lambda: Concurrency(10**10), "1,000,000,000"),
        (lambda: Concurrency(1, by="no spaces"), "no spaces"),
        (lambda: Concurrency(1, by=""), "by=''"),
        (lambda: Concurrency(1, by=("a", "a")), "twice"),
        (lambda: Concurrency(1, by=(1,)), "not a key's name"),  # type: ignore[arg-type]
        (lambda: Rate(0, per="1m"), r"Rate\(0, per='1m'\) would never admit"),
        (lambda: Rate(-3, per="1m"), "would never admit"),
        (lambda: Rate(float("nan"), per="1m"), "nan"),
        (lambda: Rate(float("inf"), per="1m"), "inf"),
        (lambda: Rate(True, per="1m"), "True"),
        (lambda: Rate("9", per="1m"), "number of jobs"),  # type: ignore[arg-type]
        (lambda: Rate(1, per=0), "`per` is a time above 0"),
        (lambda: Rate(1, per="-1s"), "not a duration"),
        (lambda: Rate(1, per="soon"), "soon"),
        (lambda: Rate(1, per=timedelta(0)), "`per`"),
        (lambda: Rate(10**9, per="1s"), "microsecond"),
        (lambda: Rate(1, per="1s", burst=0), "burst=0"),
        (lambda: Rate(1, per="1s", burst=1.5), "burst=1.5"),  # type: ignore[arg-type]
        (lambda: Rate(1, per="1s", burst=True), "burst=True"),
    ],
)
def test_a16_nonsense_is_refused_where_it_is_declared_and_named(declare: object, named: str) -> None:
    assert callable(declare)
    with pytest.raises(InvalidPolicy, match=named):
        declare()


@pytest.mark.parametrize(("limit", "burst"), [(1e-13, None), (1e-300, None), (1e-9, 1_000_000_000)])
def test_a16_a_rate_beyond_what_any_clock_can_count_is_refused_where_it_is_declared(
    limit: float, burst: int | None
) -> None:
    with pytest.raises(InvalidPolicy, match=r"hundred years|any clock"):
        Rate(limit, per="1s", burst=burst)
