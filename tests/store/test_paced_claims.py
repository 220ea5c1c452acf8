"""Starts that were claimed ahead of their instants, while the rate that they were planned by changes (A27)."""

from __future__ import annotations

from itertools import pairwise

from msgspec.structs import replace

from fairlane import Rate
from fairlane.clock import SECOND, Instant, ManualClock
from fairlane.policy import Policy
from fairlane.policy.overrides import Kind, Override
from fairlane.scheduler.settlement import Released, settle
from fairlane.store.audit import Note
from fairlane.store.protocol import Claimed, Store
from tests.store.harness import LEASE, WORKER, new_jobs

FAST = Policy("webhooks", limits=(Rate(20, per="1s", burst=1),))
NAME = "rate/1s:"
NOTE = Note(actor="ann", action="limit set")


async def claim_ahead(store: Store, count: int) -> Claimed:
    return await store.claim("webhooks", lambda: 1, worker=WORKER, lease=LEASE, ahead=count)


async def give_back(store: Store, claimed: Claimed, now: Instant) -> None:
    """What has not started yet."""
    left = [each for each in claimed.claims if claimed.paces[each.id].at > now]
    await store.settle([settle(each, Released("its queue's policy has changed"), 0) for each in left])


def instants(*all_claimed: Claimed) -> list[Instant]:
    return sorted(pace.at for claimed in all_claimed for pace in claimed.paces.values())


async def test_starts_that_are_given_back_after_a_change_of_their_rate_make_no_room_twice(
    store: Store, clock: ManualClock
) -> None:
    """Two workers hear of a lower rate one after the other, and what the first claims by it stays its own."""
    await store.declare(FAST)
    await store.enqueue(new_jobs(FAST, count=100))
    first = await claim_ahead(store, 10)
    clock.advance("60ms")
    second = await claim_ahead(store, 8)
    assert len(instants(first, second)) >= 18
    slow = Override(kind=Kind.LIMIT, limit=NAME, value=4)
    await store.change_overrides(["webhooks"], [slow], [], NOTE)
    await give_back(store, second, clock.now())
    by_the_new_rate = await claim_ahead(store, 3)
    clock.advance("20ms")
    await give_back(store, first, clock.now())
    planned = instants(by_the_new_rate, await claim_ahead(store, 3))
    assert len(planned) >= 3
    assert min(after - before for before, after in pairwise(planned)) >= SECOND // 4


async def test_a_number_that_a_job_brings_leaves_planned_starts_their_distance(
    store: Store, clock: ManualClock
) -> None:
    """U01, A27: nobody takes back what was planned by the number before."""
    policy = Policy("webhooks", limits=(Rate(lambda job: job["rate"], per="1s", burst=1, by="account"),))
    await store.declare(policy)
    (first, *others) = new_jobs(policy, {"account": "acme"}, 60)
    name = "rate/1s:account"
    await store.enqueue([replace(first, given={name: 20}), *others])
    planned = await claim_ahead(store, 10)
    (newer,) = new_jobs(policy, {"account": "acme"})
    await store.enqueue([replace(newer, given={name: 25})])
    clock.advance("60ms")
    at = instants(planned, await claim_ahead(store, 10))
    clock.advance("900ms")
    at = sorted([*at, *instants(await claim_ahead(store, 10))])
    assert len(at) >= 20
    assert min(after - before for before, after in pairwise(at)) >= SECOND // 25


async def test_a_rate_that_is_cleared_is_given_in_full_at_once(store: Store, clock: ManualClock) -> None:
    """What was planned by the lower rate does not stand in the way of the higher one."""
    await store.declare(FAST)
    await store.enqueue(new_jobs(FAST, count=100))
    slow = Override(kind=Kind.LIMIT, limit=NAME, value=2)
    await store.change_overrides(["webhooks"], [slow], [], NOTE)
    before = await claim_ahead(store, 3)
    clock.advance("20ms")
    await store.change_overrides(["webhooks"], [], [slow.id], NOTE)
    await give_back(store, before, clock.now())
    planned = instants(await claim_ahead(store, 5))
    assert SECOND // 20 <= planned[0] - clock.now() <= SECOND // 10, "others may still start by the lower rate"
    assert len(planned) >= 5
