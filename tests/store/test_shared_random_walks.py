"""Queues that share limits, taken for random walks: never too many, nobody forgotten, nothing left at the end."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from fairlane.clock import ManualClock
from fairlane.job import Claim
from fairlane.policy import Concurrency, Fair, Policy
from fairlane.scheduler.settlement import Failed, Released
from fairlane.store.protocol import Store
from tests.store.harness import claim_once, finish, given_jobs, worker_named

ACCOUNTS = ("acme", "bolt", "coil")
SLOTS, SLOTS_EACH = 5, 2
LIMITS = (Concurrency(SLOTS, name="gpu"), Concurrency(SLOTS_EACH, by="account", name="seats"))
POLICIES = (
    Policy("train", Fair(by="account"), LIMITS),
    Policy("serve", None, (*reversed(LIMITS), Concurrency(3))),
    Policy("tune", Fair(by="account"), LIMITS[1:], keys=("account", "model")),
)


class Walk:
    """One walk, and what is held at the moment."""

    def __init__(self, store: Store, clock: ManualClock, seed: int) -> None:
        self.store = store
        self.clock = clock
        self.random = random.Random(seed)
        self.held: list[Claim] = []
        self.waiting = 0

    async def step(self) -> None:
        policy = self.random.choice(POLICIES)
        match self.random.randrange(6):
            case 0:
                count = self.random.randint(1, 4)
                keys = {"account": self.random.choice(ACCOUNTS), "model": self.random.randint(1, 2)}
                await given_jobs(self.store, policy, {name: keys[name] for name in policy.keys_of_job}, count)
                self.waiting += count
            case 1 | 2:
                await self.claim(policy.queue, self.random.randint(1, 6), heard=self.random.random() < 0.5)
            case 3 | 4:
                await self.settle(self.random.randint(1, 4))
            case _:
                self.clock.advance(self.random.choice(("1ms", "20ms", "60ms")))

    async def claim(self, queue: str, want: int, *, heard: bool = False) -> bool:
        worker = worker_named("a walker")
        listener = await self.store.listen(worker) if heard else None
        brought = await claim_once(self.store, queue, want, worker=worker, listener=listener)
        if listener is not None:
            await listener.close()
        self.held += brought.claims
        self.waiting -= len(brought.claims)
        self.check()
        return bool(brought.claims) or brought.more

    async def settle(self, count: int) -> None:
        self.random.shuffle(self.held)
        ending, self.held = self.held[:count], self.held[count:]
        for each in ending:
            outcome = self.random.choice((None, None, Released("a drain"), Failed("no luck", 1_000)))
            await finish(self.store, [each], outcome)
            self.waiting += isinstance(outcome, Released) or (isinstance(outcome, Failed) and each.attempt < 3)

    def check(self) -> None:
        assert sum(each.queue in ("train", "serve") for each in self.held) <= SLOTS
        by_account = Counter(each.keys["account"] for each in self.held)
        assert max(by_account.values(), default=0) <= SLOTS_EACH, by_account

    async def drain(self) -> None:
        """Nothing new comes: whatever waits must come to run, by what the store says and by time alone."""
        idle = 0
        while (self.waiting or self.held) and idle < 5:
            found = [await self.claim(policy.queue, 20) for policy in POLICIES]
            idle = 0 if any(found) or self.held else idle + 1
            ending, self.held = self.held, []
            await finish(self.store, ending)
            self.clock.advance("60ms")
        assert self.waiting == 0, f"{self.waiting} jobs wait and nobody lets them run"


# A09, A14, F14
@pytest.mark.parametrize("seed", range(8))
async def test_shared_limits_hold_on_any_walk_and_nobody_is_forgotten(
    store: Store, clock: ManualClock, seed: int
) -> None:
    for policy in POLICIES:
        await store.declare(policy)
    walk = Walk(store, clock, seed)
    for _ in range(120):
        await walk.step()
    await walk.drain()
    for policy in POLICIES:
        await walk.claim(policy.queue, 1)
    for policy in POLICIES:
        counts = await store.counts(policy.queue)
        assert (counts.ready, counts.running, counts.parked_lanes) == (0, 0, 0)
        pruned = await store.collect(policy.queue)
        assert not pruned.more
    # A14: every slot is there again.
    for policy in POLICIES:
        for account in ACCOUNTS:
            await given_jobs(
                store, policy, {"account": account, **({"model": 1} if "model" in policy.keys else {})}, SLOTS_EACH
            )
        held = (await claim_once(store, policy.queue, 20)).claims
        assert len(held) == {"train": SLOTS, "serve": 3, "tune": 3 * SLOTS_EACH}[policy.queue]
        while held:
            await finish(store, held)
            held = (await claim_once(store, policy.queue, 20)).claims
