"""What a queue has been through, as jobs for a simulation."""

from __future__ import annotations

import msgspec

from fairlane.clock import ManualClock
from fairlane.job import State
from fairlane.policy import Concurrency, Fair, Policy
from fairlane.policy.gates import FromJob
from fairlane.scheduler.settlement import Died
from fairlane.simulation.replay import read_history, simulate
from fairlane.store.protocol import Store
from tests.store.harness import SECOND, claim, finish, given_jobs, new_jobs, operations_on

FAIR = Policy("webhooks", Fair(by="account"))


async def test_history_gives_each_job_that_ended_with_its_time_its_keys_and_how_long_it_ran(
    store: Store, clock: ManualClock
) -> None:
    await store.declare(FAIR)
    began = clock.now()
    await given_jobs(store, FAIR, {"account": "a"}, priority=3)
    clock.advance("10s")
    await given_jobs(store, FAIR, {"account": "b"}, 2)
    held = await claim(store, FAIR.queue, 2)
    clock.advance("5s")
    await finish(store, held[:1])
    await finish(store, held[1:], Died("no"))
    clock.advance("1s")
    jobs = await read_history(store, FAIR.queue, await store.now())
    assert [(job.at - began, job.run_time, job.kind.keys["account"], job.kind.priority) for job in jobs] == [
        (0, 5 * SECOND, "a", 3),
        (10 * SECOND, 5 * SECOND, "b", 0),
    ]
    assert [job.dies for job in jobs] == [held[0].keys["account"] == "b", held[1].keys["account"] == "b"]
    assert simulate(FAIR, jobs, slots=1).runs == 2


async def test_what_came_before_the_time_looked_at_waits_from_its_beginning_and_what_ended_before_is_left_out(
    store: Store, clock: ManualClock
) -> None:
    await store.declare(FAIR)
    await given_jobs(store, FAIR, {"account": "a"}, 2)
    await finish(store, await claim(store, FAIR.queue, 1))
    clock.advance("100s")
    await finish(store, await claim(store, FAIR.queue, 1))
    now = await store.now()
    (job,) = await read_history(store, FAIR.queue, now + 1, 60 * SECOND)
    assert job.at == now + 1 - 60 * SECOND


async def test_a_bounded_look_brings_the_newest_and_tells_how_far_it_is(store: Store, clock: ManualClock) -> None:
    await store.declare(FAIR)
    await given_jobs(store, FAIR, {"account": "a"}, 5)
    for _ in range(5):
        clock.advance("1s")
        await finish(store, await claim(store, FAIR.queue, 1))
    told: list[int] = []
    clock.advance("1s")
    jobs = await read_history(store, FAIR.queue, await store.now(), limit=3, on_progress=told.append)
    assert len(jobs) == 3
    assert told[-1] == 3
    assert (await store.job((await given_jobs(store, FAIR, {"account": "a"}))[0])).state is State.READY


async def test_o16_history_brings_the_numbers_that_its_jobs_brought(store: Store, clock: ManualClock) -> None:
    policy = Policy("webhooks", limits=(Concurrency(FromJob(), by="account"),))
    await store.declare(policy)
    for slots in (1, 4):
        jobs = new_jobs(policy, {"account": "a"}, 4)
        await store.enqueue([msgspec.structs.replace(job, given={"concurrency:account": slots}) for job in jobs])
    while held := await claim(store, policy.queue, 10):
        clock.advance("1s")
        await finish(store, held, ran=SECOND)
    jobs_that_ran = await read_history(store, policy.queue, await store.now() + 1, 3_600 * SECOND)
    assert [job.numbers for job in jobs_that_ran] == [
        {"concurrency:account": slots} for slots in (1, 4) for _ in "four"
    ]
    found = simulate(policy, jobs_that_ran, slots=10, claim_time=0, settle_time=0)
    assert (found.seconds, found.without_numbers) == (2.0, 0), "four at a time, as it was"
    other = Policy("webhooks", limits=(Concurrency(2, by="account"),))
    assert simulate(other, jobs_that_ran, slots=10, claim_time=0, settle_time=0).seconds == 4.0
    clock.advance("1s")
    (tried, _), *_ = await operations_on(store).trials.run(["webhooks"], history="webhooks", slots=10)
    assert tried.seconds < 2.1


async def test_history_of_jobs_without_numbers_says_how_many_lack_them(store: Store, clock: ManualClock) -> None:
    await store.declare(FAIR)
    await given_jobs(store, FAIR, {"account": "a"}, 3)
    await finish(store, await claim(store, FAIR.queue, 3))
    jobs = await read_history(store, FAIR.queue, await store.now() + 1)
    asks = Policy("webhooks", limits=(Concurrency(FromJob(), by="account"),))
    assert simulate(asks, jobs).without_numbers == 3
