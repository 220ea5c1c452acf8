"""A breaker: one for the whole fleet, kept by the database, opening by time."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from datetime import timedelta

import pytest

from fairlane.clock import ManualClock
from fairlane.job import Claim
from fairlane.policy import Breaker, Fair, Policy
from fairlane.policy.gates import Reason
from fairlane.policy.overrides import Kind, Override
from fairlane.scheduler.explain import explain
from fairlane.scheduler.settlement import Cancelled, Done, Failed, Released, RunOutcome, Snoozed
from fairlane.store.audit import Note
from fairlane.store.protocol import Store
from tests.store.harness import (
    LEASE,
    MINUTE,
    SECOND,
    Database,
    by_key,
    claim,
    claim_once,
    finish,
    given_jobs,
    ids,
    new_jobs,
    worker_named,
)

ACME = {"account": "acme"}
NOTE = Note(actor="ada", action="test")
FAILED = Failed("boom", 3_600 * SECOND)
LIMIT = Breaker(3, cooldown="5m", by="account")
SCOPES = [(None, None), ("account", Fair(by="account")), ("account", None), ("task", None)]
LEVELS = ["queue", "flow", "lane", "task"]


def policy_of(limit: Breaker = LIMIT, fair: Fair | None = None) -> Policy:
    return Policy("webhooks", fair=fair, limits=(limit,), keys=("account",))


async def end(store: Store, clock: ManualClock, claims: Iterable[Claim], outcome: RunOutcome | None = None) -> None:
    """Settle claims a moment after they were made."""
    clock.advance(0.001)
    await finish(store, claims, outcome)
    clock.advance(0.001)


async def given_open(store: Store, clock: ManualClock, policy: Policy, count: int = 20) -> int:
    """A breaker that has just opened, with so many jobs before it; when it will let a probe pass."""
    await store.declare(policy)
    await given_jobs(store, policy, ACME, count + 3)
    await end(store, clock, await claim(store, "webhooks", 3), FAILED)
    opened_at = clock.now()
    brought = await claim_once(store, "webhooks", 50)
    assert brought.claims == []
    assert brought.next_due == opened_at + 5 * MINUTE
    return brought.next_due


# C10
@pytest.mark.parametrize(("by", "fair"), SCOPES, ids=LEVELS)
async def test_it_opens_after_failures_in_a_row_and_lets_a_probe_pass_when_its_cooldown_ends(
    store: Store, clock: ManualClock, by: str | None, fair: Fair | None
) -> None:
    opens = await given_open(store, clock, policy_of(Breaker(3, cooldown="5m", by=by), fair))
    clock.set(opens - 1)
    assert await claim(store, "webhooks", 50) == []
    clock.set(opens)
    probe = await claim(store, "webhooks", 50)
    assert len(probe) == 1
    assert await claim(store, "webhooks", 50) == []
    await end(store, clock, probe)
    assert len(await claim(store, "webhooks", 50)) == 19


async def test_a_probe_that_fails_opens_it_for_another_cooldown(store: Store, clock: ManualClock) -> None:
    opens = await given_open(store, clock, policy_of())
    for _ in range(3):
        clock.set(opens)
        probe = await claim(store, "webhooks", 50)
        await end(store, clock, probe, FAILED)
        brought = await claim_once(store, "webhooks", 50)
        assert (brought.claims, brought.next_due) == ([], clock.now() + 5 * MINUTE)
        opens = brought.next_due or 0


# L18
async def test_a_probe_whose_worker_dies_has_failed(store: Store, clock: ManualClock) -> None:
    clock.set(await given_open(store, clock, policy_of()))
    assert len(await claim(store, "webhooks", 50, lease=LEASE)) == 1
    clock.advance("31s")
    assert await claim(store, "webhooks", 50) == []
    assert len((await store.reap()).settled) == 1
    brought = await claim_once(store, "webhooks", 50)
    assert (brought.claims, brought.next_due) == ([], clock.now() + 5 * MINUTE)


async def test_workers_that_die_count_as_failures(store: Store, clock: ManualClock) -> None:
    policy = policy_of()
    await store.declare(policy)
    await given_jobs(store, policy, ACME, 20)
    await claim(store, "webhooks", 3, lease=LEASE)
    clock.advance("31s")
    assert len((await store.reap()).settled) == 3
    assert await claim(store, "webhooks", 50) == []


@pytest.mark.parametrize("outcome", [Snoozed("later", SECOND), Cancelled("stop"), Released("drain")], ids=type)
async def test_a_probe_that_says_nothing_makes_room_for_another(
    store: Store, clock: ManualClock, outcome: RunOutcome
) -> None:
    clock.set(await given_open(store, clock, policy_of()))
    for _ in range(3):
        probe = await claim(store, "webhooks", 50)
        assert len(probe) == 1
        await end(store, clock, probe, outcome)
    await end(store, clock, await claim(store, "webhooks", 50))
    assert len(await claim(store, "webhooks", 50)) > 10


@pytest.mark.parametrize("outcome", [Done(None), FAILED, Snoozed("later", MINUTE), Released("drain")], ids=type)
@pytest.mark.parametrize("is_probing", [False, True], ids=["open", "probing"])
async def test_what_was_claimed_before_it_opened_neither_closes_nor_extends_it(
    store: Store, clock: ManualClock, outcome: RunOutcome, is_probing: bool
) -> None:
    policy = policy_of()
    await store.declare(policy)
    await given_jobs(store, policy, ACME, 4)
    stragglers = await claim(store, "webhooks", 4, lease=timedelta(hours=1))
    clock.advance(0.001)
    opens = await given_open(store, clock, policy)
    probe: list[Claim] = []
    if is_probing:
        clock.set(opens)
        probe = await claim(store, "webhooks", 50)
        assert len(probe) == 1
    await end(store, clock, stragglers, outcome)
    assert await claim(store, "webhooks", 50) == []
    clock.set(max(opens, clock.now()))
    probe = probe or await claim(store, "webhooks", 50)
    assert len(probe) == 1
    await end(store, clock, probe)
    assert len(await claim(store, "webhooks", 50)) >= 19


async def test_failures_beside_good_runs_of_their_batch_are_no_row(store: Store, clock: ManualClock) -> None:
    policy = policy_of()
    await store.declare(policy)
    await given_jobs(store, policy, ACME, 60)
    for _ in range(3):
        claims = await claim(store, "webhooks", 10)
        clock.advance(0.001)
        await finish(store, claims[:5], FAILED)
        await finish(store, claims[5:])
        clock.advance(0.001)
    assert len(await claim(store, "webhooks", 50)) == 30


async def test_it_stops_its_key_alone(store: Store, clock: ManualClock) -> None:
    policy = policy_of()
    await given_open(store, clock, policy)
    await given_jobs(store, policy, {"account": "bolt"}, 5)
    assert by_key(await claim(store, "webhooks", 50)) == {"bolt": 5}


async def test_it_stops_a_task_and_leaves_the_others(store: Store, clock: ManualClock) -> None:
    policy = policy_of(Breaker(3, cooldown="5m", by="task"))
    await given_open(store, clock, policy)
    other = new_jobs(policy, ACME, 5, task="refund")
    await store.enqueue(other)
    assert ids(await claim(store, "webhooks", 50)) == [job.id for job in other]


# A09
async def test_one_probe_passes_among_all_stores_on_one_database(shared_database: Database, clock: ManualClock) -> None:
    stores = [await shared_database.open(clock) for _ in range(3)]
    clock.set(await given_open(stores[0], clock, policy_of()))
    claimers = [claim(store, "webhooks", 5, worker=worker_named(str(n))) for n, store in enumerate(stores * 3)]
    claims = [each for some in await asyncio.gather(*claimers) for each in some]
    assert len(claims) == 1
    await end(stores[1], clock, claims)
    assert len(await claim(stores[2], "webhooks", 50)) == 19


async def test_an_open_breaker_outlives_the_store(shared_database: Database, clock: ManualClock) -> None:
    opens = await given_open(await shared_database.open(clock), clock, policy_of())
    await shared_database.close()
    store = await shared_database.open(clock)
    assert (await claim_once(store, "webhooks", 50)).next_due == opens
    clock.set(opens)
    assert len(await claim(store, "webhooks", 50)) == 1
    await shared_database.close()
    assert await claim(await shared_database.open(clock), "webhooks", 50) == []


async def test_an_open_breaker_without_jobs_is_not_forgotten_for_a_day(store: Store, clock: ManualClock) -> None:
    policy = policy_of()
    await store.declare(policy)
    for after, room in (("23h", 1), ("25h", 10)):
        await given_jobs(store, policy, ACME, 3, max_attempts=1)
        while claims := await claim(store, "webhooks", 50):
            await end(store, clock, claims, FAILED)
        while rest := (await store.counts("webhooks")).ready:
            clock.advance("5m")
            await end(store, clock, await claim(store, "webhooks", rest), FAILED)
        await claim(store, "webhooks", 1)
        clock.advance(after)
        while (await store.collect("webhooks")).more:
            pass
        await given_jobs(store, policy, ACME, 10, max_attempts=1)
        claims = await claim(store, "webhooks", 50)
        assert len(claims) == room
        while claims:
            await end(store, clock, claims, Cancelled("over"))
            claims = await claim(store, "webhooks", 50)


async def test_a_changed_policy_leaves_it_open_but_for_no_longer_than_it_says(store: Store, clock: ManualClock) -> None:
    await given_open(store, clock, policy_of())
    await store.apply(policy_of(Breaker(9, cooldown="1m", probes=2, by="account")))
    brought = await claim_once(store, "webhooks", 50)
    assert (brought.claims, brought.next_due) == ([], clock.now() + MINUTE)
    clock.advance("1m")
    assert len(await claim(store, "webhooks", 50)) == 2


async def test_limits_that_are_suspended_let_jobs_pass_and_an_open_breaker_stays_open(
    store: Store, clock: ManualClock
) -> None:
    opens = await given_open(store, clock, policy_of())
    await store.change_overrides(["webhooks"], [Override(kind=Kind.SUSPEND)], [], NOTE)
    passed = await claim(store, "webhooks", 5)
    assert len(passed) == 5
    await end(store, clock, passed)
    await store.change_overrides(["webhooks"], [], [Override(kind=Kind.SUSPEND).id], NOTE)
    brought = await claim_once(store, "webhooks", 50)
    assert (brought.claims, brought.next_due) == ([], opens)


async def test_explain_tells_of_it_and_until_when(store: Store, clock: ManualClock) -> None:
    policy = policy_of()
    opens = await given_open(store, clock, policy)
    (job,) = await given_jobs(store, policy, ACME)
    told = explain(await store.ask(lambda moment: moment.examine(None, job, {})), None)
    (hold,) = [hold for hold in told.holds if hold.reason is Reason.BREAKER]
    assert (hold.limit, hold.key, hold.until) == ("breaker:account", ACME, opens)
    assert "failed in a row" in hold.words


# A24
async def test_removing_it_lets_everybody_pass(store: Store, clock: ManualClock) -> None:
    await given_open(store, clock, policy_of())
    await store.apply(Policy("webhooks", keys=("account",)))
    assert len(await claim(store, "webhooks", 50)) == 20
