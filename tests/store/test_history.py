"""What is kept of each attempt, and what a running job tells about itself."""

from __future__ import annotations

import pytest

from fairlane.clock import ManualClock
from fairlane.job import State
from fairlane.policy import Policy
from fairlane.scheduler.settlement import Done, Failed, Released, Retried, RunOutcome, Snoozed
from fairlane.store import records
from fairlane.store.protocol import Store
from tests.store.harness import SECOND, claim, finish, given_jobs, worker_named

PLAIN = Policy("webhooks")


@pytest.fixture
async def queue(store: Store) -> str:
    await store.declare(PLAIN)
    return PLAIN.queue


async def test_history_carries_each_attempt_with_its_times_worker_and_error(
    store: Store, clock: ManualClock, queue: str
) -> None:
    (job,) = await given_jobs(store, PLAIN, max_attempts=3)
    expected = []
    ways: list[tuple[RunOutcome, str, str | None]] = [
        (Failed("first", 7 * SECOND), "failed", "first"),
        (Retried("second", 9 * SECOND), "retry", "second"),
        (Done(b"1"), "done", None),
    ]
    for attempt, (outcome, name, error) in enumerate(ways, start=1):
        (held,) = await claim(store, queue, worker=worker_named(f"host:{attempt}"))
        claimed_at = clock.now()
        clock.advance("3s")
        await finish(store, [held], outcome, ran=3 * SECOND)
        expected.append((attempt, claimed_at, clock.now(), f"host:{attempt}", name, error))
        clock.advance("10s")
    history = await store.run(records.attempts(job))
    assert [
        (each.attempt, each.claimed_at, each.ended_at, each.worker, each.outcome, each.error) for each in history
    ] == expected


async def test_a_running_attempt_is_part_of_the_history(store: Store, clock: ManualClock, queue: str) -> None:
    (job,) = await given_jobs(store, PLAIN)
    assert await store.run(records.attempts(job)) == []
    await finish(store, await claim(store, queue, worker=worker_named("a:1")), Failed("boom", SECOND))
    clock.advance("1s")
    await claim(store, queue, worker=worker_named("b:2"))
    first, running = await store.run(records.attempts(job))
    assert (first.attempt, first.worker, first.error) == (1, "a:1", "boom")
    assert (running.attempt, running.claimed_at, running.ended_at) == (2, clock.now(), None)
    assert (running.worker, running.error) == ("b:2", None)


async def test_the_last_failure_is_told_with_the_dead_job(store: Store, clock: ManualClock, queue: str) -> None:
    (job,) = await given_jobs(store, PLAIN, max_attempts=2)
    for error in ("first", "second"):
        await finish(store, await claim(store, queue), Failed(error, SECOND))
        clock.advance("1s")
    record = await store.job(job)
    assert (record.state, record.error, record.attempt) == (State.DEAD, "second", 2)
    assert [each.error for each in await store.run(records.attempts(job))] == ["first", "second"]
    assert await claim(store, queue) == []


async def test_a_job_that_succeeds_after_a_failure_shows_no_error(store: Store, clock: ManualClock, queue: str) -> None:
    (job,) = await given_jobs(store, PLAIN)
    await finish(store, await claim(store, queue), Failed("boom", SECOND))
    clock.advance("1s")
    await finish(store, await claim(store, queue))
    record = await store.job(job)
    assert (record.state, record.error) == (State.DONE, None)


@pytest.mark.parametrize(
    "outcome", [Snoozed("later", SECOND), Released("drain"), Released("?", SECOND)], ids=lambda o: repr(o)[:20]
)
async def test_a_snooze_or_a_release_gives_the_attempt_back(
    store: Store, clock: ManualClock, queue: str, outcome: RunOutcome
) -> None:
    (job,) = await given_jobs(store, PLAIN, max_attempts=2)
    for _ in range(5):
        (held,) = await claim(store, queue)
        assert held.attempt == 1
        await finish(store, [held], outcome)
        assert (await store.job(job)).attempt == 0
        clock.advance("1s")
    await finish(store, await claim(store, queue), Failed("boom", SECOND))
    clock.advance("1s")
    (last,) = await claim(store, queue)
    assert last.attempt == 2
    await finish(store, [last], outcome)
    clock.advance("1s")
    await finish(store, await claim(store, queue), Failed("boom", SECOND))
    assert (await store.job(job)).state is State.DEAD


async def test_history_keeps_each_counted_attempt_once_although_it_was_snoozed_before(
    store: Store, clock: ManualClock, queue: str
) -> None:
    (job,) = await given_jobs(store, PLAIN)
    await finish(store, await claim(store, queue), Snoozed("later", SECOND))
    clock.advance("1s")
    await finish(store, await claim(store, queue), Failed("boom", SECOND))
    clock.advance("1s")
    await finish(store, await claim(store, queue))
    counted = [each for each in await store.run(records.attempts(job)) if each.outcome not in ("snoozed", "released")]
    assert [(each.attempt, each.outcome) for each in counted] == [(1, "failed"), (2, "done")]


async def test_a_running_job_says_who_runs_it_and_since_when(store: Store, clock: ManualClock, queue: str) -> None:
    (job,) = await given_jobs(store, PLAIN)
    waiting = await store.job(job)
    assert (waiting.state, waiting.attempt, waiting.claimed_at, waiting.worker) == (State.READY, 0, None, None)
    clock.advance("5s")
    await claim(store, queue, worker=worker_named("host:9"))
    running = await store.job(job)
    assert (running.state, running.attempt, running.claimed_at) == (State.RUNNING, 1, clock.now())
    assert (running.worker, running.enqueued_at) == ("host:9", clock.now() - 5 * SECOND)


async def test_progress_is_noted_with_its_message(store: Store, queue: str) -> None:
    (job,) = await given_jobs(store, PLAIN)
    (held,) = await claim(store, queue)
    await store.run(records.report_progress(held, 0.25, None))
    assert ((await store.job(job)).progress, (await store.job(job)).progress_message) == (0.25, None)
    await store.run(records.report_progress(held, 0.5, "half way: ½"))
    assert ((await store.job(job)).progress, (await store.job(job)).progress_message) == (0.5, "half way: ½")
    await finish(store, [held])


async def test_a_new_attempt_does_not_show_the_progress_of_the_last_one(
    store: Store, clock: ManualClock, queue: str
) -> None:
    (job,) = await given_jobs(store, PLAIN)
    (held,) = await claim(store, queue)
    await store.run(records.report_progress(held, 0.9, "almost"))
    await finish(store, [held], Failed("boom", SECOND))
    clock.advance("1s")
    await claim(store, queue)
    record = await store.job(job)
    assert (record.state, record.progress, record.progress_message) == (State.RUNNING, None, None)


async def test_a_claim_that_is_gone_reports_no_progress(store: Store, clock: ManualClock, queue: str) -> None:
    (job,) = await given_jobs(store, PLAIN)
    (stale,) = await claim(store, queue)
    clock.advance("31s")
    await store.reap()
    await store.run(records.report_progress(stale, 0.9, "zombie"))
    assert (await store.job(job)).progress_message is None
    (newer,) = await claim(store, queue)
    await store.run(records.report_progress(newer, 0.1, "mine"))
    await store.run(records.report_progress(stale, 0.9, "zombie"))
    assert ((await store.job(job)).progress, (await store.job(job)).progress_message) == (0.1, "mine")


# Promise 7
async def test_looking_never_changes_anything(store: Store, clock: ManualClock, queue: str) -> None:
    jobs = await given_jobs(store, PLAIN, count=3)
    await claim(store, queue, 1)

    async def look() -> object:
        seen = [(await store.job(job), await store.run(records.attempts(job))) for job in jobs]
        return (
            seen,
            await store.counts(queue),
            await store.policy(queue),
            await store.run(records.queues()),
            await store.now(),
        )

    first = await look()
    assert await look() == first
    clock.advance("1s")
    assert [each.id for each in await claim(store, queue, 3)] == jobs[1:]
