"""Unique keys: at most one job of a task for a key, decided inside the transaction that would store it."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any, NamedTuple
from uuid import UUID, uuid4

import asyncpg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fairlane.clock import ManualClock
from fairlane.errors import DuplicateJob
from fairlane.job import NewJob, Outcome, State
from fairlane.policy import Policy
from fairlane.policy.unique import Unique, unique_key
from fairlane.scheduler.settlement import Died, Failed, Released, RunOutcome, Snoozed
from fairlane.store import operators, records
from fairlane.store.audit import Note
from fairlane.store.postgres import PostgresStore
from fairlane.store.protocol import Retention, Store
from tests.store.harness import SECOND, Database, claim, finish, ids, new_jobs, soon, state_of

PLAIN = Policy("webhooks")
OTHER = Policy("email")
NOTE = Note(actor="ada", action="test")


def job(unique: Unique, *, queue: Policy = PLAIN, task: str = "deliver", payload: bytes = b"{}", **rest: Any) -> NewJob:
    (made,) = new_jobs(queue, task=task, payload=payload, **rest)
    key = unique_key(unique, task, (), {}, payload)
    return NewJob(
        **{name: getattr(made, name) for name in made.__struct_fields__ if name != "unique"},
        unique=key,
    )


async def enqueue(store: Store, unique: Unique, **rest: Any) -> tuple[NewJob, Outcome, UUID | None]:
    """Enqueue one job; its outcome, and the job that held its key."""
    new = job(unique, **rest)
    conflict = (await store.enqueue([new])).get(new.id)
    return (new, Outcome.ENQUEUED, None) if conflict is None else (new, conflict.outcome, conflict.holder)


@pytest.fixture
async def store(database: Database, clock: ManualClock) -> Store:
    opened = await database.open(clock)
    await opened.declare(PLAIN)
    await opened.declare(OTHER)
    return opened


# E05
async def test_a_second_job_with_the_same_key_is_not_stored_and_leaves_no_trace(store: Store) -> None:
    first, outcome, _ = await enqueue(store, Unique("a"))
    assert outcome is Outcome.ENQUEUED
    before = await store.counts("webhooks")
    _, outcome, holder = await enqueue(store, Unique("a"))
    assert (outcome, holder) == (Outcome.DUPLICATE, first.id)
    assert await store.counts("webhooks") == before
    assert ids(await claim(store, "webhooks", 5)) == [first.id]


async def test_keys_belong_to_a_task_across_queues(store: Store) -> None:
    first, _, _ = await enqueue(store, Unique("a"))
    assert (await enqueue(store, Unique("a"), queue=OTHER))[1:] == (Outcome.DUPLICATE, first.id)
    assert (await enqueue(store, Unique("a"), task="other"))[1] is Outcome.ENQUEUED
    assert (await enqueue(store, Unique(("a", None))))[1] is Outcome.ENQUEUED


async def test_42_and_the_text_42_are_the_same_key(store: Store) -> None:
    first, _, _ = await enqueue(store, Unique(42))
    assert (await enqueue(store, Unique("42")))[1:] == (Outcome.DUPLICATE, first.id)


ENDS: list[RunOutcome | None] = [None, Died("for good")]


@pytest.mark.parametrize("how", ENDS, ids=["done", "dead"])
async def test_until_done_is_until_the_job_has_ended_however_it_does(store: Store, how: RunOutcome | None) -> None:
    first, _, _ = await enqueue(store, Unique("a"))
    claims = await claim(store, "webhooks")
    assert (await enqueue(store, Unique("a")))[1:] == (Outcome.DUPLICATE, first.id)
    await finish(store, claims, how)
    assert (await enqueue(store, Unique("a")))[1] is Outcome.ENQUEUED


async def test_a_cancelled_job_gives_its_key_free(store: Store) -> None:
    first, _, _ = await enqueue(store, Unique("a"))
    await store.cancel(first.id)
    assert (await enqueue(store, Unique("a")))[1] is Outcome.ENQUEUED


async def test_a_job_that_waits_for_its_retry_still_holds_its_key(store: Store, clock: ManualClock) -> None:
    first, _, _ = await enqueue(store, Unique("a"))
    await finish(store, await claim(store, "webhooks"), Failed("no", 5 * SECOND))
    assert (await enqueue(store, Unique("a")))[1:] == (Outcome.DUPLICATE, first.id)
    clock.advance("5s")
    assert (await enqueue(store, Unique("a")))[1:] == (Outcome.DUPLICATE, first.id)


RETURNS: list[RunOutcome] = [Failed("no", 5 * SECOND), Snoozed("later", 5 * SECOND), Released("stopped")]


@pytest.mark.parametrize("how", RETURNS, ids=["failed", "snoozed", "released"])
async def test_a_key_released_at_start_is_not_retaken_by_a_retry(
    store: Store, clock: ManualClock, how: RunOutcome
) -> None:
    until_started = Unique("a", until="started")
    first, _, _ = await enqueue(store, until_started)
    assert (await enqueue(store, until_started))[1:] == (Outcome.DUPLICATE, first.id)
    await finish(store, await claim(store, "webhooks"), how)
    second, outcome, _ = await enqueue(store, until_started)
    assert outcome is Outcome.ENQUEUED
    clock.advance("5s")
    assert (await enqueue(store, until_started))[1:] == (Outcome.DUPLICATE, second.id)
    assert {*ids(await claim(store, "webhooks", 5))} == {first.id, second.id}


async def test_a_window_rolls_from_the_enqueue_and_outlives_the_row(store: Store, clock: ManualClock) -> None:
    for_ten_minutes = Unique("a", window="10m")
    first, _, _ = await enqueue(store, for_ten_minutes)
    await finish(store, await claim(store, "webhooks"))
    clock.advance("1m")
    assert (await store.prune(Retention(done=0, dead=0))).jobs == 1
    clock.advance("8m")
    assert (await enqueue(store, for_ten_minutes))[1:] == (Outcome.DUPLICATE, first.id)
    clock.advance("1m")
    second, outcome, _ = await enqueue(store, for_ten_minutes)
    assert outcome is Outcome.ENQUEUED
    clock.advance("9m")
    assert (await enqueue(store, for_ten_minutes))[1:] == (Outcome.DUPLICATE, second.id)


async def test_pruning_forgets_keys_that_nobody_holds(store: Store, clock: ManualClock) -> None:
    for n in range(3):
        await enqueue(store, Unique(n))
        await enqueue(store, Unique(n, window="10m"), task="other")
    await finish(store, await claim(store, "webhooks", 6))
    clock.advance("1h")
    await store.prune(Retention(done=0, dead=0))
    assert (await enqueue(store, Unique(0)))[1] is Outcome.ENQUEUED
    assert (await enqueue(store, Unique(0), task="other"))[1] is Outcome.ENQUEUED


async def test_a_rejected_job_is_refused_and_the_others_of_its_batch_are_stored(store: Store) -> None:
    first, _, _ = await enqueue(store, Unique("a"))
    refused, other = job(Unique("a", on_conflict="reject")), job(Unique("b"))
    conflicts = await store.enqueue([refused, other])
    assert {new: (each.outcome, each.holder) for new, each in conflicts.items()} == {
        refused.id: (Outcome.REFUSED, first.id)
    }
    assert ids(await claim(store, "webhooks", 5)) == [first.id, other.id]


async def test_replacing_a_waiting_job_cancels_it(store: Store) -> None:
    first, _, _ = await enqueue(store, Unique("a"))
    second, outcome, holder = await enqueue(store, Unique("a", on_conflict="replace"))
    assert (outcome, holder) == (Outcome.REPLACED, first.id)
    assert await state_of(store, first.id) is State.CANCELLED
    assert str(second.id) in ((await store.job(first.id)).error or "")
    assert ids(await claim(store, "webhooks", 5)) == [second.id]


async def test_replacing_a_scheduled_job_moves_its_time(store: Store, clock: ManualClock) -> None:
    debounced = Unique("a", on_conflict="replace")
    await enqueue(store, debounced, delay=5 * SECOND)
    clock.advance("3s")
    second, outcome, _ = await enqueue(store, debounced, delay=5 * SECOND)
    assert outcome is Outcome.REPLACED
    clock.advance("3s")
    assert await claim(store, "webhooks", 5) == []
    clock.advance("2s")
    assert ids(await claim(store, "webhooks", 5)) == [second.id]


async def test_replacing_a_started_job_enqueues_a_new_one(store: Store) -> None:
    first, _, _ = await enqueue(store, Unique("a"))
    claims = await claim(store, "webhooks")
    second, outcome, _ = await enqueue(store, Unique("a", on_conflict="replace"))
    assert outcome is Outcome.ENQUEUED
    assert await state_of(store, first.id) is State.RUNNING
    await finish(store, claims)
    assert (await enqueue(store, Unique("a")))[1:] == (Outcome.DUPLICATE, second.id)


# E08
async def test_the_same_key_with_another_payload_is_an_error_when_asked(store: Store) -> None:
    first, _, _ = await enqueue(store, Unique("a"), payload=b"1")
    strict = Unique("a", same_payload=True)
    different = job(strict, payload=b"2")
    (conflict,) = (await store.enqueue([different])).values()
    assert conflict.differs
    assert (conflict.outcome, conflict.holder) == (Outcome.REFUSED, first.id)
    assert (await enqueue(store, strict, payload=b"1"))[1:] == (Outcome.DUPLICATE, first.id)


# E01
async def test_a_bulk_has_the_outcomes_that_its_jobs_would_have_alone(store: Store) -> None:
    first, again, other = job(Unique("a")), job(Unique("a")), job(Unique("b"))
    newest = job(Unique("b", on_conflict="replace"))
    conflicts = await store.enqueue([first, again, other, newest])
    assert {new: (each.outcome, each.holder) for new, each in conflicts.items()} == {
        again.id: (Outcome.DUPLICATE, first.id),
        other.id: (Outcome.DUPLICATE, newest.id),
        newest.id: (Outcome.REPLACED, other.id),
    }
    assert ids(await claim(store, "webhooks", 5)) == [first.id, newest.id]


async def test_an_id_that_is_taken_aborts_the_enqueue_also_where_keys_are_unique(store: Store) -> None:
    first, _, _ = await enqueue(store, Unique("a"))
    new = job(Unique("b"))
    same_id = NewJob(**{**{name: getattr(new, name) for name in new.__struct_fields__}, "id": first.id})
    with pytest.raises(DuplicateJob):
        await store.enqueue([job(Unique("c")), same_id])
    assert (await enqueue(store, Unique("b")))[1] is Outcome.ENQUEUED
    assert (await enqueue(store, Unique("c")))[1] is Outcome.ENQUEUED
    with pytest.raises(DuplicateJob):
        await store.enqueue([first])


async def test_a_dry_run_says_what_would_happen_and_changes_nothing(store: Store) -> None:
    first, _, _ = await enqueue(store, Unique("a"))
    new = job(Unique("a"))
    (conflict,) = (await store.foresee([new])).values()
    assert (conflict.outcome, conflict.holder) == (Outcome.DUPLICATE, first.id)
    assert await store.foresee([job(Unique("b"))]) == {}
    assert (await enqueue(store, Unique("b")))[1] is Outcome.ENQUEUED
    (conflict,) = (await store.foresee([job(Unique("a", on_conflict="replace"))])).values()
    assert conflict.outcome is Outcome.REPLACED
    assert await state_of(store, first.id) is State.READY


# C11, E06
async def test_a_rolled_back_enqueue_leaves_its_key_free(shared_database: Database) -> None:
    store = await shared_database.open()
    await store.declare(PLAIN)
    async with shared_database.transaction() as producer:
        await store.enqueue([job(Unique("a"))], tx=producer.tx)
        assert (await store.enqueue([job(Unique("a"))], tx=producer.tx)) != {}
        await producer.rollback()
    assert (await enqueue(store, Unique("a")))[1] is Outcome.ENQUEUED


# E05, E09
async def test_of_two_enqueues_of_one_key_at_once_exactly_one_is_stored(shared_database: Database) -> None:
    stores = [await shared_database.open() for _ in range(4)]
    await stores[0].declare(PLAIN)
    for turn in range(50):
        names = [f"{turn}/{n}" for n in range(3)]
        orders = [names, names[::-1], names[1:], names[:1]]

        async def produce(store: Store, order: list[str]) -> list[tuple[str, UUID]]:
            new = [job(Unique(name)) for name in order]
            conflicts = await store.enqueue(new)
            return [(name, each.id) for name, each in zip(order, new, strict=True) if each.id not in conflicts]

        stored = [pair for pairs in await soon(asyncio.gather(*map(produce, stores, orders))) for pair in pairs]
        assert Counter(name for name, _ in stored) == Counter(names)
        claims = await claim(stores[turn % 4], "webhooks", 10)
        assert sorted(ids(claims)) == sorted(each for _, each in stored)
        await finish(stores[turn % 4], claims)


# E10


async def die(store: Store, unique: Unique, **rest: Any) -> UUID:
    """Enqueue a job that dies."""
    new, outcome, _ = await enqueue(store, unique, **rest)
    assert outcome is Outcome.ENQUEUED
    (claimed,) = await claim(store, "webhooks", 1)
    await finish(store, [claimed], Died("for good"))
    return new.id


async def test_a_dead_job_is_not_replayed_while_another_holds_its_key(store: Store) -> None:
    dead = await die(store, Unique("a"))
    holder, _, _ = await enqueue(store, Unique("a"))
    for state in (State.READY, State.RUNNING):
        assert await state_of(store, holder.id) is state
        for dry_run in (True, False):
            (handled,) = await store.replay([dead], dry_run=dry_run)
            assert (handled.was, handled.holder) == (State.DEAD, holder.id)
            assert handled.skipped == f"job {holder.id} holds its unique key"
        assert await state_of(store, dead) is State.DEAD
        await claim(store, "webhooks", 5)


async def test_a_replayed_job_holds_its_key_again(store: Store) -> None:
    dead = await die(store, Unique("a"))
    between, _, _ = await enqueue(store, Unique("a"))
    await finish(store, await claim(store, "webhooks", 1))
    (handled,) = await store.replay([dead])
    assert (handled.skipped, handled.holder) == (None, None)
    assert (await enqueue(store, Unique("a")))[1:] == (Outcome.DUPLICATE, dead)
    assert ids(await claim(store, "webhooks", 5)) == [dead]
    assert await state_of(store, between.id) is State.DONE


async def test_of_dead_jobs_of_one_key_a_replay_brings_one_back(store: Store) -> None:
    dead = [await die(store, Unique("a")) for _ in range(3)]
    handled = await store.replay(dead[::-1])
    assert {each.job: each.holder for each in handled} == {dead[0]: None, dead[1]: dead[0], dead[2]: dead[0]}
    assert ids(await claim(store, "webhooks", 5)) == [dead[0]]


async def test_a_replay_may_replace_a_holder_that_waits_and_never_one_that_runs(store: Store) -> None:
    dead = await die(store, Unique("a"))
    holder, _, _ = await enqueue(store, Unique("a"))
    (foreseen,) = await store.replay([dead], on_conflict="replace", dry_run=True)
    note = Note(actor="ann", action="replay")
    (done,) = await store.replay([dead], note=note, on_conflict="replace")
    (entry,) = await store.run(records.audit())
    assert f'"{holder.id}":"cancelled for {dead}"' in f"{entry.before}{entry.after}"
    assert [(each.skipped, each.replaced) for each in (foreseen, done)] == [(None, holder.id)] * 2
    record = await store.job(holder.id)
    assert (record.state, record.error) == (State.CANCELLED, f"replaced by job {dead}")
    (running,) = await claim(store, "webhooks", 5)
    assert running.id == dead
    (handled,) = await store.replay([holder.id], on_conflict="replace")
    assert (handled.holder, await state_of(store, holder.id)) == (dead, State.CANCELLED)


async def test_a_replayed_job_holds_a_key_until_it_has_started_once_more(store: Store) -> None:
    until_started = Unique("a", until="started")
    dead = await die(store, until_started)
    waiting, _, _ = await enqueue(store, until_started)
    assert [each.holder for each in await store.replay([dead])] == [waiting.id]
    await claim(store, "webhooks", 1)
    assert [each.holder for each in await store.replay([dead])] == [None]
    assert (await enqueue(store, until_started))[1:] == (Outcome.DUPLICATE, dead)
    await claim(store, "webhooks", 1)
    assert (await enqueue(store, until_started))[1] is Outcome.ENQUEUED


async def test_a_window_is_counted_from_the_enqueue_and_no_replay_begins_it_again(
    store: Store, clock: ManualClock
) -> None:
    window = Unique("a", window=10)
    dead = await die(store, window)
    clock.advance("6s")
    assert [each.skipped for each in await store.replay([dead])] == [None]
    assert (await enqueue(store, window))[1:] == (Outcome.DUPLICATE, dead)
    clock.advance("3.999999s")
    assert (await enqueue(store, window))[1:] == (Outcome.DUPLICATE, dead)
    clock.advance("0.000001s")
    assert (await enqueue(store, window))[1] is Outcome.ENQUEUED


async def test_a_job_is_not_replayed_beside_a_live_one_of_its_window(store: Store, clock: ManualClock) -> None:
    window = Unique("a", window=10)
    dead = await die(store, window)
    clock.advance("10s")
    live, outcome, _ = await enqueue(store, window)
    assert outcome is Outcome.ENQUEUED
    for _ in range(2):
        assert [each.holder for each in await store.replay([dead])] == [live.id]
        clock.advance("10s")
    await finish(store, await claim(store, "webhooks", 5))
    assert [each.holder for each in await store.replay([dead])] == [None]


async def test_what_is_known_of_a_jobs_key_goes_with_the_job(store: Store, clock: ManualClock) -> None:
    purged, pruned = [await die(store, Unique(key)) for key in "ab"]
    await store.run(operators.purge([purged]))
    clock.advance("1s")
    await store.prune(Retention(done=0, dead=0))
    for gone, key in ((purged, "a"), (pruned, "b")):
        again = job(Unique(key))
        assert await store.enqueue([NewJob(**{**_fields(again), "id": gone})]) == {}


def _fields(job: NewJob) -> dict[str, Any]:
    return {name: getattr(job, name) for name in job.__struct_fields__}


async def test_two_operators_replay_one_job_of_a_key(shared_database: Database) -> None:
    stores = [await shared_database.open() for _ in range(2)]
    await stores[0].declare(PLAIN)
    dead = [await die(stores[0], Unique("a")) for _ in range(8)]
    await soon(asyncio.gather(*(stores[n % 2].replay([each]) for n, each in enumerate(dead))))
    states = Counter([await state_of(stores[0], each) for each in dead])
    assert states == {State.DEAD: 7, State.READY: 1}


class Action(NamedTuple):
    """Something that happens to jobs with unique keys."""

    what: str
    key: int
    which: int
    on_conflict: Any


actions = st.builds(
    Action,
    what=st.sampled_from(
        [*("enqueue", "claim", "die", "replay") * 2, "later", "done", "fail", "hurry", "force", "cancel", "wait"]
    ),
    key=st.integers(0, 1),
    which=st.integers(0, 9),
    on_conflict=st.sampled_from(["reject", "replace"]),
)


def test_a_job_that_is_replaced_by_another_of_the_same_replay_stays_cancelled(place: Database) -> None:
    life = [Action(what, 0, 0, "replace") for what in ("enqueue", "cancel", "enqueue", "replay")]
    with asyncio.Runner() as loop:
        loop.run(_live(place, life))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(life=st.lists(actions, min_size=6, max_size=30))
def test_whatever_happens_a_unique_key_has_at_most_one_live_job(place: Database, life: list[Action]) -> None:
    """E10: through enqueues, retries, deaths, replays, hurries, forced starts and cancels."""
    with asyncio.Runner() as loop:
        loop.run(_live(place, life))


async def _live(place: Database, life: list[Action]) -> None:
    clock = ManualClock()
    store = await place.open(clock)
    try:
        policy = Policy(f"q{uuid4().hex}")
        await store.declare(policy)
        known: dict[UUID, int] = {}
        running: list[Any] = []
        for action in life:
            chosen = [each for n, each in enumerate(known) if n % 10 == action.which]
            match action.what:
                case "enqueue" | "later":
                    unique = Unique(f"{policy.queue}/{action.key}", on_conflict="reject")
                    new = job(unique, queue=policy, delay=SECOND if action.what == "later" else None)
                    if not await store.enqueue([new]):
                        known[new.id] = action.key
                case "claim":
                    running += await claim(store, policy.queue, 1)
                case "done" | "fail" | "die" if running:
                    end = {"fail": Failed("no", SECOND), "die": Died("no")}.get(action.what)
                    await finish(store, [running.pop(0)], end)  # type: ignore[arg-type]
                case "replay":
                    await store.replay(list(known) if action.which < 5 else chosen, on_conflict=action.on_conflict)
                case "hurry":
                    await store.run(operators.retry_now(chosen))
                case "force":
                    await store.run(operators.force(chosen, NOTE))
                case "cancel" if chosen:
                    await store.cancel(chosen[0])
                case "wait":
                    clock.advance("1s")
            live = Counter([key for each, key in known.items() if not (await state_of(store, each)).is_final])
            assert max(live.values(), default=0) <= 1, f"{live} after {action}"
    finally:
        await place.close()


# F14
@pytest.mark.parametrize(
    "words", [("replace",) * 3, ("replace", "return", "replace"), ("replace", "reject", "replace")]
)
async def test_every_job_of_a_bulk_is_told_of_one_that_is_stored(store: Store, words: tuple[Any, ...]) -> None:
    bulk = [job(Unique("a", on_conflict=word), payload=b"%d" % n) for n, word in enumerate(words)]
    conflicts = await store.enqueue(bulk)
    last = bulk[-1].id
    assert conflicts[bulk[0].id].outcome is Outcome.DUPLICATE
    assert {conflicts[each.id].holder for each in bulk[:2]} == {last}
    assert ids(await claim(store, "webhooks", 5)) == [last]


# F10
@pytest.mark.parametrize("how", ["one", "bulk", "sql"])
async def test_a_window_on_postgres_is_counted_from_the_jobs_own_enqueue(
    postgres_url: str, connection: asyncpg.Connection[Any], how: str
) -> None:
    store = PostgresStore(postgres_url)
    await store.open()
    try:
        await store.declare(PLAIN)
        if how == "sql":
            await connection.execute(
                "select fairlane.enqueue('deliver', '[]', queue => 'webhooks', unique_key => '\"a\"', "
                "unique_window => '10 seconds')"
            )
        else:
            await store.enqueue([job(Unique(n, window=10)) for n in range(1 if how == "one" else 300)])
        windows = await connection.fetch(
            "select distinct u.expires_at - j.enqueued_at from fairlane.uniques u join fairlane.jobs j on j.id = u.job"
        )
        assert [row[0] for row in windows] == [10 * SECOND]
    finally:
        await store.close()
