"""Leases: held, renewed, run out; and what the reaper makes of a worker that is gone."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from uuid import UUID, uuid4

import pytest

from fairlane.clock import ManualClock, microseconds
from fairlane.job import State
from fairlane.policy import Concurrency, Fair, Policy
from fairlane.scheduler.settlement import SEEN, Done, Failed, Lost, Released, settle
from fairlane.store import records
from fairlane.store.protocol import Store
from tests.store.harness import (
    LEASE,
    SECOND,
    WORKER,
    Database,
    assert_at_rest,
    claim,
    claim_once,
    finish,
    given_jobs,
    ids,
    state_of,
    worker_named,
)

PLAIN = Policy("webhooks")


@pytest.fixture
async def queue(store: Store) -> str:
    await store.declare(PLAIN)
    return PLAIN.queue


# L03
async def test_renewing_a_lease_does_not_invalidate_the_claims_in_hand(
    store: Store, clock: ManualClock, queue: str
) -> None:
    await given_jobs(store, PLAIN, count=3)
    claims = await claim(store, queue, 3)
    for _ in range(3):
        clock.advance("10s")
        renewed = await store.renew([claims[0].lease], LEASE)
        assert (renewed.gone, renewed.cancelled) == ([], [])
    assert sorted(await store.run(records.held([(each.id, each.lease) for each in claims]))) == sorted(ids(claims))
    await finish(store, claims)


# L24
async def test_claims_of_a_worker_are_found_by_the_leases_that_it_does_not_know(store: Store, queue: str) -> None:
    await given_jobs(store, PLAIN, count=6)
    (known,) = await claim(store, queue, 1)
    unheard = await claim(store, queue, 3)
    await claim(store, queue, 1, worker=worker_named("another"))
    found = await store.claims_beside(WORKER.id, {known.lease})
    assert sorted(ids(found)) == sorted(ids(unheard))
    assert {each.lease for each in found} == {each.lease for each in unheard}
    assert await store.settle([settle(each, Released("nobody heard of it"), 0) for each in found]) == []
    assert await store.claims_beside(WORKER.id, {known.lease}) == []
    assert [(each.id, each.attempt) for each in await claim(store, queue, 3)] == [(each.id, 1) for each in unheard]
    await store.wake_another(queue, WORKER.id)


# L12
async def test_a_renewed_lease_runs_from_its_renewal(store: Store, clock: ManualClock, queue: str) -> None:
    await given_jobs(store, PLAIN)
    (held,) = await claim(store, queue, lease=timedelta(seconds=30))
    clock.advance("29s")
    await store.renew([held.lease], timedelta(seconds=60))
    clock.advance("59s")
    assert (await store.reap()).settled == []
    clock.advance("2s")
    assert [each.job for each in (await store.reap()).settled] == [held.id]


async def test_a_renewal_reports_the_leases_that_are_gone(store: Store, clock: ManualClock, queue: str) -> None:
    await given_jobs(store, PLAIN, count=2)
    (first,) = await claim(store, queue, lease=timedelta(seconds=10))
    (second,) = await claim(store, queue, lease=timedelta(seconds=90))
    clock.advance("20s")
    await store.reap()
    unknown = uuid4()
    renewed = await store.renew([first.lease, second.lease, unknown], LEASE)
    assert sorted(renewed.gone) == sorted([first.lease, unknown])


async def test_a_renewal_of_nothing_is_nothing(store: Store, queue: str) -> None:
    renewed = await store.renew([], LEASE)
    assert (renewed.gone, renewed.cancelled) == ([], [])


async def test_a_lease_stands_for_as_long_as_one_of_its_claims_does(
    store: Store, clock: ManualClock, queue: str
) -> None:
    await given_jobs(store, PLAIN, count=3)
    claims = await claim(store, queue, 3)
    assert len({each.lease for each in claims}) == 1
    await finish(store, claims[:2])
    assert (await store.renew([claims[2].lease], LEASE)).gone == []
    clock.advance("31s")
    assert [each.job for each in (await store.reap()).settled] == [claims[2].id]
    assert [await state_of(store, each.id) for each in claims] == [State.DONE, State.DONE, State.READY]


# promise 3
async def test_a_settlement_after_the_leases_end_but_before_the_reaper_came_is_valid(
    store: Store, clock: ManualClock, queue: str
) -> None:
    (job,) = await given_jobs(store, PLAIN)
    (held,) = await claim(store, queue)
    clock.advance("1h")
    assert await store.settle([settle(held, Done(b"1"), 5)]) == []
    assert (await store.reap()).settled == []
    assert (await store.job(job)).state is State.DONE


# promise 3
async def test_a_renewal_after_the_leases_end_but_before_the_reaper_came_is_valid(
    store: Store, clock: ManualClock, queue: str
) -> None:
    await given_jobs(store, PLAIN)
    (held,) = await claim(store, queue)
    clock.advance("1h")
    assert (await store.renew([held.lease], LEASE)).gone == []
    assert (await store.reap()).settled == []
    await finish(store, [held])


# L18
async def test_what_a_dead_worker_held_is_claimed_again_once_its_lease_has_ended(
    store: Store, clock: ManualClock
) -> None:
    policy = Policy("webhooks", fair=Fair(by="account"), limits=(Concurrency(2, by="account"),))
    await store.declare(policy)
    jobs = [job for account in "abc" for job in await given_jobs(store, policy, {"account": account}, 2)]
    held = await claim(store, "webhooks", 10, worker=worker_named("killed"))
    assert sorted(ids(held)) == sorted(jobs)
    clock.set(clock.now() + microseconds(LEASE) - 1)
    assert (await store.reap()).settled == []
    clock.set(clock.now() + 2)
    assert sorted(each.job for each in (await store.reap()).settled) == sorted(jobs)
    again = await claim(store, "webhooks", 10, worker=worker_named("next"))
    assert sorted(ids(again)) == sorted(jobs)
    assert {(each.attempt, each.is_suspect) for each in again} == {(1, False)}
    await finish(store, again)
    await assert_at_rest(store, policy, clock, [{"account": account} for account in "abc"])


# L18
async def test_the_reaper_leaves_other_leases_alone(store: Store, clock: ManualClock, queue: str) -> None:
    await given_jobs(store, PLAIN, count=4)
    short = await claim(store, queue, 2, lease=timedelta(seconds=10))
    long = await claim(store, queue, 2, lease=timedelta(seconds=60))
    clock.advance("11s")
    assert sorted(each.job for each in (await store.reap()).settled) == sorted(ids(short))
    await finish(store, long)


# L18
async def test_the_reaper_takes_a_bounded_number_and_comes_back_for_the_rest(
    store: Store, clock: ManualClock, queue: str
) -> None:
    jobs = await given_jobs(store, PLAIN, count=10)
    for _ in range(5):
        await claim(store, queue, 2)
    clock.advance("31s")
    reaped: list[UUID] = []
    for _ in range(20):
        settled = (await store.reap(limit=4)).settled
        reaped += [each.job for each in settled]
        if not settled:
            break
    assert sorted(reaped) == sorted(jobs)
    assert ids(await claim(store, queue, 10)) == jobs


# L18
async def test_many_reapers_at_once_reap_each_claim_once(database: Database, clock: ManualClock) -> None:
    stores = [await database.open(clock) for _ in range(4)]
    await stores[0].declare(PLAIN)
    jobs = await given_jobs(stores[0], PLAIN, count=40)
    for _ in range(8):
        await claim(stores[0], "webhooks", 5)
    clock.advance("31s")
    reaped = await asyncio.gather(*(store.reap() for store in stores))
    assert sorted(each.job for some in reaped for each in some.settled) == sorted(jobs)
    assert [len(await stores[0].run(records.attempts(job))) for job in jobs[:3]] == [1, 1, 1]


# L18, C10
async def test_the_reaper_says_when_the_next_lease_runs_out(store: Store, clock: ManualClock, queue: str) -> None:
    assert (await store.reap()).next_due is None
    await given_jobs(store, PLAIN, count=2)
    await claim(store, queue, lease=timedelta(seconds=40))
    await claim(store, queue, lease=timedelta(seconds=20))
    assert (await store.reap()).next_due == clock.now() + 20 * SECOND
    clock.advance("21s")
    assert (await store.reap()).next_due == clock.now() + 19 * SECOND


# promise 6
async def test_a_job_that_kills_its_worker_dies_in_the_end(store: Store, clock: ManualClock) -> None:
    policy = Policy("webhooks", limits=(Concurrency(1, by="account"),))
    await store.declare(policy)
    (job,) = await given_jobs(store, policy, {"account": "acme"}, max_attempts=3)
    # L23: twice it may have been anybody else; then it runs alone, and each loss that nobody saw is an attempt.
    victims = {1: (1, False), 2: (1, False), 3: (1, True), 4: (2, True), 5: (3, True)}
    for victim, expected in victims.items():
        (held,) = await claim(store, "webhooks", worker=worker_named(f"victim {victim}"))
        assert (held.attempt, held.is_suspect) == expected
        clock.advance("31s")
        (lost,) = (await store.reap()).settled
        assert (lost.job, lost.lease, lost.outcome) == (job, held.lease, "lost")
        assert lost.to is (State.DEAD if victim == 5 else State.READY)
    record = await store.job(job)
    assert (record.state, record.attempt, record.finished_at) == (State.DEAD, 3, clock.now())
    assert record.error
    history = await store.run(records.attempts(job))
    assert [(each.attempt, each.worker, each.outcome) for each in history] == [
        (attempt, f"victim {victim}", "lost") for victim, (attempt, _) in victims.items()
    ]
    await assert_at_rest(store, policy, clock, [{"account": "acme"}])


# L20
async def test_claim_tokens_never_repeat(store: Store, queue: str) -> None:
    await given_jobs(store, PLAIN, count=200)
    leases = [(await claim_once(store, queue, 1)).lease for _ in range(150)]
    for _ in range(50):  # the same job, over and over
        (held,) = await claim(store, queue)
        leases.append(held.lease)
        await finish(store, [held], Released("drain"))
    assert len(set(leases)) == 200


# L20
async def test_two_databases_with_the_same_history_give_out_different_tokens() -> None:
    tokens = []
    for _ in range(2):
        database = Database("sqlite-memory", "")
        store = await database.open(ManualClock())
        await store.declare(PLAIN)
        await given_jobs(store, PLAIN)
        tokens += [(await claim(store, "webhooks"))[0].lease]
        await database.close()
    assert tokens[0] != tokens[1]


async def test_held_names_the_claims_that_still_stand(store: Store, clock: ManualClock, queue: str) -> None:
    await given_jobs(store, PLAIN, count=6)
    reaped = await claim(store, queue, 1, lease=timedelta(seconds=5))
    claims = await claim(store, queue, 5, lease=timedelta(minutes=5))
    clock.advance("6s")
    await store.reap()
    await finish(store, claims[:1])
    await finish(store, claims[1:2], Released("drain"))
    taken_over = await claim(store, queue, 2)
    assert set(ids(taken_over)) == {reaped[0].id, claims[1].id}
    asked = [(each.id, each.lease) for each in (*reaped, *claims)] + [(uuid4(), uuid4())]
    assert sorted(await store.run(records.held(asked))) == sorted(ids(claims[2:]))
    assert sorted(await store.run(records.held([(each.id, each.lease) for each in taken_over]))) == sorted(
        ids(taken_over)
    )
    assert await store.run(records.held([])) == []


# L23: it would wait behind the whole lane, each time anew.
async def test_a_suspect_that_is_given_back_for_a_while_keeps_its_place(
    store: Store, queue: str, clock: ManualClock
) -> None:
    await given_jobs(store, PLAIN, count=3)
    (first,) = await claim(store, queue, 1)
    await finish(store, [first], Lost("its process died", SEEN))
    (held,) = await claim(store, queue, 1)
    assert held.id == first.id
    await finish(store, [held], Released("its turn comes later", SECOND))
    clock.advance("1s")
    await given_jobs(store, PLAIN)
    (again,) = await claim(store, queue, 1)
    assert (again.id, again.is_suspect) == (first.id, True)
    assert len(await claim(store, queue, 10)) == 3


# L23, A17
async def test_a_suspect_that_is_given_back_remains_one_and_one_that_ends_is_cleared(
    store: Store, queue: str, clock: ManualClock
) -> None:
    await given_jobs(store, PLAIN)
    await finish(store, await claim(store, queue), Lost("its process died", SEEN))
    (held,) = await claim(store, queue)
    await finish(store, [held], Released("its turn comes later", SECOND))
    clock.advance("1s")
    (held,) = await claim(store, queue)
    assert held.is_suspect
    await finish(store, [held], Failed("boom", 0))
    (held,) = await claim(store, queue)
    assert (held.attempt, held.is_suspect) == (2, False)
