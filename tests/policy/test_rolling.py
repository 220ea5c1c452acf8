"""Rolling windows: never one start too many in any of them, and never one too few for long."""

from __future__ import annotations

import json
from collections.abc import Iterable

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fairlane.errors import InvalidPolicy
from fairlane.policy import Policy, Rate
from fairlane.policy.gates import EXACT_ENTRIES, SLICES, GateState
from fairlane.scheduler.snapshot import Release

NOW = 1_900_000_000_000_000
SECOND = 1_000_000


class Gate(GateState):
    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Gate) and (self.tat, self.memo) == (other.tat, other.memo)

    def stored(self) -> Gate:
        """The same gate after a restart: what JSON keeps of it."""
        return Gate(self.in_flight, self.tat, json.loads(json.dumps(self.memo)), self.waiting)


def fullest(starts: Iterable[int], per: int) -> int:
    """The most starts in any half-open window of this length."""
    times = sorted(starts)
    return max((sum(first <= at < first + per for at in times) for first in times), default=0)


def given_back(count: int, charged_at: int) -> Release:
    return Release(b"", 0, 0, 0.0, count, 0.0, charged_at)


rates = st.builds(Rate, st.integers(1, 12), per=st.sampled_from([0.00002, 1, "7s", "1m"]), rolling=st.just(True))
narrow = st.builds(Rate, st.integers(1, 4), per=st.just(0.00002), rolling=st.just(True))
gaps = st.integers(0, 5) | st.integers(0, 2_000_000) | st.integers(0, 100_000_000)


@settings(deadline=None, max_examples=400)
@given(rates, st.lists(st.tuples(gaps, st.integers(1, 15)), max_size=30))
def test_no_window_ever_holds_more_starts_than_the_limit(rate: Rate, calls: list[tuple[int, int]]) -> None:
    now, gate, starts = NOW, Gate(), []
    for gap, asked in calls:
        now += gap
        count = min(asked, rate.room_at(gate, now))
        if count:
            rate.take(gate, now, count)
        starts += [now] * count
        assert fullest(starts, rate.per) <= rate.limit
        inside = sum(at + rate.per > now for at in starts)
        assert rate.room_at(gate, now) == rate.limit - inside


@settings(deadline=None, max_examples=400)
@given(
    narrow,
    st.lists(
        st.tuples(st.integers(0, 12), st.sampled_from(["none", "last", "all"]), st.integers(1, 3), st.booleans()),
        max_size=30,
    ),
)
def test_no_window_is_overfilled_by_claims_that_were_held_and_given_back(
    rate: Rate, calls: list[tuple[int, str, int, bool]]
) -> None:
    now, gate = NOW, Gate()
    held: list[tuple[int, int]] = []
    started: list[int] = []
    for gap, which, asked, holds in calls:
        now += gap
        back = {"none": [], "last": held[-1:], "all": held}[which]
        held = held[: len(held) - len(back)]
        if back:
            # As a lane event reports them: all that one lane gave back, and when the oldest was charged.
            since, count = back[0][0], sum(each for _, each in back)
            rate.free(gate, given_back(count, since), now, now - since, None)
        count = min(asked, rate.room_at(gate, now))
        if count:
            rate.take(gate, now, count)
            if holds:
                held.append((now, count))
            else:
                started += [now] * count
        assert fullest(started, rate.per) <= rate.limit
        for last in (at + rate.per - 1 for at in started if at + rate.per > now):
            inside = sum(at + rate.per > last for at in started)
            assert rate.room_at(gate, last) <= rate.limit - inside


@settings(deadline=None, max_examples=300)
@given(rates, st.lists(st.tuples(gaps, st.integers(1, 5)), min_size=1, max_size=20))
def test_a_shut_window_opens_at_its_time_and_not_a_microsecond_before(rate: Rate, calls: list[tuple[int, int]]) -> None:
    now, gate = NOW, Gate()
    for gap, asked in calls:
        now += gap
        if count := min(asked, rate.room_at(gate, now)):
            rate.take(gate, now, count)
    if room := rate.room_at(gate, now):
        rate.take(gate, now, room)
    opens = rate.opens_again_at(gate)
    assert opens is not None
    assert opens > now
    assert rate.room_at(gate, opens) >= 1
    assert rate.room_at(gate, opens - 1) == 0


@settings(deadline=None, max_examples=200)
@given(rates, st.integers(0, 250_000), st.lists(st.tuples(gaps, st.integers(1, 15), st.floats(0, 1)), max_size=30))
def test_no_window_of_starts_that_come_after_their_claims_holds_more_than_the_limit(
    rate: Rate, lag: int, calls: list[tuple[int, int, float]]
) -> None:
    now, gate = NOW, Gate()
    starts: list[int] = []
    for gap, asked, late in calls:
        now += gap
        before, count = gate.tat, min(asked, rate.room_at(gate, now))
        if count:
            rate.take(gate, now, count)
            rate.postpone(gate, before, now, lag)
            starts += [now + int(late * lag)] * count
    assert fullest(starts, rate.per) <= rate.limit


@settings(deadline=None, max_examples=200)
@given(rates, st.lists(st.tuples(gaps, st.integers(1, 5)), max_size=20))
def test_a_restart_changes_nothing(rate: Rate, calls: list[tuple[int, int]]) -> None:
    now, kept, restarted = NOW, Gate(), Gate()
    for gap, asked in calls:
        now += gap
        restarted = restarted.stored()
        assert rate.room_at(kept, now) == rate.room_at(restarted, now)
        if count := min(asked, rate.room_at(kept, now)):
            rate.take(kept, now, count)
            rate.take(restarted, now, count)
    assert kept == restarted


@settings(deadline=None, max_examples=200)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=8), st.integers(0, 7), st.integers(0, SECOND))
def test_a17_a_claim_given_back_takes_its_own_entry_back(counts: list[int], nth: int, held: int) -> None:
    rate = Rate(100, per="1m", rolling=True)
    gate, other = Gate(), Gate()
    nth %= len(counts)
    for n, count in enumerate(counts):
        rate.take(gate, NOW + n, count)
        if n != nth:
            rate.take(other, NOW + n, count)
    now = NOW + len(counts) + held
    assert rate.free(gate, given_back(counts[nth], NOW + nth), now, now - NOW - nth, None)
    for each in (gate, other):
        if each.memo is not None:
            each.memo.pop("now", None)  # when the last claim was: forgotten with all that it took
    assert gate == other


def test_a17_what_has_left_the_window_is_not_given_back_out_of_it() -> None:
    rate, gate = Rate(3, per="1m", rolling=True), Gate()
    rate.take(gate, NOW, 1)
    later = NOW + 60 * SECOND
    rate.take(gate, later, 3)
    assert not rate.free(gate, given_back(1, NOW), later, 60 * SECOND, None)
    assert rate.room_at(gate, later) == 0


def test_a17_what_starts_at_the_instant_of_a_claim_that_was_given_back_counts_from_that_instant_on() -> None:
    rate, gate = Rate(2, per="1s", rolling=True), Gate()
    rate.take(gate, NOW, 1)
    rate.take(gate, NOW + 1, 1)
    rate.free(gate, given_back(1, NOW + 1), NOW + 1, 0, None)
    rate.take(gate, NOW + 1, 1)
    assert rate.room_at(gate, NOW + SECOND) == 1
    assert rate.room_at(gate, NOW + SECOND + 1) == 2


def test_what_another_policy_has_charged_is_not_given_back_here() -> None:
    rate, gate = Rate(3, per="1m", rolling=True), Gate()
    rate.take(gate, NOW, 3)
    assert not rate.free(gate, given_back(1, NOW), NOW, None, None)
    assert rate.room_at(gate, NOW) == 0


def test_a_crowded_window_keeps_few_entries_admits_no_more_and_still_opens() -> None:
    rate, gate = Rate(1_000_000, per="1m", rolling=True), Gate()
    step = rate.per // 20_000
    now, taken = NOW, []
    for _ in range(50_000):
        now += step
        rate.take(gate, now, 1)
        taken.append(now)
        assert len(gate.memo["starts"]) <= EXACT_ENTRIES
    inside = sum(at + rate.per > now for at in taken)
    counted = int(rate.limit) - rate.room_at(gate, now)
    assert inside <= counted <= inside + 20_000 // SLICES + 1
    assert gate.memo["taken"] == sum(count for _, count in gate.memo["starts"])


def test_a_gate_may_be_forgotten_once_its_last_start_has_left_the_window() -> None:
    rate, gate = Rate(3, per="1m", rolling=True), Gate()
    rate.take(gate, NOW, 1)
    rate.take(gate, NOW + SECOND, 1)
    assert gate.tat == NOW + 61 * SECOND
    rate.free(gate, given_back(1, NOW + SECOND), NOW + SECOND, 0, None)
    assert gate.tat == NOW + 60 * SECOND
    rate.free(gate, given_back(1, NOW), NOW + SECOND, SECOND, None)
    assert (gate.tat, gate.memo) == (0, None)


def test_a_clock_that_steps_back_opens_nothing_early() -> None:
    rate, gate = Rate(2, per="1m", rolling=True), Gate()
    rate.take(gate, NOW, 1)
    rate.take(gate, NOW - 30 * SECOND, 1)
    assert rate.opens_again_at(gate) == NOW + 60 * SECOND


@pytest.mark.parametrize("limit", [1, 2, 5])
def test_a_limit_that_is_lowered_opens_when_enough_have_left(limit: int) -> None:
    gate = Gate()
    for n in range(5):
        Rate(5, per="1m", rolling=True).take(gate, NOW + n, 1)
    lowered = Rate(limit, per="1m", rolling=True)
    lowered.carry_over(gate, NOW + 5)
    opens = lowered.opens_again_at(gate)
    assert opens == NOW + 5 - limit + 60 * SECOND
    assert lowered.room_at(gate, opens - 1) == 0
    assert lowered.room_at(gate, opens) == 1


def test_a_rolling_rate_has_gates_of_its_own_and_is_read_back_as_it_was_stored() -> None:
    rolling, bucket = Rate(9, per="1m", by="a", rolling=True), Rate(9, per="1m", by="a")
    assert rolling.identity != bucket.identity
    assert rolling.identity != Rate(9, per="1h", by="a", rolling=True).identity
    policy = Policy("q", limits=(rolling, bucket))
    assert Policy.decode(policy.encoded) == policy
    assert "rolling" not in msgspec.json.encode(Policy("q", limits=(bucket,)).to_document()).decode()
    assert repr(rolling) == "Rate(9, per='60s', rolling=True, by='a')"


@pytest.mark.parametrize(
    ("declare", "named"),
    [
        (lambda: Rate(0.5, per="1s", rolling=True), "counts whole jobs"),
        (lambda: Rate(2.0, per="1s", rolling=True), "counts whole jobs"),
        (lambda: Rate(2, per="1s", burst=5, rolling=True), "burst=5 has no meaning"),
        (lambda: Rate(0, per="1s", rolling=True), "would never admit"),
    ],
)
def test_a16_nonsense_is_refused_where_it_is_declared_and_named(declare: object, named: str) -> None:
    assert callable(declare)
    with pytest.raises(InvalidPolicy, match=named):
        declare()
