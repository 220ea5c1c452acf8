"""A cap that learns: one for the whole fleet, kept by the database."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import pytest

from fairlane.clock import ManualClock
from fairlane.job import Claim
from fairlane.policy import AdaptiveConcurrency, Fair, Policy
from fairlane.policy.gates import Reason
from fairlane.policy.overrides import Kind, Override
from fairlane.scheduler.explain import explain
from fairlane.scheduler.settlement import Cancelled, Done, Failed, Released, RunOutcome, Snoozed
from fairlane.store.audit import Note
from fairlane.store.protocol import Store
from tests.store.harness import (
    LEASE,
    SECOND,
    Database,
    by_key,
    claim,
    finish,
    given_jobs,
    ids,
    worker_named,
)

ACME = {"account": "acme"}
NOTE = Note(actor="ada", action="test")
FAILED = Failed("boom", 3_600 * SECOND)
BY_ACCOUNT = AdaptiveConcurrency(start=8, max=100, by="account")
SCOPES = [(None, None), ("account", Fair(by="account")), ("account", None)]


def policy_of(limit: AdaptiveConcurrency = BY_ACCOUNT, fair: Fair | None = None) -> Policy:
    return Policy("webhooks", fair=fair, limits=(limit,), keys=("account",))


async def end(
    store: Store, clock: ManualClock, claims: Iterable[Claim], outcome: RunOutcome | None = None, *, ran: int = 1_000
) -> None:
    """Settle claims a moment after they were made."""
    clock.advance(0.001)
    await finish(store, claims, outcome, ran=ran)
    clock.advance(0.001)


@pytest.mark.parametrize(("by", "fair"), SCOPES, ids=["queue", "flow", "lane"])
async def test_good_runs_raise_a_cap_that_binds_and_whoever_waited_starts(
    store: Store, clock: ManualClock, by: str | None, fair: Fair | None
) -> None:
    policy = policy_of(AdaptiveConcurrency(start=4, max=20, by=by), fair)
    await store.declare(policy)
    for priority in range(10):
        await given_jobs(store, policy, ACME, 8, priority=priority)
    sizes = []
    for _ in range(4):
        claims = await claim(store, "webhooks", 50)
        sizes.append(len(claims))
        await end(store, clock, claims)
    assert sizes == [4, 8, 16, 20]


@pytest.mark.parametrize(("by", "fair"), SCOPES, ids=["queue", "flow", "lane"])
async def test_a_batch_that_fails_halves_the_cap_once_and_a_round_of_good_runs_adds_one(
    store: Store, clock: ManualClock, by: str | None, fair: Fair | None
) -> None:
    policy = policy_of(AdaptiveConcurrency(start=8, by=by), fair)
    await store.declare(policy)
    await given_jobs(store, policy, ACME, 100)
    await end(store, clock, await claim(store, "webhooks", 50), FAILED)
    sizes = []
    for _ in range(3):
        claims = await claim(store, "webhooks", 50)
        sizes.append(len(claims))
        await end(store, clock, claims)
    assert sizes == [4, 5, 6]


async def test_failures_of_claims_from_before_the_last_step_down_do_not_lower_it_again(
    store: Store, clock: ManualClock
) -> None:
    policy = policy_of()
    await store.declare(policy)
    await given_jobs(store, policy, ACME, 100)
    claims = await claim(store, "webhooks", 50)
    started = []
    for one in claims[:-1]:
        await end(store, clock, [one], FAILED)
        started.append(len(await claim(store, "webhooks", 50)))
    assert started == [0, 0, 0, 0, 1, 1, 1], "a cap of 4, not of 1"


async def test_runs_above_the_target_lower_the_cap_by_a_twentieth(store: Store, clock: ManualClock) -> None:
    policy = policy_of(AdaptiveConcurrency(start=40, target="100ms", by="account"))
    await store.declare(policy)
    await given_jobs(store, policy, ACME, 200)
    await end(store, clock, await claim(store, "webhooks", 100), ran=SECOND // 5)
    assert len(await claim(store, "webhooks", 100)) == 38


async def test_a_cap_belongs_to_its_key(store: Store, clock: ManualClock) -> None:
    policy = policy_of()
    await store.declare(policy)
    for account in ("good", "bad"):
        await given_jobs(store, policy, {"account": account}, 50)
    claims = await claim(store, "webhooks", 50)
    await end(store, clock, [each for each in claims if each.keys["account"] == "bad"], FAILED)
    await end(store, clock, [each for each in claims if each.keys["account"] == "good"])
    assert by_key(await claim(store, "webhooks", 50)) == {"good": 16, "bad": 4}


@pytest.mark.parametrize("outcome", [Snoozed("later", SECOND), Cancelled("stop"), Released("drain")], ids=type)
async def test_runs_that_say_nothing_move_nothing(store: Store, clock: ManualClock, outcome: RunOutcome) -> None:
    policy = policy_of()
    await store.declare(policy)
    await given_jobs(store, policy, ACME, 100)
    await end(store, clock, await claim(store, "webhooks", 50), outcome)
    assert len(await claim(store, "webhooks", 50)) == 8


# A09
async def test_the_cap_holds_for_all_stores_on_one_database(shared_database: Database, clock: ManualClock) -> None:
    policy = policy_of()
    stores = [await shared_database.open(clock) for _ in range(3)]
    await stores[0].declare(policy)
    await given_jobs(stores[0], policy, ACME, 200)
    for cap, outcome in ((8, FAILED), (4, Done(None)), (5, Done(None)), (6, FAILED), (3, FAILED)):
        claimers = [claim(store, "webhooks", 5, worker=worker_named(str(n))) for n, store in enumerate(stores * 3)]
        claims = [each for some in await asyncio.gather(*claimers) for each in some]
        assert len(claims) == cap
        await end(stores[1], clock, claims, outcome)


async def test_what_was_learned_outlives_the_store(shared_database: Database, clock: ManualClock) -> None:
    policy = policy_of()
    store = await shared_database.open(clock)
    await store.declare(policy)
    await given_jobs(store, policy, ACME, 100)
    await end(store, clock, await claim(store, "webhooks", 50), FAILED)
    await claim(store, "webhooks", 1)
    await shared_database.close()
    assert len(await claim(await shared_database.open(clock), "webhooks", 50)) == 3


# A23
async def test_a_cap_that_falls_below_what_runs_stops_nothing_and_starts_nothing(
    store: Store, clock: ManualClock
) -> None:
    policy = policy_of()
    await store.declare(policy)
    await given_jobs(store, policy, ACME, 100)
    claims = await claim(store, "webhooks", 50)
    await end(store, clock, claims[:1], FAILED)
    assert await claim(store, "webhooks", 50) == []
    assert (await store.counts("webhooks")).running == 7
    await end(store, clock, claims[1:5])
    assert len(await claim(store, "webhooks", 50)) == 1


async def test_a_worker_that_dies_lowers_the_cap(store: Store, clock: ManualClock) -> None:
    policy = policy_of()
    await store.declare(policy)
    await given_jobs(store, policy, ACME, 100)
    await claim(store, "webhooks", 50, lease=LEASE)
    clock.advance("31s")
    assert len((await store.reap()).settled) == 8
    clock.advance(0.001)
    assert len(await claim(store, "webhooks", 50)) == 4


# A24
async def test_a_policy_with_other_bounds_keeps_what_was_learned_within_them(store: Store, clock: ManualClock) -> None:
    policy = policy_of()
    await store.declare(policy)
    await given_jobs(store, policy, ACME, 100)
    await end(store, clock, await claim(store, "webhooks", 50), FAILED)
    held = await claim(store, "webhooks", 50)
    assert len(held) == 4
    await store.apply(policy_of(AdaptiveConcurrency(start=90, max=90, by="account")))
    assert await claim(store, "webhooks", 50) == []
    await store.apply(policy_of(AdaptiveConcurrency(min=7, by="account")))
    assert len(await claim(store, "webhooks", 50)) == 3


async def test_what_was_learned_is_collected_after_a_day_and_not_before(store: Store, clock: ManualClock) -> None:
    policy = policy_of()
    await store.declare(policy)
    await given_jobs(store, policy, ACME, 8, max_attempts=1)
    await end(store, clock, await claim(store, "webhooks", 50), FAILED)
    assert await claim(store, "webhooks", 1) == []
    for after, room in (("23h", 4), ("25h", 8)):
        clock.advance(after)
        while (await store.collect("webhooks")).more:
            pass
        await given_jobs(store, policy, ACME, 20)
        claims = await claim(store, "webhooks", 50)
        assert len(claims) == room
        while claims:
            await finish(store, claims, Cancelled("over"))
            claims = await claim(store, "webhooks", 50)


async def test_an_operator_s_bound_holds_at_once_and_ends_with_its_override(store: Store, clock: ManualClock) -> None:
    policy = policy_of()
    await store.declare(policy)
    await given_jobs(store, policy, ACME, 100)
    await end(store, clock, await claim(store, "webhooks", 50), FAILED)
    await claim(store, "webhooks", 0)
    lower = Override(kind=Kind.LIMIT, scope=(("account", "acme"),), limit="adaptive:account", value=3)
    await store.change_overrides(["webhooks"], [lower], [], NOTE)
    assert len(await claim(store, "webhooks", 50)) == 3
    await store.change_overrides(["webhooks"], [], [lower.id], NOTE)
    assert len(await claim(store, "webhooks", 50)) == 1, "what was learned, 4, was lost"


async def test_explain_tells_of_the_cap(store: Store, clock: ManualClock) -> None:
    policy = policy_of()
    await store.declare(policy)
    jobs = await given_jobs(store, policy, ACME, 20)
    claims = await claim(store, "webhooks", 50)
    await end(store, clock, claims[:1], FAILED)
    await claim(store, "webhooks", 50)
    told = explain(await store.ask(lambda moment: moment.examine(None, jobs[-1], {})), None)
    (hold,) = [hold for hold in told.holds if hold.reason is Reason.ADAPTIVE]
    assert (hold.limit, hold.used, hold.bound, hold.until) == ("adaptive:account", 7, 4, None)
    assert [holder.job for holder in hold.holders] == ids(claims[1:])[: len(hold.holders)]


# A14
async def test_when_nothing_runs_nothing_is_in_flight_however_it_ended(store: Store, clock: ManualClock) -> None:
    policy = policy_of(AdaptiveConcurrency(start=6, min=6, max=6, by="account"))
    await store.declare(policy)
    outcomes: tuple[RunOutcome, ...] = (
        Done(None),
        Failed("boom", 0),
        Released("drain"),
        Snoozed("later", 1),
        Cancelled("stop"),
    )
    for n in range(10):
        await given_jobs(store, policy, ACME, 6, max_attempts=1)
        claims = await claim(store, "webhooks", 50)
        assert len(claims) == 6, f"round {n}"
        for each, outcome in zip(claims, outcomes, strict=False):
            await end(store, clock, [each], outcome)
        clock.advance("31s")
        await store.reap()
        clock.advance("1s")
