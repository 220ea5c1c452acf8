"""Limits that move by themselves, through the plan: who is woken, when, and who is not."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fairlane.clock import SECOND, Instant
from fairlane.policy import AdaptiveConcurrency, Breaker, Fair, Limit, Policy
from fairlane.policy.breaker import Closed, Opened, Probing
from fairlane.scheduler.board import Gate
from fairlane.scheduler.settlement import Verdict
from fairlane.scheduler.snapshot import Standing, Start
from fairlane.simulation.memory import MemoryQueue

NOW = 1_900_000_000 * SECOND
GOOD, FAILED, NEUTRAL = Verdict
SCOPES = [(None, None), ("account", Fair(by="account")), ("endpoint", None), ("task", None)]
LEVELS = ["queue", "flow", "lane", "task"]


class Line:
    """One queue with one limit and a clock; `fair` decides whether its gate stops the queue, a flow or a lane."""

    def __init__(self, limit: Limit, fair: Fair | None = None) -> None:
        self.queue = MemoryQueue(Policy("q", fair, (limit,), ("account", "endpoint")))
        self.now: Instant = NOW

    def enqueue(self, count: int, *, account: str = "a", endpoint: str = "e", priority: int = 0) -> None:
        keys = {"account": account, "endpoint": endpoint, "task": "t"}
        self.queue.enqueue(self.now, keys, count, priority)

    def claim(self, want: int = 100) -> list[Start]:
        """What a worker gets that asks again for as long as there is more."""
        self.now += 1
        starts: list[Start] = []
        for _ in range(50):
            plan = self.queue.claim(self.now, want - len(starts))
            starts += plan.starts
            if not plan.more or len(starts) >= want:
                return starts
        raise AssertionError("it promises more and brings nothing")

    def settle(self, starts: list[Start], verdict: Verdict = GOOD, ran: int = 1_000) -> None:
        self.now += ran
        for start in starts:
            self.queue.settle(start, ran, verdict)

    @property
    def gate(self) -> Gate:
        (row,), (bound,) = self.queue.gates.values(), self.queue.policy.bound
        return Gate(row, bound, bound.limit)

    def apply(self, limit: Limit) -> None:
        queue = self.queue
        policy = Policy("q", queue.policy.fair, (limit,), queue.policy.keys)
        queue.apply(policy, self.now)


@pytest.mark.parametrize(("by", "fair"), SCOPES, ids=LEVELS)
def test_a_cap_that_grows_wakes_as_many_as_it_has_room_for(by: str | None, fair: Fair | None) -> None:
    line = Line(AdaptiveConcurrency(start=4, max=50, by=by), fair)
    for priority in range(20):
        line.enqueue(10, priority=priority)
    sizes = []
    for _ in range(4):
        starts = line.claim()
        sizes.append(len(starts))
        line.settle(starts)
    assert sizes == [4, 8, 16, 32]


@pytest.mark.parametrize(("by", "fair"), SCOPES, ids=LEVELS)
def test_a_cap_that_fell_below_what_runs_starts_nothing_until_that_has_drained(
    by: str | None, fair: Fair | None
) -> None:
    line = Line(AdaptiveConcurrency(start=10, by=by), fair)
    line.enqueue(100)
    running = line.claim()
    line.settle(running[:1], FAILED)
    assert line.claim() == []
    line.settle(running[1:5])
    assert line.claim() == []
    line.settle(running[5:6])
    assert len(line.claim()) == 1


def test_a_cap_belongs_to_its_key() -> None:
    line = Line(AdaptiveConcurrency(start=4, by="endpoint"))
    for endpoint in "xy":
        line.enqueue(100, endpoint=endpoint)
    starts = line.claim()
    names = {lane: row.keys["endpoint"] for lane, row in line.queue.lanes.items()}
    line.settle([start for start in starts if names[start.lane] == "x"], FAILED)
    line.settle([start for start in starts if names[start.lane] == "y"])
    started = [names[start.lane] for start in line.claim()]
    assert (started.count("x"), started.count("y")) == (2, 8)


@pytest.mark.parametrize(("by", "fair"), SCOPES, ids=LEVELS)
def test_c10_a_breaker_opens_for_its_probe_when_its_cooldown_ends_although_nobody_comes(
    by: str | None, fair: Fair | None
) -> None:
    line = Line(Breaker(3, cooldown="30s", probes=2, by=by), fair)
    for priority in range(5):
        line.enqueue(20, priority=priority)
    line.settle(line.claim(3), FAILED)
    assert line.claim() == []
    assert isinstance(line.gate.limit, Breaker)
    state = line.gate.limit.state_of(line.gate)
    assert isinstance(state, Opened)
    assert line.queue.next_alarm() == state.until
    line.now = state.until - 2
    assert line.claim() == []
    line.now = state.until
    probes = line.claim()
    assert len(probes) == 2
    assert line.claim() == []
    assert line.queue.next_alarm() is None, "only the probes can tell"
    line.settle(probes)
    assert len(line.claim()) == 95


def test_a_probe_that_fails_shuts_everybody_out_again() -> None:
    line = Line(Breaker(2, cooldown="30s", by="endpoint"))
    line.enqueue(20)
    line.settle(line.claim(2), FAILED)
    for _ in range(3):
        assert line.claim() == []
        line.now += 30 * SECOND
        (probe,) = line.claim()
        line.settle([probe], FAILED)
    assert line.claim() == []
    line.now += 30 * SECOND
    line.settle(line.claim())
    assert len(line.claim()) == 14


def test_a_probe_that_is_given_back_is_replaced_at_once() -> None:
    line = Line(Breaker(2, cooldown="30s", by="endpoint"))
    line.enqueue(20)
    line.settle(line.claim(2), FAILED)
    line.claim()
    line.now += 30 * SECOND
    (probe,) = line.claim()
    line.queue.give_back(probe)
    (again,) = line.claim()
    assert again.head == probe.head
    line.settle([again], NEUTRAL)
    assert len(line.claim()) == 1


def test_failures_that_are_reported_before_the_good_runs_of_their_batch_are_no_row() -> None:
    line = Line(Breaker(3, by="endpoint"))
    line.enqueue(200)
    starts = line.claim(100)
    line.settle(starts[:5], FAILED)
    line.settle(starts[5:])
    assert len(line.claim(100)) == 100


def test_a_breaker_stops_its_key_alone() -> None:
    line = Line(Breaker(2, by="endpoint"))
    line.enqueue(2, endpoint="down")
    line.settle(line.claim(), FAILED)
    for endpoint in ("down", "up"):
        line.enqueue(10, endpoint=endpoint)
    assert len(line.claim()) == 10
    parked = [row.keys["endpoint"] for row in line.queue.lanes.values() if row.standing == Standing.PARKED]
    assert parked == ["down"]


def test_a_changed_policy_keeps_a_learned_cap_and_counts_what_runs() -> None:
    line = Line(AdaptiveConcurrency(start=20, by="endpoint"))
    line.enqueue(100)
    running = line.claim()
    line.settle(running[:1], FAILED)
    line.claim(1)
    line.apply(AdaptiveConcurrency(start=30, max=50, by="endpoint"))
    limit = line.gate.limit
    assert isinstance(limit, AdaptiveConcurrency)
    assert (limit.cap_of(line.gate), line.gate.in_flight) == (10, 19)
    line.apply(AdaptiveConcurrency(max=4, by="endpoint"))
    limit = line.gate.limit
    assert isinstance(limit, AdaptiveConcurrency)
    assert limit.cap_of(line.gate) == 4
    line.settle(running[1:17])
    assert len(line.claim()) == 1


def test_a_changed_policy_leaves_a_breaker_where_it_stands() -> None:
    line = Line(Breaker(2, cooldown="30s", by="endpoint"))
    line.enqueue(20)
    straggler = line.claim(1)
    line.settle(line.claim(2), FAILED)
    assert line.claim() == []
    line.now += 30 * SECOND
    (probe,) = line.claim()
    limit = Breaker(4, cooldown="10s", by="endpoint")
    line.apply(limit)
    assert isinstance(limit.state_of(line.gate), Probing)
    assert line.claim() == []
    line.settle(straggler)
    assert line.claim() == []
    line.settle([probe])
    line.claim(0)
    assert isinstance(limit.state_of(line.gate), Closed)


scopes = st.sampled_from([None, "account", "endpoint", ("account", "endpoint"), "task"])
moving = st.builds(
    AdaptiveConcurrency,
    start=st.integers(1, 4),
    max=st.integers(4, 9),
    target=st.sampled_from([None, "2ms"]),
    by=scopes,
) | st.builds(Breaker, st.integers(1, 3), cooldown=st.sampled_from(["1ms", "30s"]), probes=st.integers(1, 2), by=scopes)
steps = st.lists(
    st.tuples(
        st.sampled_from(["enqueue", "claim", "claim", "good", "fail", "snooze", "return", "wait"]),
        st.integers(1, 9),
        st.sampled_from("xyz"),
        st.sampled_from("xyz"),
        st.integers(-1, 1),
    ),
    max_size=40,
)


@settings(deadline=None, max_examples=150)
@given(st.lists(moving, min_size=1, max_size=3), st.sampled_from([None, Fair(by="account")]), steps)
def test_f14_c10_whatever_happened_every_job_runs_in_the_end_by_bells_and_alarms_alone(
    limits: list[Limit], fair: Fair | None, happened: list[tuple[str, int, str, str, int]]
) -> None:
    line = Line(limits[0], fair)
    line.queue.policy = Policy("q", fair, tuple(limits), ("account", "endpoint"))
    running: list[Start] = []
    for what, count, account, endpoint, priority in happened:
        ending, rest = running[:count], running[count:]
        match what:
            case "enqueue":
                line.enqueue(count, account=account, endpoint=endpoint, priority=priority)
            case "claim":
                running += line.claim(count)
            case "wait":
                line.now += count * SECOND
            case "return":
                running = rest
                for start in ending:
                    line.queue.give_back(start)
            case _:
                running = rest
                line.settle(ending, {"good": GOOD, "fail": FAILED, "snooze": NEUTRAL}[what], ran=1_000 * count)
    for _ in range(2_000):
        running += line.claim(5)
        if running:
            line.settle([running.pop(0)])
        elif line.queue.waiting():
            alarm = line.queue.next_alarm()
            assert alarm is not None, "jobs wait, nothing runs, and nobody will ever look"
            line.now = max(line.now, alarm)
        else:
            return
    raise AssertionError("it goes on and on")
