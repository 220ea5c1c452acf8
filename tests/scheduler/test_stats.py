"""Figures are what claims told, added up: they agree with lanes and gates at every moment, whatever happened."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from hypothesis import given, settings

from fairlane import Concurrency, Fair, Rate
from fairlane.clock import SECOND
from fairlane.policy import Policy
from fairlane.policy.keys import select
from fairlane.scheduler.journal import decode_stats, encode_stats
from fairlane.scheduler.snapshot import ClaimStats, LaneStats, Plan
from fairlane.stats.keys import (
    DAY,
    HOUR,
    MINUTE,
    MINUTES,
    Held,
    KeyStats,
    Minute,
    Place,
    Span,
    Sums,
    count_lanes,
    held_by_limit,
    jobs_held,
)
from tests.scheduler.ledger import LaneKey
from tests.scheduler.lives import drain, take
from tests.scheduler.simulation import EPOCH, Bench
from tests.scheduler.strategies import Step, busy_lives, lives, policies, wide_policies


class Watched(Bench):
    """A queue whose claims are listened to."""

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy)
        self.told: list[ClaimStats] = []

    def claim(self, want: int, check: Callable[[LaneKey], None] | None = None) -> Plan:
        plan = super().claim(want, check)
        if plan.stats is not None:
            self.told.append(decode_stats(encode_stats(plan.stats)))
        return plan

    def stats(self) -> dict[Place, KeyStats]:
        """All that was told, added up in two parts, as upkeep would."""
        known: dict[Place, KeyStats] = {}
        middle = len(self.told) // 2
        for part in (self.told[:middle], self.told[middle:]):
            sums = Sums(self.policy)
            for told in part:
                sums.add(told)
            known |= {each.place: each for each in sums.over(known.values(), self.now, sums.places)}
        return known


def agrees(bench: Watched) -> None:
    """Who waits and runs by key, and which keys are held, is what lanes and gates say."""
    stats = bench.stats()
    counted = count_lanes(bench.policy.scopes, bench.queue.lanes.values())
    told = {place: (each.waiting, each.running) for place, each in stats.items() if each.waiting or each.running}
    assert told == {place: numbers for place, numbers in counted.items() if any(numbers)}
    held = {(place, limit) for place, each in stats.items() for limit in each.held_by}
    assert held == {
        ((bound.limit.by, tuple(gate.key)), gate.limit)
        for gate in bench.queue.gates.values()
        if gate.waiting and (bound := bench.policy.bound_named(gate.limit)) is not None and bound.limit.by
    }


def folded(bench: Watched) -> None:
    """Let every lane event be heard, and nothing start."""
    while bench.queue.arrivals or bench.queue.releases:
        bench.claim(0)


@settings(deadline=None, max_examples=150)
@given(policies(), lives())
def test_figures_agree_with_lanes_and_gates_whatever_happens(policy: Policy, steps: list[Step]) -> None:
    bench = Watched(policy)
    for step in steps:
        take(bench, step)
    folded(bench)
    agrees(bench)
    drain(bench)
    folded(bench)
    agrees(bench)


@settings(deadline=None, max_examples=60)
@given(wide_policies(), busy_lives())
def test_figures_of_queues_with_many_lanes_agree_too(policy: Policy, steps: list[Step]) -> None:
    bench = Watched(policy)
    for step in steps:
        take(bench, step)
    folded(bench)
    agrees(bench)


@settings(deadline=None, max_examples=100)
@given(policies(), lives())
def test_minutes_add_up_to_what_happened(policy: Policy, steps: list[Step]) -> None:
    bench = Watched(policy)
    for step in steps:
        take(bench, step)
    folded(bench)
    sums = Sums(policy)
    for told in bench.told:
        sums.add(told)
    happened = Counter[str]()
    for told in bench.told:
        happened["claimed"] += sum(lane.started for lane in told.lanes)
        happened["ended"] += sum(lane.ended for lane in told.lanes)
    assert sum(each.claimed for each in sums.minutes) == happened["claimed"] == len(bench.ledger.runs)
    begun = sum(not run.given_back for run in bench.ledger.runs)
    assert sum(each.claimed - each.unstarted for each in sums.minutes) == begun
    assert sum(each.ended for each in sums.minutes) == happened["ended"]
    assert {each.number for each in sums.minutes} == {told.at // (60 * SECOND) for told in bench.told}


@settings(deadline=None, max_examples=100)
@given(policies(), lives())
def test_minutes_of_keys_are_those_in_which_their_jobs_started(policy: Policy, steps: list[Step]) -> None:
    bench = Watched(policy)
    for step in steps:
        take(bench, step)
    folded(bench)
    started, ended = Counter[tuple[Place, int]](), Counter[Place]()
    for run in bench.ledger.runs:
        for by in policy.scopes:
            place = (by, select(by, dict(run.lane[1]), run.lane[0]))
            started[place, run.at // MINUTE] += 1
            ended[place] += run.ended_at is not None and not run.given_back
    oldest = bench.now // MINUTE - MINUTES
    stats = bench.stats()
    assert {
        (place, each.number): each.claimed for place, key in stats.items() for each in key.minutes if each.claimed
    } == {(place, minute): count for (place, minute), count in started.items() if minute > oldest}
    if bench.now - EPOCH < HOUR - MINUTE:
        assert {place: sum(each.ended for each in key.minutes) for place, key in stats.items()} == {
            place: ended[place] for place in stats
        }


@settings(deadline=None, max_examples=100)
@given(policies(), lives())
def test_a_claim_that_was_given_back_is_no_start_of_its_key(policy: Policy, steps: list[Step]) -> None:
    bench = Watched(policy)
    for step in steps:
        take(bench, step)
    folded(bench)
    for place, key in bench.stats().items():
        runs = [run for run in bench.ledger.runs if place[1] == select(place[0], dict(run.lane[1]), run.lane[0])]
        begun = [run for run in runs if not run.given_back]
        assert sum(each.claimed - each.unstarted for each in key.hours) == len(begun)
        if not key.running:
            assert key.started_at == max((run.at for run in begun), default=None)


def test_a_lost_run_says_nothing_of_how_long_a_run_takes() -> None:
    bench = Watched(by_account())
    bench.enqueue({"account": "acme", "endpoint": "e"}, 3)
    bench.claim(2)
    bench.now += 75 * SECOND
    for position in list(bench.claimed):
        bench.reap(position, 0)
    folded(bench)
    acme = bench.stats()[("account",), ("acme",)]
    assert (acme.ended, acme.run_time, [each.timed for each in acme.hours]) == (2, 0.0, [0])
    bench.claim(1)
    bench.settle(next(iter(bench.claimed)), 75 * SECOND)
    folded(bench)
    acme = bench.stats()[("account",), ("acme",)]
    assert (acme.ended, acme.run_time, sum(each.timed for each in acme.hours)) == (3, 75.0, 1)
    assert [each.cost for each in bench.queue.board.flows.values()] == [75.0]


def by_account(limit: int = 2) -> Policy:
    return Policy("q", Fair(by="account"), (Concurrency(limit, by="account"), Rate(100, per="1m", by="endpoint")))


def test_a_key_is_held_by_the_limit_that_is_full_and_not_when_it_has_room_again() -> None:
    bench = Watched(by_account())
    bench.enqueue({"account": "acme", "endpoint": "e"}, 5)
    bench.claim(5)
    acme = bench.stats()[("account",), ("acme",)]
    assert (acme.waiting, acme.running, acme.held_by) == (3, 2, ("concurrency:account",))
    for position in list(bench.claimed):
        bench.settle(position, SECOND)
    bench.claim(5)
    bench.now += SECOND
    for position in list(bench.claimed):
        bench.settle(position, SECOND)
    bench.claim(5)
    acme = bench.stats()[("account",), ("acme",)]
    assert (acme.waiting, acme.running, acme.held_by) == (0, 1, ())
    assert (acme.ended, acme.run_time, acme.started_at) == (4, 1.0, bench.now)


def test_a_full_limit_counts_whom_it_turns_away() -> None:
    bench = Watched(Policy("q", None, (Concurrency(1),)))
    bench.enqueue({}, 3)
    bench.claim(3)
    bench.claim(3)
    sums = Sums(bench.policy)
    for told in bench.told:
        sums.add(told)
    (minute,) = sums.minutes
    assert minute.denied == {"concurrency:": 2}


def test_waits_are_told_from_ready_to_start() -> None:
    bench = Watched(by_account(10))
    bench.enqueue({"account": "a", "endpoint": "e"}, 2)
    bench.now += 3 * SECOND
    bench.enqueue({"account": "b", "endpoint": "e"})
    bench.now += SECOND
    bench.claim(3)
    sums = Sums(bench.policy)
    for told in bench.told:
        sums.add(told)
    assert sum(each.waited for each in sums.minutes) == 9 * SECOND
    assert max(each.waited_longest for each in sums.minutes) == 4 * SECOND


def test_what_ended_more_than_a_day_ago_is_forgotten() -> None:
    hour = EPOCH // HOUR
    old = KeyStats(by=("account",), key=("a",), hours=(Span(hour, 5, 1, 10), Span(hour + 1, 2, 0, 4)))
    assert old.at(EPOCH).ended == 7
    assert old.at(EPOCH + DAY).hours == (Span(hour + 1, 2, 0, 4),)
    assert (old.at(EPOCH + DAY).ended, old.at(EPOCH + DAY).failed, old.at(EPOCH + DAY).ran) == (2, 0, 4)
    assert old.at(EPOCH + DAY + HOUR).is_idle


def test_minutes_of_a_key_are_kept_for_an_hour() -> None:
    minute, spans = EPOCH // MINUTE, (Span(EPOCH // HOUR, 7, 1, 14),)
    old = KeyStats(by=("a",), key=("x",), hours=spans, minutes=(Span(minute, 5, 1, 10), Span(minute + 1, 2, 0, 4)))
    assert old.at(EPOCH + HOUR - MINUTE) is old
    assert old.at(EPOCH + HOUR).minutes == (Span(minute + 1, 2, 0, 4),)
    assert (old.at(EPOCH + HOUR + MINUTE).minutes, old.at(EPOCH + HOUR + MINUTE).hours) == ((), spans)


def test_scopes_are_turns_first_then_limits_then_keys_and_the_task() -> None:
    policy = Policy("q", Fair(by="account"), (Rate(1, per="1s", by=("account", "endpoint")), Concurrency(9)))
    assert policy.scopes == (("account",), ("account", "endpoint"), ("endpoint",), ("task",))


def test_a_limit_holds_the_keys_that_it_holds_back_with_their_jobs() -> None:
    keys = [(["concurrency:a"], 5), (["concurrency:a", "rate:a"], 2), ([], 9)]
    assert held_by_limit(keys) == {"concurrency:a": Held(2, 7), "rate:a": Held(1, 2)}
    assert held_by_limit([]) == {}


def test_a_tally_says_nothing_when_nothing_happened() -> None:
    bench = Watched(by_account())
    bench.claim(3)
    assert bench.told == []


def test_minutes_together() -> None:
    one = Minute(1, claimed=2, waited_longest=5, denied={"a": 1})
    other = Minute(1, claimed=3, waited_longest=4, denied={"a": 2, "b": 1})
    assert one.and_also(other) == Minute(1, claimed=5, waited_longest=5, denied={"a": 3, "b": 1})


def test_jobs_that_cease_to_wait_are_no_arrivals() -> None:
    sums = Sums(by_account())
    sums.add(ClaimStats(EPOCH, 0, 0, [LaneStats({"account": "a", "endpoint": "e"}, 0, arrived=-2)], []))
    (minute,) = sums.minutes
    assert minute.arrived == 0
    (account, *_) = sums.over([KeyStats(by=("account",), key=("a",), waiting=3)], EPOCH, sums.places)
    assert (account.waiting, account.arrived_at) == (1, None)


def test_a_key_in_two_partitions_is_told_as_one() -> None:
    one = KeyStats(
        by=("a",),
        key=("x",),
        waiting=2,
        running=1,
        held_by=("l",),
        arrived_at=5,
        hours=(Span(1, 2, 1, 9),),
        minutes=(Span(60, 1, 0, 2), Span(61, 1, 1, 7)),
    )
    other = KeyStats(
        by=("a",),
        key=("x",),
        waiting=3,
        started_at=7,
        hours=(Span(1, 1, 0, 1), Span(2, 4, 0, 4)),
        minutes=(Span(61, 1, 0, 1, 2, 30),),
    )
    both = one.and_also(other)
    assert (both.waiting, both.running, both.held_by, both.arrived_at, both.started_at) == (5, 1, ("l",), 5, 7)
    assert (both.hours, both.ended, both.failed) == ((Span(1, 3, 1, 10), Span(2, 4, 0, 4)), 7, 1)
    assert both.minutes == (Span(60, 1, 0, 2), Span(61, 2, 1, 8, 2, 30))


def test_jobs_of_a_held_key_that_is_part_of_another_are_counted_once() -> None:
    account, endpoint = ("account",), ("account", "endpoint")
    held: dict[Place, int] = {(account, ("acme",)): 9, (endpoint, ("acme", "x")): 4, (endpoint, ("globex", "x")): 3}
    assert jobs_held(held) == 12
    assert jobs_held({}) == 0


def test_jobs_behind_keys_that_may_overlap_are_never_counted_too_few() -> None:
    assert jobs_held({(("account",), ("acme",)): 9, (("endpoint",), ("x",)): 4}) == 13
