"""The arithmetic of a cap that learns."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fairlane
from fairlane.clock import SECOND
from fairlane.errors import InvalidPolicy
from fairlane.policy import AdaptiveConcurrency, Policy
from fairlane.policy.adaptive import MOST_TASKS, REMEMBERED, Learned
from fairlane.policy.gates import Reason, Why
from fairlane.scheduler.board import Gate
from fairlane.scheduler.snapshot import GateRow, Release

NOW = 1_900_000_000 * SECOND


def gate_of(limit: AdaptiveConcurrency, memo: str | None = None, in_flight: int = 0) -> Gate:
    (bound,) = Policy("q", limits=(limit,)).bound
    return Gate(GateRow(b"g", bound.name, [], in_flight, 0, 0, 0, None, memo), bound, limit)


def ended(count: int = 1, *, ran: int = 1_000, failed: int = 0, neutral: int = 0, latest: int = NOW) -> Release:
    return Release(b"l", count, count * ran, 0.0, 0, 0.0, 0, failed, neutral, latest)


def given_back(count: int = 1) -> Release:
    return Release(b"l", 0, 0, 0.0, count, 0.0, NOW)


@st.composite
def limits(draw: st.DrawFn) -> AdaptiveConcurrency:
    least = draw(st.integers(1, 20))
    most = draw(st.integers(least, 60))
    return AdaptiveConcurrency(
        start=draw(st.none() | st.integers(least, most)),
        min=least,
        max=most,
        target=draw(st.none() | st.sampled_from(["1ms", "3ms", "10ms"])),
        decrease=draw(st.sampled_from([0.1, 0.5, 0.9])),
        smoothing=draw(st.sampled_from([0.05, 0.1, 1])),
        by=draw(st.sampled_from([None, "account", ("account", "task")])),
    )


class Life:
    """A gate and its claims: what starts, when, and how it ends."""

    def __init__(self, limit: AdaptiveConcurrency) -> None:
        self.limit = limit
        self.gate = gate_of(limit)
        self.now = NOW
        self.claims: list[int] = []

    def step(self, what: str, count: int, gap: int) -> None:
        self.now += gap
        if what == "start":
            for _ in range(min(count, self.gate.room(self.now))):
                self.gate.charge(self.now)
                self.claims.append(self.now)
            return
        ending, self.claims = self.claims[:count], self.claims[count:]
        if not ending:
            return
        match what:
            case "fail":
                for at in ending:
                    self.gate.free(ended(failed=1, latest=at), self.now, 0, "t")
            case "return":
                self.gate.free(given_back(len(ending)), self.now, 0, "t")
            case _:
                neutral = len(ending) if what == "snooze" else 0
                ran = 5_000 if what == "slow" else 1_000
                self.gate.free(ended(len(ending), ran=ran, neutral=neutral, latest=max(ending)), self.now, 0, "t")


steps = st.lists(
    st.tuples(
        st.sampled_from(["start", "start", "good", "slow", "fail", "snooze", "return"]),
        st.integers(1, 30),
        st.sampled_from([0, 1, 1_000, SECOND]),
    ),
    max_size=60,
)


@settings(deadline=None, max_examples=300)
@given(limits(), steps)
def test_the_cap_never_leaves_its_bounds_and_never_lets_more_be_in_flight(
    limit: AdaptiveConcurrency, happened: list[tuple[str, int, int]]
) -> None:
    life = Life(limit)
    for what, count, gap in happened:
        before = life.gate.in_flight
        life.step(what, count, gap)
        cap = limit.cap_of(life.gate)
        assert limit.min <= cap <= limit.max
        assert life.gate.in_flight == len(life.claims)
        assert life.gate.in_flight <= max(cap, before)


@settings(deadline=None, max_examples=200)
@given(limits(), steps)
def test_a_gate_that_is_stored_and_read_back_after_every_step_goes_the_same_way(
    limit: AdaptiveConcurrency, happened: list[tuple[str, int, int]]
) -> None:
    kept, restarted = Life(limit), Life(limit)
    for step in happened:
        kept.step(*step)
        restarted.step(*step)
        restarted.gate = Gate(restarted.gate.row(), restarted.gate.bound, limit)
        assert restarted.gate.row() == kept.gate.row()


@settings(deadline=None, max_examples=200)
@given(limits(), steps, st.integers(1, 5), st.booleans())
def test_claims_from_before_the_last_step_down_only_free_their_slots(
    limit: AdaptiveConcurrency, happened: list[tuple[str, int, int]], count: int, fails: bool
) -> None:
    life = Life(limit)
    for step in happened:
        life.step(*step)
    life.step("start", 1, 1)
    life.step("fail", 1, 1)
    before = limit.learned(life.gate)
    old = ended(count, ran=SECOND, failed=count if fails else 0, latest=before.decreased_at - 1)
    life.gate.free(old, life.now + SECOND, 0, "t")
    assert limit.learned(life.gate) == before


@settings(deadline=None, max_examples=200)
@given(limits(), st.integers(1, 20))
def test_a_cap_that_nobody_reaches_does_not_grow(limit: AdaptiveConcurrency, runs: int) -> None:
    life = Life(limit)
    for _ in range(runs):
        life.step("start", max(1, limit.cap_of(life.gate) - 1), SECOND)
        if life.gate.room(life.now) > 0:
            life.step("good", 100, SECOND)
            assert limit.cap_of(life.gate) == limit.start


def grown(limit: AdaptiveConcurrency, rounds: int) -> list[int]:
    life, caps = Life(limit), []
    for _ in range(rounds):
        life.step("start", 1_000, SECOND)
        life.step("good", 1_000, SECOND)
        caps.append(limit.cap_of(life.gate))
    return caps


def test_before_the_first_step_down_it_doubles_with_each_round_of_good_runs() -> None:
    assert grown(AdaptiveConcurrency(start=5, max=70), 5) == [10, 20, 40, 70, 70]


def test_after_it_a_whole_round_of_good_runs_raises_it_by_one() -> None:
    limit = AdaptiveConcurrency(start=20, max=100)
    life = Life(limit)
    life.step("start", 20, SECOND)
    life.step("fail", 20, SECOND)
    caps = []
    for _ in range(4):
        life.step("start", 1_000, SECOND)
        for _ in range(len(life.claims)):  # in lane events of their own, as in one
            life.step("good", 1, 1)
        caps.append(limit.cap_of(life.gate))
    assert caps == [11, 12, 13, 14]


def test_growth_does_not_depend_on_how_runs_are_put_into_bells() -> None:
    limit = AdaptiveConcurrency(start=8, max=100)
    one, many = Life(limit), Life(limit)
    for life in (one, many):
        life.step("start", 8, SECOND)
    one.step("good", 8, SECOND)
    for gap in (SECOND, 0, 0, 0, 0, 0, 0, 0):
        many.step("good", 1, gap)
    assert one.gate.row() == many.gate.row()


def test_a_whole_batch_that_fails_is_one_step_down() -> None:
    limit = AdaptiveConcurrency(start=20)
    life = Life(limit)
    life.step("start", 20, SECOND)
    life.step("fail", 20, SECOND)
    assert limit.cap_of(life.gate) == 10


def test_runs_above_the_target_lower_the_cap_by_a_twentieth_once_for_each_generation() -> None:
    limit = AdaptiveConcurrency(start=100, target="2ms")
    life = Life(limit)
    life.step("start", 100, SECOND)
    for _ in range(100):
        life.step("slow", 1, 1)
    assert limit.cap_of(life.gate) == 95
    life.step("start", 95, SECOND)
    life.step("slow", 95, SECOND)
    assert limit.cap_of(life.gate) == 90


def test_run_times_are_told_apart_by_task() -> None:
    limit = AdaptiveConcurrency(start=100, target="2ms", smoothing=0.1)
    gate = gate_of(limit)
    gate.charge(NOW, 99)
    gate.free(ended(50, ran=1_999), NOW + 1, 0, "steady")
    gate.free(ended(1, ran=1), NOW + 1, 0, "quick")
    assert limit.learned(gate).runs == {"steady": 1_999.0, "quick": 1.0}
    gate.free(ended(1, ran=2_500), NOW + 2, 0, "steady")
    assert limit.cap_of(gate) == 95, "a quick task must not hide a slow one"


def test_run_times_are_kept_for_a_bounded_number_of_tasks() -> None:
    limit = AdaptiveConcurrency(start=100, target="2ms")
    gate = gate_of(limit)
    for n in range(50):
        gate.free(ended(), NOW + n, 0, f"task{n % 20}")
    assert len(limit.learned(gate).runs) == MOST_TASKS
    assert "task9" in limit.learned(gate).runs


def test_what_says_nothing_changes_nothing() -> None:
    limit = AdaptiveConcurrency(start=10, target="1ms")
    gate = gate_of(limit, in_flight=9)
    gate.free(ended(3, ran=SECOND, neutral=3), NOW, 0, "t")
    gate.free(given_back(2), NOW, 0, "t")
    assert (gate.in_flight, gate.memo, gate.tat) == (4, None, 0)


def test_a_learned_cap_is_remembered_for_a_day() -> None:
    gate = gate_of(AdaptiveConcurrency(start=10))
    gate.charge(NOW)
    gate.free(ended(), NOW + SECOND, 0, "t")
    assert gate.tat == NOW + SECOND + REMEMBERED


def test_a_clock_that_was_set_back_does_not_freeze_the_cap() -> None:
    limit = AdaptiveConcurrency(start=16)
    life = Life(limit)
    life.step("start", 16, SECOND)
    life.step("fail", 16, SECOND)
    life.now -= 3_600 * SECOND
    for _ in range(3):
        life.step("start", 100, SECOND)
        life.step("fail", 100, SECOND)
    assert limit.cap_of(life.gate) < 8


@pytest.mark.parametrize(
    ("cap", "bounds", "expected"),
    [(50, {"max": 20}, 20), (2, {"min": 5}, 5), (12, {"max": 20}, 12)],
)
def test_other_bounds_keep_what_was_learned_within_them(cap: int, bounds: dict[str, Any], expected: int) -> None:
    limit = AdaptiveConcurrency(**bounds)
    gate = gate_of(limit, msgspec.json.encode(Learned(cap, 50)).decode())
    limit.carry_over(gate, NOW)
    assert limit.cap_of(gate) == expected
    assert limit.identity == AdaptiveConcurrency().identity


def test_it_says_what_it_waits_for() -> None:
    limit = AdaptiveConcurrency(start=8, max=20)
    life = Life(limit)
    life.step("start", 8, SECOND)
    assert limit.why(life.gate, life.now) == Why(Reason.ADAPTIVE, 8, 8, "a cap from 1 to 20, never lowered")
    life.step("fail", 1, SECOND)
    assert limit.why(life.gate, life.now) == Why(Reason.ADAPTIVE, 7, 4, "a cap from 1 to 20, learned")


def test_an_operator_s_bound_is_a_lower_ceiling_and_leaves_the_rest() -> None:
    limit = AdaptiveConcurrency(start=20, min=5, max=100, target="1s", by="account")
    lower = limit.with_bound(3)
    assert lower == AdaptiveConcurrency(start=3, min=3, max=3, target="1s", by="account")
    gate = gate_of(limit, msgspec.json.encode(Learned(50, 50)).decode())
    assert (limit.cap_of(gate), lower.cap_of(gate)) == (50, 3)
    for nonsense in (0, -1, 2.5):
        with pytest.raises(InvalidPolicy):
            limit.with_bound(nonsense)


def test_a_new_key_starts_at_ten_or_as_near_as_its_bounds_allow() -> None:
    limits = (AdaptiveConcurrency(), AdaptiveConcurrency(max=4), AdaptiveConcurrency(min=30))
    assert [limit.start for limit in limits] == [10, 4, 30]


@settings(deadline=None, max_examples=200)
@given(limits())
def test_what_is_declared_can_be_stored_and_read_and_written_again(limit: AdaptiveConcurrency) -> None:
    policy = Policy("q", limits=(limit,))
    assert Policy.decode(policy.encoded) == policy
    assert Policy.decode(policy.encoded).digest == policy.digest
    assert eval(repr(limit), vars(fairlane)) == limit


# A16
@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"min": 0}, "never learn that it may rise"),
        ({"min": -1}, "from 1 to"),
        ({"min": 5, "max": 4}, "`min` is above `max`"),
        ({"start": 0}, "between `min` and `max`"),
        ({"start": 50, "max": 20}, "between `min` and `max`"),
        ({"max": 10**10}, "to 1,000,000,000"),
        ({"start": 2.5}, "whole number"),
        ({"max": True}, "whole number"),
        ({"target": 0}, "above 0"),
        ({"target": "-1s"}, "not a duration"),
        ({"target": -3}, "above 0"),
        ({"target": "soon"}, "not a duration"),
        ({"decrease": 1}, "would not lower the cap"),
        ({"decrease": 1.5}, "would not lower the cap"),
        ({"decrease": 0}, "between 0 and 1"),
        ({"decrease": float("nan")}, "between 0 and 1"),
        ({"smoothing": 0}, "at 0 it would never move"),
        ({"smoothing": 1.1}, "at most 1"),
        ({"smoothing": "0.1"}, "above 0"),
        ({"by": "not a name"}, "not a key's name"),
    ],
    ids=str,
)
def test_nonsense_is_refused_where_it_is_declared_with_the_reason(given: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidPolicy, match=reason):
        AdaptiveConcurrency(**given)
