"""Paced starts (F3, A27): what is handed out ahead is exact by what handlers see, and takes nothing from others."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fairlane import AdaptiveConcurrency, Breaker, Concurrency, Fair, Rate, Sequence
from fairlane.clock import SECOND, Instant
from fairlane.policy.limits import Limit
from fairlane.policy.policy import Policy
from fairlane.scheduler.snapshot import AHEAD, LEAD, Pace, Passed, Plan, Start
from fairlane.simulation.memory import MemoryQueue

NOW = 1_000 * SECOND
MILLISECOND = SECOND // 1_000


def a_queue(*limits: Limit, fair: Fair | None = None) -> MemoryQueue:
    return MemoryQueue(Policy("webhooks", fair=fair, limits=limits))


def instants(plan: Plan) -> list[int]:
    """When its jobs start, in milliseconds from now."""
    return [(start.at - NOW) // MILLISECOND for start in plan.starts]


def test_what_opens_within_a_second_is_claimed_together() -> None:
    queue = a_queue(Rate(10, per="1s", burst=1))
    queue.enqueue(NOW, {}, 100)
    plan = queue.claim(NOW, 5, ahead=100)
    assert instants(plan) == [0, 100, 200, 300, 400, 500, 600, 700, 800, 900, 1_000]
    # The next look comes when half of them have started, and not with every one of them.
    assert queue.next_alarm() == NOW + 1_100 * MILLISECOND - LEAD


def test_whoever_does_not_keep_to_instants_is_given_what_can_start_now() -> None:
    queue = a_queue(Rate(10, per="1s", burst=1))
    queue.enqueue(NOW, {}, 100)
    assert instants(queue.claim(NOW, 5)) == [0]
    assert queue.next_alarm() == NOW + 100 * MILLISECOND


def test_no_more_wait_for_their_instants_than_may() -> None:
    queue = a_queue(Rate(10, per="1s", burst=1))
    queue.enqueue(NOW, {}, 100)
    plan = queue.claim(NOW, 5, ahead=3)
    assert instants(plan) == [0, 100, 200, 300]
    assert not plan.more, "whoever claims would ask again at once, and in vain"


def test_a_bucket_that_makes_up_for_late_starts_needs_no_instants() -> None:
    queue = a_queue(Rate(100, per="1m"))
    queue.enqueue(NOW, {}, 300)
    assert instants(queue.claim(NOW, 200, ahead=200)) == [0] * 100


def test_jobs_behind_different_gates_have_their_own_instants() -> None:
    queue = a_queue(Rate(2, per="1s", burst=1, by="account"), fair=Fair(by="account"))
    for account in "ab":
        queue.enqueue(NOW, {"account": account}, 10)
    plan = queue.claim(NOW, 10, ahead=10)
    assert sorted(instants(plan)) == [0, 0, 500, 500, 1_000, 1_000]


def test_slots_are_for_what_starts_now() -> None:
    queue = a_queue(Rate(2, per="1s", burst=1, by="account"))
    queue.enqueue(NOW, {"account": "a"}, 10)
    queue.enqueue(NOW, {"account": "b"}, 10)
    # One slot: the job of b could start now, and finds none.
    assert instants(queue.claim(NOW, 1, ahead=10)) == [0, 500, 1_000]


@pytest.mark.parametrize(
    "other",
    [
        Concurrency(2),
        Concurrency(2, by="region"),
        Rate(1_000, per="1s", burst=1),
        AdaptiveConcurrency(by="account", max=9),
        Breaker(by="account"),
        Concurrency(5, by="account", name="shared"),
    ],
    ids=repr,
)
def test_nothing_is_claimed_ahead_that_others_could_use_meanwhile(other: Limit) -> None:
    queue = a_queue(Rate(10, per="1s", burst=1, by="account"), other)
    queue.enqueue(NOW, {"account": "a", "region": "eu"}, 10)
    assert instants(queue.claim(NOW, 5, ahead=10)) == [0]


@pytest.mark.parametrize(
    "other",
    [Concurrency(20, by="account"), Concurrency(20, by=("account", "region")), Sequence(by="account")],
    ids=repr,
)
def test_what_only_waits_behind_the_same_rate_does_not_stand_in_its_way(other: Limit) -> None:
    queue = a_queue(Rate(10, per="1s", burst=1, by="account"), other)
    queue.enqueue(NOW, {"account": "a", "region": "eu"}, 10)
    taken = 1 if isinstance(other, Sequence) else 10
    assert len(queue.claim(NOW, 5, ahead=9).starts) == taken


def test_what_is_given_back_before_its_instant_is_not_lost_to_the_rate() -> None:
    queue = a_queue(Rate(10, per="1s", burst=1))
    queue.enqueue(NOW, {}, 100)
    plan = queue.claim(NOW, 5, ahead=100)
    first, *others = plan.starts
    queue.settle(first, 0)
    for start in others:
        queue.give_back(start)
    again = queue.claim(NOW + 50 * MILLISECOND, 5, ahead=100)
    assert instants(again)[0] == 100
    assert [start.head.position for start in again.starts] == [start.head.position for start in others[:10]]


def test_what_is_given_back_between_others_leaves_their_instants_alone() -> None:
    queue = a_queue(Rate(10, per="1s", burst=1))
    queue.enqueue(NOW, {}, 100)
    plan = queue.claim(NOW, 5, ahead=4)
    queue.give_back(plan.starts[2])
    assert instants(queue.claim(NOW + 50 * MILLISECOND, 5, ahead=1)) == [500]


class Worker:
    """Holds jobs until their instants, and is late at times."""

    def __init__(self, queue: MemoryQueue) -> None:
        self._queue = queue
        self._passed = Passed()
        self._waiting: list[Start] = []
        self.free_at: Instant = 0

    def claim(self, now: Instant, ahead: int, lag: int) -> None:
        self._waiting += self._queue.claim(now, 1, ahead=ahead, lag=lag).starts
        self._waiting.sort(key=lambda start: start.at)

    def due(self) -> Instant | None:
        if not self._waiting:
            return None
        return max(self.free_at, self._passed.opens_at(_pace(self._waiting[0])))

    def go_on(self, now: Instant) -> bool:
        """Let the first one go; say whether it has started."""
        start = self._waiting.pop(0)
        pace = _pace(start)
        if now > pace.latest:
            self._queue.give_back(start, is_spent=self._passed.opens_at(pace) > pace.at)
            return False
        self._passed.note(pace, now)
        self._queue.settle(start, 0)
        return True

    def give_all_back(self) -> None:
        for start in self._waiting:
            self._queue.give_back(start, is_spent=self._passed.opens_at(_pace(start)) > _pace(start).at)
        self._waiting.clear()


def _pace(start: Start) -> Pace:
    assert start.pace is not None
    return start.pace


RATES = st.one_of(
    st.builds(
        Rate,
        st.sampled_from([1, 3, 10, 50, 200, 1_000]),
        per=st.just("1s"),
        burst=st.sampled_from([1, 1, 2, 5]),
    ),
    st.builds(Rate, st.integers(1, 20), per=st.sampled_from(["200ms", "1s", "3s"]), rolling=st.just(True)),
).filter(lambda rate: rate.is_smooth)

ACTS = ["go on", "go on", "go on", "claim", "stand still", "give back"]


def exceeds(rate: Rate, starts: list[Instant]) -> str | None:
    """Whether these starts are more than a rate allows: by a quarter of a job, or in a window at all."""
    for first, begin in enumerate(starts):
        for number, at in enumerate(starts[first:], 1):
            if rate.rolling:
                if at - begin < rate.per and number > rate.limit:
                    return f"{number} starts within {at - begin} µs"
            elif number > rate.burst + (at - begin) / rate.interval + 0.25:
                return f"{number} starts within {at - begin} µs"
    return None


@settings(deadline=None, suppress_health_check=list(HealthCheck))
@given(rate=RATES, workers=st.integers(1, 3), data=st.data())
def test_whatever_workers_do_handlers_never_start_above_the_rate(rate: Rate, workers: int, data: st.DataObject) -> None:
    """A27. Workers claim when they like, come late, stand still, and give back what they hold."""
    queue = a_queue(rate)
    queue.enqueue(NOW, {}, 400)
    crew = [Worker(queue) for _ in range(workers)]
    now, starts = NOW, []
    for _ in range(data.draw(st.integers(5, 60), label="steps")):
        worker = crew[data.draw(st.integers(0, workers - 1), label="who")]
        match data.draw(
            st.sampled_from(["go on", "go on", "go on", "claim", "stand still", "give back"]), label="what"
        ):
            case "claim":
                worker.claim(now, data.draw(st.integers(0, 30), label="ahead"), data.draw(st.integers(0, 50_000)))
            case "stand still":
                worker.free_at = now + data.draw(st.integers(0, 1_500_000), label="for")
            case "give back":
                worker.give_all_back()
            case _:
                # Time goes on to the next instant, of whoever it is, and a little further.
                due = [(at, each) for each in crew if (at := each.due()) is not None]
                if not due:
                    now += data.draw(st.integers(1, 300_000), label="idle")
                    continue
                at, chosen = min(due, key=lambda entry: entry[0])
                late = data.draw(st.integers(0, 2 * rate.slack + 10), label="late")
                now = max(now, at) + (late if data.draw(st.booleans()) else 0)
                if chosen.go_on(now):
                    starts.append(now)
    assert exceeds(rate, starts) is None


def test_a_late_start_and_the_end_of_a_claim_together_exceed_the_rate_by_a_quarter_of_a_job() -> None:
    """A27: the last start of a claim may be late, and may follow a late one too soon. Not more than that adds up."""
    rate = Rate(10, per="1s", burst=1)
    queue = a_queue(rate)
    queue.enqueue(NOW, {}, 100)
    first, second = Worker(queue), Worker(queue)
    first.claim(NOW, 2, 0)
    starts = []
    for late in (0, 2 * rate.slack, 0):
        due = first.due()
        assert due is not None
        if first.go_on(due + late):
            starts.append(due + late)
    second.claim(starts[-1], 1, 0)
    due = second.due()
    assert due is not None
    assert second.go_on(due)
    assert len(starts) == 3
    assert exceeds(rate, [*starts, due]) is None


def test_a_start_that_a_window_no_longer_counts_from_its_instant_is_given_back() -> None:
    """A27: a window counts each start from its instant, whatever its claim has planned after it."""
    rate = Rate(2, per="200ms", rolling=True)
    queue = a_queue(rate)
    queue.enqueue(NOW, {}, 100)
    worker = Worker(queue)
    worker.claim(NOW, 10, 0)
    due = worker.due()
    assert due is not None
    assert not worker.go_on(due + rate.slack + 1)


@settings(deadline=None)
@given(rate=st.sampled_from([10, 50, 200, 1_000]), lag=st.integers(0, 40_000))
def test_a_worker_that_is_on_time_gives_the_whole_rate(rate: int, lag: int) -> None:
    """F3. Looking when the queue says so, and not more often than four times a second."""
    queue = a_queue(Rate(rate, per="1s", burst=1))
    queue.enqueue(NOW, {}, 8 * rate)
    worker, now, claims, starts = Worker(queue), NOW, 0, 0
    while now < NOW + 6 * SECOND:
        alarm = queue.next_alarm() or NOW
        due = worker.due()
        if due is None or alarm <= due:
            now = max(now, alarm)
            worker.claim(now, 1_000, lag)
            claims += 1
        else:
            now = max(now, due)
            starts += worker.go_on(now)
    assert starts >= 0.985 * 6 * rate
    assert claims <= 4 * 6


def test_what_is_handed_out_reaches_no_further_than_it_must() -> None:
    queue = a_queue(Rate(3, per="1s", burst=1))
    queue.enqueue(NOW, {}, 100)
    assert max(start.at for start in queue.claim(NOW, 5, ahead=100).starts) <= NOW + AHEAD
