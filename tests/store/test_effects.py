"""Effects: follow-up jobs and values land with the settlement, or not at all."""

from __future__ import annotations

from uuid import UUID

import msgspec
import pytest

from fairlane.clock import ManualClock
from fairlane.errors import DuplicateJob
from fairlane.job import Claim, NewJob, StampedEffects, State
from fairlane.policy import Policy
from fairlane.policy.unique import Unique, unique_key
from fairlane.scheduler.settlement import Done, Failed, Settlement, settle
from fairlane.store.protocol import Store
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

PLAIN = Policy("webhooks")
OTHER = Policy("email")


@pytest.fixture
async def store(database: Database, clock: ManualClock) -> Store:
    opened = await database.open(clock)
    await opened.declare(PLAIN)
    await opened.declare(OTHER)
    return opened


def done(held: Claim, *jobs: NewJob, put: dict[str, bytes] | None = None, delete: tuple[str, ...] = ()) -> Settlement:
    return settle(held, Done(b"1", StampedEffects(jobs, put or {}, delete)), 1_000)


async def held_claim(store: Store) -> Claim:
    await given_jobs(store, PLAIN)
    (held,) = await claim(store, "webhooks")
    return held


# L16
async def test_follow_ups_and_values_land_with_the_ack(store: Store) -> None:
    await store.put_value("old", b"0")
    held = await held_claim(store)
    now, later = new_jobs(OTHER)[0], new_jobs(OTHER, delay=MINUTE, priority=5)[0]
    assert await store.settle([done(held, now, later, put={"new": b"1"}, delete=("old",))]) == []
    assert await state_of(store, held.id) is State.DONE
    assert (await store.job(held.id)).result == b"1"
    assert ids(await claim(store, "email", 5)) == [now.id]
    assert await state_of(store, later.id) is State.SCHEDULED
    assert (await store.job(later.id)).priority == 5
    assert await store.get_value("new") == b"1"
    assert await store.get_value("old") is None


# L01, L16
async def test_a_late_ack_applies_none_of_its_effects(store: Store, clock: ManualClock) -> None:
    held = await held_claim(store)
    clock.advance(2 * LEASE.total_seconds())
    await store.reap()
    (follow_up,) = new_jobs(OTHER)
    assert await store.settle([done(held, follow_up, put={"new": b"1"})]) == [held.id]
    assert await claim(store, "email", 5) == []
    assert await store.get_value("new") is None


async def test_a_duplicate_follow_up_is_not_fatal(store: Store) -> None:
    held = await held_claim(store)
    (first,) = _unique(OTHER, "a")
    await store.enqueue([first])
    again, other = _unique(OTHER, "a", "b")
    assert await store.settle([done(held, again, other, put={"new": b"1"})]) == []
    assert await state_of(store, held.id) is State.DONE
    assert ids(await claim(store, "email", 5)) == [first.id, other.id]
    assert await store.get_value("new") == b"1"


async def test_a_duplicate_id_aborts_all_of_its_own_settlement_and_nothing_else(store: Store) -> None:
    await given_jobs(store, PLAIN, count=2)
    refused, fine = await claim(store, "webhooks", 2)
    (taken,) = new_jobs(OTHER)
    await store.enqueue([taken])
    with pytest.raises(DuplicateJob):
        await store.settle([done(refused, *new_jobs(OTHER), taken, put={"new": b"1"})])
    assert await state_of(store, refused.id) is State.RUNNING
    assert await store.get_value("new") is None
    assert ids(await claim(store, "email", 5)) == [taken.id]
    # It is still held, and can end in another way.
    await finish(store, [refused], Failed("its effects were refused", 0))
    assert await store.settle([done(fine, put={"fine": b"1"})]) == []
    assert await store.get_value("fine") == b"1"


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
    assert await store.get_value("fine") == b"1"


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
