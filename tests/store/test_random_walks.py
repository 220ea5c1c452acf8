"""Long random lives of a queue, checked against a model after every step.

Whatever happens in whatever order: no limit is exceeded (A01, A02, A05, A06, A09, A17, A25), nothing that could start
is left behind (F09, F14, A24, A26), a claim says when to come back (C10), nothing is lost or started twice (L18), and
in the end nothing is counted as running (A14).
"""

from __future__ import annotations

import random
from datetime import timedelta

import pytest

from fairlane.clock import ManualClock
from fairlane.job import Claim, State
from fairlane.policy import Concurrency, Fair, Policy, Rate
from fairlane.scheduler.settlement import Cancelled, Died, Done, Failed, Outcome, Released, Snoozed, settle
from fairlane.store.protocol import Store
from tests.store.harness import ASKED_IN_VAIN, SECOND, assert_at_rest, claim_once, given_jobs, new_jobs, worker_named
from tests.store.model import ModelQueue

KEYS = ("account", "endpoint")
RATE = Rate(3, per="5s", by="endpoint")
POLICIES = {
    "plain": [Policy("walk", keys=KEYS), Policy("walk", limits=(Concurrency(5),), keys=KEYS)],
    "lanes": [
        Policy("walk", limits=(Concurrency(2, by="account"), RATE), keys=KEYS),
        Policy("walk", limits=(Concurrency(3, by="account"), Rate(5, per="5s", by="endpoint")), keys=KEYS),
    ],
    "flows": [
        Policy("walk", fair=Fair(by="account"), limits=(Concurrency(2, by="account"), Concurrency(5)), keys=KEYS),
        Policy("walk", fair=Fair(by="account"), limits=(Concurrency(1, by="account"),), keys=KEYS),
    ],
    "mixed": [
        Policy("walk", fair=Fair(by="account"), limits=(Concurrency(3, by="account"), RATE), keys=KEYS),
        Policy("walk", fair=Fair(by="account", charge="count"), limits=(RATE, Rate(9, per="7s")), keys=KEYS),
        Policy("walk", fair=Fair(by="endpoint"), limits=(Concurrency(2, by=KEYS), Concurrency(4)), keys=KEYS),
    ],
}
STEPS = 150


class Walk:
    """One random life: every step is taken by the store and by the model."""

    def __init__(self, store: Store, clock: ManualClock, policies: list[Policy], seed: int) -> None:
        self.store = store
        self.clock = clock
        self.policies = policies
        self.chance = random.Random(seed)
        self.model = ModelQueue(policies[0])
        self.held: list[Claim] = []

    async def enqueue(self) -> None:
        keys = {"account": self.chance.choice("abcd"), "endpoint": self.chance.choice("xyz")}
        count = self.chance.choice([1, 1, 2, 6])
        delay = self.chance.choice([None, None, None, self.chance.randrange(1, 9 * SECOND)])
        priority = self.chance.choice([0, 0, 0, 5])
        jobs = new_jobs(self.model.policy, keys, count, priority=priority, delay=delay, max_attempts=3)
        await self.store.enqueue(jobs)
        for job in jobs:
            self.model.enqueue(job, self.clock.now())

    async def claim(self) -> None:
        want, got, in_vain = self.chance.choice([1, 2, 5, 20]), 0, 0
        lease = timedelta(seconds=self.chance.choice([3, 30, 300]), microseconds=7)
        self.model.promote(self.clock.now())
        while True:
            brought = await claim_once(self.store, "walk", want - got, worker=worker_named("walker"), lease=lease)
            expires_at = self.clock.now() + lease // timedelta(microseconds=1)
            self.model.started(brought.claims, expires_at, self.clock.now())
            self.held += brought.claims
            got += len(brought.claims)
            if got == want:
                return
            if not brought.more:
                break
            in_vain = 0 if brought.claims else in_vain + 1
            assert in_vain < ASKED_IN_VAIN, "the store promises more and brings nothing"
        assert self.model.left_behind(self.clock.now()) == [], "a job that no limit stops was left behind"
        opens_at = self.model.opens_at(self.clock.now())
        if opens_at is not None:
            assert brought.next_due is not None, f"something opens at {opens_at}, and nobody will look"
            assert brought.next_due <= opens_at

    async def settle(self) -> None:
        self.chance.shuffle(self.held)
        count = self.chance.randrange(len(self.held) + 1)
        # At most one claim of a job: the answer names jobs, and cannot tell a stale claim from a newer one of the same.
        ended = list({each.id: each for each in self.held[:count]}.values())
        self.held = [each for each in self.held if each not in ended]
        settlements = [settle(each, self._outcome(), self.chance.randrange(2 * SECOND)) for each in ended]
        lost = set(await self.store.settle(settlements))
        for each in settlements:
            still_held = self.model.jobs[each.job].lease == each.lease
            assert still_held == (each.job not in lost)
            if still_held:
                self.model.settled(each, self.clock.now())
                self.model.adopt(await self.store.job(each.job))

    def _outcome(self) -> Outcome:
        put_off = self.chance.randrange(1, 6 * SECOND)
        outcomes: list[Outcome] = [
            Done(None),
            Done(b"1"),
            Failed("boom", put_off),
            Snoozed("later", put_off),
            Died("over"),
            Cancelled("stop"),
            Released("drain"),
            Released("unknown", put_off),
        ]
        return self.chance.choice(outcomes)

    async def pass_time(self) -> None:
        self.clock.set(self.clock.now() + self.chance.choice([1, 700_001, 2 * SECOND + 3, 11 * SECOND + 1]))

    async def reap(self) -> None:
        expected = self.model.expired(self.clock.now())
        reaped = (await self.store.reap()).settled
        assert {each.job for each in reaped} == expected
        for each in reaped:
            self.model.settled(each, self.clock.now())
            self.model.adopt(await self.store.job(each.job))

    async def renew(self) -> None:
        leases = sorted({each.lease for each in self.held})
        gone = set((await self.store.renew(leases, timedelta(seconds=20))).gone)
        stand = {job.lease for job in self.model.in_state(State.RUNNING)}
        for lease in leases:
            if lease in stand:
                assert lease not in gone
                self.model.leases[lease] = self.clock.now() + 20 * SECOND

    async def cancel(self) -> None:
        alive = [job for job in self.model.jobs.values() if not job.state.is_final]
        if alive:
            job = self.chance.choice(alive)
            state = await self.store.cancel(job.new.id)
            assert state is (State.RUNNING if job.state is State.RUNNING else State.CANCELLED)
            job.state = state

    async def replay(self) -> None:
        ended = self.model.in_state(State.DEAD) + self.model.in_state(State.CANCELLED)
        chosen = self.chance.sample(ended, min(len(ended), self.chance.choice([1, 3])))
        delay = self.chance.choice([None, None, self.chance.randrange(1, 6 * SECOND)])
        handled = await self.store.replay([job.new.id for job in chosen], delay)
        assert {each.job: each.was for each in handled if each.skipped is None} == {
            job.new.id: job.state for job in chosen
        }
        for job in chosen:
            self.model.replayed(job, delay, self.clock.now())

    async def hurry(self) -> None:
        # What is due already may have been promoted by whoever held the queue's lock.
        for job in [each for each in self.model.in_state(State.SCHEDULED) if each.due > self.clock.now()][:2]:
            (handled,) = await self.store.retry_now([job.new.id])
            assert handled.skipped is None
            job.due = self.clock.now()

    async def apply(self) -> None:
        policy = self.chance.choice(self.policies)
        await self.store.apply(policy)
        self.model.apply(policy, self.clock.now())

    async def collect(self) -> None:
        await self.store.collect("walk", limit=self.chance.choice([2, 1_000]))

    async def come_to_rest(self) -> None:
        """Let everything that is left run, and look whether anything has stayed behind."""
        for _ in range(300):
            await self.claim()
            current = [each for each in self.held if self.model.jobs[each.id].lease == each.lease]
            settlements = [settle(each, Done(None), 1) for each in current]
            assert await self.store.settle(settlements) == []
            for each in settlements:
                self.model.settled(each, self.clock.now())
            self.held = []
            self.clock.advance("2s")
            await self.reap()
            if all(job.state.is_final for job in self.model.jobs.values()):
                break
        assert [job for job in self.model.jobs.values() if not job.state.is_final] == []
        for job in self.model.jobs.values():
            assert (await self.store.job(job.new.id)).state is job.state


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", POLICIES)
async def test_whatever_happens_no_limit_is_exceeded_and_nothing_that_could_start_is_left_behind(
    store: Store, clock: ManualClock, kind: str, seed: int
) -> None:
    walk = Walk(store, clock, POLICIES[kind], seed)
    await store.declare(walk.model.policy)
    steps = [walk.enqueue] * 6 + [walk.claim] * 8 + [walk.settle] * 6 + [walk.pass_time] * 4 + [walk.reap] * 2
    steps += [walk.renew, walk.cancel, walk.collect, walk.replay, walk.hurry]
    for turn in range(STEPS):
        step = walk.apply if turn % 50 == 49 else walk.chance.choice(steps)
        await step()
    await walk.come_to_rest()
    await assert_at_rest(store, walk.model.policy, clock, [{"account": "a", "endpoint": "x"}])


async def test_the_model_itself_sees_a_limit_exceeded(store: Store, clock: ManualClock) -> None:
    # A test that cannot fail is a defect: the same claims, held against a stricter policy.
    policy = Policy("walk", limits=(Concurrency(3, by="account"),), keys=KEYS)
    await store.declare(policy)
    walk = Walk(store, clock, [Policy("walk", limits=(Concurrency(2, by="account"),), keys=KEYS)], 0)
    jobs = new_jobs(policy, {"account": "a", "endpoint": "x"}, 3)
    await store.enqueue(jobs)
    for job in jobs:
        walk.model.enqueue(job, clock.now())
    brought = await claim_once(store, "walk", 3)
    with pytest.raises(AssertionError, match="was exceeded"):
        walk.model.started(brought.claims, clock.now(), clock.now())
    assert await given_jobs(store, policy, {"account": "b", "endpoint": "x"})
