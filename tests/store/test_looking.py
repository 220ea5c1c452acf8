"""Looking at a queue: it counts what could start, starts nothing, and leaves its listener registered or withdrawn."""

from __future__ import annotations

import asyncio

import pytest

from fairlane.clock import ManualClock
from fairlane.errors import UnknownQueue
from fairlane.policy import Concurrency, Fair, Policy, Rate
from fairlane.store.protocol import Listener, Looked, Store, WorkerIdentity
from tests.store.harness import SECOND, Database, claim, finish, given_jobs, ids, soon, worker_named

PLAIN = Policy("webhooks")
EAR = worker_named("alive_lock")


async def look(store: Store, listener: Listener, want: int, worker: WorkerIdentity = EAR) -> Looked:
    """A look that need not be repeated."""
    while True:
        looked = await store.look("webhooks", want, worker=worker, listener=listener)
        if not looked.look_again:
            return looked


async def test_a_look_counts_what_could_start_and_starts_nothing(store: Store) -> None:
    policy = Policy("webhooks", Fair(by="account"), (Concurrency(2, by="account"),))
    await store.declare(policy)
    jobs = await given_jobs(store, policy, {"account": "a"}, 5) + await given_jobs(store, policy, {"account": "b"})
    listener = await store.listen(EAR)
    try:
        assert [(await look(store, listener, want)).claimable for want in (1, 2, 10)] == [1, 2, 3]
        assert (await store.counts("webhooks")).running == 0
        claims = await claim(store, "webhooks", 10)
        assert sorted(ids(claims)) == sorted([*jobs[:2], jobs[5]])
        assert [each.attempt for each in claims] == [1, 1, 1]
        assert (await look(store, listener, 10)).claimable == 0
    finally:
        await listener.close()


async def test_a_look_takes_no_token(store: Store, clock: ManualClock) -> None:
    policy = Policy("webhooks", limits=(Rate(2, per="1h"),))
    await store.declare(policy)
    await given_jobs(store, policy, count=5)
    listener = await store.listen(EAR)
    try:
        for _ in range(3):
            assert (await look(store, listener, 5)).claimable == 2
        assert len(await claim(store, "webhooks", 5)) == 2
        looked = await look(store, listener, 5)
        assert (looked.claimable, looked.now) == (0, clock.now())
        assert looked.next_due is not None
    finally:
        await listener.close()


async def test_a_look_tells_when_a_job_is_due_and_counts_it_then(store: Store, clock: ManualClock) -> None:
    await store.declare(PLAIN)
    (job,) = await given_jobs(store, PLAIN, delay=10 * SECOND)
    listener = await store.listen(EAR)
    try:
        looked = await look(store, listener, 1)
        assert (looked.claimable, looked.next_due) == (0, clock.now() + 10 * SECOND)
        clock.advance("10s")
        assert (await look(store, listener, 1)).claimable == 1
        assert ids(await claim(store, "webhooks")) == [job]
    finally:
        await listener.close()


async def test_a_look_that_finds_too_little_registers_its_listener(store: Store) -> None:
    await store.declare(PLAIN)
    listener = await store.listen(EAR)
    try:
        assert (await look(store, listener, 1)).claimable == 0
        await given_jobs(store, PLAIN)
        assert await soon(listener.wait(None)) is True
        await finish(store, await claim(store, "webhooks"))
    finally:
        await listener.close()


async def test_a_look_for_nothing_withdraws_and_wakes_another(database: Database, clock: ManualClock) -> None:
    stores = [await database.open(clock) for _ in range(2)]
    await stores[0].declare(PLAIN)
    workers = [worker_named("leaving"), worker_named("staying")]
    listeners = [await store.listen(worker) for store, worker in zip(stores, workers, strict=True)]
    try:
        for store, worker, listener in zip(stores, workers, listeners, strict=True):
            await look(store, listener, 1, worker)
        staying = asyncio.ensure_future(listeners[1].wait(None))
        assert (await look(stores[0], listeners[0], 0, workers[0])).claimable == 0
        assert await soon(staying) is True
        await look(stores[1], listeners[1], 1, workers[1])
        for _ in range(5):
            # With one registration left, every job is told to the one who stays.
            staying = asyncio.ensure_future(listeners[1].wait(None))
            await given_jobs(stores[0], PLAIN)
            assert await soon(staying) is True
            await finish(stores[1], await claim(stores[1], "webhooks"))
            await look(stores[1], listeners[1], 1, workers[1])
    finally:
        for listener in listeners:
            await listener.close()


async def test_a_look_at_an_unknown_queue_says_so(store: Store) -> None:
    listener = await store.listen(EAR)
    try:
        with pytest.raises(UnknownQueue):
            await store.look("nowhere", 1, worker=EAR, listener=listener)
    finally:
        await listener.close()
