"""The operator's side: listing jobs, putting dead ones back, removing them, letting scheduled ones run now."""

from __future__ import annotations

import asyncio
from uuid import UUID, uuid4

import pytest

from fairlane.clock import ManualClock
from fairlane.errors import ConfigurationError, JobNotFound, UnknownQueue
from fairlane.job import State
from fairlane.policy import Concurrency, Fair, Policy
from fairlane.scheduler.settlement import Cancelled, Died, Done, Failed, RunOutcome
from fairlane.store import operators, records
from fairlane.store.operators import Handled, JobFilter
from fairlane.store.protocol import Pruned, Retention, Store
from tests.store.harness import (
    SECOND,
    Database,
    assert_at_rest,
    claim,
    finish,
    given_jobs,
    hear,
    ids,
    new_jobs,
    soon,
    state_of,
    worker_named,
)

PLAIN = Policy("webhooks")
OTHER = Policy("email")
KEYED = Policy("keyed", fair=Fair(by="account", charge="count"), limits=(Concurrency(2, by="account"),))
KEEP = Retention()


@pytest.fixture
async def queue(store: Store) -> str:
    return await declared(store)


async def declared(store: Store) -> str:
    """The queues of these tests, and the name of the one they mostly use."""
    await store.declare(PLAIN)
    await store.declare(OTHER)
    await store.declare(KEYED)
    return PLAIN.queue


async def listed(store: Store, wanted: JobFilter, limit: int = 100) -> list[UUID]:
    """Every job that fits, page by page."""
    found: list[UUID] = []
    after: str | None = None
    while True:
        page = await store.run(operators.find_jobs(wanted, after, limit))
        assert len(page.jobs) <= limit
        found += [each.id for each in page.jobs]
        if page.after is None:
            return found
        after = page.after


async def ended(store: Store, count: int, outcome: RunOutcome, policy: Policy = PLAIN) -> list[UUID]:
    """So many jobs that ended so, settled together."""
    jobs = await given_jobs(store, policy, count=count)
    await finish(store, await claim(store, policy.queue, count), outcome)
    return jobs


async def one_in_each_state(store: Store) -> dict[State, UUID]:
    jobs = {}
    (jobs[State.DONE],) = await ended(store, 1, Done(b"1"))
    (jobs[State.DEAD],) = await ended(store, 1, Died("over"))
    (jobs[State.CANCELLED],) = await ended(store, 1, Cancelled("stop"))
    (jobs[State.RUNNING],) = await given_jobs(store, PLAIN)
    assert ids(await claim(store, PLAIN.queue)) == [jobs[State.RUNNING]]
    (jobs[State.READY],) = await given_jobs(store, PLAIN)
    (jobs[State.SCHEDULED],) = await given_jobs(store, PLAIN, delay=60 * SECOND)
    return jobs


# Listing.


@pytest.mark.parametrize("queue_name", [None, "webhooks"], ids=["of all queues", "of one queue"])
async def test_jobs_are_listed_by_state_each_where_it_belongs(store: Store, queue: str, queue_name: str | None) -> None:
    jobs = await one_in_each_state(store)
    for state, job in jobs.items():
        assert await listed(store, JobFilter(queue=queue_name, state=state)) == [job], state
    assert await listed(store, JobFilter(queue=queue_name)) == sorted(jobs.values(), reverse=True)
    assert await listed(store, JobFilter(queue="email")) == []


@pytest.mark.parametrize("limit", [1, 3, 7, 100])
@pytest.mark.parametrize(
    "wanted",
    [JobFilter(), JobFilter(queue="webhooks"), JobFilter(state=State.READY)],
    ids=["all", "of a queue", "ready"],
)
async def test_pages_of_any_size_bring_every_job_once_and_the_newest_first(
    store: Store, queue: str, wanted: JobFilter, limit: int
) -> None:
    jobs = await given_jobs(store, PLAIN, count=10)
    assert await listed(store, wanted, limit) == jobs[::-1]


@pytest.mark.parametrize("limit", [1, 3, 7, 100])
@pytest.mark.parametrize("together", [1, 4])
async def test_dead_jobs_are_listed_by_their_end(
    store: Store, clock: ManualClock, queue: str, limit: int, together: int
) -> None:
    await given_jobs(store, PLAIN, count=12)
    claims = await claim(store, queue, 12)
    deaths = claims[::-1]
    expected: list[UUID] = []
    for n in range(0, 12, together):
        await finish(store, deaths[n : n + together], Died("over"))
        expected[:0] = sorted(ids(deaths[n : n + together]), reverse=True)
        clock.advance("1s")
    found = await listed(store, JobFilter(state=State.DEAD), limit)
    assert sorted(found) == sorted(expected)
    if together == 1:
        assert found == expected
    assert set(found[:4]) == set(expected[:4])


async def test_a_page_has_whole_records(store: Store, queue: str) -> None:
    jobs = await one_in_each_state(store)
    for state, job in jobs.items():
        (record,) = (await store.run(operators.find_jobs(JobFilter(state=state)))).jobs
        assert record == await store.job(job)


async def test_jobs_are_found_by_task_and_by_keys(store: Store, queue: str) -> None:
    acme, bolt = new_jobs(KEYED, {"account": "acme", "plan": "gold"}), new_jobs(KEYED, {"account": "bolt"})
    nobody, sweep = new_jobs(KEYED, {"account": None}), new_jobs(PLAIN, task="sweep")
    await store.enqueue([*acme, *bolt, *nobody, *sweep])
    assert await listed(store, JobFilter(keys={"account": "acme"})) == [acme[0].id]
    assert await listed(store, JobFilter(queue="keyed", keys={"account": "acme", "plan": "gold"})) == [acme[0].id]
    assert await listed(store, JobFilter(keys={"account": "bolt", "plan": "gold"})) == []
    assert await listed(store, JobFilter(keys={"account": None})) == [nobody[0].id]
    assert await listed(store, JobFilter(task="sweep")) == [sweep[0].id]
    assert await listed(store, JobFilter(task="sweep", queue="keyed")) == []


async def test_since_belongs_to_a_span_and_until_does_not(store: Store, clock: ManualClock, queue: str) -> None:
    start = clock.now()
    jobs = []
    for _ in range(4):
        jobs += await ended(store, 1, Died("over"))
        clock.advance("1s")
    since, until = start + SECOND, start + 3 * SECOND
    for wanted in (
        JobFilter(enqueued_since=since, enqueued_until=until),
        JobFilter(finished_since=since, finished_until=until),
        JobFilter(finished_since=since, finished_until=until, state=State.DEAD),
    ):
        assert await listed(store, wanted, 1) == [jobs[2], jobs[1]]


async def test_paging_on_misses_nothing_while_jobs_come_change_and_go(
    store: Store, clock: ManualClock, queue: str
) -> None:
    jobs = await given_jobs(store, PLAIN, count=9)
    (late,) = await given_jobs(store, PLAIN, delay=SECOND)
    first = await store.run(operators.find_jobs(JobFilter(queue=queue), limit=4))
    assert [each.id for each in first.jobs] == [late, *jobs[:5:-1]]
    await given_jobs(store, PLAIN, count=5)
    clock.advance("1s")
    await finish(store, await claim(store, queue, 12), Died("over"))  # the late one joins its lane at a new place
    await store.run(operators.purge([jobs[5], jobs[6]]))
    rest = await store.run(operators.find_jobs(JobFilter(queue=queue), first.after, limit=100))
    assert [each.id for each in rest.jobs] == jobs[4::-1]
    assert rest.after is None


async def test_paging_through_dead_jobs_misses_nothing_while_some_are_put_back(
    store: Store, clock: ManualClock, queue: str
) -> None:
    jobs = await ended(store, 6, Died("over"))
    clock.advance("1s")
    jobs += await ended(store, 3, Died("over"))
    first = await store.run(operators.find_jobs(JobFilter(state=State.DEAD), limit=4))
    seen = [each.id for each in first.jobs]
    left = [job for job in jobs if job not in seen]
    await store.replay([*seen[1:], left[0]])
    await ended(store, 4, Died("later"))
    rest = await store.run(operators.find_jobs(JobFilter(state=State.DEAD), first.after, limit=100))
    assert sorted(each.id for each in rest.jobs) == sorted(left[1:])


async def test_one_call_looks_at_a_bounded_number_and_says_where_to_go_on(
    store: Store, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operators, "LOOK_AT_MOST", 20)
    monkeypatch.setattr(operators, "STRETCH", 7)
    (needle,) = await ended(store, 1, Died("over"), OTHER)
    await ended(store, 30, Died("over"))
    await given_jobs(store, PLAIN, count=45)
    for state, least in ((None, 4), (State.DEAD, 2)):
        wanted = JobFilter(keys={"account": "nobody"}, state=state)
        pages = [await store.run(operators.find_jobs(wanted))]
        while pages[-1].after is not None:
            pages.append(await store.run(operators.find_jobs(wanted, pages[-1].after)))
        assert [page.jobs for page in pages] == [[]] * len(pages)
        assert least <= len(pages) <= least + 1
        assert await listed(store, JobFilter(queue="email", state=state), 1) == [needle]


async def test_an_unknown_queue_and_a_strange_cursor_are_refused(store: Store, queue: str) -> None:
    with pytest.raises(UnknownQueue):
        await store.run(operators.find_jobs(JobFilter(queue="nothing")))
    for after in ("", "x", "1.2", f"{uuid4().hex}.1.2"):
        with pytest.raises(ConfigurationError, match="no place in this listing"):
            await store.run(operators.find_jobs(JobFilter(), after))
    with pytest.raises(ConfigurationError, match="no place in this listing"):
        await store.run(operators.find_jobs(JobFilter(state=State.DEAD), uuid4().hex))


# Removing.


async def test_a_purged_job_is_gone_with_its_history(store: Store, clock: ManualClock, queue: str) -> None:
    jobs = await ended(store, 3, Died("over"))
    assert await store.run(operators.purge(jobs[:2])) == [Handled(job, State.DEAD) for job in jobs[:2]]
    for job in jobs[:2]:
        with pytest.raises(JobNotFound):
            await store.job(job)
        with pytest.raises(JobNotFound):
            await store.run(records.attempts(job))
    assert await listed(store, JobFilter(state=State.DEAD)) == [jobs[2]]
    clock.advance("8d")
    assert await store.prune(KEEP) == Pruned(1)


# Hurrying.


@pytest.mark.parametrize("how", ["delayed", "backing off"])
async def test_a_scheduled_job_can_be_made_due_now(store: Store, clock: ManualClock, queue: str, how: str) -> None:
    (job,) = await given_jobs(store, PLAIN, delay=3_600 * SECOND if how == "delayed" else None)
    if how != "delayed":
        await finish(store, await claim(store, queue), Failed("boom", 3_600 * SECOND))
    assert await claim(store, queue) == []
    assert await store.run(operators.retry_now([job])) == [Handled(job, State.SCHEDULED)]
    (held,) = await claim(store, queue)
    assert (held.id, held.attempt) == (job, 1 if how == "delayed" else 2)


async def test_hurrying_never_delays(store: Store, clock: ManualClock, queue: str) -> None:
    (job,) = await given_jobs(store, PLAIN, delay=SECOND)
    due = (await store.job(job)).due_at
    clock.advance("1m")
    await store.run(operators.retry_now([job]))
    assert (await store.job(job)).due_at == due


async def test_a_job_that_is_made_due_wakes_a_waiter(database: Database, clock: ManualClock) -> None:
    store = await database.open(clock)
    await store.declare(PLAIN)
    (job,) = await given_jobs(store, PLAIN, delay=3_600 * SECOND)
    me = worker_named("me")
    listener = await store.listen(me)
    await hear(store, PLAIN.queue, listener, worker=me)
    waiting = asyncio.ensure_future(listener.wait(None))
    await store.run(operators.retry_now([job]))
    assert await soon(waiting) is True
    await listener.close()


# Retention by count.


@pytest.mark.parametrize("together", [1, 4, 10])
async def test_at_most_so_many_finished_jobs_are_kept_and_the_oldest_go_first(
    store: Store, clock: ManualClock, queue: str, together: int
) -> None:
    jobs = await given_jobs(store, PLAIN, count=10)
    claims = await claim(store, queue, 10)
    for n in range(0, 10, together):
        await finish(store, claims[n : n + together])
        clock.advance("1s")
    dead = await ended(store, 2, Died("over"))
    passes = [await store.prune(Retention(keep=3), limit=4) for _ in range(2)]
    assert [(each.jobs, each.more) for each in passes] == [(4, True), (3, False)]
    assert await store.prune(Retention(keep=3), limit=4) == Pruned(0)
    assert sorted(await listed(store, JobFilter(state=State.DONE))) == jobs[7:]
    assert sorted(await listed(store, JobFilter(state=State.DEAD))) == dead


async def test_done_and_cancelled_jobs_are_counted_together_and_dead_ones_apart(
    store: Store, clock: ManualClock, queue: str
) -> None:
    dead = await ended(store, 3, Died("over"))
    clock.advance("1s")
    await ended(store, 2, Cancelled("stop"))
    clock.advance("1s")
    done = await ended(store, 2, Done(None))
    assert (await store.prune(Retention(keep=2))).jobs == 3
    assert sorted(await listed(store, JobFilter(state=State.DONE))) == done
    assert await listed(store, JobFilter(state=State.CANCELLED)) == []
    assert len(await listed(store, JobFilter(state=State.DEAD))) == 2
    assert await store.prune(Retention(keep=0)) == Pruned(4)
    assert dead


async def test_jobs_that_were_put_back_or_purged_do_not_count_as_kept(
    store: Store, clock: ManualClock, queue: str
) -> None:
    old = await ended(store, 2, Died("over"))
    clock.advance("1s")
    newer = await ended(store, 4, Died("over"))
    await store.run(operators.purge(newer[:2]))
    await store.replay(newer[2:])
    assert await store.prune(Retention(keep=2)) == Pruned(0)
    assert sorted(await listed(store, JobFilter(state=State.DEAD))) == old


# Races, with connections of their own.


async def test_a_job_is_replayed_or_pruned_never_both_never_neither(shared_database: Database) -> None:
    clock = ManualClock()
    operator, upkeep = await shared_database.open(clock), await shared_database.open(clock)
    await operator.declare(PLAIN)
    for _ in range(8):
        jobs = []
        for _ in range(6):
            jobs += await ended(operator, 5, Died("over"))
        clock.advance("8d")
        report, pruned = await asyncio.gather(operator.replay(jobs[::-1]), upkeep.prune(KEEP, 17))
        back = {each.job for each in report if each.skipped is None}
        assert len(back) + pruned.jobs <= 30
        while (more := await upkeep.prune(KEEP, 17)).jobs or more.more:
            pruned = Pruned(pruned.jobs + more.jobs)
        assert len(back) + pruned.jobs == 30
        assert {each.skipped is None or each.was is None for each in report} == {True}
        claims = await claim(operator, PLAIN.queue, 40)
        assert set(ids(claims)) == back
        await finish(operator, claims)
        clock.advance("2d")
        while (await upkeep.prune(KEEP)).jobs:
            pass


async def test_two_operators_replay_a_job_once(shared_database: Database) -> None:
    clock = ManualClock()
    stores = [await shared_database.open(clock) for _ in range(3)]
    await stores[0].declare(PLAIN)
    jobs = await ended(stores[0], 20, Died("over"))
    reports = await asyncio.gather(
        stores[0].replay(jobs), stores[1].replay(jobs[::-1]), stores[2].run(operators.purge(jobs[5:15][::-1]))
    )
    done = [each.job for report in reports for each in report if each.skipped is None]
    assert sorted(done) == jobs
    purged = {each.job for each in reports[2] if each.skipped is None}
    assert sorted(ids(await claim(stores[0], PLAIN.queue, 30))) == sorted(set(jobs) - purged)


async def test_a_job_is_cancelled_before_it_starts_or_asked_to_stop_after(shared_database: Database) -> None:
    clock = ManualClock()
    operator, worker = await shared_database.open(clock), await shared_database.open(clock)
    await operator.declare(PLAIN)
    for _ in range(5):
        jobs = await given_jobs(operator, PLAIN, count=20)
        cancelling = asyncio.gather(*(operator.cancel(job) for job in jobs[::-1]))
        claims = await claim(worker, PLAIN.queue, 20)
        states = await cancelling
        started = set(ids(claims))
        for job, state in zip(jobs[::-1], states, strict=True):
            assert state is (State.RUNNING if job in started else State.CANCELLED)
        # Those that run have been told so, by the claim itself or by the note that a renewal reads.
        await finish(worker, claims, Failed("boom", SECOND))
        assert {await state_of(operator, job) for job in jobs} == {State.CANCELLED}
    await assert_at_rest(operator, PLAIN, clock)


async def test_a_job_that_is_made_due_while_claims_promote_runs_once(shared_database: Database) -> None:
    clock = ManualClock()
    operator, worker = await shared_database.open(clock), await shared_database.open(clock)
    await operator.declare(PLAIN)
    jobs = await given_jobs(operator, PLAIN, count=50, delay=SECOND)
    clock.advance("1s")
    report, claims = await asyncio.gather(operator.run(operators.retry_now(jobs[::-1])), claim(worker, PLAIN.queue, 50))
    assert {each.was for each in report} <= {State.SCHEDULED, State.READY, State.RUNNING}
    claims += await claim(worker, PLAIN.queue, 50)
    assert sorted(ids(claims)) == jobs
