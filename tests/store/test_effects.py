"""Effects: follow-up jobs and values land with the settlement, or not at all."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Any
from uuid import UUID

import msgspec
import pytest

from fairlane import App, Effects, HeldClaim, Queue, context
from fairlane.clock import ManualClock
from fairlane.effects import landed_of
from fairlane.errors import DuplicateJob
from fairlane.job import BuiltEffects, Claim, Landed, NewJob, Outcome, State
from fairlane.policy import Policy
from fairlane.policy.unique import Conflict, OnConflict, Unique, unique_key
from fairlane.scheduler.settlement import Done, Failed, Settlement, settle
from fairlane.store import records
from fairlane.store.protocol import Landings, Store
from tests.store.by_hand import url_of
from tests.store.harness import (
    LEASE,
    MINUTE,
    Database,
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
from tests.worker.harness import working

PLAIN = Policy("webhooks")
OTHER = Policy("email")


@pytest.fixture
async def store(database: Database, clock: ManualClock) -> Store:
    opened = await database.open(clock)
    await opened.declare(PLAIN)
    await opened.declare(OTHER)
    return opened


def done(held: Claim, *jobs: NewJob, put: dict[str, bytes] | None = None, delete: tuple[str, ...] = ()) -> Settlement:
    return settle(held, Done(b"1", BuiltEffects(jobs, put or {}, delete)), 1_000)


async def held_claim(store: Store) -> Claim:
    await given_jobs(store, PLAIN)
    (held,) = await claim(store, "webhooks")
    return held


# L16
async def test_follow_ups_and_values_land_with_the_ack(store: Store) -> None:
    await store.run(records.put_value("old", b"0"))
    held = await held_claim(store)
    now, later = new_jobs(OTHER)[0], new_jobs(OTHER, delay=MINUTE, priority=5)[0]
    assert await store.settle([done(held, now, later, put={"new": b"1"}, delete=("old",))]) == []
    assert await state_of(store, held.id) is State.DONE
    assert (await store.job(held.id)).result == b"1"
    assert ids(await claim(store, "email", 5)) == [now.id]
    assert await state_of(store, later.id) is State.SCHEDULED
    assert (await store.job(later.id)).priority == 5
    assert await store.run(records.get_value("new")) == b"1"
    assert await store.run(records.get_value("old")) is None


# L01, L16
async def test_a_late_ack_applies_none_of_its_effects(store: Store, clock: ManualClock) -> None:
    held = await held_claim(store)
    clock.advance(2 * LEASE.total_seconds())
    await store.reap()
    (follow_up,) = new_jobs(OTHER)
    assert await store.settle([done(held, follow_up, put={"new": b"1"})]) == [held.id]
    assert await claim(store, "email", 5) == []
    assert await store.run(records.get_value("new")) is None


async def test_a_duplicate_follow_up_is_not_fatal(store: Store) -> None:
    held = await held_claim(store)
    (first,) = _unique(OTHER, "a")
    await store.enqueue([first])
    again, other = _unique(OTHER, "a", "b")
    assert await store.settle([done(held, again, other, put={"new": b"1"})]) == []
    assert await state_of(store, held.id) is State.DONE
    assert ids(await claim(store, "email", 5)) == [first.id, other.id]
    assert await store.run(records.get_value("new")) == b"1"


async def test_a_duplicate_id_aborts_all_of_its_own_settlement_and_nothing_else(store: Store) -> None:
    await given_jobs(store, PLAIN, count=2)
    refused, fine = await claim(store, "webhooks", 2)
    (taken,) = new_jobs(OTHER)
    await store.enqueue([taken])
    with pytest.raises(DuplicateJob):
        await store.settle([done(refused, *new_jobs(OTHER), taken, put={"new": b"1"})])
    assert await state_of(store, refused.id) is State.RUNNING
    assert await store.run(records.get_value("new")) is None
    assert ids(await claim(store, "email", 5)) == [taken.id]
    # It is still held, and can end in another way.
    await finish(store, [refused], Failed("its effects were refused", 0))
    assert await store.settle([done(fine, put={"fine": b"1"})]) == []
    assert await store.run(records.get_value("fine")) == b"1"


async def test_of_a_batch_that_was_refused_each_can_be_settled_alone(store: Store) -> None:
    # A store may have recorded some of them, or none; whoever settles them again does not lose them.
    await given_jobs(store, PLAIN, count=3)
    refused, plain, fine = await claim(store, "webhooks", 3)
    (taken,) = new_jobs(OTHER)
    await store.enqueue([taken])
    bad, *good = done(refused, taken), settle(plain, Done(b"1"), 0), done(fine, put={"fine": b"1"})
    with pytest.raises(DuplicateJob):
        await store.settle([bad, *good])
    for each in good:
        assert await store.settle([each], is_repeated=True) == []
    with pytest.raises(DuplicateJob):
        await store.settle([bad], is_repeated=True)
    assert [await state_of(store, each.id) for each in (refused, plain, fine)] == [
        State.RUNNING,
        State.DONE,
        State.DONE,
    ]
    assert await store.run(records.get_value("fine")) == b"1"


async def test_settlements_with_and_without_effects_go_together(store: Store) -> None:
    await given_jobs(store, PLAIN, count=3)
    first, second, third = await claim(store, "webhooks", 3)
    (follow_up,) = new_jobs(OTHER)
    gone = settle(msgspec.structs.replace(third, lease=UUID(int=7)), Done(None), 0)
    lost = await store.settle([settle(first, Done(b"1"), 0), done(second, follow_up), gone])
    assert lost == [third.id]
    assert await state_of(store, first.id) is State.DONE
    assert ids(await claim(store, "email", 5)) == [follow_up.id]


# C09
async def test_a_follow_up_wakes_whoever_waits_for_it(shared_database: Database) -> None:
    store, waiting = [await shared_database.open() for _ in range(2)]
    await store.declare(PLAIN)
    await store.declare(OTHER)
    worker = worker_named("waiting")
    listener = await waiting.listen(worker)
    await hear(waiting, "email", listener, worker=worker)
    held = await held_claim(store)
    (follow_up,) = new_jobs(OTHER)
    await store.settle([done(held, follow_up)])
    assert await soon(listener.wait(None)) is True
    assert ids(await claim(waiting, "email", worker=worker)) == [follow_up.id]
    await listener.close()


def _unique(policy: Policy, *keys: str) -> list[NewJob]:
    return [
        msgspec.structs.replace(job, unique=unique_key(Unique(key), job.task, (), {}, job.payload))
        for key in keys
        for job in new_jobs(policy)
    ]


# E11
WORDS: list[tuple[OnConflict, Outcome]] = [
    ("return", Outcome.DUPLICATE),
    ("reject", Outcome.REFUSED),
    ("replace", Outcome.REPLACED),
]


def unique(job: NewJob, on_conflict: OnConflict) -> NewJob:
    key = unique_key(Unique("a", on_conflict=on_conflict), job.task, (), {}, job.payload)
    return msgspec.structs.replace(job, unique=key)


@pytest.mark.parametrize(("on_conflict", "outcome"), WORDS)
async def test_whoever_settles_hears_what_became_of_each_follow_up(
    store: Store, on_conflict: OnConflict, outcome: Outcome
) -> None:
    held = await held_claim(store)
    holder, other = unique(new_jobs(OTHER)[0], "return"), new_jobs(OTHER)[0]
    await store.enqueue([holder])
    follow_up = unique(new_jobs(OTHER)[0], on_conflict)
    landed: Landings = {}
    assert await store.settle([done(held, follow_up, other)], landed=landed) == []
    assert landed == {held.id: {follow_up.id: Conflict(outcome, holder.id)}}
    assert await state_of(store, held.id) is State.DONE
    assert await state_of(store, other.id) is State.READY


async def test_what_nobody_holds_and_what_is_lost_is_heard_too(store: Store) -> None:
    held = await held_claim(store)
    landed: Landings = {}
    await store.settle([done(held, put={"a": b"1"})], landed=landed)
    assert landed == {held.id: {}}
    again: Landings = {}
    assert await store.settle([done(held, new_jobs(OTHER)[0])], landed=again) == [held.id]
    assert await store.settle([done(held, new_jobs(OTHER)[0])], landed=again, is_repeated=True) in ([], [held.id])
    assert again == {}


async def test_of_follow_ups_that_replace_each_other_the_last_is_stored_and_stands_for_all(store: Store) -> None:
    """E11, F14: in one settlement as in one bulk."""
    held = await held_claim(store)
    holder = unique(new_jobs(OTHER)[0], "return")
    await store.enqueue([holder])
    first, second, last = (unique(job, "replace") for job in new_jobs(OTHER, count=3))
    settlement = done(held, first, second, last)
    landed: Landings = {}
    assert await store.settle([settlement], landed=landed) == []
    found = landed_of(settlement.effects, landed[held.id])
    assert [each.outcome for each in found.enqueue] == [Outcome.DUPLICATE, Outcome.DUPLICATE, Outcome.REPLACED]
    assert {each.job for each in found.enqueue} == {last.id}
    assert await state_of(store, holder.id) is State.CANCELLED
    assert await state_of(store, last.id) is State.READY


@pytest.mark.parametrize("how", ["by itself", "in a transaction"])
async def test_an_ack_by_hand_reports_its_effects(
    shared_database: Database, clock: ManualClock, stack: AsyncExitStack, how: str
) -> None:
    """E11."""
    app = await stack.enter_async_context(App(url_of(shared_database), clock=clock))
    queue = app.queue("webhooks")

    @app.task(queue="webhooks")
    async def work(number: int) -> None: ...

    await work.enqueue(1)
    (held,) = await queue.claim(1)
    assert (await (await _another(work, queue)).ack()) == Landed()
    holder = await work.using(unique=Unique("a")).enqueue(2)
    calls = [
        work.call(3),
        *(work.using(unique=Unique("a", on_conflict=word)).call(4) for word in ("return", "reject", "replace")),
    ]
    effects = Effects(enqueue=calls, put={"x": 1}, delete=["y"])
    if how == "by itself":
        landed = await held.ack(effects=effects)
    else:
        async with shared_database.transaction() as open_one:
            landed = await held.ack(effects=effects, tx=open_one.tx)
            await open_one.commit()
    assert [each.outcome for each in landed.enqueue] == [
        Outcome.ENQUEUED,
        Outcome.DUPLICATE,
        Outcome.REFUSED,
        Outcome.REPLACED,
    ]
    assert landed.not_stored == landed.enqueue[1:3]
    assert [each.job for each in landed.not_stored] == [holder.id, holder.id]
    assert (landed.put, landed.delete) == (("x",), ("y",))
    assert [await app.job(landed.enqueue[n].job).status() for n in (0, 3)] == [State.READY] * 2
    assert await holder.status() is State.CANCELLED


async def _another(work: Any, queue: Queue) -> HeldClaim:
    await work.enqueue(0)
    (held,) = await queue.claim(1)
    return held


@pytest.mark.parametrize("ends", ["commit", "rollback"])
async def test_an_effect_that_a_handler_adds_after_its_ack_is_stored_or_reported(
    shared_database: Database, stack: AsyncExitStack, caplog: pytest.LogCaptureFixture, ends: str
) -> None:
    """E11: after a rollback the job ends with its handler, and they land with it; after a commit it has ended."""
    app = await stack.enter_async_context(App(url_of(shared_database)))

    @app.task
    async def charge() -> None:
        context().put("early", 1)
        async with shared_database.transaction() as open_one:
            await context().ack(tx=open_one.tx)
            await (open_one.commit() if ends == "commit" else open_one.rollback())
        context().put("late", 1)
        context().enqueue(charge.using(delay="1h").call())

    job = await charge.enqueue()
    async with working(app):
        await job.result()
    assert await app.values.get("early") == 1
    assert await app.values.get("late") == (None if ends == "commit" else 1)
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    lost = f"job {job.id}: 2 effects were not stored: they were added after the job was settled in a transaction"
    assert told == ([lost] if ends == "commit" else [])
