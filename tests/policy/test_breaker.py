"""The arithmetic of a breaker."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fairlane
from fairlane.clock import SECOND
from fairlane.errors import InvalidPolicy
from fairlane.policy import Breaker, Policy
from fairlane.policy.breaker import REMEMBERED, Closed, Opened, Probing
from fairlane.policy.gates import Reason, Why
from fairlane.policy.limits import UNBOUNDED
from fairlane.scheduler.board import Gate
from fairlane.scheduler.snapshot import GateRow, Release

NOW = 1_900_000_000 * SECOND
COOLDOWN = 30 * SECOND


class Life:
    """A gate and its claims. `claims` are when those in flight were claimed, the oldest first."""

    def __init__(self, limit: Breaker) -> None:
        (bound,) = Policy("q", limits=(limit,)).bound
        self.limit = limit
        self.gate = Gate(GateRow(b"g", bound.name, [], 0, 0, 0, 0, None), bound, limit)
        self.now = NOW
        self.claims: list[int] = []

    @property
    def state(self) -> object:
        return self.limit.state_of(self.gate)

    def start(self, count: int = 1) -> int:
        """Start up to so many; how many it let through."""
        count = min(count, self.gate.room(self.now))
        for _ in range(count):
            self.gate.charge(self.now)
        self.claims += [self.now] * count
        return count

    def end(self, count: int = 1, how: str = "good", *, newest: bool = False) -> None:
        """End so many, in the lane events in which stores report them."""
        if newest:
            self.claims.reverse()
        ending, self.claims = sorted(self.claims[:count]), sorted(self.claims[count:])
        if not ending:
            return
        if how == "fail":
            events = [Release(b"l", 1, 1, 0.0, 0, 0.0, 0, 1, 0, at) for at in ending]
        elif how == "return":
            events = [Release(b"l", 0, 0, 0.0, len(ending), 0.0, ending[0])]
        else:
            neutral = len(ending) if how == "snooze" else 0
            events = [Release(b"l", len(ending), 1, 0.0, 0, 0.0, 0, 0, neutral, ending[-1])]
        for event in events:
            self.gate.free(event, self.now, 0, "t")

    def fail(self, count: int) -> None:
        assert self.start(count) == count
        self.now += 1
        self.end(count, "fail")

    def restart(self) -> None:
        self.gate = Gate(self.gate.row(), self.gate.bound, self.limit)


def opened(limit: Breaker, stragglers: int = 0) -> Life:
    life = Life(limit)
    life.start(stragglers)
    life.now += 1
    held, life.claims = life.claims, []
    life.fail(limit.failures)
    life.claims = held
    assert life.state == Opened(life.now + limit.cooldown)
    return life


breakers = st.builds(
    Breaker,
    st.integers(1, 6),
    within=st.sampled_from(["1s", "10m"]),
    cooldown=st.sampled_from(["1s", "30s", 0.000001]),
    probes=st.integers(1, 4),
    by=st.sampled_from([None, "endpoint", ("endpoint", "task")]),
)
steps = st.lists(
    st.tuples(
        st.sampled_from(["start", "start", "good", "fail", "fail", "fail", "snooze", "return"]),
        st.integers(1, 8),
        st.booleans(),
        st.sampled_from([1, 1_000, SECOND, COOLDOWN]),
    ),
    max_size=60,
)


@settings(deadline=None, max_examples=400)
@given(breakers, steps)
def test_while_it_probes_never_more_than_its_probes_are_in_flight_and_open_nothing_starts(
    limit: Breaker, happened: list[tuple[str, int, bool, int]]
) -> None:
    life = Life(limit)
    for what, count, newest, gap in happened:
        life.now += gap
        if what != "start":
            life.end(count, what, newest=newest)
        else:
            before = life.state
            started = life.start(count)
            match before, life.state:
                case Opened(until=until), _:
                    assert started <= (limit.probes if life.now >= until else 0)
                case _, Closed():
                    assert started == count
        state = life.state
        if isinstance(state, Probing):
            assert sum(at >= state.since for at in life.claims) <= limit.probes
            assert 0 <= state.stragglers <= life.gate.in_flight
        assert life.gate.in_flight == len(life.claims)


@settings(deadline=None, max_examples=300)
@given(breakers, steps)
def test_it_is_never_stuck_with_nothing_in_flight_it_opens_by_time_and_closes_when_probes_go_well(
    limit: Breaker, happened: list[tuple[str, int, bool, int]]
) -> None:
    life = Life(limit)
    for what, count, newest, gap in happened:
        life.now += gap
        if what == "start":
            life.start(count)
        else:
            life.end(count, what, newest=newest)
    life.end(len(life.claims), "snooze")
    if life.gate.room(life.now) == 0:
        opens = life.gate.opens_at(life.now)
        assert opens is not None
        assert opens > life.now
        assert life.gate.room(opens - 1) == 0
        life.now = opens
    for _ in range(limit.probes):
        life.now += 1
        assert life.start() == 1
        life.end()
    assert isinstance(life.state, Closed)


@settings(deadline=None, max_examples=200)
@given(breakers, steps)
def test_a_gate_that_is_stored_and_read_back_after_every_step_goes_the_same_way(
    limit: Breaker, happened: list[tuple[str, int, bool, int]]
) -> None:
    kept, restarted = Life(limit), Life(limit)
    for what, count, newest, gap in happened:
        for life in (kept, restarted):
            life.now += gap
            if what == "start":
                life.start(count)
            else:
                life.end(count, what, newest=newest)
        restarted.restart()
        assert restarted.gate.row() == kept.gate.row()


@settings(deadline=None, max_examples=200)
@given(breakers, st.integers(1, 6), st.sampled_from(["good", "fail", "snooze", "return"]), st.booleans())
def test_stragglers_neither_close_an_open_or_probing_breaker_nor_extend_it(
    limit: Breaker, stragglers: int, how: str, is_probing: bool
) -> None:
    life = opened(limit, stragglers)
    if is_probing:
        life.now += limit.cooldown
        assert life.start(100) == limit.probes
    before = life.state
    life.now += 1
    life.end(stragglers, how)
    if is_probing:
        assert isinstance(before, Probing)
        assert life.state == Probing(before.since, stragglers=0)
        assert life.start(100) == 0, "a straggler's end made room for one probe too many"
    else:
        assert life.state == before


def test_it_opens_at_the_last_failure_of_the_row_and_not_before() -> None:
    life = Life(Breaker(3))
    life.fail(2)
    assert life.gate.room(life.now) == UNBOUNDED
    life.fail(1)
    assert life.gate.room(life.now) == 0
    assert life.gate.opens_at(life.now) == life.now + COOLDOWN


def test_a_run_that_goes_well_begins_the_row_anew() -> None:
    life = Life(Breaker(3))
    for _ in range(5):
        life.fail(2)
        life.start()
        life.now += 1
        life.end()
    assert isinstance(life.state, Closed)


def test_failures_of_a_batch_in_which_others_went_well_are_no_row() -> None:
    life = Life(Breaker(3))
    life.start(100)
    life.now += 1
    life.end(95, "good")
    life.end(5, "fail")
    assert life.state == Closed((), NOW)


def test_failures_further_apart_than_the_window_are_no_row() -> None:
    life = Life(Breaker(3, within="1m"))
    for _ in range(10):
        life.fail(1)
        life.now += 31 * SECOND
    assert isinstance(life.state, Closed)
    life.now += 1
    life.fail(1)
    life.fail(1)
    assert isinstance(life.state, Opened)


def test_probes_that_go_well_close_it_all_of_them_are_needed() -> None:
    life = opened(Breaker(probes=3))
    life.now += COOLDOWN
    assert life.start(100) == 3
    life.end(2)
    assert life.start(100) == 0
    life.end(1)
    assert life.start(100) == 100


def test_a_probe_that_fails_opens_it_again_for_a_whole_cooldown() -> None:
    life = opened(Breaker(probes=2))
    life.now += COOLDOWN
    life.start(2)
    life.now += 5
    life.end(1, "fail")
    assert life.state == Opened(life.now + COOLDOWN)
    life.end(1, "good")
    assert life.start() == 0, "a probe of the last time closed it"


@pytest.mark.parametrize("how", ["snooze", "return"])
@pytest.mark.parametrize("stragglers", [0, 3])
def test_a_probe_that_says_nothing_makes_room_for_another(how: str, stragglers: int) -> None:
    life = opened(Breaker(), stragglers)
    life.now += COOLDOWN
    for _ in range(3):
        assert life.start(10) == 1
        life.now += 1
        life.end(1, how, newest=True)
    assert life.start(10) == 1


def test_failures_from_before_it_closed_do_not_count_afterwards() -> None:
    life = opened(Breaker(3), stragglers=10)
    life.now += COOLDOWN
    life.start()
    life.now += 1
    life.end(1, newest=True)
    life.end(10, "fail")
    assert isinstance(life.state, Closed)


def test_a_job_that_an_operator_starts_while_it_is_open_is_counted_and_finds_nothing_out() -> None:
    life = opened(Breaker())
    before = life.state
    life.gate.charge(life.now)
    assert (life.state, life.gate.in_flight) == (before, 1)
    life.claims.append(life.now)
    life.now += 1
    life.end()
    assert life.state == before


def test_what_it_knows_is_not_forgotten_too_early() -> None:
    life = Life(Breaker(2, within="1m"))
    life.fail(1)
    assert life.gate.tat == life.now + 60 * SECOND
    life.fail(1)
    assert life.gate.tat == life.now + COOLDOWN + REMEMBERED
    life.now += COOLDOWN
    life.start()
    assert life.gate.tat == life.now + REMEMBERED
    life.end()
    assert life.gate.tat == life.now, "a closed breaker is as good as a new one"


def test_a_clock_that_was_set_back_does_not_blind_it() -> None:
    life = Life(Breaker(3))
    life.start()
    life.end()
    life.now -= 3_600 * SECOND
    life.now += 10
    life.fail(3)
    assert isinstance(life.state, Closed), "the newest good run looks as if it had been claimed now"
    life.now += 10
    life.fail(3)
    assert isinstance(life.state, Opened)


def test_other_numbers_keep_it_open_but_no_longer_than_they_would() -> None:
    life = opened(Breaker(3, cooldown="1h"))
    shorter = Breaker(3, cooldown="10s", probes=2)
    assert shorter.identity == life.limit.identity
    shorter.carry_over(life.gate, life.now)
    assert shorter.state_of(life.gate) == Opened(life.now + 10 * SECOND)
    longer = Breaker(3, cooldown="2h")
    longer.carry_over(life.gate, life.now)
    assert longer.state_of(life.gate) == Opened(life.now + 10 * SECOND)


def test_with_fewer_probes_those_that_went_well_are_enough() -> None:
    life = opened(Breaker(probes=3))
    life.now += COOLDOWN
    life.start(2)
    life.end(2)
    fewer = Breaker(probes=2)
    fewer.carry_over(life.gate, life.now)
    assert isinstance(fewer.state_of(life.gate), Closed)


def test_it_says_what_it_waits_for() -> None:
    life = opened(Breaker(3, probes=2), stragglers=4)
    assert life.limit.why(life.gate, life.now) == Why(Reason.BREAKER, 3, 3, "runs failed in a row; then it probes")
    life.now += COOLDOWN
    life.start(2)
    assert (why := life.limit.why(life.gate, life.now)).words.startswith("probes run")
    assert (why.used, why.bound) == (2, 2)


def test_an_operator_s_bound_is_another_number_of_failures() -> None:
    limit = Breaker(5, within="1m", cooldown="7s", probes=2, by="account")
    assert limit.with_bound(9) == Breaker(9, within="1m", cooldown="7s", probes=2, by="account")
    for nonsense in (0, 2.5):
        with pytest.raises(InvalidPolicy):
            limit.with_bound(nonsense)


@settings(deadline=None, max_examples=200)
@given(breakers)
def test_what_is_declared_can_be_stored_and_read_and_written_again(limit: Breaker) -> None:
    policy = Policy("q", limits=(limit,))
    assert Policy.decode(policy.encoded) == policy
    assert Policy.decode(policy.encoded).digest == policy.digest
    assert eval(repr(limit), vars(fairlane)) == limit


def test_its_memo_is_json_that_an_operator_can_read() -> None:
    life = opened(Breaker())
    assert msgspec.json.decode(life.gate.row().memo or "") == {"type": "open", "until": life.now + COOLDOWN}


# A16
@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"failures": 0}, "from 1 to 100"),
        ({"failures": 101}, "from 1 to 100"),
        ({"failures": 2.5}, "not a whole number"),
        ({"failures": True}, "not a whole number"),
        ({"within": 0}, "`within` is a time above 0"),
        ({"within": "a while"}, "not a duration"),
        ({"cooldown": "0s"}, "`cooldown` is a time above 0"),
        ({"cooldown": -1}, "`cooldown` is a time above 0"),
        ({"probes": 0}, "it would stay open"),
        ({"probes": 1.5}, "whole number"),
        ({"by": ("a", "a")}, "twice"),
    ],
    ids=str,
)
def test_nonsense_is_refused_where_it_is_declared_with_the_reason(given: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidPolicy, match=reason):
        Breaker(**given)
