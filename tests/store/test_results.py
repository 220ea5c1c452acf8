"""Waiting for a job to end: whoever ends it tells, in whatever process, and no end is missed. Nothing here polls."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from pathlib import Path
from typing import Any, TypeVar
from uuid import UUID, uuid4

import msgspec
import pytest

from fairlane.clock import ManualClock
from fairlane.errors import JobNotFound, StoreUnavailable
from fairlane.job import BuiltEffects, JobRecord, State
from fairlane.policy import Policy
from fairlane.policy.unique import Unique, unique_key
from fairlane.scheduler.settlement import Cancelled, Died, Done, Failed
from fairlane.store import records
from fairlane.store import results as awaiting
from fairlane.store.postgres import PostgresStore
from fairlane.store.protocol import Store
from fairlane.store.sqlite import SqliteStore
from fairlane.store.sqlite import wakeups as results
from tests.store.harness import MINUTE, SECOND, Database, claim, finish, given_jobs, new_jobs, soon
from tests.waiting import until_found

T = TypeVar("T")

PLAIN = Policy("webhooks")
NEVER = 1e8


@pytest.fixture(autouse=True)
def no_last_resort(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only wake-ups can pass: the next look would come in years."""
    monkeypatch.setattr(awaiting, "LOOK_EVERY", NEVER)


@pytest.fixture
async def queue(store: Store) -> str:
    await store.declare(PLAIN)
    return PLAIN.queue


async def is_heard(store: Store, jobs: Iterable[UUID]) -> None:
    """Return once the waits of a store for these jobs are registered, and nothing but a wake-up can end them."""
    asked = set(jobs)

    async def registered() -> bool:
        if isinstance(store, PostgresStore):
            listener = store._results
            return asked <= listener._registered and not listener._uncertain and not listener._new
        assert isinstance(store, SqliteStore)
        rows = await store._database.read(lambda tx: tx.connection.execute("select job from result_waiters").fetchall())
        return asked <= {UUID(bytes=job) for (job,) in rows}

    await until_found(registered)


async def done(store: Store, _: ManualClock, job: UUID) -> None:
    await finish(store, await claim(store, "webhooks"), Done(b"42"))


async def dead(store: Store, _: ManualClock, job: UUID) -> None:
    await finish(store, await claim(store, "webhooks"), Died("boom"))


async def cancelled_while_it_waits(store: Store, _: ManualClock, job: UUID) -> None:
    assert await store.cancel(job) is State.CANCELLED


async def cancelled_while_it_runs(store: Store, _: ManualClock, job: UUID) -> None:
    claims = await claim(store, "webhooks")
    assert await store.cancel(job) is State.RUNNING
    await finish(store, claims, Cancelled("as asked"))


async def reaped_to_death(store: Store, clock: ManualClock, job: UUID) -> None:
    """Twice it might have been anybody's fault; the third time it ran alone."""
    for _ in range(3):
        assert len(await claim(store, "webhooks")) == 1
        clock.advance("31s")
        assert [each.job for each in (await store.reap()).settled] == [job]


async def done_at_the_second_attempt(store: Store, clock: ManualClock, job: UUID) -> None:
    await finish(store, await claim(store, "webhooks"), Failed("not yet", 0))
    await finish(store, await claim(store, "webhooks"))


ENDS: list[tuple[Callable[[Store, ManualClock, UUID], Awaitable[None]], State, int]] = [
    (done, State.DONE, 1),
    (dead, State.DEAD, 3),
    (cancelled_while_it_waits, State.CANCELLED, 3),
    (cancelled_while_it_runs, State.CANCELLED, 3),
    (reaped_to_death, State.DEAD, 1),
    (done_at_the_second_attempt, State.DONE, 2),
]


@pytest.mark.parametrize(("end", "state", "attempts"), ENDS)
async def test_whoever_waits_is_told_however_the_job_ends(
    store: Store,
    clock: ManualClock,
    queue: str,
    end: Callable[[Store, ManualClock, UUID], Awaitable[None]],
    state: State,
    attempts: int,
) -> None:
    (job,) = await given_jobs(store, PLAIN, max_attempts=attempts)
    waiting = asyncio.create_task(store.wait_until_ended(job, None))
    await is_heard(store, [job])
    await end(store, clock, job)
    assert (await soon(waiting)).state is state


@pytest.mark.parametrize(("end", "state", "attempts"), ENDS)
async def test_whoever_waits_in_another_process_is_told_too(
    shared_database: Database,
    clock: ManualClock,
    end: Callable[[Store, ManualClock, UUID], Awaitable[None]],
    state: State,
    attempts: int,
) -> None:
    here, there = await shared_database.open(clock), await shared_database.open(clock)
    await here.declare(PLAIN)
    (job,) = await given_jobs(here, PLAIN, max_attempts=attempts)
    waiting = asyncio.create_task(here.wait_until_ended(job, None))
    await is_heard(here, [job])
    await end(there, clock, job)
    assert (await soon(waiting)).state is state


@pytest.mark.parametrize("by_a_follow_up", [False, True], ids=["enqueue", "follow-up"])
async def test_whoever_waits_for_a_job_that_is_replaced_is_told(store: Store, queue: str, by_a_follow_up: bool) -> None:
    await given_jobs(store, PLAIN)
    (held,) = await claim(store, "webhooks")
    newest = Unique("a", on_conflict="replace")
    old, new = (
        msgspec.structs.replace(job, unique=unique_key(newest, job.task, (), {}, job.payload))
        for job in new_jobs(PLAIN, count=2)
    )
    await store.enqueue([old])
    waiting = asyncio.create_task(store.wait_until_ended(old.id, None))
    await is_heard(store, [old.id])
    if by_a_follow_up:
        await finish(store, [held], Done(None, BuiltEffects((new,))))
    else:
        await store.enqueue([new])
    assert (await soon(waiting)).state is State.CANCELLED


async def test_a_job_that_has_ended_is_there_at_once(store: Store, clock: ManualClock, queue: str) -> None:
    (job,) = await given_jobs(store, PLAIN)
    await done(store, clock, job)
    record = await store.wait_until_ended(job, None)
    assert (record.state, record.result) == (State.DONE, b"42")


async def test_a_job_that_was_never_stored_is_not_waited_for(store: Store, queue: str) -> None:
    with pytest.raises(JobNotFound):
        await store.wait_until_ended(uuid4(), None)


async def test_a_wait_ends_when_its_time_is_up_and_leaves_the_job_alone(
    store: Store, clock: ManualClock, queue: str
) -> None:
    (job,) = await given_jobs(store, PLAIN)
    (held,) = await claim(store, queue)
    waiting = asyncio.create_task(store.wait_until_ended(job, clock.now() + 5 * SECOND))
    await is_heard(store, [job])
    clock.advance("4s")
    await asyncio.sleep(0)
    assert not waiting.done()
    clock.advance("1s")
    assert (await soon(waiting)).state is State.RUNNING
    assert (await store.wait_until_ended(job, clock.now())).state is State.RUNNING
    assert await store.run(records.held([(job, held.lease)])) == [job]


async def test_waiting_again_after_the_time_was_up_hears_the_end(store: Store, clock: ManualClock, queue: str) -> None:
    (job,) = await given_jobs(store, PLAIN)
    for _ in range(3):
        assert (await soon(store.wait_until_ended(job, clock.now()))).state is State.READY
    waiting = asyncio.create_task(store.wait_until_ended(job, clock.now() + MINUTE))
    await is_heard(store, [job])
    await done(store, clock, job)
    assert (await soon(waiting)).state is State.DONE


async def test_a_hundred_wait_at_once_and_each_hears_of_its_own_job(
    shared_database: Database, clock: ManualClock
) -> None:
    here, there = await shared_database.open(clock), await shared_database.open(clock)
    await here.declare(PLAIN)
    jobs = await given_jobs(here, PLAIN, count=100)
    waits = [asyncio.create_task(here.wait_until_ended(job, None)) for job in jobs]
    await is_heard(here, jobs)
    claims = await claim(there, "webhooks", 100)
    for batch in (claims[:1], claims[1:7], claims[7:]):
        await finish(there, batch)
        ended = {each.id for each in batch}
        records: list[JobRecord] = await soon(
            asyncio.gather(*(wait for job, wait in zip(jobs, waits, strict=True) if job in ended))
        )
        assert {record.id for record in records} == ended
        assert all(record.state is State.DONE for record in records)
        ended_so_far = sum(wait.done() for wait in waits)
        assert ended_so_far == claims.index(batch[-1]) + 1, "somebody was let go whose job goes on"


async def test_a_hundred_may_wait_for_the_same_job(store: Store, clock: ManualClock, queue: str) -> None:
    (job,) = await given_jobs(store, PLAIN)
    first = [asyncio.create_task(store.wait_until_ended(job, None)) for _ in range(50)]
    await is_heard(store, [job])
    then = [asyncio.create_task(store.wait_until_ended(job, None)) for _ in range(50)]
    for wait in first[:10]:
        wait.cancel()
    await done(store, clock, job)
    records = await soon(asyncio.gather(*first[10:], *then))
    assert {record.state for record in records} == {State.DONE}


async def test_an_end_is_never_missed_however_it_meets_the_registration(
    shared_database: Database, clock: ManualClock
) -> None:
    stores = [await shared_database.open(clock) for _ in range(2)]
    await stores[0].declare(PLAIN)
    chance = random.Random(7)

    async def after(turns: int, work: Coroutine[Any, Any, T]) -> T:
        for _ in range(turns):
            await asyncio.sleep(0)
        return await work

    for number in range(300):
        waiter, worker = stores[number % 2], chance.choice(stores)
        (job,) = await given_jobs(waiter, PLAIN)
        claims = await claim(worker, "webhooks")
        # A registration takes a few round trips, a settlement one: the end falls before, into and after each of them.
        wait = after(chance.randrange(40), waiter.wait_until_ended(job, None))
        end = after(chance.randrange(400), finish(worker, claims))
        record, _ = await soon(asyncio.gather(wait, end))
        assert record.state is State.DONE, f"round {number}"


async def test_many_ends_meet_many_registrations(shared_database: Database, clock: ManualClock) -> None:
    stores = [await shared_database.open(clock) for _ in range(3)]
    await stores[0].declare(PLAIN)
    jobs = await given_jobs(stores[0], PLAIN, count=300)
    chance = random.Random(3)

    async def work(store: Store) -> None:
        while claims := await claim(store, "webhooks", chance.randrange(1, 6)):
            await finish(store, claims)

    async def wait(job: UUID, turns: int) -> State:
        for _ in range(turns):
            await asyncio.sleep(0)
        return (await chance.choice(stores).wait_until_ended(job, None)).state

    waits = [asyncio.create_task(wait(job, chance.randrange(300))) for job in jobs]
    await soon(asyncio.gather(*(work(store) for store in stores[1:])))
    assert set(await soon(asyncio.gather(*waits))) == {State.DONE}


async def test_whoever_waits_when_the_store_is_closed_is_told_so(database: Database, clock: ManualClock) -> None:
    store = database.connect(clock)
    await store.open()
    await store.declare(PLAIN)
    (job,) = await given_jobs(store, PLAIN)
    waiting = asyncio.create_task(store.wait_until_ended(job, None))
    await is_heard(store, [job])
    await store.close()
    with pytest.raises(StoreUnavailable):
        await soon(waiting)


async def test_on_sqlite_a_dead_waiter_goes_with_the_next_reaping_and_a_living_one_stays(
    shared_database: Database,
) -> None:
    store = await shared_database.open()
    if not isinstance(store, SqliteStore):
        pytest.skip("PostgreSQL knows the dead by their sessions: tests/store/test_postgres_results.py")
    await store.declare(PLAIN)
    (job,) = await given_jobs(store, PLAIN)
    waiting = asyncio.create_task(store.wait_until_ended(job, None))
    await is_heard(store, [job])
    dead = uuid4()
    await store._database.write(lambda tx: tx.run("register_result_waiter", job.bytes, dead.bytes), durable=False)
    await store.reap()
    left = await store._database.read(lambda tx: tx.all("select_result_waiters"))
    assert left == [(store._results._id.bytes,)]
    await finish(store, await claim(store, "webhooks"))
    assert (await soon(waiting)).state is State.DONE


async def test_on_sqlite_a_look_that_goes_wrong_is_not_the_last(
    tmp_path: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> list[UUID]:
        raise RuntimeError("nobody thought of this")

    database = Database("sqlite-file", str(tmp_path / "jobs.db"))
    store = await database.open(clock)
    await store.declare(PLAIN)
    first, second = await given_jobs(store, PLAIN, count=2)
    waits = [asyncio.create_task(store.wait_until_ended(job, None)) for job in (first, second)]
    await is_heard(store, [first, second])
    with monkeypatch.context() as patched:
        patched.setattr(results, "_ended", broken)
        await finish(store, await claim(store, "webhooks", 1))
        assert (await soon(waits[0])).state is State.DONE
    await finish(store, await claim(store, "webhooks", 1))
    assert (await soon(waits[1])).state is State.DONE
    await database.close()
