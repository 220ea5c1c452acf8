"""Operations: looked at first, bounded, in batches, with a report."""

from __future__ import annotations

from uuid import UUID, uuid4

import msgspec
import pytest

from fairlane import operations
from fairlane.clock import ManualClock
from fairlane.errors import ConfigurationError, JobNotFound
from fairlane.job import State
from fairlane.operations import document_of
from fairlane.policy import Policy
from fairlane.policy.unique import OnReplayConflict, Unique, unique_key
from fairlane.scheduler.settlement import Died, Done, Failed
from fairlane.store.operators import JobFilter
from fairlane.store.protocol import Store
from tests.store.harness import SECOND, claim, finish, given_jobs, ids, new_jobs, operations_on, state_of

PLAIN = Policy("webhooks")
DEAD = JobFilter(state=State.DEAD)


@pytest.fixture(autouse=True)
async def queue(store: Store) -> str:
    await store.declare(PLAIN)
    return PLAIN.queue


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations.jobs, "BATCH", 4)


async def dead_jobs(store: Store, count: int) -> list[UUID]:
    jobs = await given_jobs(store, PLAIN, count=count)
    await finish(store, await claim(store, PLAIN.queue, count), Died("over"))
    return jobs


async def dead_job(store: Store, unique: Unique) -> UUID:
    (job,) = new_jobs(PLAIN)
    job = msgspec.structs.replace(job, unique=unique_key(unique, job.task, (), {}, job.payload))
    await store.enqueue([job])
    await finish(store, await claim(store, PLAIN.queue), Died("over"))
    return job.id


async def test_a_list_is_as_long_as_asked_for_and_says_where_to_go_on(store: Store) -> None:
    jobs = await given_jobs(store, PLAIN, count=7)
    first = await operations_on(store).jobs.list(JobFilter(), 5)
    rest = await operations_on(store).jobs.list(JobFilter(), 5, first.after)
    assert [each.id for each in (*first.jobs, *rest.jobs)] == jobs[::-1]
    assert rest.after is None


@pytest.mark.parametrize(
    ("payload", "call"),
    [(b'[["acme"],{"n":1}]', [["acme"], {"n": 1}]), (b"\x80pickled", "(8 bytes that are no text)")],
    ids=["JSON", "something else"],
)
async def test_a_job_is_shown_with_its_call_and_its_attempts(store: Store, payload: bytes, call: object) -> None:
    (job,) = new_jobs(PLAIN, payload=payload)
    await store.enqueue([job])
    await finish(store, await claim(store, PLAIN.queue), Failed("ValueError: boom\n\n  File x, line 1", SECOND))
    details = await operations_on(store).jobs.show(job.id)
    assert details.call == call
    assert [each.error for each in details.attempts] == ["ValueError: boom\n\n  File x, line 1"]
    assert document_of(details.record)["state"] == "scheduled"
    assert document_of(details.attempts[0])["claimed_at"] == "2030-01-01T00:00:00+00:00"
    with pytest.raises(JobNotFound):
        await operations_on(store).jobs.show(uuid4())


async def test_a_dry_run_says_what_would_be_touched_and_changes_nothing(store: Store) -> None:
    jobs = await dead_jobs(store, 14)
    report = await operations_on(store).jobs.replay(DEAD, limit=12, dry_run=True, actor="ada")
    assert (len(report.done), report.is_dry_run, report.more) == (12, True, True)
    assert len(report.sample) == 10
    assert {each.id for each in report.sample} <= set(jobs)
    assert {await state_of(store, job) for job in jobs} == {State.DEAD}


async def test_a_bulk_action_works_in_batches_and_is_bounded(store: Store) -> None:
    jobs = await dead_jobs(store, 11)
    said: list[int] = []
    report = await operations_on(store).jobs.replay(DEAD, limit=9, on_progress=said.append, actor="ada")
    assert (len(report.done), report.skipped, report.more) == (9, (), True)
    assert said == [4, 8, 9]
    rest = await operations_on(store).jobs.replay(DEAD, actor="ada")
    assert (len(rest.done), rest.more) == (2, False)
    assert sorted(ids(await claim(store, PLAIN.queue, 20))) == jobs


@pytest.mark.parametrize("unique", [Unique("a"), Unique("a", until="started"), Unique("a", window="1h")], ids=repr)
@pytest.mark.parametrize("on_conflict", ["reject", "replace"])
@pytest.mark.parametrize("is_named", [False, True], ids=["filtered", "named"])
async def test_of_many_dead_jobs_of_one_key_one_comes_back_however_many_batches_that_takes(
    store: Store, clock: ManualClock, unique: Unique, on_conflict: OnReplayConflict, is_named: bool
) -> None:
    dead = []
    for _ in range(9):
        clock.advance("2h")
        dead.append(await dead_job(store, unique))
    wanted = dead if is_named else DEAD
    foreseen = await operations_on(store).jobs.replay(wanted, on_conflict=on_conflict, dry_run=True, actor="ada")
    report = await operations_on(store).jobs.replay(wanted, on_conflict=on_conflict, actor="ada")
    for each in (foreseen, report):
        assert (len(each.done), each.held) == (1, 8)
    assert ids(await claim(store, PLAIN.queue, 20)) == [report.done[0].job]
    assert sorted([await state_of(store, job) for job in dead]) == [State.RUNNING] + [State.DEAD] * 8


async def test_a_key_that_an_action_has_taken_stays_taken_although_its_job_ends_meanwhile(store: Store) -> None:
    dead = [await dead_job(store, Unique("a")) for _ in range(5)]
    first = await store.replay(dead[:2])
    await finish(store, await claim(store, PLAIN.queue))
    taken = dict(each.took for each in first if each.took is not None)
    assert {each.holder for each in await store.replay(dead[2:], earlier=taken)} == {dead[0]}


async def test_jobs_named_one_by_one_are_reported_one_by_one(store: Store) -> None:
    jobs = await dead_jobs(store, 5)
    (ready,) = await given_jobs(store, PLAIN)
    gone = uuid4()
    for dry_run in (True, False):
        report = await operations_on(store).jobs.replay([*jobs, ready, gone, gone], dry_run=dry_run, actor="ada")
        assert sorted(each.job for each in report.done) == jobs
        reasons = {each.job: each.skipped or "" for each in report.skipped}
        assert "it is ready" in reasons[ready]
        assert "no such job" in reasons[gone]
        assert len(report.skipped) == 2
    assert (await operations_on(store).jobs.replay([*jobs, ready], limit=2, actor="ada")).more is True


async def test_a_filter_without_a_state_means_what_the_action_is_for(store: Store, clock: ManualClock) -> None:
    dead = await dead_jobs(store, 2)
    (done,) = await given_jobs(store, PLAIN)
    await finish(store, await claim(store, PLAIN.queue), Done(None))
    (later,) = await given_jobs(store, PLAIN, delay=60 * SECOND)
    (running,) = await given_jobs(store, PLAIN)
    await claim(store, PLAIN.queue)
    (ready,) = await given_jobs(store, PLAIN)

    async def touched(action: str, wanted: JobFilter) -> set[UUID]:
        report = await getattr(operations_on(store).jobs, action)(wanted, actor="ada", dry_run=True)
        return {each.job for each in report.done}

    everything = JobFilter(queue=PLAIN.queue)
    assert await touched("replay", everything) == set(dead)
    assert await touched("purge", everything) == set(dead)
    assert await touched("purge", JobFilter(state=State.DONE)) == {done}
    assert await touched("retry", everything) == {later}
    assert await touched("cancel", everything) == {later, running, ready}
    with pytest.raises(ConfigurationError, match="ready jobs cannot be replayed; possible are: dead, cancelled"):
        await operations_on(store).jobs.replay(JobFilter(state=State.READY), actor="ada")


async def test_cancelling_many_cancels_what_waits_and_asks_what_runs(store: Store) -> None:
    running, *waiting = await given_jobs(store, PLAIN, count=6)
    await claim(store, PLAIN.queue)
    report = await operations_on(store).jobs.cancel(JobFilter(), actor="ada")
    assert {each.job: each.was for each in report.done} == {running: State.RUNNING} | dict.fromkeys(
        waiting, State.READY
    )
    assert {await state_of(store, job) for job in waiting} == {State.CANCELLED}
    assert (await store.job(running)).cancel_requested
    again = await operations_on(store).jobs.cancel(waiting, actor="ada")
    assert (again.done, len(again.skipped)) == ((), 5)


async def test_purging_and_hurrying_many(store: Store) -> None:
    jobs = await dead_jobs(store, 6)
    later = await given_jobs(store, PLAIN, count=6, delay=3_600 * SECOND)
    assert len((await operations_on(store).jobs.purge(DEAD, actor="ada")).done) == 6
    assert (await operations_on(store).jobs.list(DEAD)).jobs == []
    assert len((await operations_on(store).jobs.retry(JobFilter(), actor="ada")).done) == 6
    assert sorted(ids(await claim(store, PLAIN.queue, 20))) == later
    assert jobs


async def test_a_limit_that_leaves_nothing_is_refused(store: Store) -> None:
    with pytest.raises(ConfigurationError, match="limit=0"):
        await operations_on(store).jobs.replay(DEAD, limit=0, actor="ada")
